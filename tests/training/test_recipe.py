"""A recipe runs its stages in order, each of them once."""

import sys
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest

from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import ConfigError
from training import recipe
from training.__main__ import main
from training.common.run_directory import RunDirectory
from training.stages import STAGES, Stage, StoppedEarly


class Config(FrozenModel):
    output: Path
    data_dir: Path = Path("corpora")
    steps: int = 1


class Bakery(ModuleType):
    """A stage that records its calls, and stops early for the output `stop_in`."""

    Config = Config

    def __init__(self) -> None:
        super().__init__("bakery_for_tests")
        self.calls: list[tuple[str, bool]] = []
        self.data_dirs: list[Path] = []
        self.stop_in = ""

    def run(self, config: Config, *, resume: Path | None, dry_run: bool) -> None:
        name = config.output.name
        self.calls.append((name, resume is not None))
        self.data_dirs.append(config.data_dir)
        run = RunDirectory.open(config.output, config, resume=resume is not None)
        run.metrics(step=1)
        if name == self.stop_in:
            raise StoppedEarly("stopped at step 1")


@pytest.fixture
def bakery(monkeypatch: pytest.MonkeyPatch) -> Bakery:
    module = Bakery()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    stages = {
        "dough": Stage(module.__name__, ""),
        "oven": Stage(module.__name__, ""),
        "run": STAGES["run"],
    }
    monkeypatch.setattr(recipe, "STAGES", MappingProxyType(stages))
    monkeypatch.setattr(recipe, "load_stage", lambda name: module)
    return module


@pytest.fixture
def bread(tmp_path: Path) -> Path:
    for name in ("dough", "oven"):
        output = (tmp_path / name).as_posix()
        (tmp_path / f"{name}.toml").write_text(f'output = "{output}"\n', encoding="utf-8")
    path = tmp_path / "bread.toml"
    path.write_text(
        f'''output = "{(tmp_path / "notes").as_posix()}"
[[stage]]
name = "dough"
config = "dough.toml"
[[stage]]
name = "oven"
config = "oven.toml"
set = ["steps=2"]
''',
        encoding="utf-8",
    )
    return path


def test_stages_run_in_order_and_only_once(bakery, bread):
    assert main(["run", str(bread)]) == 0
    assert main(["run", str(bread)]) == 0

    assert bakery.calls == [("dough", False), ("oven", False)]


def test_changed_config_runs_the_stage_again(bakery, bread):
    main(["run", str(bread)])
    bread.write_text(bread.read_text(encoding="utf-8").replace("=2", "=3"), encoding="utf-8")

    # the run directory belongs to a run with another config, so resuming is refused
    assert main(["run", str(bread)]) == 2
    assert bakery.calls[2:] == [("oven", True)]


def test_interrupted_stage_is_resumed(bakery, bread):
    bakery.stop_in = "oven"
    assert main(["run", str(bread)]) == 130
    bakery.stop_in = ""
    assert main(["run", str(bread)]) == 0

    assert bakery.calls == [("dough", False), ("oven", False), ("oven", True)]


def test_dry_run_checks_every_config_and_runs_nothing(bakery, bread):
    (bread.parent / "oven.toml").write_text("stepps = 3\n", encoding="utf-8")

    assert main(["run", str(bread), "--dry-run"]) == 2
    assert bakery.calls == []


def test_invalid_last_stage_is_reported_before_the_first_runs(bakery, bread):
    (bread.parent / "oven.toml").unlink()

    assert main(["run", str(bread)]) == 2
    assert bakery.calls == []


def test_data_dir_is_passed_to_every_stage(bakery, bread):
    assert main(["run", str(bread), "--set", "data_dir=elsewhere"]) == 0

    assert bakery.data_dirs == [Path("elsewhere")] * 2


def test_folders_are_expanded_in_set(bakery, bread):
    text = bread.read_text(encoding="utf-8")
    text = text.replace('"steps=2"', '"output={output}/of-{data_dir}", "steps=2"')
    bread.write_text(f'data_dir = "flour"\n{text}', encoding="utf-8")

    assert main(["run", str(bread), "--set", f"output={bread.parent / 'moved'}"]) == 0

    assert bakery.calls == [("dough", False), ("of-flour", False)]
    assert (bread.parent / "moved" / "of-flour" / "metrics.jsonl").exists()
    assert len([*(bread.parent / "moved").glob("oven-*.done.json")]) == 1


def test_recipes_with_the_same_output_share_equal_stages(bakery, bread):
    other = bread.with_name("rolls.toml")
    text = bread.read_text(encoding="utf-8")
    other.write_text(text.replace('"steps=2"', '"output={output}/rolls"'), encoding="utf-8")

    assert main(["run", str(bread)]) == 0
    before = len(bakery.calls)
    assert main(["run", str(other)]) == 0
    assert main(["run", str(bread)]) == 0

    # only the changed stage ran, and the first recipe is still done
    assert len(bakery.calls) == before + 1


def test_data_dir_placeholder_needs_data_dir(bakery, bread, capsys):
    text = bread.read_text(encoding="utf-8").replace('"steps=2"', '"steps={data_dir}"')
    bread.write_text(text, encoding="utf-8")

    assert main(["run", str(bread)]) == 2
    assert "stage 2: 'steps={data_dir}' needs the recipe's data_dir" in capsys.readouterr().err


def test_nested_recipes_are_rejected(bakery, bread):
    bread.write_text(bread.read_text(encoding="utf-8").replace('"dough"', '"run"'), "utf-8")

    with pytest.raises(ConfigError):
        load_toml(bread, recipe.Config)
