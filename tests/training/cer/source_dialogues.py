"""Dialogues of corpora as the tests of the pipeline's steps need them."""

from typing import Any

from compeer_core.dialogue import Speaker
from training.cer.records import SourceDialogue, SourceUtterance


def source_dialogue(id: str, *said: str | SourceUtterance, **fields: Any) -> SourceDialogue:
    """A dialogue of the train split.

    Args:
        id: Begins with the corpus.
        said: Utterances; texts are the seeker's and the supporter's in turn.
        fields: Other values.
    """
    speakers = (Speaker.SEEKER, Speaker.SUPPORTER)
    values: dict[str, Any] = {
        "source_id": id,
        "corpus": id.partition("/")[0],
        "language": "en",
        "split": "train",
        "licence": "MIT",
        "utterances": tuple(
            SourceUtterance(speaker=speakers[number % 2], text=each)
            if isinstance(each, str)
            else each
            for number, each in enumerate(said)
        ),
    }
    return SourceDialogue(id=id, **(values | fields))
