"""Models that write for the pipeline: their settings, and those that run in this process.

A checkpoint writes in batches, which is how it is fast
(`compeer_core.backends.transformers_.batch_generation`); a script of recorded turns is read in the
same way. Requests to an endpoint are in `training.cer.requests.endpoint_requests`.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from compeer_core.backends.openai.settings import KEY_VARIABLES
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.scripted import ScriptedBackend
from compeer_core.config import FrozenModel
from compeer_core.errors import CompeerError, ConfigError
from compeer_core.messages import without_images
from compeer_core.registry import Source, SourceKind, parse_source

_NEVER = threading.Event()


class GeneratorSettings(FrozenModel):
    """A model that writes, and how it is queried."""

    source: str
    """`openai:URL#MODEL`, a checkpoint folder, `hf:ID` or `scripted:FILE`, see
    `compeer_core.registry`. The key of an endpoint is read from the environment
    (`compeer_core.backends.openai.policy.KEY_VARIABLES`) and never written anywhere."""
    name: str = ""
    """The author's name in records; empty: the model's name in `source`."""
    adapter: Path | None = None
    """A LoRA adapter for a checkpoint."""
    device: str | None = None
    """Where a checkpoint runs; None takes a GPU if there is one."""
    style: Literal["prompted", "trained"] = "prompted"
    """Whether a prompt must explain the output grammar, or the model was trained to write it."""
    sees_images: bool = False
    """False leaves pictures out of its prompts."""
    in_flight: int = Field(default=8, ge=1)
    """Endpoint: requests at a time. In process: rows of a batch."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests start evenly spaced, at most this often. None: no limit."""
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=0.9, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=512, ge=1)
    thinking: bool | None = None
    """See `compeer_core.backends.protocol.Sampling`."""
    choices: tuple[str, ...] = Field(default=(), exclude_if=lambda words: not words)
    """The possible texts, each one token: the likeliest is taken and nothing is sampled. Only in process; for a
    judge that is too small to keep to a format. Empty: any text."""
    tries: int = Field(default=4, ge=1)
    """Attempts per question: after an unusable text, another seed is tried. In process and at
    temperature 0 there is one attempt, since another seed changes nothing."""
    retries: int = Field(default=6, ge=0)
    """How often a request without a text (429, 5xx, time-out, lost connection) is sent again."""
    backoff_seconds: float = Field(default=0.5, ge=0)
    """Wait before the first retry, doubled for each further one; `Retry-After` takes precedence."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Time limit of one request, up to the last byte of its reply."""
    price_per_million_input: float | None = Field(default=None, ge=0)
    """Per million tokens, in any currency, for the estimate of a dry run; None: unknown."""
    price_per_million_output: float | None = Field(default=None, ge=0)

    @field_validator("source")
    @classmethod
    def _holds_no_key(cls, source: str) -> str:
        with suppress(ConfigError):  # a source that cannot be parsed is refused where it is opened
            where = parse_source(source)
            if where.kind is SourceKind.ENDPOINT and urlsplit(where.location).username is not None:
                raise ValueError(
                    "the URL contains a user name or key, which would be saved in the run's config.json; "
                    f"set {' or '.join(KEY_VARIABLES)} instead"
                )
        return source

    @model_validator(mode="after")
    def _chooses_in_process(self) -> Self:
        if self.choices and not self.in_process:
            raise ValueError(f"{self.source}: only a checkpoint in this process takes choices")
        return self

    @property
    def where(self) -> Source:
        """The parsed source. Raises `ConfigError` if it cannot be parsed."""
        return parse_source(self.source)

    @property
    def author(self) -> str:
        """The author's name in records."""
        where = self.where
        return self.name or where.model or Path(where.location).name

    @property
    def sampling(self) -> Sampling:
        """How tokens are sampled; the seed belongs to a prompt."""
        return Sampling(
            self.temperature,
            self.top_p,
            self.repetition_penalty,
            self.max_new_tokens,
            seed=0,
            thinking=self.thinking,
        )

    @property
    def made_under(self) -> dict[str, Any]:
        """What a text depends on besides the question. The address of an endpoint is not part."""
        where = self.where
        is_name = where.kind is SourceKind.HUB
        return {
            "model": where.model or (where.location if is_name else Path(where.location).name),
            "adapter": None if self.adapter is None else self.adapter.name,
            "sees_images": self.sees_images,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.max_new_tokens,
            # Only where it is set, so that texts of older runs are still found.
            **({} if self.thinking is None else {"thinking": self.thinking}),
            **({"choices": self.choices} if self.choices else {}),
        }

    @property
    def in_process(self) -> bool:
        """Whether it is a checkpoint that runs in this process, in batches."""
        return self.where.kind in {SourceKind.CHECKPOINT, SourceKind.HUB}

    @property
    def is_endpoint(self) -> bool:
        return self.where.kind is SourceKind.ENDPOINT


@dataclass(frozen=True)
class Prompt:
    """The messages before a text, and the seed of its sampling."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True)
class Written:
    """A text, and its length in tokens."""

    text: str
    tokens: int


class BatchGenerator(Protocol):
    """A model in this process."""

    def write(self, prompts: Sequence[Prompt]) -> list[Written | CompeerError]:
        """Write a text for each prompt of a batch, in order; an error stands for a missing text.

        Raises:
            BackendError: The model itself failed.
        """
        ...

    def close(self) -> None:
        """Free the model. May be called twice."""
        ...


def open_generator(settings: GeneratorSettings) -> BatchGenerator:
    """Load a checkpoint or a script.

    Raises:
        ConfigError: The source cannot be parsed or is an endpoint, or the script is wrong.
        BackendError: The checkpoint cannot be loaded.
    """
    if settings.is_endpoint:
        raise ConfigError(f"{settings.source} is an endpoint, not a model in this process")
    if settings.choices:
        return _Chooser(settings)
    return _Checkpoint(settings) if settings.in_process else _Script(settings)


def reserved_tokens(settings: GeneratorSettings) -> tuple[str, ...]:
    """Return the special tokens of a model, for `compeer_core.prompts.neutralise`.

    Only the tokenizer of a checkpoint is loaded. Those of an endpoint are unknown.
    """
    if not settings.in_process:
        return ()
    from compeer_core.backends.transformers_.tokens import control_tokens
    from compeer_core.processing import load_processor

    processor = load_processor(settings.where.location)
    return control_tokens(getattr(processor, "tokenizer", processor))


class _Script:
    """Recorded turns."""

    def __init__(self, settings: GeneratorSettings) -> None:
        self._backend = ScriptedBackend.from_file(Path(settings.where.location))
        self._settings = settings

    def write(self, prompts: Sequence[Prompt]) -> list[Written | CompeerError]:
        return [self._write_one(prompt) for prompt in prompts]

    def _write_one(self, prompt: Prompt) -> Written | CompeerError:
        sampling = replace(self._settings.sampling, seed=prompt.seed)
        completion = self._backend.open(visible(prompt.messages, self._settings), sampling, _NEVER)
        try:
            return Written(storable("".join(completion.generate())), completion.tokens)
        except CompeerError as error:
            return error

    def close(self) -> None:
        self._backend.close()


class _Checkpoint:
    """A checkpoint in this process."""

    def __init__(self, settings: GeneratorSettings) -> None:
        from compeer_core.model_pool import shared_pool  # imports torch
        from training.common.threads import use_all_threads

        self._settings = settings
        location = settings.where.location
        self._lease = shared_pool().lease(location, settings.adapter, None, settings.device)
        use_all_threads(self._lease.chat)

    def write(self, prompts: Sequence[Prompt]) -> list[Written | CompeerError]:
        from compeer_core.backends.transformers_ import batch_generation as batches

        chat, adapter = self._lease.chat, self._lease.adapter
        # Prompts that differ only in their seed are prefilled once.
        places: dict[tuple[Message, ...], list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            places[visible(prompt.messages, self._settings)].append(place)
        rows = [
            batches.Prompt(messages, tuple(prompts[place].seed for place in same))
            for messages, same in places.items()
        ]
        results = chat.owner.call(
            lambda: batches.generate_turns(chat, adapter, rows, self._settings.sampling, _NEVER)
        )
        written: dict[int, Written | CompeerError] = {}
        for same, result in zip(places.values(), results, strict=True):
            if isinstance(result, CompeerError):
                written |= dict.fromkeys(same, result)
                continue
            for place, turn in zip(same, result, strict=True):
                written[place] = Written(storable(turn.text), len(turn.ids))
        return [written[place] for place in range(len(prompts))]

    def close(self) -> None:
        self._lease.release()


class _Chooser:
    """A checkpoint in this process whose texts are the likeliest of `GeneratorSettings.choices`."""

    def __init__(self, settings: GeneratorSettings) -> None:
        from compeer_core.model_pool import load_label_scorer  # imports torch
        from training.common.threads import use_all_threads

        self._settings = settings
        location = settings.where.location
        self._scorer = load_label_scorer(location, adapter=settings.adapter, device=settings.device)
        use_all_threads(self._scorer.chat)

    def write(self, prompts: Sequence[Prompt]) -> list[Written | CompeerError]:
        return [self._write_one(prompt) for prompt in prompts]

    def _write_one(self, prompt: Prompt) -> Written | CompeerError:
        choices = self._settings.choices
        *before, last = visible(prompt.messages, self._settings)
        shown = replace(last, content=tuple(p for p in last.content if not isinstance(p, str)))
        try:
            session = self._scorer.open([*before, shown])
            try:
                shares = session.ask(last.text, choices)
            finally:
                session.close()
        except CompeerError as error:
            return error
        return Written(choices[shares.index(max(shares))], 1)

    def close(self) -> None:
        self._scorer.close()


def visible(messages: Sequence[Message], settings: GeneratorSettings) -> tuple[Message, ...]:
    """Return the messages, without pictures if the model cannot see."""
    return tuple(messages) if settings.sees_images else without_images(messages)


def storable(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")
