"""Histories that a policy is asked to answer: what GRPO samples from and what policies are compared on.

They come from files that other stages have written: samples of the SFT stage, or rows of CER. Of
either only the history is shown to a policy. The reply that people gave is what a judge compares
with, and what people labelled is kept for the evaluation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict

from compeer_core.cer import CaseUtterance, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue, Utterance
from compeer_core.errors import ConfigError
from compeer_core.reasoning import read
from compeer_core.taxonomy import Emotion
from training.data.pictures import FACES, Pictures
from training.data.samples import Sample, read_records


@dataclass(frozen=True)
class History:
    """What was said so far, and what is known about the turn that follows."""

    id: str
    source: str
    """The dialogue that it comes from originally: intervals draw whole sources."""
    utterances: tuple[CaseUtterance, ...]
    reference: str
    """The reply that the supporter of the corpus gave."""
    language: str = "en"
    strategies: tuple[str, ...] = ()
    """Of that reply, by people; empty where nobody said."""
    emotion: str | None = None
    """The seeker's, by people; of ESConv, which labels dialogues, the dialogue's."""
    corpus: str = ""
    """Empty where no corpus is behind it."""

    @property
    def has_pictures(self) -> bool:
        return any(said.images for said in self.utterances)

    def shortened(self, characters: int) -> "History":
        """Return it without its oldest utterances beyond so many characters; see `first_kept`."""
        begin = first_kept([len(said.text) for said in self.utterances], characters)
        return replace(self, utterances=self.utterances[begin:])

    def dialogue(self, pictures: Pictures) -> Dialogue:
        """Return it as a dialogue, with its pictures opened.

        Raises:
            ConfigError: A picture cannot be opened.
        """
        shown = pictures.shown(self.utterances)
        return Dialogue(
            tuple(
                Utterance(said.speaker, said.text, images)
                for said, images in zip(self.utterances, shown, strict=True)
            ),
            id=self.source,
        )


def first_kept(lengths: Sequence[int], limit: int) -> int:
    """Return the place of the first utterance that stays where the oldest are left out.

    Args:
        lengths: Of each utterance, oldest first.
        limit: How much may stay in all; the last utterance always does.

    Example:
        >>> first_kept([50, 20, 30], 50), first_kept([50, 20, 30], 10)
        (1, 2)
    """
    room = limit
    for place in reversed(range(len(lengths))):
        room -= lengths[place]
        if room < 0:
            return min(place + 1, len(lengths) - 1)
    return 0


def read_histories(paths: Sequence[Path], split: str) -> tuple[list[History], Counter[str]]:
    """Return the histories of files, each once, and how many rows gave none, by reason.

    Args:
        paths: `samples.<split>.jsonl` of the SFT stage, which hold one split each, or rows of CER.
            Rows of CER that answer the same history are one history.
        split: Rows of CER of other splits are left out.

    Raises:
        ConfigError: A file is missing, holds something else, or there is no history in any.
    """
    found: dict[tuple[str, ...], History] = {}
    left_out: Counter[str] = Counter()
    for path in paths:
        for one in _histories_of(path, split):
            if isinstance(one, str):
                left_out[one] += 1
                continue
            key = (one.source, *(f"{said.speaker}:{said.text}" for said in one.utterances))
            if key in found:
                left_out["the same history again"] += 1
            found.setdefault(key, one)
    if not found:
        raise ConfigError(
            f"{', '.join(map(str, paths)) or 'no file'}: no history of split '{split}' with a "
            f"reply ({_told(left_out)})"
        )
    return list(found.values()), left_out


def drawn_histories(histories: Sequence[History], count: int | None, seed: int) -> list[History]:
    """Return so many of the histories, drawn by the seed, in their order; None takes all."""
    if count is None or count >= len(histories):
        return list(histories)
    chosen = np.random.default_rng(seed).permutation(len(histories))[:count]
    return [histories[number] for number in sorted(chosen.tolist())]


class _AnyRow(FrozenModel):
    """Tells the kinds of rows apart."""

    model_config = ConfigDict(extra="ignore")

    completion: Any = None


def _histories_of(path: Path, split: str) -> Iterator[History | str]:
    """Yield histories, or why a row has none."""
    is_sample = any(row.completion is not None for row in islice(read_records(path, _AnyRow), 1))
    if is_sample:
        yield from (_of_sample(sample) for sample in read_records(path, Sample))
        return
    for record in read_records(path, CerRecord):
        yield _of_record(record) if record.case.split == split else "another split"


def _of_sample(sample: Sample) -> History | str:
    turn = read(sample.completion)
    if not turn.reply:
        return "no reply of the corpus"
    emotion = None if turn.emotion is None else turn.emotion.emotion
    return History(
        id=sample.id,
        source=sample.dialogue_id,
        utterances=tuple(
            CaseUtterance(
                speaker=said.speaker,
                text=said.text,
                images=() if said.face is None else (f"{FACES}{said.face}",),
            )
            for said in sample.history
        ),
        reference=turn.reply,
        strategies=(sample.strategy,),
        emotion=emotion.value if isinstance(emotion, Emotion) else None,
        corpus="esconv",
    )


def _of_record(record: CerRecord) -> History | str:
    case = record.case
    if not case.original:
        return "no reply of the corpus"
    return History(
        id=record.id,
        source=case.source_id,
        utterances=case.history,
        reference=case.original,
        language=case.language,
        strategies=tuple(strategy.value for strategy in case.labels.strategies),
        emotion=None if case.labels.emotion is None else case.labels.emotion.value,
        corpus=case.corpus,
    )


def _told(left_out: Iterable[str] | Counter[str]) -> str:
    counts = Counter(left_out)
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items())) or "0 rows"
