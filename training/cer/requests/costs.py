"""What a run will ask its generators, before it has asked anything: for the estimate of a dry run.

What the model of the filter would drop counts as kept. Rewriting counts as if every case of the
train split became a row with each turn that is written for it, which is the most that can be; the
corpus's own words stand in for those that are yet to be written.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from compeer_core.backends.protocol import Message
from compeer_core.cer import Candidate, Case, CerRecord, Variant
from compeer_core.dialogue import Speaker
from compeer_core.prompts import LANGUAGES
from training.cer.personality.rewriting import drift_question, pieces, rewriting_question
from training.cer.prompts import load
from training.cer.records import SourceDialogue
from training.cer.requests.asking import Question
from training.cer.settings import Config
from training.cer.steps import filtering, generation
from training.data.pictures import Pictures
from training.data.samples import read_records

__all__ = ["Asked", "all_questions"]

_REWRITTEN = (Variant.REWRITE, Variant.PERSONA)


@dataclass(frozen=True)
class Asked:
    """The questions of one step to one generator."""

    step: str
    generator: str
    """Its name in the config."""
    questions: Iterable[Question]


def all_questions(
    config: Config, path: Callable[[str], Path], pictures: Pictures
) -> Iterator[Asked]:
    """Yield what is asked in each step.

    Args:
        config: The run's.
        path: Gives the files `kept` and `cases`.
        pictures: Where the pictures of the cases lie.
    """
    roles = config.roles
    if roles.filter is not None:
        yield Asked("filter", roles.filter, _filter_questions(config, path("kept")))
    authors = [config.generators[name].author for name in config.writers]
    for name in config.writers:
        settings = config.generators[name]
        author = generation.Author(settings.author, settings.style, settings.sees_images)
        asked = generation.questions(
            path("cases"), config.generation, authors, author, pictures, config.seed
        )
        yield Asked("turns", name, asked)
    if config.personality is None:
        return
    turns = config.generation.samples_per_case
    if config.generation.share == "each":
        turns *= len(authors)
    if roles.traits is not None:
        yield Asked("traits", roles.traits, _trait_questions(path("cases")))
    if roles.rewriting is not None:
        yield Asked("rewriting", roles.rewriting, _rewriting_questions(path("cases"), turns))
    if roles.checking is not None:
        yield Asked("checking", roles.checking, _checking_questions(path("cases"), turns))


def _filter_questions(config: Config, kept: Path) -> Iterator[Question]:
    for dialogue in read_records(kept, SourceDialogue):
        if dialogue.corpus not in config.filter.not_asked:
            yield filtering.filter_question(dialogue, config.filter, ())


def _trait_questions(cases: Path) -> Iterator[Question]:
    """Yield one for each speaker of each dialogue of the train split, by its longest case."""
    longest: dict[str, int] = {}
    for case in _trained_on(cases):
        longest[case.dialogue_id] = max(longest.get(case.dialogue_id, 0), case.round)
    for case in _trained_on(cases):
        if longest[case.dialogue_id] == case.round:
            prompt = load("disc", case.language if case.language in LANGUAGES else "en")
            for speaker in Speaker:
                said = "\n".join(each.text for each in case.history if each.speaker is speaker)
                yield Question(f"{case.id}/{speaker}", (Message("user", (prompt, said)),), 0)


def _rewriting_questions(cases: Path, turns_per_case: int) -> Iterator[Question]:
    """Yield the questions that have rows rewritten, for both variants."""
    for row in _rows(cases, turns_per_case):
        for variant in _REWRITTEN:
            yield rewriting_question(row, variant, None, 0)


def _checking_questions(cases: Path, turns_per_case: int) -> Iterator[Question]:
    """Yield the questions whether rewritings say the same, for both variants."""
    for row in _rows(cases, turns_per_case):
        for variant in _REWRITTEN:
            question = drift_question(row, [f"{each.text}." for each in pieces(row)], variant, 0)
            if question is not None:
                yield question


def _trained_on(cases: Path) -> Iterator[Case]:
    return (case for case in read_records(cases, Case) if case.split == "train")


def _rows(cases: Path, turns_per_case: int) -> Iterator[CerRecord]:
    for case in _trained_on(cases):
        reply = Candidate(author="corpus", reply=case.original or "")
        for number in range(turns_per_case):
            yield CerRecord(id=f"{case.id}/{number}", case=case, first=reply, second=reply)
