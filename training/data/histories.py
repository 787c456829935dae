"""Histories to answer: the prompts of GRPO and of evaluations, read from CER rows.

A policy sees only the history of a row. A judge compares its reply with the corpus's, and
evaluations use the human labels.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from compeer_core.cer import CerRecord, Split
from compeer_core.errors import ConfigError
from training.data.records import read_records


def first_kept(lengths: Sequence[int], limit: int) -> int:
    """Return the index of the first utterance to keep when the oldest are dropped.

    Args:
        lengths: Of each utterance, oldest first.
        limit: Largest total length; the last utterance always stays.

    Example:
        >>> first_kept([50, 20, 30], 50), first_kept([50, 20, 30], 10)
        (1, 2)
    """
    room = limit
    for index in reversed(range(len(lengths))):
        room -= lengths[index]
        if room < 0:
            return min(index + 1, len(lengths) - 1)
    return 0


def shortened(record: CerRecord, characters: int | None) -> CerRecord:
    """Drop the oldest utterances of a history beyond so many characters; None drops none."""
    if characters is None:
        return record
    history = record.case.history
    begin = first_kept([len(utterance.text) for utterance in history], characters)
    case = record.case.model_copy(update={"history": history[begin:]})
    return record.model_copy(update={"case": case})


def has_pictures(record: CerRecord) -> bool:
    """Return whether a history shows a picture."""
    return any(utterance.images for utterance in record.case.history)


def read_histories(paths: Sequence[Path], split: Split) -> tuple[list[CerRecord], Counter[str]]:
    """Read the rows of a split that have a reply of the corpus, one row per history.

    Args:
        paths: Files of CER rows.
        split: Rows of other splits are skipped.

    Returns:
        The rows, and how many others were skipped, by reason.

    Raises:
        ConfigError: A file is missing or holds anything but CER rows, or no row is left.
    """
    rows: dict[tuple[str, ...], CerRecord] = {}
    skipped: Counter[str] = Counter()
    for path in paths:
        for record in read_records(path, CerRecord):
            case = record.case
            key = (case.source_id, *(f"{u.speaker}:{u.text}" for u in case.history))
            if case.split != split:
                skipped["another split"] += 1
            elif not case.original:
                skipped["no reply of the corpus"] += 1
            elif key in rows:
                skipped["the same history again"] += 1
            else:
                rows[key] = record
    if not rows:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(skipped.items()))
        raise ConfigError(
            f"{', '.join(map(str, paths)) or 'no file'}: no history of split '{split}' with a "
            f"reply ({reasons or '0 rows'})"
        )
    return list(rows.values()), skipped
