"""Sampling of a turn's next token, as one logits processor.

It draws from the turn's own random generator, so a seed gives the same turn whatever else is served.
"""

import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.turn_constraints import TurnConstraints

CANDIDATES = 256
"""Tokens that top-p considers first. Sorting the whole vocabulary for every token takes as long as a
part of a small model's forward pass, and nearly all probability lies on a few tokens."""


class Sampler(LogitsProcessor):
    """Draws the next token and masks all others: constraints, penalty, temperature, top-p, seed.

    The steps are those of `generate`, in its order. They form one processor because the draw uses
    the turn's own generator, and because `generate` inspects the signature of every processor for
    every token.
    """

    def __init__(
        self,
        sampling: Sampling,
        placeholder: int | None,
        device: torch.device,
        constraints: TurnConstraints | None = None,
    ) -> None:
        self._placeholder = placeholder
        self._constraints = constraints
        self._penalty: RepetitionPenaltyLogitsProcessor | None = None
        self._temperature = sampling.temperature
        self._top_p = float(sampling.top_p)
        self._generator: torch.Generator | None = None
        if sampling.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        if sampling.temperature == 0:
            return
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**63)  # torch accepts no larger ones

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._placeholder is not None:
            # An image that the model invents could not be given to it as input.
            scores[:, self._placeholder] = -torch.inf
        if self._constraints is not None:
            self._constraints.mask(scores[0])
        if self._penalty is not None:
            scores = self._penalty(input_ids, scores)
        if self._generator is None:
            return scores
        scores = self._nucleus(input_ids, scores / self._temperature)
        drawn = torch.multinomial(torch.softmax(scores, -1), 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)

    def _nucleus(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask all but the most probable tokens, whose probabilities reach `top_p`."""
        if self._top_p == 1:
            return scores
        likely, tokens = scores.topk(min(CANDIDATES, scores.shape[1]))
        probabilities = (likely - scores.logsumexp(-1, keepdim=True)).exp()
        reached = probabilities.cumsum(-1)
        if likely.shape[1] < scores.shape[1] and bool(reached[0, -1] < self._top_p):
            nucleus: torch.Tensor = TopPLogitsWarper(self._top_p)(input_ids, scores)
            return nucleus
        likely = likely.masked_fill(reached - probabilities >= self._top_p, -torch.inf)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, likely)
