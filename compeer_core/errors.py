"""All exceptions that this package raises deliberately.

```text
CompeerError
├── ConfigError(ValueError)        a file, a flag or a list of models is invalid: exit code 2
│   └── UnknownModelError          a model name is not in the list; the message has the known names
├── PromptError(ValueError)        a template and its values do not match
├── CompletionError(ValueError)    a text is not a complete supporter turn
├── InputError(ValueError)         a visitor's input cannot be used
│   ├── ImageError                 ... an image
│   └── VoteRefusedError           ... a vote
├── StoreError(RuntimeError)       the database of votes failed
└── BackendError(RuntimeError)     a model or an endpoint failed
    ├── EndpointError              an endpoint failed; tells whether another request may succeed
    └── CheckpointError            a checkpoint cannot be loaded: exit code 2 at start-up
```

Each class also inherits the matching built-in. All can be pickled, since they cross process borders in
training; classes with fields of their own define ``__reduce__``.

A plain `ValueError` from a constructor in this package is a bug of the calling code, not a fault of a
visitor or a model.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any


class CompeerError(Exception):
    """Base of all errors below."""


class ConfigError(CompeerError, ValueError):
    """A configuration file, a command-line flag or a list of models is invalid.

    The message names the file, the key, the value and the remedy.
    """


class UnknownModelError(ConfigError):
    """A model name is not in the registry.

    Attributes:
        name: The requested name.
        known: All names, in the registry's order.
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
    """A prompt file is missing, or its placeholders and values do not match."""


class CompletionError(CompeerError, ValueError):
    """A text is not a complete supporter turn.

    Attributes:
        text: The whole text.
        problems: One sentence per problem.
    """

    def __init__(self, message: str, text: str = "", problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.text = text
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.text, self.problems)


class InputError(CompeerError, ValueError):
    """A visitor's input cannot be used.

    The message is for logs, in English. A screen shows its own sentence for ``code``, filled with
    ``values``, in the visitor's language.

    Attributes:
        code: A stable key, for example ``message_empty``.
        values: Values of the sentence, for example ``{"limit": 4000}``.
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
    """An image cannot be used.

    Its ``code`` is ``image_not_image``, ``image_unreadable`` (a corrupt image), ``image_too_large``
    or ``too_many_images``.
    """


class VoteRefusedError(InputError):
    """A vote, a revision or an undo is refused, and nothing was changed.

    Its ``code`` is ``battle_unknown``, ``battle_not_yours``, ``battle_not_finished``,
    ``battle_failed``, ``battle_closed``, ``battle_expired``, ``already_voted``, ``not_voted``,
    ``undo_too_late``, ``undo_revealed``, ``preference_unknown``, ``tag_unknown``, ``note_too_long`` or
    ``forgotten``.
    """


class StoreError(CompeerError, RuntimeError):
    """The database of votes failed. Acknowledged votes are safe."""


class BackendError(CompeerError, RuntimeError):
    """A model or an endpoint failed."""


class Fault(StrEnum):
    """What an endpoint's failure implies for other requests."""

    SETTINGS = "settings"
    """No request will succeed: wrong key, address or model, or no credit left."""
    REQUEST = "request"
    """This request will not succeed, others may: it is too long, or rejected in this form."""
    PASSING = "passing"
    """The same request may succeed later: overload, a lost connection, a partial answer."""


class EndpointError(BackendError):
    """An endpoint failed.

    Attributes:
        reason: The failure without the model's name, for counts.
        fault: What it implies for other requests.
        wait_seconds: The value of `Retry-After`, if any.
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
    """A checkpoint folder is incomplete or cannot be loaded."""
