"""Advantages within a group (COMPEER, Eq. 3).

    A_i = (r_i - mean(r_1 .. r_G)) / std(r_1 .. r_G)

The standard deviation is the unbiased one (G - 1), as in trl. Two cases that the paper leaves open:

- all rewards alike: nothing can be learnt from the group, so every advantage is 0;
- rewards that differ by next to nothing: divided by their tiny standard deviation they would become
  full-strength advantages made of noise. `std_floor` is the least that is divided by.

A member whose reward is not known (NaN: its judgement could not be read) is left out of mean and
standard deviation and gets 0.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

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
    values = np.asarray(rewards, dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError(f"rewards must be finite or NaN, got {values.tolist()}")
    if not std_floor > 0:
        raise ValueError(f"std_floor must be above 0, got {std_floor}")
    known = ~np.isnan(values)
    advantages = np.zeros_like(values)
    if known.sum() >= 2:
        these = values[known]
        spread = max(float(these.std(ddof=1)), std_floor)
        advantages[known] = (these - these.mean()) / spread
    return advantages
