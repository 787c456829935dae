"""Marks in a step the words that refer to the conversation, and sums them up for the inspector."""

from collections import Counter
from itertools import groupby

from compeer_core.dialogue import Speaker
from compeer_core.grounding import Evidence, Ground
from compeer_core.reasoning import STEPS, Part
from ui_components.shared.progress import PartProgress, Progress
from ui_components.shared.session import Session
from ui_components.shared.texts import Texts


def marked_pieces(
    part: Part, now: PartProgress, session: Session, texts: Texts
) -> list[dict[str, object]]:
    """Cut a step's text into pieces, each plain or marked with what it refers to.

    A quotation is one piece. A sentence about a photo is cut by the quotations in it.
    """
    owners: list[Evidence | None] = [None] * len(now.text)
    for evidence in sorted(now.evidence, key=lambda each: each.ground is not Ground.NO_PHOTO):
        owners[evidence.start : evidence.end] = [evidence] * (evidence.end - evidence.start)
    runs = [(owner, len(list(run))) for owner, run in groupby(owners)]
    last_runs = {owner: number for number, (owner, _) in enumerate(runs)}
    utterances = tuple(session.utterances())
    pieces: list[dict[str, object]] = []
    start = 0
    for number, (owner, length) in enumerate(runs):
        end = start + length
        piece: dict[str, object] = {"text": now.text[start:end], "kind": "", "note": ""}
        if owner is not None:
            piece["kind"] = owner.ground.value
            if owner.message is not None:
                turn, utterance = utterances[owner.message]
                is_seeker = utterance.speaker is Speaker.SEEKER
                piece["key"] = f"{part}-{start}"
                piece["target"] = f"{'said' if is_seeker else 'reply'}-{turn}"
                piece["start"], piece["end"] = owner.message_start, owner.message_end
                where = "inspector.in_message" if is_seeker else "inspector.in_reply"
                piece["note"] = texts(where, number=turn + 1)
            elif number == last_runs[owner]:
                piece["note"] = texts(f"inspector.mark_{owner.ground}")
        pieces.append(piece)
        start = end
    return pieces


def grounding_line(progress: Progress | None, texts: Texts) -> dict[str, object] | None:
    """Say how many quotations the steps have and whether they were said; None if there is nothing to say."""
    if progress is None:
        return None
    counts = Counter(each.ground for part in STEPS for each in progress.parts[part].evidence)
    quotations = [
        texts(f"inspector.{ground}", count=counts[ground])
        for ground in (Ground.FOUND, Ground.NOT_SAID)
        if counts[ground]
    ]
    words = [texts("inspector.quotations", list=texts.listed(quotations))] if quotations else []
    if counts[Ground.NO_PHOTO]:
        words.append(texts("inspector.no_photo", count=counts[Ground.NO_PHOTO]))
    if not words:
        return None
    is_sound = counts.keys() <= {Ground.FOUND}
    return {"words": " ".join(words), "kind": "found" if is_sound else "unfounded"}
