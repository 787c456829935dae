"""A backend whose draws of one turn differ, for the tests of the gate."""

import threading
from collections.abc import Sequence

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.scripted import ScriptedCompletion, ScriptedTurn


class Draws:
    """Plays one text after the other, whatever the conversation; the last one again and again."""

    name = "draws"
    can_write = True
    reserved = ()

    def __init__(self, *turns: ScriptedTurn | str) -> None:
        self.turns = [ScriptedTurn(text=turn) if isinstance(turn, str) else turn for turn in turns]
        self.seeds: list[int | None] = []

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> ScriptedCompletion:
        turn = self.turns[min(len(self.seeds), len(self.turns) - 1)]
        self.seeds.append(sampling.seed)
        return ScriptedCompletion(turn, sampling.max_new_tokens, stop, can_write=True)

    def close(self) -> None:
        """Do nothing: there are no resources."""
