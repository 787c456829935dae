"""`python -m training`: one-sentence errors and exit codes."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from compeer_core.config import FrozenModel
from compeer_core.errors import BackendError
from training.__main__ import main
from training.stages import STAGES, Stage, StoppedEarly, WaitingForPeople


class Shape(FrozenModel):
    layers: int = 2


class Config(FrozenModel):
    steps: int = 10
    shape: Shape = Shape()


class Recorder(ModuleType):
    """A stage that records its calls, and raises `failure` if set."""

    Config = Config

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Config, Path | None, bool]] = []
        self.failure: Exception | None = None

    def run(self, config: Config, *, resume: Path | None, dry_run: bool) -> None:
        self.calls.append((config, resume, dry_run))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = Recorder("a_stage_for_tests")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "polish.toml"
    path.write_text("steps = 3\n", encoding="utf-8")
    return str(path)


def command(*arguments: str) -> int:
    flags = {"steps": "how often to rub"}
    return main(arguments, {"polish": Stage("a_stage_for_tests", "polish the brass", flags)})


def test_stage_receives_config_resume_and_dry_run(stage, config_file):
    code = command(
        "polish", config_file, "--set", "shape.layers=5", "--resume", "runs/x", "--dry-run"
    )

    assert code == 0
    assert stage.calls == [(Config(steps=3, shape=Shape(layers=5)), Path("runs/x"), True)]


def test_config_file_can_be_a_flag(stage, config_file, capsys):
    assert command("polish", "--config", config_file, "--set", "shape.layers=5") == 0

    assert stage.calls == [(Config(steps=3, shape=Shape(layers=5)), None, False)]
    assert command("polish", config_file, "--config", config_file) == 2
    assert "not allowed with argument config" in capsys.readouterr().err
    assert len(stage.calls) == 1


def test_a_stage_may_take_config_keys_as_arguments(stage, config_file, capsys):
    stages = {"polish": Stage("a_stage_for_tests", "polish", arguments={"steps": "how often"})}

    assert main(["polish", "7", "--set", "shape.layers=5"], stages) == 0
    assert main(["polish", "7", "--config", config_file], stages) == 0
    assert main(["polish", "often"], stages) == main(["polish"], stages) == 2
    assert stage.calls == [
        (Config(steps=7, shape=Shape(layers=5)), None, False),
        (Config(steps=7), None, False),
    ]
    errors = capsys.readouterr().err.splitlines()
    assert "command line: steps: " in errors[0]
    assert "required: steps" in errors[1]
    assert main(["--help"], stages) == 0
    assert "polish takes steps instead of a file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["polsih", "x.toml"], "unknown stage 'polsih' (did you mean 'polish'?)"),
        (["polish"], "config"),
        (["polish", "missing.toml"], "missing.toml"),
        (["polish", "{config}", "--set", "stepps=4"], "steps"),
        (["polish", "{config}", "--set", "steps=many"], "steps"),
        (["polish", "{config}", "--quick"], "--quick"),
        (["results", "--root", "{config}", "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_command_is_explained_on_stderr(stage, config_file, capsys, arguments, says):
    code = command(*(word.format(config=config_file) for word in arguments))

    captured = capsys.readouterr()
    assert code == 2
    assert stage.calls == []
    assert captured.out == ""
    assert captured.err.startswith("python -m training: ")
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_failure_is_one_sentence_and_exit_code_1(stage, config_file, capsys):
    stage.failure = BackendError("the model ran out of memory")

    assert command("polish", config_file) == 1
    assert capsys.readouterr().err == "python -m training: the model ran out of memory\n"


@pytest.mark.parametrize("failure", [StoppedEarly("stopped at step 4"), KeyboardInterrupt()])
def test_interrupted_stage_exits_with_130(stage, config_file, failure):
    stage.failure = failure

    assert command("polish", config_file) == 130


def test_stage_waiting_for_people_exits_with_0(stage, config_file, capsys):
    stage.failure = WaitingForPeople("items.jsonl waits for two annotators")

    assert command("polish", config_file) == 0
    assert capsys.readouterr().out == "items.jsonl waits for two annotators\n"


def test_two_word_stage_names(stage, config_file):
    stages = {
        "rub": Stage("no_such_module", "rub"),
        "rub dry": Stage("a_stage_for_tests", "rub without oil"),
    }

    assert main(["rub", "dry", config_file], stages) == 0
    assert stage.calls == [(Config(steps=3), None, False)]


def test_config_key_as_a_flag(stage, config_file, capsys):
    assert command("polish", config_file, "--steps", "7", "--set", "shape.layers=5") == 0
    assert stage.calls[0][0] == Config(steps=7, shape=Shape(layers=5))

    assert command("polish", config_file, "--steps", "many") == 2
    assert "steps: Input should be a valid integer" in capsys.readouterr().err
    assert command("polish", "--help") == 0
    assert "--steps VALUE" in capsys.readouterr().out


def test_unexpected_errors_keep_their_traceback(stage, config_file):
    stage.failure = ZeroDivisionError()

    with pytest.raises(ZeroDivisionError):
        command("polish", config_file)


def test_help_lists_every_stage(capsys):
    assert main(["--help"]) == 0

    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in [*STAGES, "results"])


def test_help_of_one_stage_does_not_import_it(capsys):
    assert main(["polish", "--help"], {"polish": Stage("no_such_module", "polish the brass")}) == 0
    assert "polish the brass" in capsys.readouterr().out


def test_help_does_not_import_torch(repository):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from training.__main__ import main; main(['--help']); "
            "sys.exit('torch' in sys.modules)",
        ],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_no_arguments_show_the_usage(capsys):
    assert main([]) == 2
    assert "usage: python -m training" in capsys.readouterr().out
