"""ESCoT (Zhang et al. 2024, https://arxiv.org/abs/2406.10960): dialogues with chains of thought.

The full layout has the dialogue before a reply, the reply, and five links: emotion, its stimulus,
the seeker's appraisal, the strategy and the reason for it. The chain layout (its ablation data, the
only one with a small train split) has the same as one input and one output text, without the name of
the strategy. The links become labels of the last utterance, which is the reply; the emotion is a
sentence, so it is a label and not an `Emotion`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compeer_core.dialogue import Speaker
from training.cer.corpora.builder import Builder, RawUtterance
from training.cer.corpora.reading import Row, converted, json_array, labels_of
from training.cer.records import Dropped, SourceDialogue

_LINKS = ("emotion", "emotion_stimuli", "individual_appraisal", "strategy_reason")
_LINK_OF_HEADING = {
    "Emotion": "emotion",
    "Emotion Stimulus": "emotion_stimuli",
    "Individual Appraisal": "individual_appraisal",
    "Strategy Reason": "strategy_reason",
    "Response": "response",
}
_HEADING = re.compile(rf"^({'|'.join(_LINK_OF_HEADING)}):\n", re.MULTILINE)
_TURN = re.compile(r"^(seeker|supporter): ", re.MULTILINE)


def _builder(path: Path, dropped: Dropped, split: str | None) -> Builder:
    return Builder("escot", "en", "none stated", path, dropped, split, vocabulary="escot")


def load(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the dialogues of a file in the full layout, each ending with the explained reply."""
    builder = _builder(path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        record: dict[str, Any] = row.value
        original = record["original_data"]
        utterances = [
            RawUtterance(Speaker(turn["speaker"]), turn["content"]) for turn in original["dialog"]
        ]
        reply = RawUtterance(
            Speaker.SUPPORTER,
            original["response"],
            strategy=original["strategy"],
            labels=labels_of(record["cot_data"], _LINKS),
        )
        return builder.dialogue(
            row.where,
            id=f"escot/full/{record['id']}",
            source_id=str(record["id"]),
            utterances=[*utterances, reply],
        )

    return converted(json_array(path, dropped), convert, path, dropped)


def load_chain(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the dialogues of a file of the ablation data, with its links."""
    builder = _builder(path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        record: dict[str, Any] = row.value
        _, *turns = _TURN.split(record["input"])
        _, *links = _HEADING.split(record["output"])
        chain = {
            _LINK_OF_HEADING[heading]: text.strip()
            for heading, text in zip(links[::2], links[1::2], strict=True)
        }
        reply = chain.pop("response")
        utterances = [
            RawUtterance(Speaker(speaker), text)
            for speaker, text in zip(turns[::2], turns[1::2], strict=True)
        ]
        return builder.dialogue(
            row.where,
            id=f"escot/{'+'.join(chain) or 'response'}/{record['dialog_id']}",
            source_id=str(record["dialog_id"]),
            utterances=[*utterances, RawUtterance(Speaker.SUPPORTER, reply, labels=chain)],
        )

    return converted(json_array(path, dropped), convert, path, dropped)
