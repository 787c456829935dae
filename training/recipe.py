"""A recipe: several stages in order, `python -m training run <recipe.toml>`.

```toml
output = "runs/nano"          # where the recipe notes what is done
data_dir = "corpora"          # handed to every stage that has such a key

[[stage]]
name = "tokenizer"
config = "nano/tokenizer.toml"   # beside the recipe

[[stage]]
name = "pretrain"
config = "nano/pretrain.toml"
set = ["steps=200", "tokenizer={output}/tokenizer"]
```

In `set`, `{output}` and `{data_dir}` stand for the recipe's own, so that one `--set` moves all of it.

A stage that is done is skipped when the recipe runs again, as long as its config is the same, and
in any other recipe with the same `output`: variants of a model share the stages before them. A stage
that was stopped half-way is resumed if its config names its run directory as `output`.
"""

import json
import logging
import re
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import ConfigError
from training.common.fingerprints import digest
from training.common.run_directory import CONFIG_FILE, METRICS_FILE
from training.stages import STAGES, StageModule, load_stage

_log = logging.getLogger(__name__)


class Step(FrozenModel):
    """One stage of a recipe."""

    name: str
    """A stage of `python -m training --help`."""
    config: Path
    """Its TOML file; a relative path starts at the recipe's folder."""
    set: tuple[str, ...] = ()
    """Keys to change, as with --set; `{output}` and `{data_dir}` are filled in."""


class Config(FrozenModel):
    """A recipe."""

    output: Path
    """Folder for the notes of what is done."""
    data_dir: Path | None = None
    """Handed to every stage whose config has a `data_dir`; None leaves the stages' own."""
    stage: tuple[Step, ...] = Field(min_length=1)
    """The stages, in order."""
    folder: Path = Path()
    """Where relative config paths start. The command line fills in the recipe's own folder."""

    @model_validator(mode="after")
    def _no_recipe_in_a_recipe(self) -> Self:
        if any(step.name == "run" for step in self.stage):
            raise ValueError("a recipe cannot hold another recipe")
        return self


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Run the stages that are not done yet; with `dry_run`, only check that every config loads."""
    if resume is not None:
        raise ConfigError("a recipe needs no --resume: it skips what is done by itself")
    planned = [_plan(config, number, step) for number, step in enumerate(config.stage, start=1)]
    for number, (step, module, settings) in enumerate(planned, start=1):
        fingerprint = _fingerprint(step.name, settings)
        name = step.name.replace(" ", "-")
        note = config.output / f"{name}-{fingerprint[:12]}.done.json"
        title = f"{number}/{len(planned)} {step.name} ({step.config})"
        if _is_done(config.output, fingerprint):
            _log.info("%s: done before", title)
        elif dry_run:
            _log.info("%s: would run", title)
        else:
            _log.info("%s: runs", title)
            module.run(settings, resume=_begun(settings), dry_run=False)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"config_sha256": fingerprint}) + "\n", encoding="utf-8")


def _plan(config: Config, number: int, step: Step) -> tuple[Step, StageModule, FrozenModel]:
    """Load the config of one stage, so that a mistake in the last one is found before the first."""
    if step.name not in STAGES:
        raise ConfigError(
            f"stage {number}: unknown stage '{step.name}'; the stages are {', '.join(STAGES)}"
        )
    module = load_stage(step.name)
    changes = [_filled(change, number, config) for change in step.set]
    if config.data_dir is not None and "data_dir" in module.Config.model_fields:
        changes.append(f"data_dir={json.dumps(str(config.data_dir))}")
    return step, module, load_toml(config.folder / step.config, module.Config, changes)


def _filled(change: str, number: int, config: Config) -> str:
    """Put the recipe's folders in their places."""
    if "{data_dir}" in change and config.data_dir is None:
        raise ConfigError(
            f"stage {number}: {change!r} needs the recipe's data_dir, which is not set"
        )
    folders = {"{output}": str(config.output), "{data_dir}": str(config.data_dir)}
    return re.sub(r"\{(?:output|data_dir)\}", lambda match: folders[match[0]], change)


def _begun(settings: FrozenModel) -> Path | None:
    """Return the run directory of a stage that has begun and not ended, if it has one."""
    output = getattr(settings, "output", None)
    if not isinstance(output, Path):
        return None
    has_begun = (output / CONFIG_FILE).exists() and (output / METRICS_FILE).exists()
    return output if has_begun else None


def _fingerprint(name: str, settings: FrozenModel) -> str:
    return digest([name, settings.model_dump(mode="json")])


def _is_done(folder: Path, fingerprint: str) -> bool:
    """Whether a recipe with this folder has noted that a stage with this config is done."""
    notes = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.done.json"))
    return any(note["config_sha256"] == fingerprint for note in notes)
