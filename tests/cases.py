"""Cases and rows of CER as tests need them."""

from typing import Any

from compeer_core.cer import Case, CaseUtterance
from compeer_core.dialogue import Speaker


def case_of(
    dialogue_id: str, /, text: str = "I failed.", images: tuple[str, ...] = (), **changes: Any
) -> Case:
    """A case of one seeker message, in the train split of a made-up corpus.

    Args:
        dialogue_id: Names the dialogue and its source.
        text: The message.
        images: Names of its pictures.
        changes: Other values of fields; `history` replaces the message.
    """
    values: dict[str, Any] = {
        "id": f"{dialogue_id}#0",
        "dialogue_id": dialogue_id,
        "source_id": dialogue_id,
        "corpus": "made_up",
        "language": "en",
        "split": "train",
        "licence": "none",
        "round": 0,
        "rounds": 1,
        "history": (CaseUtterance(speaker=Speaker.SEEKER, text=text, images=images),),
        "original": "Oh no.",
    }
    return Case(**(values | changes))
