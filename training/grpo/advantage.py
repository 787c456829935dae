"""Advantages within a group (COMPEER, Eq. 3).

    A_i = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)

The standard deviation is the unbiased one (G - 1), as in trl. Two cases that the paper leaves open:

- all rewards alike: nothing can be learnt from the group, so every advantage is 0;
- rewards that differ by next to nothing: divided by their tiny standard deviation they would become
  full-strength advantages made of noise. `std_floor` is the least that is divided by.

A member whose reward is not known (NaN: its judgement could not be read) is left out of mean and
standard deviation and gets 0.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

Scale = Literal["group", "batch", "none"]
"""
- group: divide by the standard deviation of the group, as in Eq. 3.
- batch: by that of all rewards of a generation (Liu et al. 2025, arXiv 2508.08221).
- none: only the mean is taken off (Dr. GRPO, arXiv 2503.20783).
"""

STD_FLOOR = 0.1
"""In the unit of the reward. One verdict more is worth 2, which makes a standard deviation of 1 in a
group of 4: the floor does not touch that. Equal rewards divided by 1.500 to 1.503 have one of 0.0006."""


def group_advantages(rewards: ArrayLike, std_floor: float = STD_FLOOR) -> Floats:
    """Return the advantages of one group.

    Args:
        rewards: Shape (G,); NaN where a reward is not known.
        std_floor: The least standard deviation that is divided by; above 0.

    Returns:
        Shape (G,), finite. All 0 where fewer than two rewards are known.

    Raises:
        ValueError: A reward is infinite, or the floor is not above 0.

    Example:
        >>> group_advantages([3.0, 1.0, 1.0, -1.0]).round(4).tolist()  # mean 1, std 1.633
        [1.2247, 0.0, 0.0, -1.2247]
    """
    values = _checked(rewards, std_floor)
    return _centred(values) / max(_std(values), std_floor)


def batch_advantages(
    rewards: ArrayLike, group_size: int, scale: Scale = "group", std_floor: float = STD_FLOOR
) -> Floats:
    """Return the advantages of several groups that stand one behind the other.

    Args:
        rewards: Shape (groups x G,); NaN where a reward is not known.
        group_size: G.
        scale: What is divided by.
        std_floor: The least standard deviation that is divided by; above 0.

    Raises:
        ValueError: The last group is not whole, a reward is infinite, or the floor is not above 0.

    Example:
        >>> batch_advantages([3.0, 1.0, 5.0, 5.0], 2, "none").tolist()
        [1.0, -1.0, 0.0, 0.0]
    """
    values = _checked(rewards, std_floor)
    if values.size % group_size:
        raise ValueError(f"{values.size} rewards are no groups of {group_size}")
    groups = values.reshape(-1, group_size)
    if scale == "group":
        return np.concatenate([group_advantages(group, std_floor) for group in groups])
    centred = np.concatenate([_centred(group) for group in groups])
    return centred if scale == "none" else centred / max(_std(values), std_floor)


def _checked(rewards: ArrayLike, std_floor: float) -> Floats:
    values = np.asarray(rewards, dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError(f"rewards must be finite or NaN, got {values.tolist()}")
    if not std_floor > 0:
        raise ValueError(f"std_floor must be above 0, got {std_floor}")
    return values


def _centred(group: Floats) -> Floats:
    """Take the mean off; 0 for a member that is not known, and for one that is alone."""
    known = ~np.isnan(group)
    centred = np.zeros_like(group)
    if known.sum() >= 2:
        centred[known] = group[known] - group[known].mean()
    return centred


def _std(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if known.size >= 2 else 0.0
