"""Every exception this package raises on purpose.

```text
CompeerError
├── ConfigError(ValueError)        a file, a flag or a list of models is wrong: exit code 2
│   └── UnknownModelError          a name that no list holds; says which ones there are
├── PromptError(ValueError)        a template and the values for it do not fit
├── CompletionError(ValueError)    a text is not a complete supporter turn
├── InputError(ValueError)         what a visitor sent cannot be used
│   ├── ImageError                 the same, of a picture
│   └── VoteRefusedError           the same, of a vote
├── StoreError(RuntimeError)       the database of votes fails while it is used
└── BackendError(RuntimeError)     a model or an endpoint failed
    ├── EndpointError              an endpoint failed, and whether another request may succeed
    └── CheckpointError            a checkpoint folder cannot be loaded: exit code 2 at start-up
```

Each class is also the built-in that a caller without this package would expect. All of them can be
pickled, since they cross process borders in training. A class with fields of its own therefore
says in ``__reduce__`` how it is built again.

Nothing else is raised on purpose. A `ValueError` from a constructor in this package means that the
calling code, not a visitor or a model, made a value that cannot exist.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any


class CompeerError(Exception):
    """Base of all errors below: catch it where any of them ends a task."""


class ConfigError(CompeerError, ValueError):
    """A configuration file, a command-line flag or a list of models is wrong.

    The message names the file, the key, the value found and the way out.
    """


class UnknownModelError(ConfigError):
    """A model name that the registry does not hold.

    Attributes:
        name: The name that was asked for.
        known: The names there are, in the registry's order.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        nearest = get_close_matches(name, self.known, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        listed = ", ".join(self.known) or "none"
        super().__init__(f"unknown model {name!r}{hint}; known models: {listed}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.known)


class PromptError(CompeerError, ValueError):
    """A prompt file is absent, or its placeholders and the values given do not match."""


class CompletionError(CompeerError, ValueError):
    """A text that should be a complete supporter turn is not.

    Attributes:
        text: What was read, whole.
        problems: One sentence for each thing that is wrong.
    """

    def __init__(self, message: str, text: str = "", problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.text = text
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.text, self.problems)


class InputError(CompeerError, ValueError):
    """Something a visitor sent cannot be used.

    The message is English and for logs. A screen shows its own sentence for ``code``, filled with
    ``values``, in the visitor's language.

    Attributes:
        code: A stable key, for example ``message_empty``.
        values: What the sentence needs, for example ``{"limit": 4000}``.
    """

    def __init__(
        self, message: str, code: str = "input_unusable", values: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.values: dict[str, Any] = dict(values or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code, self.values)


class ImageError(InputError):
    """A picture cannot be used.

    Its ``code`` is ``image_not_image`` (the bytes are something else), ``image_unreadable`` (a
    picture, but broken), ``image_too_large`` or ``too_many_images``.
    """


class VoteRefusedError(InputError):
    """A vote, a revision or an undo is not taken, and nothing was changed.

    Its ``code`` is ``battle_unknown``, ``battle_not_yours``, ``battle_not_finished``,
    ``battle_failed``, ``battle_closed``, ``battle_expired``, ``already_voted``, ``not_voted``,
    ``undo_too_late``, ``preference_unknown``, ``tag_unknown``, ``note_too_long`` or ``forgotten``.
    """


class StoreError(CompeerError, RuntimeError):
    """The database of votes failed while it was used. What was acknowledged before is kept."""


class BackendError(CompeerError, RuntimeError):
    """A model or an endpoint failed while it was used."""


class Fault(StrEnum):
    """What an endpoint's failure means for other requests."""

    SETTINGS = "settings"
    """No request will succeed: a wrong key, address or model, or nothing left to pay with."""
    REQUEST = "request"
    """This request will not succeed, others may: it is too long, or not taken in this form."""
    PASSING = "passing"
    """The same request may succeed later: too much to do, a lost connection, half an answer."""


class EndpointError(BackendError):
    """An endpoint failed.

    Attributes:
        reason: What it did, without the model's name, so that it can be counted.
        fault: What that means for other requests.
        wait_seconds: How long it asks to be left alone (`Retry-After`), if it does.
    """

    def __init__(
        self,
        message: str,
        reason: str = "failed",
        fault: Fault = Fault.PASSING,
        wait_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.fault = fault
        self.wait_seconds = wait_seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason, self.fault, self.wait_seconds)


class CheckpointError(BackendError):
    """A checkpoint folder lacks a file, or cannot be loaded."""
