"""Sampling of a turn's next token, as one logits processor.

It draws from the turn's own random generator, so a seed gives the same turn whatever else is served.
"""

import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.exact_quotations import ExactQuotations


class Sampler(LogitsProcessor):
    """Draws the next token and masks all others: quotations, temperature, top-p, penalty, seed.

    The steps are the library's, in the order of `generate`. They form one processor because the
    draw uses the turn's own generator, and because `generate` inspects the signature of every
    processor for every token.
    """

    def __init__(
        self,
        sampling: Sampling,
        placeholder: int | None,
        device: torch.device,
        quotations: ExactQuotations | None = None,
    ) -> None:
        self._placeholder = placeholder
        self._quotations = quotations
        self._chain: list[LogitsProcessor] = []
        self._generator: torch.Generator | None = None
        if sampling.repetition_penalty != 1:
            self._chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature == 0:
            return
        if sampling.temperature != 1:
            self._chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_p < 1:
            self._chain.append(TopPLogitsWarper(float(sampling.top_p)))
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**63)  # torch accepts no larger ones

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._placeholder is not None:
            # An image that the model invents could not be given to it as input.
            scores[:, self._placeholder] = -torch.inf
        if self._quotations is not None:
            self._quotations.mask(scores[0])
        for step in self._chain:
            scores = step(input_ids, scores)
        if self._generator is None:
            return scores
        drawn = torch.multinomial(torch.softmax(scores, -1), 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)
