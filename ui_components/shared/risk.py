"""One risk check for all of a visitor's messages, in Chat and Compare alike.

The state belongs to the visitor, not to a conversation: clearing one, starting another or changing the
screen does not reset it. It is in memory only and is deleted with the visitor's data.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from compeer_core.dialogue import language_of
from compeer_core.images import Image
from compeer_core.safety import RiskCheck, RiskState
from ui_components.shared.session_store import SessionKey, SessionStore


@dataclass(frozen=True)
class _Record:
    """A `RiskState` as `SessionStore` stores it."""

    state: RiskState = field(default_factory=RiskState)

    @property
    def is_empty(self) -> bool:
        return self.state == RiskState()

    def pictures(self) -> Iterator[Image]:
        return iter(())

    def picture(self, key: str, index: int) -> Image | None:
        return None

    def aged(self, now: float) -> "_Record":
        return self


MAX_SEARCHED = 20_000
"""How many characters of a message are searched for signs; longer messages are refused anyway."""


class RiskStates:
    """The `RiskState` of every visitor."""

    def __init__(self, check: RiskCheck, is_current: Callable[[SessionKey], bool]) -> None:
        self._check = check
        self._store = SessionStore(_Record(), is_current=is_current)

    def get(self, key: SessionKey) -> RiskState:
        """Return the state after the visitor's last message."""
        return self._store.get(_of_visitor(key)).state

    def assess(self, key: SessionKey, text: str) -> RiskState:
        """Return the state that a message leads to.

        A sign is stored at once, even if the message is then refused. Call `accepted` when the message
        has been stored.
        """
        text = text[:MAX_SEARCHED]
        sign = self._check(text, language_of(text))
        state = self.get(key).after(sign)
        if sign is not None:
            self._store.update(_of_visitor(key), lambda _: _Record(state))
        return state

    def accepted(self, key: SessionKey, state: RiskState) -> None:
        """Count a message that led to a state; a sign that arrived since then is not lost."""
        if state.messages_since:
            self._store.update(_of_visitor(key), lambda record: _Record(record.state.after(None)))

    def forget(self, visitor: str) -> None:
        """Delete a visitor's state."""
        self._store.forget(visitor)

    def sweep(self) -> None:
        """Delete expired states."""
        self._store.sweep()


def _of_visitor(key: SessionKey) -> SessionKey:
    """Return one key for all conversations of a visitor; without a cookie each stands alone."""
    return replace(key, conversation="") if key.visitor else key
