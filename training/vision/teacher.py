"""A convolutional network learns expressions: `python -m training vision teacher <config.toml>`.

It is not shipped. Of few photos a convolutional network learns more than a vision transformer does, and the image
tower can learn from what it says of each varied photo (`training.vision.train`, after DeiT: Touvron et al. 2021,
https://arxiv.org/abs/2012.12877; docs/experiments.md has the result).

A run stopped at any point continues from its last checkpoint with the same photos.
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
    smoothed,
)

WEIGHTS = "teacher.safetensors"
"""The network, in the run's directory."""
REPORT = "teacher.json"
"""What it is worth, in the run's directory."""


class Config(PhotoSchedule):
    """`[vision teacher]`: which photos, how long."""

    image_side: int = Field(default=48, ge=16)
    """Photos are scaled to this side, in pixels; those of FER2013 have it."""
    adamw_lr: float = 2e-3


class ExpressionNetwork(nn.Module):
    """Four pairs of 3 x 3 convolutions over grey photos, each pair at half the side of the one before.

    The first pair has 16 channels, each other twice those of the one before: 0.3 M weights.
    """

    side: Tensor

    def __init__(self, side: int) -> None:
        """Build the network.

        Args:
            side: Photos are looked at in this size, in pixels; it is kept with the weights.
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
        """Return logits, shape (photos, classes), of square photos in [0, 1], shape (photos, 3, side, side).

        Photos of another side than the network's are scaled to it.
        """
        grey = (photos.mean(1, keepdim=True) - 0.5) / 0.25
        side = int(self.side)
        if photos.shape[-1] != side:
            grey = functional.interpolate(grey, (side, side), mode="bilinear", antialias=True)
        seen = self.features(grey.contiguous(memory_format=torch.channels_last))
        logits: Tensor = self.head(seen.mean((2, 3)))
        return logits.float()


def read_teacher(folder: Path) -> ExpressionNetwork:
    """Return the network of a run, ready to be asked.

    Raises:
        ConfigError: There is none.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (the vision teacher stage writes it)")
    weights = load_file(path)
    network = ExpressionNetwork(int(weights["side"]))
    network.load_state_dict(weights)
    return network.eval().requires_grad_(False)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train the network to `config.steps`, or continue a run; Ctrl-C saves first."""
    faces = read_faces(config.faces)
    if dry_run:
        return
    directory = open_run(config.output, config, resume)
    torch.manual_seed(config.seed)
    photos = photos_of_splits(faces, config)
    layout: Any = {"memory_format": torch.channels_last}  # torch's annotations do not know it here
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
        targets_of=lambda _, labels: smoothed(labels.to(config.device), config),
    )
    (directory.path / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")
    save_file(
        {name: value.contiguous() for name, value in network.state_dict().items()},
        directory.path / WEIGHTS,
    )
