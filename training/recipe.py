"""A recipe: several stages in order, `python -m training run <recipe.toml>`.

```toml
output = "runs/small"         # receives a marker file per finished stage
data_dir = "corpora"          # passed to every stage that has this key

[[stage]]
name = "cer rules"
config = "cer_rules.toml"     # relative to the recipe
set = ["esconv={data_dir}/esconv"]

[[stage]]
name = "sft adapter"
config = "sft_adapter_esconv.toml"
set = ["steps=200", 'records=["{output}/rules/rows.jsonl"]']
```

In `set`, `{output}` and `{data_dir}` expand to the recipe's values, so one `--set` relocates a whole
recipe.

A finished stage is skipped as long as its config is unchanged. Recipes with the same `output` share
finished stages, so variants of a model reuse their common stages. An interrupted stage is resumed
if its config has a run directory as `output`.
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
from training.stages import STAGES, StageModule, load_stage, refuse_resume

_log = logging.getLogger(__name__)


class Step(FrozenModel):
    """One stage of a recipe."""

    name: str
    """A stage of `python -m training --help`."""
    config: Path
    """Its TOML file, relative to the recipe's folder."""
    set: tuple[str, ...] = ()
    """Keys to override, as with --set; `{output}` and `{data_dir}` are expanded."""


class Config(FrozenModel):
    """A recipe."""

    output: Path
    """Folder for the marker files of finished stages."""
    data_dir: Path | None = None
    """Passed to every stage whose config has a `data_dir`; None keeps the stages' own values."""
    stage: tuple[Step, ...] = Field(min_length=1)
    """The stages, in order."""
    folder: Path = Path()
    """Base of relative config paths. The command line sets it to the recipe's folder."""

    @model_validator(mode="after")
    def _no_recipe_in_a_recipe(self) -> Self:
        if any(step.name == "run" for step in self.stage):
            raise ValueError("a recipe cannot hold another recipe")
        return self


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Run the stages that are not done yet; with `dry_run`, only check that every config loads."""
    refuse_resume(resume, "a recipe skips finished stages by itself")
    planned = [_plan(config, number, step) for number, step in enumerate(config.stage, start=1)]
    for number, (step, module, settings) in enumerate(planned, start=1):
        config_sha256 = digest([step.name, settings.model_dump(mode="json")])
        name = step.name.replace(" ", "-")
        marker = config.output / f"{name}-{config_sha256[:12]}.done.json"
        title = f"{number}/{len(planned)} {step.name} ({step.config})"
        if _is_done(config.output, config_sha256):
            _log.info("%s: already done", title)
        elif dry_run:
            _log.info("%s: would run", title)
        else:
            _log.info("%s: running", title)
            module.run(settings, resume=_unfinished_run(settings), dry_run=False)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(json.dumps({"config_sha256": config_sha256}) + "\n", encoding="utf-8")


def _plan(config: Config, number: int, step: Step) -> tuple[Step, StageModule, FrozenModel]:
    """Load one stage's config. All are loaded first, so a mistake in the last one shows at once."""
    if step.name not in STAGES:
        raise ConfigError(
            f"stage {number}: unknown stage '{step.name}'; the stages are {', '.join(STAGES)}"
        )
    module = load_stage(step.name)
    overrides = [_expand(override, number, config) for override in step.set]
    if config.data_dir is not None and "data_dir" in module.Config.model_fields:
        overrides.append(f"data_dir={json.dumps(str(config.data_dir))}")
    return step, module, load_toml(config.folder / step.config, module.Config, overrides)


def _expand(override: str, number: int, config: Config) -> str:
    """Expand the recipe's folders in one entry of `set`."""
    if "{data_dir}" in override and config.data_dir is None:
        raise ConfigError(
            f"stage {number}: {override!r} needs the recipe's data_dir, which is not set"
        )
    folders = {"{output}": str(config.output), "{data_dir}": str(config.data_dir)}
    return re.sub(r"\{(?:output|data_dir)\}", lambda match: folders[match[0]], override)


def _unfinished_run(settings: FrozenModel) -> Path | None:
    """Return the run directory of an interrupted stage, or None."""
    output = getattr(settings, "output", None)
    if not isinstance(output, Path):
        return None
    is_run = (output / CONFIG_FILE).exists() and (output / METRICS_FILE).exists()
    return output if is_run else None


def _is_done(folder: Path, config_sha256: str) -> bool:
    """Whether `folder` has the marker file of a stage with this config."""
    markers = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.done.json"))
    return any(marker["config_sha256"] == config_sha256 for marker in markers)
