"""CER rows and a generator for the tests of personality rewriting."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord, DecidedBy, HumanLabels
from compeer_core.dialogue import Speaker
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    render,
)
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Emotion, Preference, Sentiment, Stage, Strategy
from training.cer.requests.asking import Answer, Check, Question

RULE = DecidedBy(kind="rule", name="test/1")


def turn(reply: str) -> str:
    return render(
        SupportTurn(
            Reasoning(
                HistoryStep('They said: "I can\'t sleep."', Stage.EXPLORATION),
                EmotionStep("They are worried.", Sentiment.NEGATIVE, Emotion.ANXIETY, 3),
                StrategyStep("Ask for more.", Strategy.QUESTION),
            ),
            reply,
        )
    )


def row(
    name: str,
    said: Iterable[str],
    reply: str = "I'm sorry to hear that. You should talk to your mom.",
    other: str = "What's going on at work right now?",
    *,
    split: str = "train",
    round: int = 0,
    language: str = "en",
    corpus: str = "toy",
) -> CerRecord:
    texts = list(said)
    speakers = [
        Speaker.SEEKER if (len(texts) - i) % 2 else Speaker.SUPPORTER for i in range(len(texts))
    ]
    case = Case(
        id=f"{name}#{round}",
        dialogue_id=name,
        source_id=name,
        corpus=corpus,
        language=language,
        split=split,  # type: ignore[arg-type]
        licence="CC0",
        round=round,
        rounds=9,
        history=tuple(
            CaseUtterance(speaker=speaker, text=text)
            for speaker, text in zip(speakers, texts, strict=True)
        ),
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
            turn=turn(other),
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
        said = MANNERS[number % 4]
        said = [*said[:2], f"{said[2]} It is about number {number}."]
        split = "test" if number % 6 == 5 else "train"
        result.append(row(f"d{number}", said[:1], split=split))
        result.append(row(f"d{number}", said, split=split, round=1))
    return result


def written(folder: Path, records: Iterable[CerRecord]) -> Path:
    path = folder / "cer.jsonl"
    write_rows(path, records)
    return path


class FakeAsker:
    """Answers by a function of the last message; what a check refuses has no text."""

    name = "fake"
    reserved = ()

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        self.keys: list[str] = []

    def ask(
        self, questions: Iterable[Question], check: Check, *, label: str, total: int | None = None
    ) -> Iterator[Answer]:
        for question in questions:
            self.keys.append(question.key)
            text = self._answer(question.messages[-1].text)
            problem = check(question.key, text)
            yield Answer(key=question.key, text=None if problem else text, problem=problem, tries=1)


NUMBERED = re.compile(r'^\d+\. (?:Seeker|Supporter): (".*")$', re.MULTILINE)


def rewriter(change: Callable[[str], str]) -> Callable[[str], str]:
    """A generator that answers rewriting questions by changing each utterance."""

    def answer(message: str) -> str:
        said = [json.loads(text) for text in NUMBERED.findall(message)]
        return json.dumps({"utterances": [change(text) for text in said]})

    return answer
