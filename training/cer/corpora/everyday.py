"""Dialogues other than emotional support: everyday talk and motivational interviews.

- DailyDialog (Li et al. 2017, https://arxiv.org/abs/1710.03957) in ConvLab's unified format, one
  array. Neither side seeks help; the first speaker counts as the seeker.
- EmpatheticDialogues (Rashkin et al. 2019, https://arxiv.org/abs/1811.00207), a CSV per split with a
  row for each utterance. Commas are written `_comma_` and nothing is quoted, so quotation marks are
  literal; some files have an unnamed ninth field of candidate replies. The first speaker describes the
  situation in the column `prompt` and feels the emotion in the column `context`, one of 32, which is
  stored as a label. On the hub: `hub:facebook/empathetic_dialogues@refs/convert/parquet`.
- AnnoMI (Wu et al. 2022, https://github.com/uccollab/AnnoMI): transcribed counselling, good and bad.
  The full file has a row for each annotator: the text is read once, with the first annotator's
  labels.
- AvaMERG (Zhang et al. 2025, https://arxiv.org/abs/2502.04976): empathetic dialogues with avatars.
  No file was available: the layout follows programs that read it (one array; `conversation_id`,
  `topic` and `turns`, each with a `dialogue_history` of `index`, `role` and `utterance`, and a
  `response`), and is tested on synthetic text only.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from compeer_core.dialogue import Speaker
from training.cer.corpora.builder import Builder, RawUtterance
from training.cer.corpora.reading import Row, converted, csv_rows, json_array, labels_of
from training.cer.records import Dropped, Reason, SourceDialogue

_SPEAKERS = {
    **dict.fromkeys(("user", "client", "speaker"), Speaker.SEEKER),
    **dict.fromkeys(("system", "therapist", "listener"), Speaker.SUPPORTER),
}
_DAILYDIALOG_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_EMPATHETIC = ("conv_id", "utterance_idx", "context", "prompt", "speaker_idx", "utterance")
_INTERVIEW = ("mi_quality", "topic", "video_title")
_BEHAVIOUR = ("main_therapist_behaviour", "client_talk_type")


def load_dailydialog(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of all splits, or of one; each record names its own."""
    licence = "CC BY-NC-SA 4.0"
    builders = {
        theirs: Builder("dailydialog", "en", licence, path, dropped, ours, vocabulary="dailydialog")
        for theirs, ours in _DAILYDIALOG_SPLITS.items()
    }

    def convert(row: Row) -> SourceDialogue | None:
        record: dict[str, Any] = row.value
        builder = builders[record["data_split"]]
        if split not in {None, builder.split}:
            return None
        utterances = [
            RawUtterance(_SPEAKERS[turn["speaker"]], turn["utterance"], emotion=turn["emotion"])
            for turn in record["turns"]
        ]
        return builder.dialogue(
            row.where,
            id=record["dialogue_id"],
            source_id=record["original_id"],
            utterances=utterances,
            labels={"topic": "; ".join(record["domains"])},
        )

    return converted(json_array(path, dropped), convert, path, dropped)


def load_empathetic_dialogues(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of one split."""
    builder = Builder("empathetic_dialogues", "en", "CC BY-NC 4.0", path, dropped, split)
    rows = csv_rows(path, dropped, _EMPATHETIC, quoted=False)
    talks = (
        Row(list(talk), name) for name, talk in groupby(rows, lambda row: row.value["conv_id"])
    )

    def convert(talk: Row) -> SourceDialogue | None:
        first = talk.value[0].value
        utterances = [
            RawUtterance(
                Speaker.SEEKER
                if row.value["speaker_idx"] == first["speaker_idx"]
                else Speaker.SUPPORTER,
                _unescaped(row.value["utterance"]),
            )
            for row in talk.value
        ]
        return builder.dialogue(
            talk.where,
            id=f"empathetic_dialogues/{talk.where}",
            source_id=str(talk.where),
            utterances=utterances,
            situation=_unescaped(first["prompt"]),
            labels={"emotion": first["context"]},
        )

    return converted(talks, convert, path, dropped)


def _unescaped(text: str) -> str:
    return text.replace("_comma_", ",").replace("_pipe_", "|").strip()


def load_annomi(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the interviews of the simple or the full file."""
    builder = Builder("annomi", "en", "none stated, publicly available", path, dropped, split)
    columns = ("transcript_id", "utterance_id", "interlocutor", "utterance_text", *_INTERVIEW)
    rows = csv_rows(path, dropped, (*columns, *_BEHAVIOUR))
    interviews = (
        Row(list(interview), number)
        for number, interview in groupby(rows, lambda row: row.value["transcript_id"])
    )

    def convert(interview: Row) -> SourceDialogue | None:
        once: dict[str, Row] = {}
        for row in interview.value:
            if once.setdefault(row.value["utterance_id"], row) is not row:
                dropped.add(Reason.REPEATED, path, row.where, "another annotator")
        utterances = [
            RawUtterance(
                _SPEAKERS[row.value["interlocutor"]],
                row.value["utterance_text"],
                labels={
                    name: label
                    for name, label in labels_of(row.value, _BEHAVIOUR).items()
                    if label != "n/a"
                },
            )
            for row in once.values()
        ]
        return builder.dialogue(
            interview.where,
            id=f"annomi/{interview.where}",
            source_id=str(interview.where),
            utterances=utterances,
            labels=labels_of(interview.value[0].value, _INTERVIEW),
        )

    return converted(interviews, convert, path, dropped)


def load_avamerg(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues, from the last of the growing histories, which contains the others."""
    builder = Builder("avamerg", "en", "see the authors' page", path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        record: dict[str, Any] = row.value
        last = record["turns"][-1]
        utterances = [
            RawUtterance(_SPEAKERS[turn["role"].lower()], turn["utterance"])
            for turn in last["dialogue_history"]
        ]
        return builder.dialogue(
            row.where,
            id=f"avamerg/{record['conversation_id']}",
            source_id=str(record["conversation_id"]),
            utterances=[*utterances, RawUtterance(Speaker.SUPPORTER, last["response"])],
            labels=labels_of(record, ["topic"]),
        )

    return converted(json_array(path, dropped), convert, path, dropped)
