"""ESConv's supporter turns with reasoning by rule, as CER rows: `python -m training cer rules <config.toml>`.

Every stage that fine-tunes a policy can learn from these rows, and GRPO takes its prompts from
them. A rule wrote the reasoning steps (`training.cer.rule_reasoning`) and nobody judged them, so
the rows hold no step verdicts. Photos can be shown beside the seeker's last message; the photos of
the train split never appear in the others.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, Case, CaseUtterance, CerRecord, HumanLabels, Split
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import SupportTurn, render
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Emotion
from training.cer.corpora.esconv import load_lines
from training.cer.records import Dropped, Reason, SourceDialogue
from training.cer.rule_reasoning import label_turn, reasoning_by_rule
from training.cer.steps.cases import Turn, rounds_of, turns_of
from training.data.faces import face_class_of
from training.data.histories import first_kept
from training.data.pictures import Photos, read_photos

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[cer rules]`: which dialogues become rows, and with how many photos."""

    esconv: Path
    """Folder with ESConv's `train.txt.gz`, `valid.txt.gz` and `test.txt.gz`."""
    output: Path
    """Folder that receives `rows.jsonl`, with the rows of all splits."""
    faces: Path | None = None
    """Folder of the packed faces; None shows no photos."""
    face_share: float = Field(default=0.25, ge=0, le=1)
    """Share of turns whose last seeker message shows a photo that fits the emotion."""
    history_characters: int = Field(default=100_000, ge=0)
    """Drop the oldest turns beyond this; no dialogue of ESConv is as long as the default."""
    seed: int = Field(default=0, ge=0)
    """Draws the wording and the photos."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    if resume is not None:
        raise ConfigError("`cer rules` cannot be resumed: start it again, it takes seconds")
    rows: list[CerRecord] = []
    for split in SPLITS:
        split_rows = list(rule_rows(config, split))
        _log.info("%s: %d turns", split, len(split_rows))
        rows += split_rows
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def rule_rows(config: Config, split: Split) -> Iterator[CerRecord]:
    """Yield a row for each supporter turn of a split that answers the seeker.

    Raises:
        ConfigError: A file is missing or damaged, or holds no dialogue in ESConv's layout.
    """
    path = config.esconv / f"{split}.txt.gz"
    dropped = Dropped()
    dialogues = [
        dialogue
        for dialogue in load_lines(path, dropped, split)
        if _is_labelled(dialogue, path, dropped)
    ]
    if dropped.reasons:
        _log.info("%s: %s", path, ", ".join(f"{n} x {r}" for r, n in dropped.reasons.items()))
    if not dialogues:
        raise ConfigError(f"{path}: no dialogue in ESConv's layout (one JSON object per line)")
    photos = {} if config.faces is None else read_photos(config.faces)
    class_of = {} if config.faces is None else face_class_of(config.faces)
    writer = RowWriter(split, photos, class_of, config.face_share, config.history_characters)
    rng = np.random.default_rng(config.seed)
    for dialogue in dialogues:
        yield from writer.rows(dialogue, rng)


def _is_labelled(dialogue: SourceDialogue, path: Path, dropped: Dropped) -> bool:
    labels = (dialogue.emotion, dialogue.problem, dialogue.intensity_before)
    if None in labels:
        dropped.add(Reason.ANOTHER_LAYOUT, path, dialogue.id, "no emotion, problem or intensity")
    return None not in labels


@dataclass(frozen=True)
class RowWriter:
    """Writes the rows of dialogues of one split."""

    split: Split
    photos: Photos
    class_of: Mapping[Emotion, str]
    """Class of the photo beside each emotion."""
    face_share: float
    history_characters: int

    def rows(self, dialogue: SourceDialogue, rng: np.random.Generator) -> Iterator[CerRecord]:
        """Yield the rows of one dialogue."""
        turns = turns_of(dialogue)
        supporter_positions = [
            n for n, turn in enumerate(turns) if turn.speaker is Speaker.SUPPORTER
        ]
        answers = [
            (position, reply)
            for position in rounds_of(turns)
            if turns[position].strategies
            # a reply may be nothing but mark-up
            and (reply := re.sub(r"[<>]", "", turns[position].text).strip())
        ]
        for number, (position, reply) in enumerate(answers):
            place = supporter_positions.index(position) / len(supporter_positions)
            yield self._row(
                dialogue, turns[: position + 1], place, reply, number, len(answers), rng
            )

    def _row(
        self,
        dialogue: SourceDialogue,
        turns: tuple[Turn, ...],
        place: float,
        reply: str,
        number: int,
        rounds: int,
        rng: np.random.Generator,
    ) -> CerRecord:
        """Return the row of the last of these turns."""
        assert dialogue.emotion and dialogue.problem and dialogue.intensity_before  # `_is_labelled`
        *before, answer = turns
        labels = label_turn(
            dialogue.emotion,
            dialogue.intensity_before,
            dialogue.intensity_after or dialogue.intensity_before,
            [turn.text for turn in before if turn.speaker is Speaker.SEEKER],
            place,
        )
        face_class, photo = self._photo_for(labels.emotion, rng)
        history = _history(before, photo, self.history_characters)
        case = Case(
            id=f"{dialogue.id}#{number}",
            dialogue_id=dialogue.id,
            source_id=dialogue.source_id,
            corpus=dialogue.corpus,
            language=dialogue.language,
            split=self.split,
            licence=dialogue.licence,
            round=number,
            rounds=rounds,
            history=history,
            original=reply,
            situation=dialogue.situation or None,
            labels=HumanLabels(
                strategies=answer.strategies,
                emotion=dialogue.emotion,
                emotion_of="dialogue",
                problem=dialogue.problem,
                intensity_before=dialogue.intensity_before,
                intensity_after=dialogue.intensity_after,
            ),
        )
        reasoning = reasoning_by_rule(
            history, labels, answer.strategies[0], dialogue.problem, face_class, rng
        )
        turn = render(SupportTurn(reasoning, reply))
        return CerRecord(
            id=case.id, case=case, first=Candidate(author="corpus", reply=reply, turn=turn)
        )

    def _photo_for(
        self, emotion: Emotion, rng: np.random.Generator
    ) -> tuple[str | None, str | None]:
        """Draw the class and the name of a photo; None twice where none is shown."""
        part = "train" if self.split == "train" else "valid"
        face_class = self.class_of.get(emotion, "")
        names = self.photos.get((part, face_class))
        if not names or rng.random() >= self.face_share:
            return None, None
        return face_class, str(rng.choice(names))


def _history(before: list[Turn], photo: str | None, characters: int) -> tuple[CaseUtterance, ...]:
    recent = before[first_kept([len(turn.text) for turn in before], characters) :]
    utterances = [CaseUtterance(speaker=turn.speaker, text=turn.text) for turn in recent]
    if photo is not None:
        utterances[-1] = utterances[-1].model_copy(update={"images": (photo,)})
    return tuple(utterances)
