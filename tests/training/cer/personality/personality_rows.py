"""CER rows and a generator for the tests of personality rewriting."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from compeer_core.cer import Candidate, CerRecord, DecidedBy, HumanLabels
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference, Strategy
from tests.cases import case_of, said, turn_text

RULE = DecidedBy(kind="rule", name="test/1")


def row(
    name: str,
    texts: Iterable[str],
    reply: str = "I'm sorry to hear that. You should talk to your mom.",
    other: str = "What's going on at work right now?",
    *,
    split: str = "train",
    round: int = 0,
    language: str = "en",
    corpus: str = "toy",
) -> CerRecord:
    case = case_of(
        name,
        id=f"{name}#{round}",
        corpus=corpus,
        language=language,
        split=split,
        round=round,
        rounds=9,
        history=said(*texts),
        original=reply,
        labels=HumanLabels(strategies=(Strategy.SUGGESTIONS,)),
    )
    return CerRecord(
        id=f"{name}#{round}",
        case=case,
        first=Candidate(author="corpus", reply=reply),
        second=Candidate(
            author="policy",
            reply=other,
            turn=turn_text(other),
            steps=(True, False, True),
            steps_by=RULE,
        ),
        preference=Preference.FIRST,
        preference_by=RULE,
    )


MANNERS = (
    [
        "Hi!!! Wow, I love talking to you!",
        "Oh great!",
        "I'm so happy, haha! My dad is really great!",
    ],
    ["Hello.", "Yes, I understand.", "Thank you. I am sorry, I hope that is all right with you."],
    ["I need help now.", "Go on.", "I must decide. I want it to stop. It never ends."],
    [
        "It started because my boss said that perhaps I might lose the job.",
        "I see.",
        "However, although I suppose it is possible, I don't know whether it happens in 2 weeks.",
    ],
)


def rows(count: int = 24) -> list[CerRecord]:
    """Rows of `count` dialogues in four manners, two rows of each; every sixth is for testing."""
    result = []
    for number in range(count):
        texts = MANNERS[number % 4]
        texts = [*texts[:2], f"{texts[2]} It is about number {number}."]
        split = "test" if number % 6 == 5 else "train"
        result.append(row(f"d{number}", texts[:1], split=split))
        result.append(row(f"d{number}", texts, split=split, round=1))
    return result


def written(folder: Path, records: Iterable[CerRecord]) -> Path:
    path = folder / "cer.jsonl"
    write_rows(path, records)
    return path


NUMBERED = re.compile(r'^\d+\. (?:Seeker|Supporter): (".*")$', re.MULTILINE)


def rewriter(change: Callable[[str], str]) -> Callable[[str], str]:
    """A generator that answers rewriting questions by changing each utterance."""

    def answer(message: str) -> str:
        texts = map(json.loads, NUMBERED.findall(message))
        return json.dumps({"utterances": [change(text) for text in texts]})

    return answer
