"""The config of stage `cer`: a table for each step, and the role of each generator."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from compeer_core.cer import Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.registry import SourceKind
from training.cer.card import Settings as CardSettings
from training.cer.corpora.hub import is_hub_name
from training.cer.personality.clusters import Settings as ClusterSettings
from training.cer.requests.generators import GeneratorSettings
from training.cer.silver.dataset import Settings as SilverSettings
from training.cer.steps.cases import Settings as CaseSettings
from training.cer.steps.filtering import Settings as FilterSettings
from training.cer.steps.generation import Settings as GenerationSettings
from training.cer.steps.human_labels import JudgedCorpus
from training.cer.steps.ingest import CorpusFile
from training.data.near_duplicates import Rule


class Roles(FrozenModel):
    """The generator of each task, by its name in `Config.generators`."""

    filter: str | None = None
    """Filters the dialogues that pass the rules; None: the rules only."""
    turns: tuple[str, ...] = ()
    """Write the turns with reasoning; empty: all generators."""
    traits: str | None = None
    """Describes the traits of the speakers; None: the lexical rule."""
    rewriting: str | None = None
    """Rewrites rows; None: the rules of `manner`."""
    checking: str | None = None
    """Compares rewritten rows with the originals; None: the rules of `drift` only."""

    @property
    def named(self) -> tuple[str, ...]:
        single = (self.filter, self.traits, self.rewriting, self.checking)
        return (*self.turns, *(name for name in single if name is not None))


class AnnotationSettings(FrozenModel):
    """Who labels the turns."""

    mode: Literal["people", "reader", "silver"] = "silver"
    """`people`: annotators, with answers from files. `reader`: the same files, filled in by a language
    model, whose single answer is enough. `silver`: the published rule."""
    files: tuple[Path, ...] = ()
    """Annotators' answers, CSV or JSON lines, in addition to `annotation/answers` of the run."""
    wait: bool = True
    """Wait until each question is settled or dropped. False: continue with the settled ones."""


class PersonalitySettings(FrozenModel):
    """How rows of the train split are rewritten."""

    clusters: ClusterSettings = ClusterSettings()
    """How personas are clustered."""


class Config(FrozenModel):
    """How a CER data set is made."""

    output: Path
    """The run directory: rows, card, reports and intermediate files."""
    data_dir: Path = Path("corpora")
    """The folder of corpora; paths of corpora are relative to it."""
    seed: int = Field(default=0, ge=0)
    """The seed of every draw: splits of unsplit corpora, rounds, samples, orders, personas."""
    engine: Literal["local", "ray"] = "local"
    """Where work on single rows runs: in this process, or on Ray Data workers (extra `ray`). The files
    are the same, byte for byte. Workers run the questions to generators, the filter rules, the
    sampling of rounds, the silver rule, the lexical traits, and rewriting by rule with its check.
    This process keeps what needs many rows or their order (ingest, near-duplicates, the comparison of
    layouts, habit counts, selection, clusters, personas, figures, the card), sentence encoders,
    photos, human judgements, and writing files."""
    workers: int = Field(default=2, ge=1)
    """Ray processes; each takes one CPU and its share of the concurrent requests."""
    max_requests: int | None = Field(default=None, ge=0)
    """The most requests to generators in one start, retries included; the run then stops and keeps
    the answers."""
    corpora: tuple[CorpusFile, ...] = Field(min_length=1)
    """The files, in reading order."""
    role_cards: tuple[str, ...] = ()
    """Files of role cards in ESC-Eval's layout. Their source dialogues are removed from `train`."""
    faces: str | None = None
    """The packed folder of faces; needed for `cases.face_share`."""
    sources_per_split: PositiveInt | Mapping[Split, PositiveInt] | None = None
    """Use a subset: at most this many source dialogues of each split, in all their layouts; or a number
    for each split (`{ train = 190, valid = 38 }`, none of the others)."""
    leaks: Rule = Rule()
    """When a train dialogue repeats a held-out one."""
    filter: FilterSettings = FilterSettings()
    """Which dialogues are dropped as incoherent, artificial or not a dialogue."""
    cases: CaseSettings = CaseSettings()
    """Which rounds become cases."""
    generators: Mapping[str, GeneratorSettings] = {}
    """Models, by a name of your choice."""
    roles: Roles = Roles()
    """The task of each model."""
    generation: GenerationSettings = GenerationSettings()
    """How many turns are written, and which are accepted."""
    annotation: AnnotationSettings = AnnotationSettings()
    """Labels by people or by the rule."""
    silver: SilverSettings = SilverSettings()
    """Whether labels are chained, and the selection of rows, for `annotation.mode = "silver"`."""
    judged: tuple[JudgedCorpus, ...] = ()
    """Corpora that contain human judgements of replies; their rows get separate files."""
    personality: PersonalitySettings | None = None
    """The three variants of the train split; None: no variants."""
    card: CardSettings = CardSettings()
    """The texts of the card."""

    @model_validator(mode="after")
    def _roles_are_known(self) -> Self:
        for name in self.roles.named:
            if name not in self.generators:
                near = get_close_matches(name, self.generators, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                known = ", ".join(self.generators) or "none"
                raise ValueError(f"roles: no generator {name!r}{hint}; known: {known}")
        if not self.generators:
            raise ValueError("generators: at least one is needed to write turns")
        return self

    @property
    def writers(self) -> tuple[str, ...]:
        """The names of the generators that write turns."""
        return self.roles.turns or tuple(self.generators)


def check(config: Config) -> None:
    """Check that all inputs of a run exist.

    Raises:
        ConfigError: A file is missing, or a model's source is not usable.
    """
    for file in config.corpora:
        if not is_hub_name(file.path):
            _must_exist(config.data_dir / file.path)
    for name in (*config.role_cards, *(path for each in config.judged for path in each.paths)):
        _must_exist(config.data_dir / name)
    for path in config.annotation.files:
        _must_exist(path)
    if config.faces is not None:
        _must_exist(config.data_dir / config.faces)
    elif config.cases.face_share:
        raise ConfigError("cases.face_share is above 0: set `faces` to the packed folder of faces")
    for settings in config.generators.values():
        where = settings.where
        if where.kind in {SourceKind.CHECKPOINT, SourceKind.SCRIPTED}:
            _must_exist(Path(where.location))


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
