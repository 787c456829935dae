"""How the next token of a turn is chosen: sampling as one logits processor.

It draws from a random generator of the turn's own, so that a seed gives the same turn whoever else
is served.
"""

import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from compeer_core.backends.protocol import Sampling


class Choice(LogitsProcessor):
    """Chooses the next token and leaves no other: temperature, top-p, penalty, and a seed.

    The steps are the library's own, in the order in which `generate` has them. They are one
    processor here because the draw comes from a generator that belongs to the turn, and because
    `generate` looks at the signature of every processor again for every token.
    """

    def __init__(self, sampling: Sampling, placeholder: int | None, device: torch.device) -> None:
        self._placeholder = placeholder
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
            self._generator.manual_seed(sampling.seed % 2**63)  # torch takes no larger ones

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._placeholder is not None:
            # A picture that the model invents could not be shown to it when it reads on.
            scores[:, self._placeholder] = -torch.inf
        for step in self._chain:
            scores = step(input_ids, scores)
        if self._generator is None:
            return scores
        drawn = torch.multinomial(torch.softmax(scores, -1), 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)
