"""Blind comparisons for the annotation desk: items without authors, and their key.

An item has a context and the replies of two models in random order, without reasoning, since that of one model
would favour its reply. In each pair of models, each is first in half of the items. The key names the models and
stays with whoever runs the study.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from compeer_core.annotation.annotations import AnnotationItem
from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.reasoning import reply_of
from training.common.fingerprints import digest
from training.data.pictures import Pictures
from training.evaluation.contexts import SampledTurn

NO_REPLY = "(no reply)"

Against = Literal["first", "all"]
"""Which models are compared: the first with each of the others, as in the paper, or all with each other."""


class PairKey(FrozenModel):
    """What is hidden from the raters of an item."""

    item_id: str
    case: str
    """Id of the context, the unit of resampling."""
    source: str
    """The source dialogue of the context."""
    corpus: str
    seed: int
    """Of the sampling of both turns."""
    models: tuple[str, str]
    """Their names, in the order of the item's replies."""
    turns: tuple[str, str]
    """The whole turns, in the same order."""


def model_pairs(models: Sequence[str], against: Against) -> list[tuple[str, str]]:
    """Return the pairs of models to compare.

    Example:
        >>> model_pairs("abc", "first"), model_pairs("abc", "all")
        ([('a', 'b'), ('a', 'c')], [('a', 'b'), ('a', 'c'), ('b', 'c')])
    """
    pairs = list(combinations(models, 2))
    return pairs if against == "all" else [pair for pair in pairs if pair[0] == models[0]]


def blind_items(
    turns: Iterable[SampledTurn], pairs: Sequence[tuple[str, str]], seed: int
) -> list[tuple[AnnotationItem, PairKey]]:
    """Return the items of all pairs and contexts in random order, each with its key.

    Args:
        turns: One for each model and context.
        pairs: The models to compare.
        seed: Decides ids, sides and order.
    """
    by_case: dict[str, dict[str, SampledTurn]] = {}
    for turn in turns:
        by_case.setdefault(turn.case.id, {})[turn.policy] = turn
    items = []
    for number, pair in enumerate(pairs):
        swapped = np.random.default_rng([seed, 3, number]).permutation(len(by_case)) % 2
        for of_case, is_swapped in zip(by_case.values(), swapped.tolist(), strict=True):
            sides = (of_case[pair[0]], of_case[pair[1]])
            items.append(_item(sides[::-1] if is_swapped else sides, sorted(pair), seed))
    order = np.random.default_rng([seed, 4]).permutation(len(items)).tolist()
    return [items[place] for place in order]


def _item(
    sides: tuple[SampledTurn, SampledTurn], names: Sequence[str], seed: int
) -> tuple[AnnotationItem, PairKey]:
    one, other = sides
    case = one.case
    item_id = digest(["human", seed, case.id, *names])[:32]
    item = AnnotationItem(
        id=item_id,
        language=case.language,
        history=case.history,
        steps=None,
        replies=(reply_of(one.text) or NO_REPLY, reply_of(other.text) or NO_REPLY),
    )
    key = PairKey(
        item_id=item_id,
        case=case.id,
        source=case.source_id,
        corpus=case.corpus,
        seed=one.seed,
        models=(one.policy, other.policy),
        turns=(one.text, other.text),
    )
    return item, key


def write_pictures(folder: Path, contexts: Iterable[Case], pictures: Pictures) -> int:
    """Write the pictures of contexts below a folder, under their names; return their number.

    Raises:
        ConfigError: A picture cannot be opened (`Pictures.open`).
    """
    names = {name for case in contexts for utterance in case.history for name in utterance.images}
    for name in sorted(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures.open(name).data)
    return len(names)
