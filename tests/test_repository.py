"""Documents, configs and packaging files match the code."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from compeer_core.config import FrozenModel, load_toml
from training.common.results import update_documents
from training.stages import STAGES, load_stage

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "training" / "configs").rglob("*.toml"))
MODULES_WITH_EXAMPLES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for package in ("compeer_core", "training", "ui_components")
    for path in (ROOT / package).rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
MEGABYTE = 1_000_000
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "assets/*/README.md", "assets/checkpoints/*/README.md")
    for path in ROOT.glob(pattern)
)


def stage_of(path: Path) -> str:
    """The stage a config is for: its name begins with the stage; a file with [[stage]] is a recipe."""
    if "stage" in tomllib.loads(path.read_text(encoding="utf-8")):
        return "run"
    if path.stem == "silver":  # named after its output
        return "cer"
    words = path.stem.split("_")
    two = " ".join(words[:2])
    return two if two in STAGES else words[0]


def test_the_readme_opens_with_the_only_two_commands():
    first_block = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]

    assert first_block.splitlines()[1:] == [
        "pip install -e . && python app.py",
        "pip install -e '.[dev]' && python -m pytest -n 2",
    ]


def test_the_readme_fits_on_a_few_screens():
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 250
    assert len(text.encode()) <= 15_000


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_of_documents_lead_to_files_and_headings(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text)
    broken = []
    for target, heading in targets:
        path = (ROOT / document).parent / target if target else ROOT / document
        if not path.exists() or (heading and heading not in headings_of(path)):
            broken.append(f"{target}#{heading}")

    assert broken == []


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=str
)
def test_paths_that_documents_name_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = re.findall(
        r"(?<![\w./-])((?:assets|compeer_core|docs|tests|training|ui_components)/[\w./-]*[\w/])",
        text,
    )

    assert sorted({path for path in paths if not (ROOT / path).exists()}) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_of_documents_name_a_config_of_their_stage(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    commands = re.findall(r"-m training ((?:[a-z]+ )+)(training/configs/\S+\.toml)", text)

    assert [
        f"{stage}{path}" for stage, path in commands if stage.strip() != stage_of(ROOT / path)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documents_install_only_extras_that_exist(document):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / document).read_text(encoding="utf-8")
    lists = re.findall(r"pip install -e '\.\[([\w,]+)\]'", text)
    named = {extra for names in lists for extra in names.split(",")}
    named.update(re.findall(r"extra\s+`(\w+)`", text))

    assert named <= set(project["optional-dependencies"])


def headings_of(path: Path) -> set[str]:
    """The anchors that GitHub and MkDocs make of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_changelog_begins_with_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)

    assert versions[0] == project["version"]
    assert len(versions) == text.count("\n## ")


def test_every_page_of_the_documentation_is_in_the_site():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = sorted(page for entry in site["nav"] for page in entry.values())

    assert pages == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_tables_in_documents_match_the_results_files():
    assert update_documents(ROOT, write=False) == [], "run: python -m training results"


def test_the_documentation_lists_every_stage():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")

    assert [name for name in STAGES if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_a_module_with_config_and_run(name):
    module = load_stage(name)

    assert issubclass(module.Config, FrozenModel)
    assert callable(module.run)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    stage = stage_of(path)
    assert stage in STAGES, f"{path.name}: the name must begin with a stage"

    load_toml(path, load_stage(stage).Config)


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_docstring_examples_pass(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize("package", ["compeer_core", "training", "ui_components"])
def test_every_module_has_a_docstring(package):
    undocumented = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""'))
    ]

    assert undocumented == []


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (("dialogue", "reasoning", "unifireward", "turn", "registry"), set()),
        (("votes.store", "votes.database"), {"psycopg"}),
    ],
)
def test_importing_the_core_loads_neither_torch_nor_gradio(modules, unwanted):
    imports = ", ".join(f"compeer_core.{module}" for module in modules)
    unwanted |= {"torch", "transformers", "gradio"}
    code = f"import sys, {imports}; sys.exit(' '.join({unwanted} & set(sys.modules)) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, f"loaded: {done.stderr}"


def test_app_py_imports_neither_training_nor_torch():
    # import contracts cover packages, and app.py is a module
    tree = ast.parse((ROOT / "app.py").read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }

    assert not imported & {"training", "torch", "transformers", "peft", "trl", "bitsandbytes"}


def test_shipped_weights_are_small_and_not_pickled():
    files = [path for path in (ROOT / "assets").rglob("*") if path.is_file()]

    assert [p.name for p in files if p.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}] == []
    assert [p.name for p in files if p.stat().st_size > 95 * MEGABYTE] == []
    assert sum(path.stat().st_size for path in files) <= 150 * MEGABYTE


def test_every_checkpoint_has_a_card():
    folders = [path.parent for path in (ROOT / "assets").rglob("*.safetensors")]

    assert [folder.name for folder in folders if not (folder / "README.md").exists()] == []


def test_the_check_script_is_executable_and_parses():
    script = ROOT / ".ci" / "run"

    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
