"""Advantages within a group (COMPEER, Eq. 3).

    A_i = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)

The standard deviation is the unbiased one (G - 1), as in trl. The paper leaves two cases open:

- Equal rewards teach nothing, so every advantage is 0.
- Nearly equal rewards, divided by their tiny standard deviation, would turn noise into full-strength
  advantages. `std_floor` is the smallest divisor.

A member with an unknown reward (NaN: its judgement failed) is excluded from mean and standard
deviation and gets 0.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from compeer_core.stats import Floats

Scale = Literal["group", "batch", "none"]
"""
- group: divide by the standard deviation of the group, as in Eq. 3.
- batch: divide by that of all rewards of a generation (Liu et al. 2025, arXiv 2508.08221).
- none: only subtract the mean (Dr. GRPO, arXiv 2503.20783).
"""

STD_FLOOR = 0.1
"""In units of the reward. One more verdict adds 2, a standard deviation of 1 in a group of 4, which
the floor does not affect. Equal rewards divided by 1.500 to 1.503 have a standard deviation of 0.0006."""


def group_advantages(rewards: ArrayLike, std_floor: float = STD_FLOOR) -> Floats:
    """Return the advantages of one group.

    Args:
        rewards: Shape (G,); NaN where unknown.
        std_floor: Smallest divisor; above 0.

    Returns:
        Shape (G,), finite. All 0 if fewer than two rewards are known.

    Raises:
        ValueError: A reward is infinite, or the floor is not positive.

    Example:
        >>> group_advantages([3.0, 1.0, 1.0, -1.0]).round(4).tolist()  # mean 1, std 1.633
        [1.2247, 0.0, 0.0, -1.2247]
    """
    values = _checked(rewards, std_floor)
    return _centred(values) / max(_std(values), std_floor)


def batch_advantages(
    rewards: ArrayLike, group_size: int, scale: Scale = "group", std_floor: float = STD_FLOOR
) -> Floats:
    """Return the advantages of several groups, one after another.

    Args:
        rewards: Shape (groups x G,); NaN where unknown.
        group_size: G.
        scale: What to divide by.
        std_floor: Smallest divisor; above 0.

    Raises:
        ValueError: The last group is incomplete, a reward is infinite, or the floor is not positive.

    Example:
        >>> batch_advantages([3.0, 1.0, 5.0, 5.0], 2, "none").tolist()
        [1.0, -1.0, 0.0, 0.0]
    """
    values = _checked(rewards, std_floor)
    if values.size % group_size:
        raise ValueError(f"{values.size} rewards do not form groups of {group_size}")
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
    """Subtract the mean; 0 for unknown rewards, and for a single known one."""
    known = ~np.isnan(group)
    centred = np.zeros_like(group)
    if known.sum() >= 2:
        centred[known] = group[known] - group[known].mean()
    return centred


def _std(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if known.size >= 2 else 0.0
