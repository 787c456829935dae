"""A Hugging Face Space, the Dockerfile and compose.yaml: what can be tried without either.

The Dockerfile's steps are carried out in a folder of the test, as far as they are not another
system's: files are copied, the environment is set, the program is started, asked for its health and
ended. The `slow` test does so in a new virtual environment with what a Space installs.
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

from ui_components.server.listening import listen

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
SPACES_ADD = ("uvicorn>=0.14.0", "websockets>=10.4", "spaces")
"""A Space of gradio installs these beside requirements.txt, and gradio[oauth,mcp]==sdk_version."""
LOADED_BY_NAME = {"accelerate", "bitsandbytes", "psycopg"}
"""transformers loads the first two when a model wants them, SQLAlchemy the third."""
START_SECONDS = 90.0


# --- reading the files ----------------------------------------------------------------------------


def front_matter() -> dict[str, object]:
    _, head, _ = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    read = yaml.safe_load(head)
    assert isinstance(read, dict)
    return read


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    read = [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]
    return {canonicalize_name(one.name): one for one in read}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's steps in order, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = kept.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in lines if line.strip()]


def steps(name: str) -> list[str]:
    return [value for instruction, value in instructions() if instruction == name]


def image_environment() -> dict[str, str]:
    pairs = [word for line in steps("ENV") for word in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def exec_form(value: str) -> list[str]:
    """The words of `CMD ["a", "b"]`, which no shell reads."""
    return [str(word) for word in json.loads(value[value.index("[") :])]


def copied() -> list[tuple[str, str]]:
    """What the Dockerfile copies, and where to."""
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
    assert len(str(space["short_description"])) <= 60  # a push with more is refused
    assert space["sdk"] == "gradio"
    assert (ROOT / str(space["app_file"])).is_file()
    assert space["license"] == str(project()["license"]).lower()


def test_the_space_runs_the_gradio_and_the_python_of_the_project():
    space = front_matter()

    assert isinstance(space["python_version"], str)  # 3.10 would be read as 3.1
    assert space["python_version"] in SpecifierSet(str(project()["requires-python"]))
    assert str(space["sdk_version"]) in requirements()["gradio"].specifier
    assert f"python:{space['python_version']}-slim" in steps("FROM")


def test_the_readme_goes_on_after_the_front_matter():
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert text.split("---\n", 2)[2].lstrip().startswith("# COMPEER\n")


# --- requirements.txt -----------------------------------------------------------------------------


def declared() -> dict[str, Requirement]:
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *extras["postgres"]]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_the_requirements_are_those_of_the_project():
    known = declared()

    assert {name: str(one) for name, one in requirements().items()} == {
        name: str(known[name]) for name in requirements()
    }


def test_the_requirements_are_what_the_app_imports_and_no_more():
    files = [ROOT / "app.py"]
    files += [*(ROOT / "compeer_core").rglob("*.py"), *(ROOT / "ui_components").rglob("*.py")]
    modules = {
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
    brings = packages_distributions()
    known = declared()
    needed = {canonicalize_name(one) for name in modules for one in brings.get(name, ())}

    assert set(requirements()) == (needed & set(known)) | LOADED_BY_NAME


def test_pip_takes_pytorch_for_processors():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()

    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in lines


def test_the_lock_pins_what_is_required_within_its_bounds_each_file_by_its_hash():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=[\w])", text) if not entry.startswith("#")]
    pinned = {Requirement(entry.split(" \\\n")[0]).name: entry for entry in entries}

    for name, requirement in requirements().items():
        version = re.match(r"[\w\[\]-]+==(\S+)", pinned[name])
        assert version is not None
        assert version[1] in requirement.specifier, f"{name}: make requirements.lock anew"
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "nvidia" not in text  # PyTorch for processors


def test_what_a_space_installs_beside_them_can_be_had_too():
    # Some version must satisfy both; where any does, one of the bounds' own versions does.
    ours = requirements()
    added = [Requirement(line) for line in (*SPACES_ADD, *(requires("gradio") or ()))]
    for theirs in added:
        mine = ours.get(canonicalize_name(theirs.name))
        extra = {"extra": "mcp"}, {"extra": "oauth"}, {"extra": ""}
        if mine is None or not (
            theirs.marker is None or any(theirs.marker.evaluate(one) for one in extra)
        ):
            continue
        bounds = [one.version.removesuffix(".*") for one in (*mine.specifier, *theirs.specifier)]
        both = mine.specifier & theirs.specifier
        assert any(version in both for version in bounds), f"{mine} and gradio's {theirs}"


# --- the image ------------------------------------------------------------------------------------


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path of the repository from the builder."""
    answer = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        if pattern == "*" or path == pattern or path.startswith(f"{pattern}/"):
            answer = not line.startswith("!")
    return answer


def test_the_builder_is_sent_what_is_copied_and_nothing_private():
    assert [source for source, _ in copied() if not (ROOT / source).exists()] == []
    assert [source for source, _ in copied() if ignored(source)] == []
    for path in (".env", ".git", "runs", "data", "tests", "training", "venv"):
        assert ignored(path), path


def test_the_program_in_the_image_is_nobody_special():
    order = [name for name, _ in instructions()]

    assert steps("USER") == ["1000"]
    assert order.index("USER") > max(at for at, name in enumerate(order) if name == "RUN")
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert "--uid 1000" in steps("RUN")[0]
    assert steps("VOLUME") == [image_environment()["COMPEER_DATA_DIR"]]
    assert steps("EXPOSE") == [image_environment()["GRADIO_SERVER_PORT"]]


def test_the_image_installs_the_list_of_requirements():
    words = shlex.split(steps("RUN")[1])

    assert words[:2] == ["pip", "install"]
    assert words[words.index("--requirement") + 1] == "requirements.lock"
    assert "--require-hashes" in words


def test_compose_starts_the_image_over_a_postgresql_with_one_password():
    read = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    app, votes = read["services"]["compeer"], read["services"]["votes"]
    password = votes["environment"]["POSTGRES_PASSWORD"]
    user, name = votes["environment"]["POSTGRES_USER"], votes["environment"]["POSTGRES_DB"]

    assert app["environment"] == {
        "COMPEER_DATABASE_URL": f"postgresql://{user}:{password}@votes/{name}"
    }
    assert password.startswith("${POSTGRES_PASSWORD:?")  # refused where there is none
    assert app["ports"] == [f"127.0.0.1:7860:{image_environment()['GRADIO_SERVER_PORT']}"]
    assert app["volumes"] == [f"data:{image_environment()['COMPEER_DATA_DIR']}"]
    assert set(read["volumes"]) == {"data", "votes"}


def test_the_page_about_deployment_names_what_there_is():
    text = (ROOT / "ui_components" / "DEPLOY.md").read_text(encoding="utf-8")
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "app.py", *(ROOT / "compeer_core").rglob("*.py"))
    )

    for variable in set(re.findall(r"\b(?:COMPEER|GRADIO|OPENAI)_[A-Z_]+", text)):
        assert f'"{variable}"' in code, variable
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / "ui_components" / link).exists(), link


# --- carried out ----------------------------------------------------------------------------------


def lay_out(folder: Path) -> Path:
    """Copy what the Dockerfile copies, and make it read-only as root's files are for the program."""
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
    """Start the image's program with its environment alone; it prints its address."""
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


def test_the_image_s_files_are_enough_to_start_stay_healthy_and_end(tmp_path):
    carry_out(Path(sys.executable), tmp_path)


@pytest.mark.slow
@pytest.mark.network  # the package index
@pytest.mark.timeout(1800)
def test_what_a_space_installs_is_enough_to_start_and_stay_healthy(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    gradio = f"gradio[oauth,mcp]=={front_matter()['sdk_version']}"
    pip = [python, "-m", "pip"]
    wanted = ["--requirement", ROOT / "requirements.txt", gradio, *SPACES_ADD]
    subprocess.run([*pip, "install", "--quiet", *wanted], check=True, timeout=1500)
    subprocess.run([*pip, "check"], check=True, timeout=120)

    carry_out(python, tmp_path)


def carry_out(python: Path, folder: Path) -> None:
    """Carry out the Dockerfile's steps from its first COPY on, and end it as `docker stop` does."""
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
        asked = [str(python), *check[1:]]
        healthy = subprocess.run(asked, env=os.environ | environment, check=False, timeout=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    gone = subprocess.run(
        asked, env=os.environ | environment, check=False, timeout=30, stderr=subprocess.DEVNULL
    )

    assert healthy.returncode == 0
    assert gone.returncode == 1  # Docker knows no other number
    assert (data / "compeer.sqlite3").is_file()


def test_in_a_space_the_page_is_served_to_its_proxy_and_lost_votes_are_announced(tmp_path):
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
    words = ["python", "app.py", "--reward", "none"]

    with started(Path(sys.executable), ROOT, words, space) as process:
        page = urllib.request.Request(f"http://127.0.0.1:{port}/", headers=proxied)
        with urllib.request.urlopen(page, timeout=60) as answer:
            cookie = answer.headers["set-cookie"]
            policy = answer.headers["content-security-policy"]
            body = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        told = process.stderr.read()

    assert re.search(r"SameSite=None; Secure; Partitioned$", cookie)
    assert "frame-ancestors 'self' https://huggingface.co" in policy
    assert "https://someone-compeer.hf.space" in body  # gradio's own addresses
    assert "http://127.0.0.1" not in body
    assert "votes are stored in a file of this Space and lost" in told
    assert "COMPEER_DATABASE_URL" in told
