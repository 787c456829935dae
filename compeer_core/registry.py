"""The models of a page: `models.toml`, and loading its entries as policies and judges.

```toml
[[models]]
name = "compeer-small"
kind = "policy"                                  # or "judge"
title = "COMPEER-small"
source = "checkpoints/compeer-small-base"        # relative to this file
adapter = "checkpoints/compeer-small"            # LoRA, beside the weights
languages = ["en"]                               # "*" for any
licence = "CC-BY-NC-4.0"
default = true

[[models]]
name = "qwen"
kind = "policy"
source = "openai:http://localhost:8000/v1#Qwen/Qwen2.5-VL-7B-Instruct"
style = "prompted"                               # not trained on our grammar; a prompt asks for it
sampling = { temperature = 0.8, max_new_tokens = 800 }

[[models]]
name = "qwen-judge"
kind = "judge"
source = "openai:http://localhost:8000/v1#Qwen/Qwen2.5-VL-7B-Instruct"
temperatures = { steps = 1.4, replies = 1.2 }    # calibration of its probabilities
findings = true                                  # it was trained with the findings of compeer_core.findings
verdicts = "parsed"                              # parse its text; the default is "logprobs"
sampling = { max_new_tokens = 300 }              # budget of that text
```

A `source` is one of

- a checkpoint folder,
- ``hf:NAME_OR_PATH``, a checkpoint on the Hugging Face Hub (or a folder),
- ``openai:URL#MODEL``, a model behind an endpoint (`compeer_core.backends.openai.policy`),
- ``scripted:FILE``, recorded turns (`compeer_core.backends.scripted`).

`verdicts` is for a judge behind an endpoint (`compeer_core.backends.openai.scoring`): "logprobs", the
default, reads the probabilities of its first word; "parsed" lets it write, and parses the verdict at
the end. If an endpoint returns no log-probabilities, its text is parsed in any case, with a warning.

A judge may consist of two models, one for the steps (PRM) and one for the reply (ORM); `reply_source`,
`reply_adapter` or both define the second.

A model is loaded on first use, and only once, however many visitors request it at the same time.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from compeer_core.backends.openai.settings import MAX_WRITTEN_TOKENS, Verdicts
from compeer_core.backends.protocol import Backend, LabelScorer, Sampling
from compeer_core.backends.scripted import ScriptedBackend, ScriptedScorer
from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import CheckpointError, CompeerError, ConfigError, UnknownModelError
from compeer_core.policy import ANY_LANGUAGE, Policy, Style, speaks
from compeer_core.prompts import LANGUAGES
from compeer_core.safety import RiskCheck, RiskSign, find_risk
from compeer_core.taxonomy import ESCONV_STRATEGIES, load_strategies
from compeer_core.unifireward import Judge, Temperatures

logger = logging.getLogger(__name__)

Kind = Literal["policy", "judge"]
Quantize = Literal["4bit", "8bit", "int8"]


# --- sources -------------------------------------------------------------------------------------


class SourceKind(StrEnum):
    """Kinds of model sources."""

    CHECKPOINT = "checkpoint"
    """A local folder."""
    HUB = "hub"
    """A Hugging Face Hub ID."""
    ENDPOINT = "endpoint"
    """An OpenAI-compatible server."""
    SCRIPTED = "scripted"
    """Recorded turns instead of a model."""


@dataclass(frozen=True)
class Source:
    """The location of a model."""

    kind: SourceKind
    location: str
    """A folder, a Hub ID, a URL or a file."""
    model: str = ""
    """The model's name at an endpoint."""


_FORMS = {
    "hf": SourceKind.HUB,
    "openai": SourceKind.ENDPOINT,
    "scripted": SourceKind.SCRIPTED,
}


def parse_source(text: str) -> Source:
    """Parse a source.

    Raises:
        ConfigError: It is empty, has an unknown prefix, or lacks a part.

    Example:
        >>> parse_source("openai:http://localhost:8000/v1#tiny").model
        'tiny'
    """
    form, colon, rest = text.partition(":")
    # One letter before the colon is a Windows drive; a slash belongs to a path.
    if not colon or len(form) < 2 or "/" in form or "\\" in form:
        if not text.strip():
            raise ConfigError("the source of a model is empty")
        return Source(SourceKind.CHECKPOINT, text)
    if form not in _FORMS:
        nearest = get_close_matches(form, _FORMS, n=1)
        hint = f" (did you mean '{nearest[0]}:'?)" if nearest else ""
        known = "a folder, hf:NAME, openai:URL#MODEL or scripted:FILE"
        raise ConfigError(f"{text!r}: unknown source '{form}:'{hint}; known: {known}")
    if not rest:
        raise ConfigError(f"{text!r}: nothing follows '{form}:'")
    if form != "openai":
        return Source(_FORMS[form], rest)
    url, _, model = rest.partition("#")
    if not model:
        raise ConfigError(f"{text!r}: the name of the model is missing; write openai:URL#MODEL")
    return Source(SourceKind.ENDPOINT, url, model)


# --- the list ------------------------------------------------------------------------------------


class SamplingOverrides(FrozenModel):
    """Changes to `Sampling`'s defaults."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
    exact_quotations: bool | None = None
    fresh_sentences: bool | None = None
    thinking: bool | None = None

    def applied(self) -> Sampling:
        """Return the resulting sampling."""
        return replace(Sampling(), **self.model_dump(exclude_none=True))


class VerdictTemperatures(FrozenModel):
    """A judge's calibration; see `compeer_core.unifireward.Temperatures`."""

    steps: float = Field(default=1.0, gt=0)
    replies: float = Field(default=1.0, gt=0)


class ModelEntry(FrozenModel):
    """One model of the list."""

    name: str = Field(pattern=r"^[\w.\-]{1,80}$")
    """Its name in flags, the API and votes."""
    kind: Kind
    """A "policy" generates turns, a "judge" scores them."""
    title: str = ""
    """Its title on the page; empty: its name."""
    source: str
    """Its location; see the module docstring."""
    adapter: Path | None = None
    """A folder with a LoRA adapter for a checkpoint."""
    style: Style = "trained"
    """Whether it was trained on the grammar, or a prompt asks for it."""
    system_prompt: str = ""
    """For a policy of the style "trained": a system message, if the model needs one."""
    message_suffix: str = ""
    """For a policy: a text after the last message, as some models need to answer without thoughts."""
    sees_images: bool = True
    """For a policy: False leaves pictures out of its prompts, as a language model needs; the page says so."""
    languages: tuple[str, ...] = (ANY_LANGUAGE,)
    """Languages on its card (ISO 639-1); "*" is any."""
    licence: str = ""
    """Licence of the weights."""
    card: Path | None = None
    """A model card, Markdown."""
    strategies: Path | None = None
    """A strategy vocabulary other than ESConv's."""
    strategy_openings: dict[str, Annotated[str, Field(pattern=r"^[^<>\n]*\S$")]] = {}  # noqa: RUF012
    """For a policy that is not behind an endpoint: by strategy, the first words of its strategy step where that
    strategy is forced (`Question = "A question about"`); see `compeer_core.policy.Policy`."""
    sampling: SamplingOverrides = SamplingOverrides()
    """Changes to the sampling. For a judge only `max_new_tokens` counts, if its text is parsed."""
    reply_source: str = ""
    """For a judge of two models (PRM and ORM): the source of the one for replies. Empty: `source`."""
    reply_adapter: Path | None = None
    """Its adapter. With either key the judge has two models."""
    verdicts: Verdicts = "logprobs"
    """How the verdicts of a judge behind an endpoint are read."""
    temperatures: VerdictTemperatures = VerdictTemperatures()
    """For a judge: the temperatures of its verdicts on steps and replies, fitted on a validation split."""
    findings: bool = False
    """For a judge: its questions about steps contain what a rule finds in them, as in its training."""
    risk_check: Path | None = None
    """For a checkpoint of a policy: weights of a learned check for signs of danger on it
    (`compeer_core.risk_classifier`)."""
    small: bool = False
    """Whether the page must warn that the model is too small for real use. Screens use this field, not
    the name."""
    default: bool = False
    """Whether it is the default of its kind; at most one is. Otherwise the first is the default."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelEntry":
        kind = self.where.kind
        if self.adapter is not None and kind not in {SourceKind.CHECKPOINT, SourceKind.HUB}:
            raise ValueError(f"an adapter needs a checkpoint, but the source is {self.source!r}")
        for constraint in ("exact_quotations", "fresh_sentences"):
            needs_checkpoint = getattr(self.sampling, constraint)
            if needs_checkpoint and kind not in {SourceKind.CHECKPOINT, SourceKind.HUB}:
                raise ValueError(
                    f"{constraint} needs a checkpoint, but the source is {self.source!r}"
                )
        if self.risk_check is not None and (self.kind, kind) != ("policy", SourceKind.CHECKPOINT):
            raise ValueError("risk_check is only for a policy whose source is a checkpoint folder")
        if self.for_replies is not None and self.kind != "judge":
            raise ValueError("reply_source and reply_adapter are only for a judge")
        is_remote_judge = self.kind == "judge" and kind is SourceKind.ENDPOINT
        if "verdicts" in self.model_fields_set and not is_remote_judge:
            raise ValueError("verdicts is only for a judge behind an endpoint (openai:URL#MODEL)")
        if self.kind != "judge" and "temperatures" in self.model_fields_set:
            raise ValueError("temperatures is only for a judge; a policy has sampling.temperature")
        if self.system_prompt and (self.kind, self.style) != ("policy", "trained"):
            raise ValueError("system_prompt is only for a policy of the style 'trained'")
        if self.kind != "policy" and (self.message_suffix or not self.sees_images):
            raise ValueError("message_suffix and sees_images are only for a policy")
        if self.kind != "judge" and self.findings:
            raise ValueError("findings is only for a judge")
        if self.strategy_openings and (self.kind != "policy" or kind is SourceKind.ENDPOINT):
            raise ValueError(
                "strategy_openings is only for a policy that is not behind an endpoint"
            )
        return self

    @classmethod
    def from_flag(cls, source: str, kind: Kind = "policy") -> "ModelEntry":
        """Return the entry of a source from the command line; it becomes the default of its kind.

        Raises:
            ConfigError: The source is invalid, or does not fit the kind.
        """
        where = parse_source(source)
        is_local = where.kind in {SourceKind.SCRIPTED, SourceKind.CHECKPOINT} or (
            where.kind is SourceKind.HUB and Path(where.location).is_dir()
        )
        if is_local:  # a list resolves paths from its own folder, a shell from the current one
            source = _source_of_path(where.kind, Path(where.location).resolve())
        label = where.model or Path(where.location).name
        # The same model may be policy and judge.
        ending = "-judge" if kind == "judge" else ""
        stem = re.sub(r"[^\w.\-]+", "-", label.rpartition("/")[2])[: 80 - len(ending)] or kind
        try:
            return cls(
                name=f"{stem}{ending}",
                kind=kind,
                title=label,
                source=source,
                style="trained" if where.kind is SourceKind.SCRIPTED else "prompted",
                default=True,
            )
        except ValidationError as error:
            raise ConfigError(f"{source!r}: {error.errors()[0]['msg']}") from error

    @property
    def where(self) -> Source:
        """The parsed source."""
        return parse_source(self.source)

    @property
    def for_replies(self) -> "ModelEntry | None":
        """The model that judges replies, if it is a separate one."""
        if not self.reply_source and self.reply_adapter is None:
            return None
        return self.model_copy(
            update={
                "source": self.reply_source or self.source,
                "adapter": self.reply_adapter,
                "reply_source": "",
                "reply_adapter": None,
            }
        )

    def located(self, folder: Path) -> "ModelEntry":
        """Return the entry of a list in `folder` with its source and adapter as seen from the current folder."""
        where, source = self.where, self.source
        if where.kind in {SourceKind.SCRIPTED, SourceKind.CHECKPOINT}:
            source = _source_of_path(where.kind, folder / where.location)
        adapter = None if self.adapter is None else folder / self.adapter
        return self.model_copy(update={"source": source, "adapter": adapter})

    def speaks(self, language: str) -> bool:
        """Whether the card lists `language`; an undetermined one ("und") counts as listed."""
        return speaks(self.languages, language)


def _source_of_path(kind: SourceKind, path: Path) -> str:
    return f"scripted:{path}" if kind is SourceKind.SCRIPTED else str(path)


class _ModelList(FrozenModel):
    models: tuple[ModelEntry, ...] = Field(min_length=1)


# --- the registry --------------------------------------------------------------------------------


class Registry:
    """The list of models, and the loaded ones."""

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        folder: Path = Path(),
        *,
        quantize: Quantize | None = None,
        device: str | None = None,
    ) -> None:
        """Use a list of models; nothing is loaded yet.

        Args:
            entries: In display order.
            folder: Base of relative paths in the entries.
            quantize: For checkpoints: quantization of their weights.
            device: For checkpoints: their device; None chooses.

        Raises:
            ConfigError: A name is repeated, or a kind has two defaults.
        """
        self.entries = tuple(entries)
        self._folder = folder
        self._quantize: Quantize | None = quantize
        self._device = device
        names = [entry.name for entry in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"the list of models has {name!r} more than once")
        for kind in get_args(Kind):
            defaults = [
                entry.name for entry in self.entries if entry.kind == kind and entry.default
            ]
            if len(defaults) > 1:
                raise ConfigError(f"more than one default {kind}: {', '.join(defaults)}")
        self._slots = {name: _Slot() for name in names}

    @classmethod
    def from_toml(
        cls, path: Path, *, quantize: Quantize | None = None, device: str | None = None
    ) -> "Registry":
        """Read `models.toml`.

        Raises:
            ConfigError: The file cannot be read or is invalid.
        """
        models = load_toml(path, _ModelList).models
        try:
            return cls(models, path.parent, quantize=quantize, device=device)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def adding(self, entry: ModelEntry) -> "Registry":
        """Return a registry with one more model, with nothing loaded yet.

        If `entry` is a default, it replaces the default of its kind.

        Raises:
            ConfigError: The name is taken.
        """
        others = self.entries
        if entry.default:
            others = tuple(
                other.model_copy(update={"default": False}) if other.kind == entry.kind else other
                for other in others
            )
        return Registry(
            (*others, entry), self._folder, quantize=self._quantize, device=self._device
        )

    def entry(self, name: str, kind: Kind) -> ModelEntry:
        """Return the entry of a name and kind; an empty name means the default.

        Raises:
            UnknownModelError: It does not exist.
        """
        of_kind = [entry for entry in self.entries if entry.kind == kind]
        wanted = name or self.default_name(kind)
        for entry in of_kind:
            if entry.name == wanted:
                return entry
        raise UnknownModelError(name or f"default {kind}", [entry.name for entry in of_kind])

    def default_name(self, kind: Kind) -> str:
        """Return the name of the default, or of the first of its kind; empty if there are none."""
        of_kind = [entry for entry in self.entries if entry.kind == kind]
        flagged = [entry for entry in of_kind if entry.default]
        return next((entry.name for entry in (*flagged, *of_kind)), "")

    def policy(self, name: str = "") -> Policy:
        """Return the policy of a name, loaded; an empty name means the default.

        Raises:
            UnknownModelError: It does not exist.
            ConfigError: Its script or vocabulary is invalid.
            BackendError: It cannot be loaded; `CheckpointError` if a file is missing.
        """
        entry = self.entry(name, "policy")
        loaded = self._loaded(entry, self._load_policy)
        assert isinstance(loaded, Policy)
        return loaded

    def judge(self, name: str = "") -> Judge | None:
        """Return the judge of a name, loaded; an empty name means the default, None if there is none.

        Raises:
            UnknownModelError: It does not exist.
            ConfigError: Its script is invalid, or a verdict is not one token for it.
            BackendError: It cannot be loaded; `CheckpointError` if a file is missing.
        """
        if not name and not self.default_name("judge"):
            return None
        entry = self.entry(name, "judge")
        loaded = self._loaded(entry, self._load_judge)
        assert isinstance(loaded, Judge)
        return loaded

    def risk_check(self) -> RiskCheck:
        """Return the check for signs of danger in messages.

        It is the phrase list. If that finds nothing, the learned check of the first entry that has one may give a
        sign or a hint. It loads its base at the first such message and shares it with the entry's policy. If it cannot be
        loaded, the phrase list remains and the error is logged.
        """
        for entry in self.entries:
            if entry.risk_check is not None:
                source, file = self._checkpoint(entry.where), self._folder / entry.risk_check
                learned = self._learned_check(source, file)
                return lambda text, language: find_risk(text, language) or learned(text, language)
        return find_risk

    def check(self) -> None:
        """Check that all files and folders of the list exist. Loads nothing.

        Raises:
            CheckpointError: Some do not; the message names each.
        """
        missing = [sentence for entry in self.entries for sentence in self._missing(entry)]
        if missing:
            raise CheckpointError("\n".join(missing))

    def public(self) -> list[dict[str, Any]]:
        """Return the public part of the entries, without paths and addresses."""
        return [
            {
                "name": entry.name,
                "kind": entry.kind,
                "title": entry.title or entry.name,
                "languages": list(entry.languages),
                "licence": entry.licence,
                "style": entry.style,
                "sees_images": entry.sees_images,
                "source": entry.where.kind.value,
                "default": entry.name == self.default_name(entry.kind),
            }
            for entry in self.entries
        ]

    def close(self) -> None:
        """Free the loaded models. A later request loads a model again."""
        for slot in self._slots.values():
            with slot.lock:
                loaded, slot.loaded = slot.loaded, None
            if loaded is not None:
                (loaded.backend if isinstance(loaded, Policy) else loaded).close()

    # --- loading -------------------------------------------------------------------------------

    def _loaded(
        self, entry: ModelEntry, load: Callable[[ModelEntry], Policy | Judge]
    ) -> Policy | Judge:
        slot = self._slots[entry.name]
        with slot.lock:
            if slot.loaded is None:
                # A model runs without its card.
                missing = self._missing(entry.model_copy(update={"card": None}))
                if missing:
                    raise CheckpointError("\n".join(missing))
                slot.loaded = load(entry)
            return slot.loaded

    def _load_policy(self, entry: ModelEntry) -> Policy:
        vocabulary = ESCONV_STRATEGIES
        if entry.strategies is not None:
            vocabulary = load_strategies(self._folder / entry.strategies)
        if unknown := entry.strategy_openings.keys() - {*vocabulary.names}:
            raise ConfigError(
                f"{entry.name}: strategy_openings: {', '.join(sorted(unknown))} not in the strategies "
                f"{', '.join(vocabulary.names)}"
            )
        return Policy(
            name=entry.name,
            backend=self._backend(entry),
            style=entry.style,
            languages=entry.languages,
            system_prompt=entry.system_prompt,
            message_suffix=entry.message_suffix,
            sees_images=entry.sees_images,
            vocabulary=vocabulary,
            sampling=entry.sampling.applied(),
            strategy_openings=entry.strategy_openings,
        )

    def _backend(self, entry: ModelEntry) -> Backend:
        where = entry.where
        if where.kind is SourceKind.SCRIPTED:
            return ScriptedBackend.from_file(self._folder / where.location)
        if where.kind is SourceKind.ENDPOINT:
            from compeer_core.backends.openai.policy import OpenAIBackend

            return OpenAIBackend(where.location, where.model)
        from compeer_core.model_pool import load_transformers  # imports torch, so only if needed

        return load_transformers(
            self._checkpoint(where),
            adapter=self._adapter(entry),
            quantize=self._quantize,
            device=self._device,
        )

    def _load_judge(self, entry: ModelEntry) -> Judge:
        language = next((code for code in entry.languages if code in LANGUAGES), "en")
        other = entry.for_replies
        return Judge(
            entry.name,
            self._scorer(entry, language),
            language,
            reply_scorer=None if other is None else self._scorer(other, language),
            temperatures=Temperatures(**entry.temperatures.model_dump()),
            findings=entry.findings,
        )

    def _scorer(self, entry: ModelEntry, language: str) -> LabelScorer:
        where = entry.where
        if where.kind is SourceKind.SCRIPTED:
            return ScriptedScorer.from_file(self._folder / where.location)
        if where.kind is SourceKind.ENDPOINT:
            from compeer_core.backends.openai.scoring import OpenAIScorer

            return OpenAIScorer(
                where.location,
                where.model,
                verdicts=entry.verdicts,
                language=language,
                max_written_tokens=entry.sampling.max_new_tokens or MAX_WRITTEN_TOKENS,
            )
        from compeer_core.model_pool import load_label_scorer  # imports torch, so only if needed

        return load_label_scorer(
            self._checkpoint(where),
            adapter=self._adapter(entry),
            quantize=self._quantize,
            device=self._device,
        )

    def _learned_check(self, source: str, file: Path) -> RiskCheck:
        lock = threading.Lock()
        loaded: list[RiskCheck] = []

        def check(text: str, language: str) -> RiskSign | None:
            with lock:
                if not loaded:
                    loaded.append(self._loaded_check(source, file))
            return loaded[0](text, language)

        return check

    def _loaded_check(self, source: str, file: Path) -> RiskCheck:
        from compeer_core.model_pool import load_risk_check  # imports torch

        try:
            return load_risk_check(source, file, quantize=self._quantize, device=self._device)
        except CompeerError as error:
            logger.error("the learned check for signs of danger could not be loaded: %s", error)
            return lambda text, language: None

    def _checkpoint(self, where: Source) -> str:
        is_hub = where.kind is SourceKind.HUB
        return where.location if is_hub else str(self._folder / where.location)

    def _adapter(self, entry: ModelEntry) -> Path | None:
        return None if entry.adapter is None else self._folder / entry.adapter

    def _missing(self, entry: ModelEntry) -> list[str]:
        """Return a sentence for each missing file or folder of an entry."""
        where = entry.where
        other = entry.for_replies
        sentences = [] if other is None else self._missing(other.model_copy(update={"card": None}))
        folders = [entry.adapter]
        if where.kind is SourceKind.CHECKPOINT:
            folders.append(Path(where.location))
        files = [entry.strategies, entry.card, entry.risk_check]
        if where.kind is SourceKind.SCRIPTED:
            files.append(Path(where.location))
        for folder in folders:
            if folder is not None and not (self._folder / folder).is_dir():
                sentences.append(
                    f"model {entry.name!r}: there is no folder {self._folder / folder}"
                )
        for file in files:
            if file is not None and not (self._folder / file).is_file():
                sentences.append(f"model {entry.name!r}: there is no file {self._folder / file}")
        return sentences


class _Slot:
    """One model; the holder of the lock may load it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loaded: Policy | Judge | None = None
