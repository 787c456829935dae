"""DISC traits of speakers, and their description in words.

DISC goes back to Marston, "Emotions of Normal People" (1928): dominance, inducement (today
influence), submission (today steadiness) and compliance. Marston built no test. The paper uses the
four as names for ways of communicating, and so does this module: they are a **vocabulary of
manner**, neither a clinical test nor a statement about a person.

A `Persona` comes from one of two sources:

- a generator answers the prompt ``disc.<language>.md`` with four scores and a description;
- a published lexical rule (``traits.toml``) counts direct, hedging, polite and other words,
  punctuation and sentence lengths; compares the rates with the usual ones; adds the deviations up to
  four scores; and describes the scores and the largest deviations in words.

A persona belongs to one speaker of one dialogue. It is derived from the row with the longest history,
so that it shows no more of a dialogue than the rows do. Only the train split is read, because only
its rows are rewritten.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from compeer_core.backends.protocol import Message
from compeer_core.cer import Case, CerRecord, DecidedBy, Variant
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker, language_of
from compeer_core.prompts import LANGUAGES, SPEAKER_NAMES, fill, neutralise
from compeer_core.row_files import write_rows
from training.cer.personality.wording import questions, sentences, words
from training.cer.prompts import load
from training.cer.records import StepReport
from training.cer.requests.asking import Asker, Question
from training.cer.requests.engines import LOCAL, Engine
from training.cer.requests.seeding import generator_for
from training.common.progress import track
from training.data.records import read_records

TRAITS = ("D", "I", "S", "C")

_RULES_FILE = Path(__file__).with_name("traits.toml")
_CLEAR = 2.5
"""Deviations are clipped at this many spreads from the usual rate."""


class Disc(FrozenModel):
    """Scores of the four ways of communicating, 0 to 1; 0.5 is usual."""

    d: float = Field(ge=0, le=1)
    """Dominance: direct, decided, to the point."""
    i: float = Field(ge=0, le=1)
    """Influence: lively, warm, outgoing."""
    s: float = Field(ge=0, le=1)
    """Steadiness: patient, polite, agreeing."""
    c: float = Field(ge=0, le=1)
    """Compliance: careful, structured, exact."""


class Persona(FrozenModel):
    """One speaker's manner, described by a rule or a generator."""

    id: str
    """`<corpus>/<dialogue id>/<speaker>`."""
    corpus: str
    dialogue_id: str
    source_id: str
    """The original dialogue: two windows of it have the same speakers."""
    language: str
    speaker: Speaker
    scores: Disc
    description: str
    """One to three sentences in the dialogue's language."""
    described_by: DecidedBy


_CHARACTERS = 6000
"""The most characters of a speaker's text, from its end."""


def persona_id(case: Case, speaker: Speaker) -> str:
    """Return the id of a speaker of a case's dialogue."""
    return f"{case.corpus}/{case.dialogue_id}/{speaker}"


# --- The step ---------------------------------------------------------------------------------


def describe(
    source: Path,
    output: Path,
    asker: Asker | None = None,
    *,
    seed: int = 0,
    engine: Engine = LOCAL,
) -> StepReport:
    """Write a `Persona` for each speaker of each train dialogue of CER rows.

    Args:
        source: `CerRecord` rows; variants are skipped.
        output: Receives `Persona` rows, in the order of the dialogues' longest rows.
        asker: The generator; None: the lexical rule.
        seed: The seed of the generator's sampling.
        engine: Applies the rule; an asker has its own.
    """
    chosen = _longest_rows(source)
    speeches = _Speeches(source, frozenset(chosen.values()))
    dropped: dict[str, dict[str, int]] = {}
    read = 0

    def personas() -> Iterator[Persona]:
        nonlocal read
        outcomes = (
            engine.map(_by_rule, speeches)
            if asker is None
            else _by_generator(speeches, asker, seed)
        )
        for corpus, outcome in track(outcomes, "personas", unit="speakers"):
            read += 1
            if isinstance(outcome, Persona):
                yield outcome
            else:
                reasons = dropped.setdefault(corpus, {})
                reasons[outcome] = reasons.get(outcome, 0) + 1

    written = write_rows(output, personas())
    return StepReport(
        step="personality.traits",
        read=read,
        written=written,
        dropped=dropped,
        figures={"by": RULE.name if asker is None else "generator", "dialogues": len(chosen)},
    )


@dataclass(frozen=True)
class Speech:
    """The utterances of one speaker of a case."""

    case: Case
    speaker: Speaker
    texts: tuple[str, ...]

    @property
    def id(self) -> str:
        return persona_id(self.case, self.speaker)

    @property
    def language(self) -> str:
        return self.case.language

    @property
    def corpus(self) -> str:
        return self.case.corpus


def _longest_rows(source: Path) -> dict[str, int]:
    """Return, for each dialogue of the train split, the index of the row with the longest history."""
    rounds: dict[str, tuple[int, int]] = {}
    for number, record in enumerate(read_records(source, CerRecord)):
        if record.case.split != "train" or record.variant is not Variant.ORIGINAL:
            continue
        key = f"{record.case.corpus}/{record.case.dialogue_id}"
        best = rounds.get(key)
        if best is None or record.case.round > best[0]:
            rounds[key] = (record.case.round, number)
    return {key: number for key, (_, number) in rounds.items()}


@dataclass(frozen=True)
class _Speeches:
    """The speeches of the chosen rows, read from the file at each iteration."""

    source: Path
    rows: frozenset[int]

    def __iter__(self) -> Iterator[Speech]:
        for number, record in enumerate(read_records(self.source, CerRecord)):
            if number in self.rows:
                yield from self._of(record.case)

    def _of(self, case: Case) -> Iterator[Speech]:
        for speaker in Speaker:
            texts = [turn.text for turn in case.history if turn.speaker is speaker and turn.text]
            if speaker is Speaker.SUPPORTER and case.original:
                texts.append(case.original)
            if texts:
                yield Speech(case, speaker, tuple(_last(texts, _CHARACTERS)))


def _last(texts: list[str], characters: int) -> list[str]:
    last: list[str] = []
    for text in reversed(texts):
        characters -= len(text)
        if last and characters < 0:
            break
        last.append(text[: 4 * characters] if characters < 0 else text)
    return last[::-1]


def _persona(speech: Speech, scores: Disc, description: str, by: DecidedBy) -> Persona:
    return Persona(
        id=speech.id,
        corpus=speech.corpus,
        dialogue_id=speech.case.dialogue_id,
        source_id=speech.case.source_id,
        language=speech.language,
        speaker=speech.speaker,
        scores=scores,
        description=description,
        described_by=by,
    )


# --- By a generator ---------------------------------------------------------------------------


def _by_generator(
    speeches: Iterable[Speech], asker: Asker, seed: int
) -> Iterator[tuple[str, Persona | str]]:
    """Yield the corpus of each speech, with its persona or why there is none."""
    by = DecidedBy(kind="model", name=asker.name)
    answers = asker.ask(
        (_question(speech, seed) for speech in speeches), check_disc, label="traits", total=None
    )
    for speech, answer in zip(speeches, answers, strict=True):
        if answer.text is None:
            yield speech.corpus, f"no usable answer ({answer.problem})"
            continue
        scores, description = read_disc(answer.text)
        yield speech.corpus, _persona(speech, scores, description, by)


def _question(speech: Speech, seed: int) -> Question:
    language = speech.language if speech.language in LANGUAGES else "en"
    key = f"disc:{language}:{speech.id}"
    lines = "\n".join(f"- {neutralise(text)}".replace("\n", " ") for text in speech.texts)
    name = SPEAKER_NAMES[language][speech.speaker].lower()
    filled = fill(load("disc", language), speaker=name, utterances=lines)
    return Question(
        key, (Message("user", (filled,)),), int(generator_for(seed, key).integers(2**31))
    )


class DiscAnswer(FrozenModel):
    """The JSON object that a generator returns."""

    D: float = Field(ge=0, le=1)
    I: float = Field(ge=0, le=1)  # noqa: E741  # the letters of DISC
    S: float = Field(ge=0, le=1)
    C: float = Field(ge=0, le=1)
    description: str = Field(min_length=10, max_length=800)


def read_disc(text: str) -> tuple[Disc, str]:
    """Read a generator's answer: one JSON object, bare or in a code fence.

    Raises:
        ValueError: It is not one, or a value is missing or out of range.
    """
    answer = DiscAnswer.model_validate(json_object(text))
    return Disc(d=answer.D, i=answer.I, s=answer.S, c=answer.C), answer.description.strip()


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object of an answer.

    Raises:
        ValueError: There is none, it is incomplete, or there is text around it other than a fence.
    """
    bare = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip())
    try:
        value = json.loads(bare)
    except json.JSONDecodeError as error:
        raise ValueError("incomplete JSON" if bare.startswith("{") else "no JSON") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def check_disc(key: str, text: str) -> str | None:
    """Return why an answer is unusable, or None. The key contains the language (``disc:<language>:``)."""
    try:
        _, description = read_disc(text)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['type']}"
    except ValueError as error:
        return str(error)
    if not 1 <= len(sentences(description)) <= 4:
        return "a description of more than a few sentences"
    language = key.split(":")[1]
    return None if language_of(description) == language else "wrong language"


# --- By the rule ------------------------------------------------------------------------------

Counts = Mapping[str, float]


@dataclass(frozen=True)
class _Norm:
    usual: float
    spread: float


@dataclass(frozen=True)
class _Rules:
    prior_words: int
    weights: Mapping[str, Mapping[str, float]]
    markers: Mapping[str, Mapping[str, frozenset[str]]]
    norms: Mapping[str, Mapping[str, Mapping[str, _Norm]]]
    """By language, speaker and count."""
    words: Mapping[str, Mapping[str, Mapping[str, Mapping[str, str]]]]
    """Descriptions by language, kind ("traits" or "habits"), name and level ("high" or "low")."""


@cache
def _rules() -> _Rules:
    table = tomllib.loads(_RULES_FILE.read_text(encoding="utf-8"))
    return _Rules(
        table["prior_words"],
        table["weights"],
        {
            language: {
                name: frozenset(markers.replace("-", " ").split())
                for name, markers in table[language]["words"].items()
            }
            for language in LANGUAGES
        },
        {
            language: {
                speaker: {
                    name: _Norm(*norm) for name, norm in table[language]["usual"][speaker].items()
                }
                for speaker in Speaker
            }
            for language in LANGUAGES
        },
        {
            language: {kind: table[language][kind] for kind in ("traits", "habits")}
            for language in LANGUAGES
        },
    )


RULE = DecidedBy(kind="rule", name="traits/1")
"""The decider of personas by the lexical rule."""


def _by_rule(speeches: Iterable[Speech]) -> Iterator[tuple[str, Persona | str]]:
    for speech in speeches:
        deviations = unusual(speech.texts, speech.speaker, speech.language)
        scores = score(deviations)
        text = sentence_for(scores, deviations, speech.language)
        yield speech.corpus, _persona(speech, scores, text, RULE)


def count(texts: Iterable[str], language: str = "en") -> tuple[Counts, int]:
    """Count what the rule needs.

    Returns:
        The counts by name (`sentence_length`: sentences), and the number of words.
    """
    language = language if language in LANGUAGES else "en"
    joined = "\n".join(texts)
    all_words = words(joined, language)
    markers = _rules().markers[language]
    if language == "zh":
        counts = {
            name: float(sum(joined.count(marker) for marker in listed))
            for name, listed in markers.items()
        }
    else:
        plain = [word.replace("’", "'") for word in all_words]
        counts = {
            name: float(sum(word in listed for word in plain)) for name, listed in markers.items()
        }
    counts["exclamations"] = float(len(re.findall("[!！]", joined)))
    counts["questions"] = float(questions(joined))
    counts["sentence_length"] = float(len(sentences(joined)))
    return counts, len(all_words)


def unusual(texts: Iterable[str], speaker: Speaker, language: str = "en") -> Counts:
    """Return the deviation of each count from the usual rate of such speakers, in spreads.

    The rates of speakers with few words shrink towards the usual rate (``prior_words``).
    """
    rules = _rules()
    language = language if language in LANGUAGES else "en"
    counts, length = count(texts, language)
    norms = rules.norms[language][speaker]
    prior = rules.prior_words
    deviations: dict[str, float] = {}
    for name, norm in norms.items():
        if name == "sentence_length":
            rate = (length + prior) / (counts[name] + prior / norm.usual)
        else:
            rate = (100 * counts[name] + prior * norm.usual) / (length + prior)
        deviation = (rate - norm.usual) / norm.spread
        deviations[name] = min(max(deviation, -_CLEAR), _CLEAR)
    return deviations


def score(deviations: Counts) -> Disc:
    """Return scores: the logistic function of the weighted sum of deviations, to three decimals.

    Example:
        >>> score({})
        Disc(d=0.5, i=0.5, s=0.5, c=0.5)
    """
    weights = _rules().weights
    values: NDArray[np.float64] = np.array(
        [
            sum(weight * deviations.get(name, 0.0) for name, weight in weights[trait].items())
            for trait in TRAITS
        ]
    )
    d, i, s, c = (1 / (1 + np.exp(-values))).round(3).tolist()
    return Disc(d=d, i=i, s=s, c=c)


# --- In words ---------------------------------------------------------------------------------

_CLEARLY = 0.62
_NOTABLE = 0.8
_HABITS_TOLD = 3


def sentence_for(scores: Disc, deviations: Counts, language: str = "en") -> str:
    """Describe scores and the largest deviations in one or two sentences.

    Example:
        >>> sentence_for(Disc(d=0.8, i=0.5, s=0.3, c=0.5), {"hedges": -2.0})
        'Speaks in a direct and decided, impatient and brisk manner. States things without hedging.'
    """
    language = language if language in LANGUAGES else "en"
    words_for = _rules().words[language]
    levels = [
        (abs(value - 0.5), words_for["traits"][trait][level])
        for trait in TRAITS
        if (level := _level(value := getattr(scores, trait.lower())))
    ]
    manners = [words for _, words in sorted(levels, key=lambda level: -level[0])]
    habits = [
        habit
        for name, value in sorted(deviations.items(), key=lambda entry: (-abs(entry[1]), entry[0]))
        if abs(value) >= _NOTABLE
        and (habit := words_for["habits"].get(name, {}).get("high" if value > 0 else "low"))
    ][:_HABITS_TOLD]
    if language == "zh":
        first = f"说话{'、'.join(manners) or '平和居中'}。"
        return first + (f"{'，'.join(habits)}。" if habits else "")
    first = f"Speaks in {_article(manners)} manner."
    rest = "; ".join(habits)
    return f"{first} {rest[0].upper()}{rest[1:]}." if rest else first


def _level(value: float) -> str | None:
    if value >= _CLEARLY:
        return "high"
    return "low" if value <= 1 - _CLEARLY else None


def _article(manners: list[str]) -> str:
    listed = ", ".join(manners) or "balanced"
    return f"{'an' if listed[0] in 'aeiou' else 'a'} {listed}"
