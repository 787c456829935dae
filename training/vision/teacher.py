"""Trains a CNN on expressions, to distil from: `python -m training vision teacher <config.toml>`.

With few photos a CNN learns more than a vision transformer, so the image tower is trained on the CNN's
predictions for augmented photos (`training.vision.train`; DeiT, Touvron et al. 2021,
https://arxiv.org/abs/2012.12877; docs/experiments.md has the results). The CNN is not shipped.

An interrupted run resumes from its last checkpoint with the same data order.
"""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from compeer_core.errors import ConfigError
from training.data.faces import FACE_CLASSES, read_faces
from training.finetune.optimisation import Optimisers, open_run
from training.vision.expressions import (
    PhotoSchedule,
    learn_expressions,
    photos_of_splits,
    smooth_labels,
)

WEIGHTS = "teacher.safetensors"
"""The network's weights, in the run directory."""
REPORT = "teacher.json"
"""The network's accuracy, in the run directory."""


class Config(PhotoSchedule):
    """`[vision teacher]`: photos and schedule."""

    image_side: int = Field(default=48, ge=16)
    """Photos are scaled to this side, in pixels; 48 is FER2013's."""
    adamw_lr: float = 2e-3


class ExpressionNetwork(nn.Module):
    """A CNN on grey photos: four pairs of 3 x 3 convolutions with 16 to 128 channels, 0.3 M weights.

    Each pair is followed by 2 x 2 max pooling.
    """

    side: Tensor

    def __init__(self, side: int) -> None:
        """Build the network.

        Args:
            side: Side of the input in pixels; saved with the weights.
        """
        super().__init__()
        self.register_buffer("side", torch.tensor(side))
        layers: list[nn.Module] = []
        channels = 1
        for wide in (16, 32, 64, 128):
            for _ in range(2):
                layers += [
                    nn.Conv2d(channels, wide, 3, padding=1, bias=False),
                    nn.BatchNorm2d(wide),
                    nn.ReLU(inplace=True),
                ]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, len(FACE_CLASSES))

    def forward(self, photos: Tensor) -> Tensor:
        """Return logits, shape (photos, classes).

        Args:
            photos: Shape (photos, 3, side, side), in [0, 1]; scaled to the network's side if needed.
        """
        grey = (photos.mean(1, keepdim=True) - 0.5) / 0.25
        side = int(self.side)
        if photos.shape[-1] != side:
            grey = functional.interpolate(grey, (side, side), mode="bilinear", antialias=True)
        features = self.features(grey.contiguous(memory_format=torch.channels_last))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits.float()


def read_teacher(folder: Path) -> ExpressionNetwork:
    """Load the network of a run, for inference.

    Raises:
        ConfigError: The run has no weights.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (the vision teacher stage writes it)")
    weights = load_file(path)
    network = ExpressionNetwork(int(weights["side"]))
    network.load_state_dict(weights)
    return network.eval().requires_grad_(False)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train the network for `config.steps` steps, or resume a run; Ctrl-C saves first."""
    faces = read_faces(config.faces)
    if dry_run:
        return
    directory = open_run(config.output, config, resume)
    torch.manual_seed(config.seed)
    photos = photos_of_splits(faces, config)
    layout: Any = {"memory_format": torch.channels_last}  # missing in torch's annotations
    network = ExpressionNetwork(config.image_side).to(config.device, **layout)
    if config.compile:
        network.features.compile()
    optimisers = Optimisers([], [(list(network.parameters()), config.adamw_lr)], config)
    report = learn_expressions(
        network,
        optimisers,
        config,
        directory,
        photos,
        logits_of=lambda photos: network(photos.to(config.device))[:, None],
        targets_of=lambda _, labels: smooth_labels(labels.to(config.device), config),
    )
    (directory.path / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")
    save_file(
        {name: value.contiguous() for name, value in network.state_dict().items()},
        directory.path / WEIGHTS,
    )
