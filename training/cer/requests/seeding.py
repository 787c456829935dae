"""Seeds that do not depend on order: every draw has a generator of its own, made from names.

A row's draw is seeded by the run's seed and the row's id. So it is the same whatever was drawn
before, whichever engine runs the step, and however often the run was interrupted.
"""

import hashlib

import numpy as np


def stable_hash(*names: str) -> int:
    """Return 128 bits that depend on the names alone; the built-in `hash` differs by process.

    Names are length-prefixed, so different lists of names never form the same text.

    Example:
        >>> stable_hash("a", "b") == stable_hash("a", "b") != stable_hash("ab")
        True
    """
    text = "".join(f"{len(name)}:{name}" for name in names)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:16], "big")


def generator_for(seed: int, *names: str) -> np.random.Generator:
    """Return the random generator for these names, such as a step and the id of a row.

    Args:
        seed: The run's; at least 0.
        names: What is drawn, and for which row.

    Example:
        >>> draws = [generator_for(0, "order", row).integers(100) for row in ("a", "b", "a")]
        >>> bool(draws[0] == draws[2])
        True
    """
    return np.random.default_rng([seed, stable_hash(*names)])


def seed_for(seed: int, *names: str) -> int:
    """Return a model's seed for these names: from 0 to 2^31 - 1, which all servers accept."""
    return int(generator_for(seed, *names).integers(2**31))
