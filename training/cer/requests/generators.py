"""Models that write for the pipeline: behind an endpoint, in this process, or recorded.

`open_generator` makes one from its settings. A generator takes a few prompts at a time, and may be
called from several threads: an endpoint takes one prompt, from as many threads as requests may be
in flight; a checkpoint takes a batch from one thread, since a batch is how it is fast
(`compeer_core.backends.transformers_.batch_generation`). Both return text or say why there is none;
when to ask again is `training.cer.requests.request_dispatch`'s business, so an endpoint's own retries are switched off:
each request counts towards the budget and the rate.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from compeer_core.backends.openai.policy import OpenAIBackend, Patience
from compeer_core.backends.protocol import Backend, Message, Sampling
from compeer_core.backends.scripted import ScriptedBackend
from compeer_core.config import FrozenModel
from compeer_core.errors import CompeerError
from compeer_core.registry import Source, SourceKind, parse_source

CONNECT_SECONDS = 10.0
"""An endpoint that is there answers sooner."""


class GeneratorSettings(FrozenModel):
    """A model that writes, and how it is asked."""

    source: str
    """`openai:URL#MODEL`, a checkpoint folder, `hf:ID` or `scripted:FILE`, see
    `compeer_core.registry`. The key of an endpoint comes from the environment
    (`compeer_core.backends.openai.policy.KEY_VARIABLES`) and is never written anywhere."""
    name: str = ""
    """The author that records name; empty: the model's name in `source`."""
    adapter: Path | None = None
    """A LoRA adapter for a checkpoint."""
    device: str | None = None
    """Where a checkpoint runs; None takes what there is."""
    style: Literal["prompted", "trained"] = "prompted"
    """Was it trained to write the output grammar, or must a prompt ask for it?"""
    sees_images: bool = False
    """False: pictures are left out of what it is asked."""
    in_flight: int = Field(default=8, ge=1)
    """Endpoint: requests at a time. In process: rows of a batch."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests begin evenly spaced, not more often than this. None: as fast as it goes."""
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=0.9, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=512, ge=1)
    tries: int = Field(default=4, ge=1)
    """Texts that a question may cost: an unusable one is asked for again with another seed. In
    process and at temperature 0 there is one try, since another seed changes nothing."""
    retries: int = Field(default=6, ge=0)
    """How often a request that got no text (429, 5xx, time-out, lost connection) is sent again."""
    backoff_seconds: float = Field(default=0.5, ge=0)
    """Before the first of those; doubled for each further one, and as long as `Retry-After` asks."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """For one request, from its beginning to the last word of its answer."""
    price_per_million_input: float | None = Field(default=None, ge=0)
    """For the estimate, in whatever currency; None: unknown."""
    price_per_million_output: float | None = Field(default=None, ge=0)

    @property
    def where(self) -> Source:
        """The source, read. Raises `ConfigError` where it cannot be."""
        return parse_source(self.source)

    @property
    def author(self) -> str:
        """What records call whoever wrote."""
        where = self.where
        return self.name or where.model or Path(where.location).name

    @property
    def sampling(self) -> Sampling:
        """How words are chosen; the seed belongs to a prompt."""
        return Sampling(
            self.temperature, self.top_p, self.repetition_penalty, self.max_new_tokens, seed=0
        )

    @property
    def made_under(self) -> dict[str, Any]:
        """What a text depends on beside the question. Where an endpoint is does not matter."""
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
        }

    @property
    def in_process(self) -> bool:
        """Whether it is a checkpoint that runs here, in batches."""
        return self.where.kind in {SourceKind.CHECKPOINT, SourceKind.HUB}


@dataclass(frozen=True)
class Prompt:
    """What a text is written after, and the seed of its draws."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True)
class Written:
    """A text."""

    text: str
    tokens: int


class Generator(Protocol):
    """A model that writes."""

    def write(
        self, prompts: Sequence[Prompt], stop: threading.Event
    ) -> list[Written | CompeerError]:
        """Write a text for each prompt.

        Args:
            prompts: One for an endpoint; for a checkpoint, a batch.
            stop: Set it to be done early; what is returned then means nothing.

        Returns:
            In the order of the prompts. An error means that there is no text for this prompt.

        Raises:
            BackendError: The model itself has failed.
        """
        ...

    def close(self) -> None:
        """Free the model. May be called twice."""
        ...


def open_generator(settings: GeneratorSettings) -> Generator:
    """Load a checkpoint, or get ready to speak to an endpoint (nothing is sent yet).

    Raises:
        ConfigError: The source is none, or its script is wrong.
        BackendError: The checkpoint cannot be loaded.
    """
    where = settings.where
    if settings.in_process:
        return _Batches(settings)
    if where.kind is SourceKind.SCRIPTED:
        return _Single(ScriptedBackend.from_file(Path(where.location)), settings)
    limit = settings.timeout_seconds
    patience = Patience(
        connect_seconds=min(CONNECT_SECONDS, limit),
        first_text_seconds=2 * limit,  # the limit of the whole request comes first
        between_seconds=2 * limit,
        turn_seconds=limit,
        tries=1,
    )
    return _Single(OpenAIBackend(where.location, where.model, patience), settings)


def reserved_tokens(settings: GeneratorSettings) -> tuple[str, ...]:
    """Return the special tokens of a model, for `compeer_core.prompts.neutralise`.

    Of a checkpoint, only the tokenizer is loaded. What an endpoint's are, nobody can tell.
    """
    if not settings.in_process:
        return ()
    from compeer_core.backends.transformers_.tokens import control_tokens
    from compeer_core.processing import load_processor

    processor = load_processor(settings.where.location)
    return control_tokens(getattr(processor, "tokenizer", processor))


class _Single:
    """One prompt at a time, from any thread."""

    def __init__(self, backend: Backend, settings: GeneratorSettings) -> None:
        self._backend = backend
        self._settings = settings

    def write(
        self, prompts: Sequence[Prompt], stop: threading.Event
    ) -> list[Written | CompeerError]:
        return [self._one(prompt, stop) for prompt in prompts]

    def _one(self, prompt: Prompt, stop: threading.Event) -> Written | CompeerError:
        sampling = replace(self._settings.sampling, seed=prompt.seed)
        messages = _shown(prompt.messages, self._settings)
        try:
            completion = self._backend.open(messages, sampling, stop)
            try:
                text = "".join(completion.generate())
                return Written(_storable(text), completion.tokens)
            finally:
                completion.close()
        except CompeerError as error:
            return error

    def close(self) -> None:
        self._backend.close()


class _Batches:
    """A checkpoint in this process."""

    def __init__(self, settings: GeneratorSettings) -> None:
        # torch, only where it is needed
        from compeer_core.model_pool import shared_pool

        self._settings = settings
        location = settings.where.location
        self._lease = shared_pool().lease(location, settings.adapter, None, settings.device)

    def write(
        self, prompts: Sequence[Prompt], stop: threading.Event
    ) -> list[Written | CompeerError]:
        from compeer_core.backends.transformers_ import batch_generation as batches

        chat, adapter = self._lease.chat, self._lease.adapter
        # What is asked more than once is read once.
        places: dict[tuple[Message, ...], list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            places[_shown(prompt.messages, self._settings)].append(place)
        rows = [
            batches.Prompt(messages, tuple(prompts[place].seed for place in of_messages))
            for messages, of_messages in places.items()
        ]
        outcomes = chat.owner.call(
            lambda: batches.generate_turns(chat, adapter, rows, self._settings.sampling, stop)
        )
        written: dict[int, Written | CompeerError] = {}
        for of_messages, outcome in zip(places.values(), outcomes, strict=True):
            if isinstance(outcome, CompeerError):
                written |= dict.fromkeys(of_messages, outcome)
                continue
            for place, turn in zip(of_messages, outcome, strict=True):
                written[place] = Written(_storable(turn.text), len(turn.ids))
        return [written[place] for place in range(len(prompts))]

    def close(self) -> None:
        self._lease.release()


def _shown(messages: Sequence[Message], settings: GeneratorSettings) -> tuple[Message, ...]:
    """The messages, without pictures for a model that cannot see."""
    if settings.sees_images:
        return tuple(messages)
    return tuple(
        Message(message.role, tuple(part for part in message.content if isinstance(part, str)))
        for message in messages
    )


def _storable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can bring and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
