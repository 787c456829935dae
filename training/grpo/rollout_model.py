"""A second set of weights, which writes the completions while the first is trained.

What is trained is slow to write with: an adapter makes several small products of each large one, and
autocast puts weights into bf16 anew for every token. The copy has the adapter merged and lies in the
precision in which it computes. It is brought up to date before each generation.

What it writes is drawn from the policy that is trained up to rounding. The probabilities in Eq. 2 are
those that the update computes, of old policy and new one alike.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer


class RolloutModel:
    """Weights that are never trained themselves.

    Attributes:
        model: The model to write with.
    """

    def __init__(self, model: Any) -> None:
        """Take a model with the same base weights, in the precision to write in."""
        self.model = model.eval().requires_grad_(False)

    def follow(self, trained: Any) -> None:
        """Take over all weights that are trained, those of LoRA adapters merged into their layers.

        Args:
            trained: The model in training, with peft's wrapper or without.
        """
        source = trained.get_base_model() if isinstance(trained, PeftModel) else trained
        with torch.no_grad():
            for name, module in self.model.named_modules():
                of_trained = source.get_submodule(name)
                if isinstance(of_trained, LoraLayer):
                    module.weight.copy_(merged(of_trained))
                    continue
                for key, weight in module.named_parameters(recurse=False):
                    known = getattr(of_trained, key)
                    if known.requires_grad:
                        weight.copy_(known)


def merged(layer: Any) -> torch.Tensor:
    """Return the weight of a linear layer with its active LoRA adapters.

    W + (alpha / rank) B A (Hu et al. 2021, arXiv 2106.09685).

    Args:
        layer: One of peft's `LoraLayer`, over a `torch.nn.Linear` that is not quantised.

    Returns:
        Of shape (features out, features in), in fp32.
    """
    weight: torch.Tensor = layer.base_layer.weight.float()
    for adapter in layer.active_adapters:
        weight = weight + layer.get_delta_weight(adapter).float()
    return weight
