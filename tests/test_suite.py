"""What conftest.py promises of a run, tried on a small suite of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = """
import pytest

pytestmark = pytest.mark.browser

def test_a_page(): pass
def test_another_page(): pass
"""
SETTINGS = """
import os

def test_no_setting_of_the_person_comes_in(): assert "COMPEER_DATABASE_URL" not in os.environ
"""
CORES = """
import os

def test_the_cores_are_shared(): assert os.environ["OMP_NUM_THREADS"] == "1"
"""
SKIPPED = """
import pytest

@pytest.mark.browser
def test_a_page(): pytest.skip("no reason")
"""


def run(folder: Path, *flags: str, **files: str) -> tuple[int, str]:
    """Write test modules beside our conftest.py, and run them with our settings."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "OMP_", "COMPEER_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *flags, folder],
        env=environment | {"COMPEER_REQUIRE_BROWSER": "1", "COMPEER_DATABASE_URL": "sqlite:///x"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def browser_tests(written: str) -> str:
    """The line that .ci/run looks for."""
    return re.search(r"^browser tests: .*$", written, re.MULTILINE)[0]


def test_browser_tests_of_all_processes_are_counted_and_a_skipped_one_fails_the_run(tmp_path):
    code, written = run(
        tmp_path, "-n", "2", pages=PAGES, skipped=SKIPPED, settings=SETTINGS, cores=CORES
    )

    assert "4 passed, 1 skipped" in written
    assert browser_tests(written) == "browser tests: 2 passed, 1 skipped"
    assert code == pytest.ExitCode.TESTS_FAILED, written


def test_a_run_without_browser_tests_fails_where_the_browser_is_required(tmp_path):
    code, written = run(tmp_path, settings=SETTINGS)

    assert code == pytest.ExitCode.TESTS_FAILED, written
    assert browser_tests(written) == "browser tests: 0 passed, 0 skipped"


def test_a_file_of_browser_tests_and_others_is_refused(tmp_path):
    code, written = run(tmp_path, mixed=SKIPPED + SETTINGS)

    assert code == pytest.ExitCode.USAGE_ERROR, written
    assert "test_mixed.py" in written
