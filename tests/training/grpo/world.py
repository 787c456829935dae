"""A small world for GRPO: histories, a judge that goes by words, an encoder that does so too.

A turn is wrong in a step where the step says "wrong", and judging fails where it says "broken" (the
server) or "exhausted" (torch). Of
two replies the one with more "good" in it is better, else both are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compeer_core import row_files
from compeer_core.backends.protocol import Message
from compeer_core.cer import Candidate, CaseUtterance, CerRecord, HumanLabels
from compeer_core.dialogue import Speaker
from compeer_core.errors import BackendError
from compeer_core.judgement import Judgement, ResponseVerdict, StepVerdict
from compeer_core.reasoning import Reading
from compeer_core.taxonomy import Emotion, Preference, Strategy
from compeer_core.unifireward import Judge
from tests.cases import case_of
from training.grpo.reward import GroupReward, Scored


def turn(reply: str, history: str = "h", emotion: str = "e", strategy: str = "s") -> str:
    """A complete turn in the output grammar."""
    return (
        f"<history>{history}\nStage: Exploration</history>\n"
        f"<emotion>{emotion}\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
        f"<strategy>{strategy}\nStrategy: Question</strategy>\n<reply>{reply}</reply>"
    )


@dataclass(frozen=True)
class WordScorer:
    """Judges by the words in a question."""

    name: str = "words"
    reserved: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """Labels that are taken for more than one token."""

    def check_labels(self, labels: Sequence[str]) -> None:
        if set(labels) & set(self.refused):
            from compeer_core.errors import ConfigError

            raise ConfigError("a verdict is more than one token")

    def open(self, messages: Sequence[Message]) -> "WordScoring":
        return WordScoring()

    def close(self) -> None:
        pass


class WordScoring:
    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        if "broken" in text:
            raise BackendError("the judge fell over")
        if "exhausted" in text:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if "True" in labels:
            return (0.2, 0.8) if "wrong" in text else (0.9, 0.1)
        first, _, second = text.partition("Second:")
        one, other = first.count("good"), second.count("good")
        return (0.1, 0.2, 0.6, 0.1) if one == other else ((1, 0, 0, 0), (0, 1, 0, 0))[one < other]

    def answer(self, label: str) -> None:
        pass

    def close(self) -> None:
        pass


class WordEncoder:
    """Texts resemble each other by the words that they share."""

    name = "words"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        words = sorted({word for text in texts for word in text.lower().split()})
        place = {word: number for number, word in enumerate(words)}
        found = np.zeros((len(texts), max(1, len(words))), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                found[row, place[word]] += 1
        return found


class ByLetters(GroupReward):
    """Pays by the letters of a completion, complete or not: an untrained model writes no turn."""

    def judged(self, texts: Sequence[str], rows: Sequence[int]) -> list[Scored]:
        return [self._of_letters(text, int(row)) for text, row in zip(texts, rows, strict=True)]

    def _of_letters(self, text: str, row: int) -> Scored:
        steps = tuple(StepVerdict(letter not in text, 0.5) for letter in "aei")
        found = {Preference.FIRST: 1.0 * ("o" in text)}
        probabilities = {preference: found.get(preference, 0.0) for preference in Preference}
        preference = Preference.FIRST if "o" in text else Preference.SECOND
        judgement = Judgement(steps, ResponseVerdict(preference, probabilities), is_complete=True)
        reading = Reading(None, None, None, text[:40], (), text)
        return self._scored(row, reading, judgement)


def judge(**changes: Any) -> Judge:
    return Judge("words", WordScorer(**changes))


def record(number: int, split: str = "train", **changes: Any) -> CerRecord:
    """A row of CER whose history has three utterances."""
    messages = (
        (Speaker.SEEKER, f"I lost job number {number}."),
        (Speaker.SUPPORTER, "That is hard. Since when?"),
        (Speaker.SEEKER, f"For {number} weeks. " + "It goes on. " * (number % 3)),
    )
    images = changes.pop("images", ())
    history = tuple(
        CaseUtterance(speaker=speaker, text=text, images=images if place == 2 else ())
        for place, (speaker, text) in enumerate(messages)
    )
    values = {
        "id": f"d{number}#1",
        "source_id": f"s{number}",
        "corpus": "esconv",
        "split": split,
        "round": 1,
        "rounds": 2,
        "history": history,
        "original": "good: I see.",
        "labels": HumanLabels(strategies=(Strategy.QUESTION,), emotion=Emotion.SADNESS),
    }
    case = case_of(f"d{number}", **(values | changes))
    return CerRecord(id=f"r{number}", case=case, first=Candidate(author="corpus", reply="I see."))


def write_rows(path: Path, count: int, split: str = "train", **changes: Any) -> Path:
    row_files.write_rows(path, [record(number, split, **changes) for number in range(1, count + 1)])
    return path


def write_mixed_rows(path: Path, count: int, face: str) -> None:
    """Every third history shows a face beside its last utterance."""
    row_files.write_rows(
        path,
        [record(n, images=(face,) if n % 3 == 0 else ()) for n in range(1, count + 1)],
    )


def install(setattr_: Any) -> None:
    """Put the judge, the encoder and the reward of this module in the stage's place."""
    from training.grpo import train

    setattr_(train.JudgeSource, "load", lambda source: judge())
    setattr_(train, "load_encoder", lambda source=None, **others: WordEncoder())
    setattr_(train, "GroupReward", ByLetters)


def small_config(policy: Path, faces: Path, folder: Path, **changes: Any) -> Any:
    """The config of a run; `changes` are those of its training, or of `config`."""
    from training.grpo.train import Config

    training = {
        "batch_size": 2,
        "accumulation": 2,
        "group_size": 2,
        "max_steps": 3,
        "lr": 1e-2,
        "max_new_tokens": 12,
        "save_steps": 1,
        "precision": "fp32",
        "freeze_vision": False,
    }
    outer = changes.pop("config", {})
    return Config.model_validate(
        {
            "prompts": [folder / "train.jsonl"],
            "base": policy,
            "output": folder / "run",
            "faces": faces,
            "judge": {"source": "words"},
            **outer,
            "training": {**training, **changes},
        }
    )
