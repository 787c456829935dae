"""The config of stage `cer`: one table for each step, and which generator does what."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from compeer_core.backends.openai.settings import KEY_VARIABLES
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.registry import SourceKind
from training.cer.card import Settings as CardSettings
from training.cer.corpora.hub import is_hub_name
from training.cer.personality.clusters import Settings as ClusterSettings
from training.cer.personality.rewriting import Settings as RewritingSettings
from training.cer.personality.traits import Settings as TraitSettings
from training.cer.requests.generators import GeneratorSettings
from training.cer.silver.dataset import Settings as SilverSettings
from training.cer.silver.mixed import Mixing
from training.cer.steps.cases import Settings as CaseSettings
from training.cer.steps.decontamination import Settings as LeakSettings
from training.cer.steps.filtering import Settings as FilterSettings
from training.cer.steps.generation import Settings as GenerationSettings
from training.cer.steps.human_labels import JudgedCorpus
from training.cer.steps.human_labels import Settings as HumanSettings
from training.cer.steps.ingest import CorpusFile


class Roles(FrozenModel):
    """Who does what, by the names of `Config.generators`."""

    filter: str | None = None
    """Reads each dialogue that passed the rules; None leaves the filter at its rules."""
    turns: tuple[str, ...] = ()
    """Write the turns with reasoning; empty means all generators."""
    traits: str | None = None
    """Tells the traits of the speakers; None uses the lexical rule."""
    rewriting: str | None = None
    """Rewrites rows; None uses the rules of manner."""
    checking: str | None = None
    """Compares rewritten rows with the originals; None leaves it at the rules of drift."""

    @property
    def named(self) -> tuple[str, ...]:
        single = (self.filter, self.traits, self.rewriting, self.checking)
        return (*self.turns, *(name for name in single if name is not None))


class AnnotationSettings(FrozenModel):
    """Who says what is right and what is better."""

    mode: Literal["people", "silver"] = "silver"
    """`people`: annotators, whose answers are read from files. `silver`: the published rule."""
    files: tuple[Path, ...] = ()
    """Answers of annotators, CSV or JSON lines, in addition to those in `annotation/answers` of the
    run."""
    wait: bool = True
    """Wait until each question is settled or dropped. False goes on with what is settled."""


class PersonalitySettings(FrozenModel):
    """How rows of the train split are rewritten."""

    traits: TraitSettings = TraitSettings()
    """How manners of speaking are told."""
    clusters: ClusterSettings = ClusterSettings()
    """How they are grouped."""
    rewriting: RewritingSettings = RewritingSettings()
    """How rows are rewritten, and which rewritings are left out."""


class Config(FrozenModel):
    """A CER data set."""

    output: Path
    """Where everything goes: the rows, the card, the reports, and the steps on the way."""
    data_dir: Path = Path("corpora")
    """The folder of corpora: relative paths below start there."""
    seed: int = Field(default=0, ge=0)
    """Of every draw: splits without a split of their own, rounds, samples, orders, personas."""
    engine: Literal["local", "ray"] = "local"
    """Where the work on single rows is done: in this process, or by the workers of Ray Data (extra
    `ray`). Both make the same files, byte by byte. On the workers run the questions to generators,
    the rules of the filter, the drawing of rounds, the silver rule, the rule that tells traits, and
    the rewriting by rules with its check (that of a sentence encoder aside: an open model is not sent
    to workers). In this process stays what needs many rows at once or their order: reading corpora,
    near-duplicates of tests, the comparison of layouts, the counts of what people do, which rows are
    taken, the vocabulary of likeness, clusters, personas, measures and the card; then photos, which
    lie on this machine; what people have judged, which is short; and writing files."""
    workers: int = Field(default=2, ge=1)
    """Of Ray: processes, each of which takes a CPU and has its own part of the requests in flight."""
    max_requests: int | None = Field(default=None, ge=0)
    """Requests to generators in one start, repeated ones included; then the run stops, and what was
    answered is kept."""
    corpora: tuple[CorpusFile, ...] = Field(min_length=1)
    """The files, in the order in which they are read."""
    role_cards: tuple[str, ...] = ()
    """Files of role cards in the layout of ESC-Eval, below `data_dir`. Dialogues of the train split
    that they were made from are left out."""
    faces: str | None = None
    """The packed folder of faces, below `data_dir`; needed for `cases.face_share`."""
    sources_per_split: int | None = Field(default=None, ge=1)
    """For a trial: at most so many dialogues, in all their layouts, of each split."""
    leaks: LeakSettings = LeakSettings()
    """When a row of training gives a test away."""
    filter: FilterSettings = FilterSettings()
    """Which dialogues are incoherent, artificial or no dialogues."""
    cases: CaseSettings = CaseSettings()
    """Which rounds are looked at."""
    generators: Mapping[str, GeneratorSettings] = {}
    """Models that write or read, by a name of your own."""
    roles: Roles = Roles()
    """Which of them does what."""
    generation: GenerationSettings = GenerationSettings()
    """How many turns are written, and which are usable."""
    annotation: AnnotationSettings = AnnotationSettings()
    """People or the rule."""
    silver: SilverSettings = SilverSettings()
    """The rule's thresholds, for `annotation.mode = "silver"`."""
    mixing: Mixing | None = None
    """Turns for training that are put together from steps of other histories, in silver mode."""
    judged: tuple[JudgedCorpus, ...] = ()
    """Corpora in which people have judged replies already; their rows stand in files of their
    own."""
    human: HumanSettings = HumanSettings()
    """How those judgements become preferences."""
    personality: PersonalitySettings | None = None
    """The three variants of the train split; None leaves them out."""
    card: CardSettings = CardSettings()
    """What stands in the card beside the numbers."""

    @model_validator(mode="after")
    def _roles_are_known(self) -> Self:
        for name in self.roles.named:
            if name not in self.generators:
                near = get_close_matches(name, self.generators, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                known = ", ".join(self.generators) or "none"
                raise ValueError(f"roles: no generator {name!r}{hint}; there are: {known}")
        if not self.generators:
            raise ValueError("generators: at least one is needed, to write turns")
        return self

    @property
    def writers(self) -> tuple[str, ...]:
        """The names of the generators that write turns."""
        return self.roles.turns or tuple(self.generators)


def check(config: Config) -> None:
    """Look for everything that a run will read, before it begins.

    Raises:
        ConfigError: A file is missing, or a model's source cannot be read.
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
        raise ConfigError("cases.face_share is not 0: name the packed folder of faces as `faces`")
    for name, settings in config.generators.items():
        where = settings.where
        if where.kind is SourceKind.ENDPOINT and urlsplit(where.location).username is not None:
            raise ConfigError(
                f"generators.{name}.source: a URL with a key or a password would be written to the "
                f"run's config.json; put the key into {' or '.join(KEY_VARIABLES)}"
            )
        if where.kind in {SourceKind.CHECKPOINT, SourceKind.SCRIPTED}:
            _must_exist(Path(where.location))


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
