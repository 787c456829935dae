"""A blind preference study (the paper's Fig. 6): `python -m training evaluate human <config.toml>`.

The first run samples a turn of each model for each held-out context, writes a package for raters and stops:

```text
<output>/package/items.jsonl    items of the annotation desk, sides at random, without authors
<output>/package/<pictures>     the pictures of the contexts, under their names
<output>/key.json               models, seeds and whole turns; not for raters
<output>/ratings/person, llm    empty folders for the answers
```

Raters answer at the desk or in a file of their own. Once there are answers, a run analyses them. People and language
models get a result each; their answers are never put together. A dry run prints how many cases a study needs.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from compeer_core.annotation.annotations import Annotation
from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.row_files import read_json, replacing, write_rows
from training.common import results
from training.common.fingerprints import digest
from training.common.run_directory import RunDirectory
from training.data.pictures import Pictures
from training.evaluation.answer_store import clear_stores
from training.evaluation.contexts import BlindConfig, read_contexts, sampled_turns
from training.evaluation.pair_items import (
    Against,
    PairKey,
    blind_items,
    model_pairs,
    write_pictures,
)
from training.evaluation.plots import plot_preferences
from training.evaluation.policy_answers import Policies, PolicySource, gate_state
from training.evaluation.preference_power import power_table
from training.evaluation.preferences import (
    agreement_metrics,
    order_metrics,
    pair_metrics,
    strength_metrics,
)
from training.evaluation.ratings import (
    SOURCES,
    LabelSource,
    independent_answers,
    rating_files,
    read_ratings,
    standing_ratings,
)
from training.stages import WaitingForPeople, refuse_resume

_log = logging.getLogger(__name__)

KEY, PACKAGE, ITEMS, RATINGS = "key.json", "package", "items.jsonl", "ratings"
RATERS: Mapping[LabelSource, str] = {"person": "people", "llm": "language models, not by people"}
"""How a result's title names the raters."""


class Config(BlindConfig):
    """`[evaluate human]`: models, contexts and the place of the answers.

    At most one context of each source dialogue is drawn. The paper has 200.
    """

    models: Policies[PolicySource] = Field(min_length=2)
    against: Against = "first"
    """Which models are compared: the first with each of the others, as in the paper, or all with each other."""
    name: str = Field(pattern=r"^human_[\w-]+$")
    """Name of the results files, before `_person` and `_llm`."""
    data_dir: Path | None = None
    """Folder of the corpora, for contexts that show other pictures."""
    command: str = "python -m training evaluate human training/configs/evaluate_human.toml"
    """The command that reproduces the result."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return model_pairs([model.name for model in self.models], self.against)


class Key(FrozenModel):
    """`key.json`: what raters must not see."""

    settings: str
    """Digest of the settings that the package depends on."""
    items: tuple[PairKey, ...]


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the package, or analyse the answers once there are some.

    Raises:
        WaitingForPeople: The package is written, answers are missing.
        ConfigError: An answer cannot be used; the message names file and row.
    """
    if resume != config.output:
        refuse_resume(resume, "evaluate human resumes by itself")
    if dry_run:
        _log.info("%s", power_table(sum(contexts.count for contexts in config.contexts)))
        contexts = _contexts(config)
        _log.info("%d contexts, %d items", len(contexts), len(contexts) * len(config.pairs))
        return
    ratings = config.output / RATINGS
    files = rating_files(ratings)
    if not (config.output / KEY).is_file():
        for paths in files.values():
            raise ConfigError(
                f"{paths[0]}: its key {config.output / KEY} is missing; put the key of these answers "
                "back, or move the answers elsewhere to start a new study"
            )
        _write_package(config, _contexts(config))
    key = _read_key(config)
    if not files:
        for source in SOURCES:
            (ratings / source).mkdir(parents=True, exist_ok=True)
        raise WaitingForPeople(
            f"{len(key.items)} items are in {config.output / PACKAGE / ITEMS}. Add them to a desk "
            f"(python -m compeer_core.votes items {config.output / PACKAGE / ITEMS}) or hand them out, put "
            f"the answers (export --what annotations) into {ratings / 'person'} or {ratings / 'llm'}, and "
            "run this command again"
        )
    answers = read_ratings(files, {item.item_id: item for item in key.items})
    if not answers:
        raise ConfigError(f"{ratings}: the files have no answers")
    RunDirectory.continued(config.output, config)
    for source, of_source in answers.items():
        _publish(config, key, source, of_source)


def _contexts(config: Config) -> list[Case]:
    return list(read_contexts(config.contexts, config.seed, one_per_source=True))


def _settings(config: Config) -> str:
    return digest(config.model_dump(mode="json", exclude={"output", "results", "name", "command"}))


def _write_package(config: Config, contexts: Sequence[Case]) -> None:
    """Write items, pictures and key. The key is last, so that an interrupted run is resumed."""
    RunDirectory.continued(config.output, config)
    pictures = Pictures(config.data_dir, config.faces)
    turns = sampled_turns(
        config.models, contexts, pictures, config.sampling, config.output, config.seed
    )
    items = blind_items(turns, config.pairs, config.seed)
    package = config.output / PACKAGE
    write_pictures(package, contexts, pictures)
    write_rows(package / ITEMS, (item for item, _ in items))
    key = Key(settings=_settings(config), items=tuple(key for _, key in items))
    with replacing(config.output / KEY) as file:
        file.write(key.model_dump_json(indent=1) + "\n")
    clear_stores(config.output)


def _read_key(config: Config) -> Key:
    path = config.output / KEY
    key = read_json(path, Key)
    if key.settings != _settings(config):
        raise ConfigError(
            f"{path}: the package was written with other settings; choose another output"
        )
    return key


def _publish(config: Config, key: Key, source: LabelSource, answers: Sequence[Annotation]) -> None:
    """Write the result of one source of labels, with its table and plot."""
    ratings = standing_ratings(answers, {item.item_id: item for item in key.items}, source)
    raters = sorted({each.rater for each in ratings})
    unused = len({(each.item_id, each.annotator) for each in answers}) - len(ratings)
    if unused:
        _log.warning(
            "%d %s answers are withdrawn, or came after the second person's", unused, source
        )
    if not ratings:
        raise ConfigError(f"{config.output / RATINGS / source}: no answer has a preference")
    metrics = [
        *pair_metrics(ratings, config.pairs),
        *strength_metrics(ratings, config.seed),
        *order_metrics(ratings),
    ]
    for pair in config.pairs:
        items = [item.item_id for item in key.items if {*item.models} == {*pair}]
        metrics += agreement_metrics(independent_answers(answers, items), pair, config.seed)
    cases = len({each.key.case for each in ratings})
    who = f"{len(raters)} raters" if source == "person" else ", ".join(raters)
    result = results.made(
        ("torch", "transformers", "peft", "scikit-learn"),
        name=f"{config.name}_{source}",
        title=f"Replies compared blind by {RATERS[source]}: {cases} cases, {len(ratings)} answers",
        model=", ".join(model.name for model in config.models),
        label_source=f"{source} ({who})",
        command=config.command,
        seed=config.seed,
        gate=gate_state(config.models),
        interval="95 % CI over cases",
        compared="Model",
        metrics=tuple(metrics),
    )
    folder = config.output / source
    folder.mkdir(parents=True, exist_ok=True)
    results.publish(result, config.results, folder)
    plot_preferences(result.metrics, result.label_source, folder / "preferences.png")
