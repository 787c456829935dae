"""A second set of weights that generates the completions.

Generating with the trained weights is slow: an adapter adds several small products to each large one,
and autocast converts weights to bf16 for every token. The rollout model has the adapter merged and is
stored in the precision in which it computes. It is updated before each generation.

It samples from the trained policy up to rounding. The log-probabilities in Eq. 2, of the old and the
new policy alike, are those that the update computes.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer


class RolloutModel:
    """Weights that generate and are never trained.

    Attributes:
        model: The generating model.
    """

    def __init__(self, model: Any) -> None:
        """Take a model with the same base weights, in the precision to generate in."""
        self.model = model.eval().requires_grad_(False)

    def update_from(self, trained: Any) -> None:
        """Copy all trained weights, with LoRA adapters merged into their layers.

        Args:
            trained: The model in training, with or without peft's wrapper.
        """
        source = trained.get_base_model() if isinstance(trained, PeftModel) else trained
        with torch.no_grad():
            for name, module in self.model.named_modules():
                trained_module = source.get_submodule(name)
                if isinstance(trained_module, LoraLayer):
                    module.weight.copy_(merged(trained_module))
                    continue
                for key, weight in module.named_parameters(recurse=False):
                    trained_weight = getattr(trained_module, key)
                    if trained_weight.requires_grad:
                        weight.copy_(trained_weight)


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
