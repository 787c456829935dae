"""Hugging Face Space, Dockerfile and compose.yaml, tested without Docker and without the hub.

The tests run the Dockerfile's portable steps in a temporary folder: copy the files, set the
environment, start the program, check its health and stop it. The `slow` test does so in a new
virtual environment with what a Space installs.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.pages import write_models
from ui_components.server.listening import listen

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
SPACES_ADD = ("uvicorn>=0.14.0", "websockets>=10.4", "spaces")
"""A gradio Space installs these in addition to requirements.txt and gradio[oauth,mcp]==sdk_version."""
LOADED_BY_NAME = {"accelerate"}
"""transformers and peft import it on demand."""
OPTIONAL = {"sentence-transformers"}
"""An encoder by name imports it and says which extra to install."""
START_SECONDS = 90.0


# --- reading the files ----------------------------------------------------------------------------


def front_matter() -> dict[str, object]:
    _, head, _ = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(head)
    assert isinstance(fields, dict)
    return fields


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]
    return {canonicalize_name(requirement.name): requirement for requirement in listed}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = code.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in lines if line.strip()]


def steps(name: str) -> list[str]:
    return [value for instruction, value in instructions() if instruction == name]


def image_environment() -> dict[str, str]:
    pairs = [word for line in steps("ENV") for word in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def exec_form(value: str) -> list[str]:
    """The arguments of `CMD ["a", "b"]`, which runs without a shell."""
    return [str(word) for word in json.loads(value[value.index("[") :])]


def copied() -> list[tuple[str, str]]:
    """Source and target of everything that the Dockerfile copies."""
    lines = [line.split() for line in steps("COPY")]
    return [(source, line[-1]) for line in lines for source in line[:-1]]


# --- the Space ------------------------------------------------------------------------------------


def test_the_front_matter_is_what_a_space_accepts():
    space = front_matter()

    assert set(space) <= {
        *("title", "emoji", "colorFrom", "colorTo", "sdk", "sdk_version", "python_version"),
        *("app_file", "short_description", "license", "pinned", "suggested_hardware", "tags"),
    }
    assert {space["colorFrom"], space["colorTo"]} <= COLOURS
    assert len(str(space["emoji"])) == 1
    assert not str(space["emoji"]).isascii()
    assert len(str(space["short_description"])) <= 60  # the hub refuses longer ones
    assert space["sdk"] == "gradio"
    assert (ROOT / str(space["app_file"])).is_file()
    assert space["license"] == str(project()["license"]).lower()


def test_the_space_runs_the_gradio_and_the_python_of_the_project():
    space = front_matter()

    assert isinstance(space["python_version"], str)  # YAML reads 3.10 as 3.1
    assert space["python_version"] in SpecifierSet(str(project()["requires-python"]))
    assert str(space["sdk_version"]) in requirements()["gradio"].specifier
    assert f"python:{space['python_version']}-slim" in steps("FROM")


def test_the_readme_starts_after_the_front_matter():
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert text.split("---\n", 2)[2].lstrip().startswith("# COMPEER\n")


# --- requirements.txt -----------------------------------------------------------------------------


def extras() -> dict[str, list[str]]:
    return project()["optional-dependencies"]


def declared() -> dict[str, Requirement]:
    """Return every requirement of pyproject.toml by name; one name has the same bounds everywhere."""
    lines = [*project()["dependencies"], *(line for lines in extras().values() for line in lines)]
    every: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name == "compeer":
            continue
        assert str(every.setdefault(name, requirement)) == str(requirement)
    return every


def test_requirements_txt_is_what_its_generator_writes():
    generated = subprocess.run(
        [sys.executable, ROOT / ".ci" / "requirements"], capture_output=True, text=True, check=True
    )

    assert (ROOT / "requirements.txt").read_text(encoding="utf-8") == generated.stdout


def imported_modules(*places: str) -> set[str]:
    """Return the top-level modules that Python files import, at module level or later."""
    roots = [ROOT / place for place in places]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
    return {
        name.partition(".")[0]
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }


def distributions_of(modules: set[str]) -> set[str]:
    known = packages_distributions()
    return {canonicalize_name(name) for module in modules for name in known.get(module, ())}


def test_the_dependencies_are_exactly_what_the_app_imports():
    needed = distributions_of(imported_modules("app.py", "compeer_core", "ui_components"))
    every = declared()
    chat = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}

    assert chat == (needed & set(every)) - OPTIONAL | LOADED_BY_NAME


def test_the_extras_hold_what_training_imports_beyond_the_chat():
    needed = distributions_of(imported_modules("training"))
    every = declared()
    lines = [line for extra in ("cer", "eval", "train", "ray") for line in extras()[extra]]
    offered = {canonicalize_name(Requirement(line).name) for line in lines}
    chat = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}

    assert (needed & set(every)) - chat == offered - {"bitsandbytes"}  # transformers imports it


def test_requirements_txt_selects_the_cpu_build_of_pytorch():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()

    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in lines


def test_the_lock_file_pins_every_requirement_within_its_bounds_with_hashes():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=[\w])", text) if not entry.startswith("#")]
    pinned = {Requirement(entry.split(" \\\n")[0]).name: entry for entry in entries}

    for name, requirement in requirements().items():
        version = re.match(r"[\w\[\]-]+==(\S+)", pinned[name])
        assert version is not None
        assert version[1] in requirement.specifier, f"{name}: regenerate requirements.lock"
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "nvidia" not in text  # the CPU build of PyTorch


def test_requirements_do_not_conflict_with_what_a_space_installs():
    # Some version must satisfy both; if one exists, a version named in the bounds does.
    ours = requirements()
    added = [Requirement(line) for line in (*SPACES_ADD, *(requires("gradio") or ()))]
    for theirs in added:
        mine = ours.get(canonicalize_name(theirs.name))
        extra = {"extra": "mcp"}, {"extra": "oauth"}, {"extra": ""}
        if mine is None or not (
            theirs.marker is None or any(theirs.marker.evaluate(values) for values in extra)
        ):
            continue
        bounds = [
            specifier.version.removesuffix(".*")
            for specifier in (*mine.specifier, *theirs.specifier)
        ]
        both = mine.specifier & theirs.specifier
        assert any(version in both for version in bounds), f"{mine} and gradio's {theirs}"


# --- the image ------------------------------------------------------------------------------------


def ignored(path: str) -> bool:
    """Whether .dockerignore excludes a path of the repository."""
    is_ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        if pattern == "*" or path == pattern or path.startswith(f"{pattern}/"):
            is_ignored = not line.startswith("!")
    return is_ignored


def test_the_build_context_has_the_copied_files_and_nothing_private():
    assert [source for source, _ in copied() if not (ROOT / source).exists()] == []
    assert [source for source, _ in copied() if ignored(source)] == []
    for path in (".env", ".git", "runs", "data", "tests", "training", "venv"):
        assert ignored(path), path


def test_the_image_runs_as_an_unprivileged_user():
    order = [name for name, _ in instructions()]

    assert steps("USER") == ["1000"]
    assert order.index("USER") > max(at for at, name in enumerate(order) if name == "RUN")
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert "--uid 1000" in steps("RUN")[0]
    assert steps("VOLUME") == [image_environment()["COMPEER_DATA_DIR"]]
    assert steps("EXPOSE") == [image_environment()["GRADIO_SERVER_PORT"]]


def test_the_image_installs_the_lock_file_with_hashes():
    words = shlex.split(steps("RUN")[1])

    assert words[:2] == ["pip", "install"]
    assert words[words.index("--requirement") + 1] == "requirements.lock"
    assert "--require-hashes" in words


def test_compose_connects_the_app_to_its_postgresql():
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    app, votes = compose["services"]["compeer"], compose["services"]["votes"]
    password = votes["environment"]["POSTGRES_PASSWORD"]
    user, name = votes["environment"]["POSTGRES_USER"], votes["environment"]["POSTGRES_DB"]

    assert app["environment"] == {
        "COMPEER_DATABASE_URL": f"postgresql://{user}:{password}@votes/{name}"
    }
    assert password.startswith("${POSTGRES_PASSWORD:?")  # compose refuses to start without it
    assert app["ports"] == [f"127.0.0.1:7860:{image_environment()['GRADIO_SERVER_PORT']}"]
    assert app["volumes"] == [f"data:{image_environment()['COMPEER_DATA_DIR']}"]
    assert set(compose["volumes"]) == {"data", "votes"}


def test_variables_of_the_page_on_serving_are_read_by_the_code():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "app.py", *(ROOT / "compeer_core").rglob("*.py"))
    )

    for variable in set(re.findall(r"\b(?:COMPEER|GRADIO|OPENAI)_[A-Z_]+", text)):
        assert f'"{variable}"' in code, variable


# --- running it ------------------------------------------------------------------------------------


def lay_out(folder: Path) -> Path:
    """Copy what the Dockerfile copies."""
    for source, target in copied():
        path = folder / target if target != "./" else folder / source
        if (ROOT / source).is_dir():
            skip = shutil.ignore_patterns("__pycache__", "screenshots")
            shutil.copytree(ROOT / source, path, ignore=skip)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, path)
    return folder


def free_port() -> int:
    with listen("127.0.0.1", 0) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def started(
    python: Path, folder: Path, words: list[str], environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    """Start the image's program with only its own environment, and wait for its address."""
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    assert words[0] == "python"
    with subprocess.Popen(
        [str(python), *words[1:]],
        cwd=folder,
        env=inherited | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert "COMPEER is served at" in line, process.stderr.read()
            yield process
        finally:
            process.kill()


def health(port: str) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as answer:
        return dict(json.load(answer))


def wait_until_ready(port: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while health(port)["model_state"] == "loading" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert health(port)["model_state"] == "ready"


def test_the_files_of_the_image_are_enough_to_start_stay_healthy_and_stop(tmp_path):
    run_image_steps(Path(sys.executable), tmp_path)


@pytest.mark.slow
@pytest.mark.network  # the package index
@pytest.mark.timeout(1800)
def test_what_a_space_installs_is_enough_to_start_and_stay_healthy(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    gradio = f"gradio[oauth,mcp]=={front_matter()['sdk_version']}"
    pip = [python, "-m", "pip"]
    packages = ["--requirement", ROOT / "requirements.txt", gradio, *SPACES_ADD]
    subprocess.run([*pip, "install", "--quiet", *packages], check=True, timeout=1500)
    subprocess.run([*pip, "check"], check=True, timeout=120)

    run_image_steps(python, tmp_path)


def run_image_steps(python: Path, folder: Path) -> None:
    """Run the Dockerfile's steps from its first COPY on, and stop the program as `docker stop` does."""
    data = folder / "data"
    port = str(free_port())
    environment = image_environment()
    assert environment["GRADIO_SERVER_NAME"] == "0.0.0.0"
    environment |= {
        "COMPEER_DATA_DIR": str(data),
        "GRADIO_SERVER_PORT": port,
        "HF_HOME": str(data / "huggingface"),
    }
    application = lay_out(folder / "app")
    entry, check = exec_form(steps("ENTRYPOINT")[0]), exec_form(steps("HEALTHCHECK")[0])

    with started(python, application, entry, environment) as process:
        wait_until_ready(port)
        health_check = [str(python), *check[1:]]
        healthy = subprocess.run(
            health_check, env=os.environ | environment, check=False, timeout=30
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    stopped = subprocess.run(
        health_check,
        env=os.environ | environment,
        check=False,
        timeout=30,
        stderr=subprocess.DEVNULL,
    )

    assert healthy.returncode == 0
    assert stopped.returncode == 1  # the only failure code that Docker defines
    assert (data / "compeer.sqlite3").is_file()


def test_in_a_space_the_page_trusts_its_proxy_and_warns_that_votes_get_lost(tmp_path):
    port = str(free_port())
    space = {
        "SYSTEM": "spaces",
        "SPACE_ID": "someone/compeer",
        "SPACE_HOST": "someone-compeer.hf.space",
        "GRADIO_SERVER_PORT": port,
        "HOME": str(tmp_path),
    }
    proxied = {
        "host": "someone-compeer.hf.space",
        "x-forwarded-proto": "https",
        "x-forwarded-host": "someone-compeer.hf.space",
    }
    words = ["python", "app.py", "--models", str(write_models(tmp_path))]

    with started(Path(sys.executable), ROOT, words, space) as process:
        page = urllib.request.Request(f"http://127.0.0.1:{port}/", headers=proxied)
        with urllib.request.urlopen(page, timeout=60) as answer:
            cookie = answer.headers["set-cookie"]
            policy = answer.headers["content-security-policy"]
            body = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        log = process.stderr.read()

    assert re.search(r"SameSite=None; Secure; Partitioned$", cookie)
    assert "frame-ancestors 'self' https://huggingface.co" in policy
    assert "https://someone-compeer.hf.space" in body  # gradio's own addresses
    assert "http://127.0.0.1" not in body
    assert "votes are stored in a file of this Space and lost" in log
    assert "COMPEER_DATABASE_URL" in log
