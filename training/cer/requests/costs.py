"""The cost of a run, estimated before anything is asked.

The estimate is an upper bound where it can be: the model of the filter is assumed to keep every
dialogue, and every case of the train split is assumed to become a row with each of its turns. The
corpus's own words stand in for texts that do not exist yet.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from compeer_core.backends.protocol import Message
from compeer_core.cer import Candidate, Case, CerRecord, Variant
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.images import Image
from compeer_core.prompts import LANGUAGES
from training.cer.personality.rewriting import drift_question, pieces, rewriting_question
from training.cer.prompts import load
from training.cer.records import SourceDialogue
from training.cer.requests.generators import GeneratorSettings
from training.cer.requests.request_dispatch import Question
from training.cer.settings import Config
from training.cer.steps import filtering, generation
from training.data.pictures import Pictures
from training.data.records import read_records

CHARACTERS_PER_TOKEN = 4.0
"""Latin script; English takes 4 to 4.5 in the tokenizers of current models."""
CHARACTERS_PER_WIDE_TOKEN = 1.5
"""Chinese, Japanese and Korean take 1 to 1.8."""
PIXELS_PER_TOKEN = 28 * 28
"""Of a picture, in Qwen2.5-VL."""
TOKENS_PER_MESSAGE = 5
"""What a chat template adds."""


class Estimate(FrozenModel):
    """The cost of questions that are each answered at the first attempt."""

    requests: int
    input_tokens: int
    """Roughly, from the numbers of characters and pixels."""
    output_tokens: int
    """At most: `max_new_tokens` for each answer."""
    price: float | None
    """At most, in the currency of the settings; None if they have no prices."""

    def __str__(self) -> str:
        price = "no prices are set" if self.price is None else f"at most {self.price:.2f}"
        return (
            f"{self.requests} requests, about {self.input_tokens} input tokens, "
            f"at most {self.output_tokens} output tokens, {price}"
        )


def estimate(questions: Iterable[Question], settings: GeneratorSettings) -> Estimate:
    """Estimate the cost of questions. Nothing is sent."""
    requests = 0
    read = 0.0
    for question in questions:
        requests += 1
        for message in question.messages:
            read += TOKENS_PER_MESSAGE
            read += sum(_tokens(part, settings.sees_images) for part in message.content)
    written = requests * settings.max_new_tokens
    prices = settings.price_per_million_input, settings.price_per_million_output
    price = None
    if prices != (None, None):
        price = (read * (prices[0] or 0.0) + written * (prices[1] or 0.0)) / 1e6
    return Estimate(requests=requests, input_tokens=round(read), output_tokens=written, price=price)


def _tokens(part: str | Image, sees_images: bool) -> float:
    if not isinstance(part, str):
        return part.width * part.height / PIXELS_PER_TOKEN if sees_images else 0.0
    wide = sum(character >= "\u2e80" for character in part)
    return wide / CHARACTERS_PER_WIDE_TOKEN + (len(part) - wide) / CHARACTERS_PER_TOKEN


# --- the questions of a run -----------------------------------------------------------------------


@dataclass(frozen=True)
class StepQuestions:
    """The questions of one step to one generator, by its name in the config."""

    step: str
    generator: str
    questions: Iterable[Question]


def all_questions(
    config: Config, path: Callable[[str], Path], pictures: Pictures
) -> Iterator[StepQuestions]:
    """Yield the questions of each step.

    Args:
        config: Of the run.
        path: Returns the files `kept` and `cases` by their names.
        pictures: The pictures of the cases.
    """
    roles = config.roles
    cases = path("cases")
    if roles.filter is not None:
        yield StepQuestions("filter", roles.filter, _filter_questions(config, path("kept")))
    authors = [config.generators[name].author for name in config.writers]
    for name in config.writers:
        settings = config.generators[name]
        author = generation.Author(settings.author, settings.style, settings.sees_images)
        turns = generation.questions(
            cases, config.generation, authors, author, pictures, config.seed
        )
        yield StepQuestions("turns", name, turns)
    if config.personality is None:
        return
    per_case = config.generation.samples_per_case * len(authors)
    if roles.traits is not None:
        yield StepQuestions("traits", roles.traits, _trait_questions(cases))
    if roles.rewriting is not None:
        yield StepQuestions("rewriting", roles.rewriting, _rewriting_questions(cases, per_case))
    if roles.checking is not None:
        yield StepQuestions("checking", roles.checking, _checking_questions(cases, per_case))


def _filter_questions(config: Config, kept: Path) -> Iterator[Question]:
    for dialogue in read_records(kept, SourceDialogue):
        yield filtering.filter_question(dialogue, config.filter)


def _trait_questions(cases: Path) -> Iterator[Question]:
    """Yield a question for each speaker of each dialogue of the train split, by its longest case."""
    longest: dict[str, int] = {}
    for case in _train_cases(cases):
        longest[case.dialogue_id] = max(longest.get(case.dialogue_id, 0), case.round)
    for case in _train_cases(cases):
        if longest[case.dialogue_id] == case.round:
            prompt = load("disc", case.language if case.language in LANGUAGES else "en")
            for speaker in Speaker:
                texts = "\n".join(each.text for each in case.history if each.speaker is speaker)
                yield Question(f"{case.id}/{speaker}", (Message("user", (prompt, texts)),), 0)


def _rewriting_questions(cases: Path, turns_per_case: int) -> Iterator[Question]:
    for row, variant in _rewritings(cases, turns_per_case):
        yield rewriting_question(row, variant, None, 0)


def _checking_questions(cases: Path, turns_per_case: int) -> Iterator[Question]:
    for row, variant in _rewritings(cases, turns_per_case):
        texts = [f"{piece.text}." for piece in pieces(row)]
        question = drift_question(row, texts, variant, 0)
        if question is not None:
            yield question


def _rewritings(cases: Path, turns_per_case: int) -> Iterator[tuple[CerRecord, Variant]]:
    for case in _train_cases(cases):
        reply = Candidate(author="corpus", reply=case.original or "")
        for number in range(turns_per_case):
            row = CerRecord(id=f"{case.id}/{number}", case=case, first=reply, second=reply)
            yield from ((row, variant) for variant in (Variant.REWRITE, Variant.PERSONA))


def _train_cases(cases: Path) -> Iterator[Case]:
    return (case for case in read_records(cases, Case) if case.split == "train")
