"""Constraints on the tokens of a turn, which a model decodes under whatever it prefers.

`exact_quotations` and `fresh_sentences` are two. A turn that has several applies all of them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Constraint(Protocol):
    """A constraint of one turn. It is told of every token, and masks the logits of the next one."""

    def push(self, token: int) -> None:
        """Take a token that was generated."""
        ...

    def write(self, text: str) -> None:
        """Take text that was not generated."""
        ...

    def mask(self, scores: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to minus infinity.

        Args:
            scores: Logits of the next token, shape (vocabulary,); modified.
        """
        ...


class TurnConstraints:
    """Several constraints of one turn as one."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = tuple(constraints)

    def push(self, token: int) -> None:
        """Take a token that was generated."""
        for constraint in self._constraints:
            constraint.push(token)

    def write(self, text: str) -> None:
        """Take text that was not generated."""
        for constraint in self._constraints:
            constraint.write(text)

    def mask(self, scores: torch.Tensor) -> None:
        """Set the logits of all forbidden tokens to minus infinity; see `Constraint.mask`."""
        for constraint in self._constraints:
            constraint.mask(scores)
