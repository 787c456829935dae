"""Filter dialogues (COMPEER, "Construction of the CER Dataset").

The paper has a language model remove "semantic incoherence, artificial style, or non-dialogue
content", over 23 % of its data. Here rules come first: they cost nothing, and drop only what no reader
would keep. A model, if there is one, then judges the remaining dialogues with the prompt
`prompts/filter.<language>.md`. The first rule that a dialogue breaks drops it:

| rule             | drops a dialogue                                                         |
|------------------|--------------------------------------------------------------------------|
| one speaker      | in which only one side speaks                                            |
| too few rounds   | with fewer than `min_rounds` supporter replies to the seeker             |
| too short        | with fewer than `min_letters` letters (a Chinese character counts twice) |
| too long         | with more than `max_characters`, or an utterance of more than            |
|                  | `max_utterance_characters`                                               |
| no words         | with more than `max_run_share` of its letters in runs of five equal ones |
| another language | with less than `min_language_share` of its letters in its script         |
| LLM artifact     | with a phrase of `llm_artifacts.toml`: "as an AI language model"         |
| repetition       | with a long utterance that occurs `max_same` times or more, or with more |
|                  | than `max_repeated_share` of its utterances being repeated long ones     |
| nested speakers  | with an utterance that names other speakers: "... 支持者：..."           |
| markup           | with more than `max_markup_share` of its characters in URLs, tags, code  |
| stage directions | with one in more than `max_stage_share` of its utterances: "[laughs]"    |
| list             | with at least `min_list_lines` list items, which are more than           |
|                  | `max_list_share` of all lines                                            |

A long utterance has 20 letters or more; a Chinese character counts twice. There is no rule for common
openings: in the public corpora no opening of three utterances is shared by more than 11 sources, and
the shared ones are greetings.

Of 58,886 rows of the public corpora the rules drop 164 (0.3 %), and a person read each of these with
its rule: none of the 1,261 dialogues of ESConv, 3 of its 157 failed ones ("fffff"), 22 of 2,797
windows (greetings, or one side alone), 16 of 3,600 of SMILE (several speakers merged into one turn),
21 of 2,953 of CPsyCoun (loops), 78 of 4,791 rated replies (a model that names itself), 6 answers that are style sheets, a bot or lists of addresses. Of 1,744
dialogues that GPT-4 wrote with a persona, 4 break a rule of content. So rules do not detect an
artificial corpus: that is the model's task.
"""

import json
import re
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import Field

from compeer_core.backends.protocol import Message
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.prompts import SPEAKER_NAMES, fill, neutralise
from compeer_core.row_files import write_rows
from training.cer.corpora.reading import text_key
from training.cer.prompts import load
from training.cer.records import DroppedDialogue, SourceDialogue, StepReport
from training.cer.requests.asking import Answer, Asker, Question
from training.cer.requests.engines import LOCAL, Engine
from training.cer.requests.seeding import seed_for
from training.common.progress import count_lines, track
from training.data.records import read_records

PAPER = "over 23 % of the data (COMPEER, Construction of the CER Dataset)"
LONG_LETTERS = 20
RULES_LAYER = "rules"
MODEL_LAYER = "model"


class Rule(StrEnum):
    """The rules, as reasons for dropping."""

    ONE_SPEAKER = "one speaker"
    TOO_FEW_ROUNDS = "too few rounds"
    TOO_SHORT = "too short"
    TOO_LONG = "too long"
    NO_WORDS = "no words"
    LANGUAGE = "another language"
    LLM_ARTIFACT = "LLM artifact"
    REPEATED = "repetition"
    NESTED_SPEAKERS = "nested speakers"
    MARKUP = "markup"
    STAGE = "stage directions"
    LIST = "list"


class Reason(StrEnum):
    """The model's reasons, as its answer spells them."""

    INCOHERENT = "incoherent"
    ARTIFICIAL = "artificial"
    NOT_DIALOGUE = "not_dialogue"


class Settings(FrozenModel):
    """Thresholds of the rules, and the questions to the model."""

    min_rounds: int = Field(default=1, ge=0)
    """A round is a supporter turn right after a seeker turn. Judged answers to a post have 1."""
    min_letters: int = Field(default=12, ge=0)
    max_utterance_characters: int = Field(default=12_000, ge=1)
    max_characters: int = Field(default=100_000, ge=1)
    max_run_share: float = Field(default=0.8, ge=0, le=1)
    min_language_share: float = Field(default=0.6, ge=0, le=1)
    max_same: int = Field(default=4, ge=2)
    max_repeated_share: float = Field(default=0.25, ge=0, le=1)
    max_markup_share: float = Field(default=0.2, ge=0, le=1)
    max_stage_share: float = Field(default=0.5, ge=0, le=1)
    min_list_lines: int = Field(default=10, ge=1)
    max_list_share: float = Field(default=0.8, ge=0, le=1)
    shown_characters: int = Field(default=6_000, ge=200)
    """The most characters of a dialogue in the prompt: half for its beginning, half for its end."""
    shown_utterance_characters: int = Field(default=1_000, ge=50)
    """The most characters of an utterance in the prompt, at most a quarter of the above."""


def filter_dialogues(
    source: Path,
    kept: Path,
    dropped: Path,
    settings: Settings,
    asker: Asker | None = None,
    *,
    engine: Engine = LOCAL,
) -> StepReport:
    """Copy the dialogues that pass the filter.

    Args:
        source: `SourceDialogue` rows.
        kept: Receives the rows that pass, in order.
        dropped: Receives `DroppedDialogue` rows for the others.
        settings: Thresholds and prompts.
        asker: The model; None applies the rules only.
        engine: Applies the rules.
    """
    ruled = track(
        engine.map(_Rules(settings), read_records(source, SourceDialogue)),
        "filtering",
        total=count_lines(source),
        unit="dialogues",
    )
    state = _Outcome()
    written = write_rows(kept, _fit(ruled, settings, asker, state))
    # The model's verdicts arrive later than the rules', so the order has to be restored.
    write_rows(dropped, (state.dropped[number] for number in sorted(state.dropped)))
    return state.report(written)


# --- Both layers ------------------------------------------------------------------------------


_Ruled = tuple[SourceDialogue, "Broken | None"]


@dataclass(frozen=True)
class _Rules:
    """Applies the rules to each dialogue."""

    settings: Settings

    def __call__(self, dialogues: Iterator[SourceDialogue]) -> Iterator[_Ruled]:
        for dialogue in dialogues:
            yield dialogue, broken_rule(dialogue, self.settings)


@dataclass(frozen=True)
class _Row:
    number: int
    dialogue: SourceDialogue


@dataclass
class _Outcome:
    read: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    layers: Counter[str] = field(default_factory=Counter)
    dropped: dict[int, DroppedDialogue] = field(default_factory=dict)
    """By row number."""
    undecided: Counter[str] = field(default_factory=Counter)

    def drop(self, row: _Row, layer: str, reason: str, detail: str = "") -> None:
        dialogue = row.dialogue
        self.reasons[dialogue.corpus][f"{layer}: {reason}"] += 1
        self.layers[layer] += 1
        self.dropped[row.number] = DroppedDialogue(
            id=dialogue.id, corpus=dialogue.corpus, layer=layer, reason=reason, detail=detail
        )

    def report(self, written: int) -> StepReport:
        read = self.read.total()
        return StepReport(
            step="filter",
            read=read,
            written=written,
            dropped={
                corpus: dict(sorted(counts.items()))
                for corpus, counts in sorted(self.reasons.items())
            },
            figures={
                "share dropped": (read - written) / read if read else None,
                "share dropped by the paper": PAPER,
                **{f"dropped by {layer}": self.layers[layer] for layer in sorted(self.layers)},
                **{
                    f"share of {corpus} dropped": self.reasons[corpus].total() / count
                    for corpus, count in sorted(self.read.items())
                },
                **{
                    f"undecided: {problem}": count
                    for problem, count in sorted(self.undecided.items())
                },
            },
        )


def _fit(
    ruled: Iterator[_Ruled], settings: Settings, asker: Asker | None, state: _Outcome
) -> Iterator[SourceDialogue]:
    sound = _sound(ruled, state)
    for row in sound if asker is None else _asked(sound, settings, asker, state):
        yield row.dialogue


def _asked(
    rows: Iterator[_Row], settings: Settings, asker: Asker, state: _Outcome
) -> Iterator[_Row]:
    # The asker reads ahead and answers in order.
    waiting: deque[_Row] = deque()

    def questions() -> Iterator[Question]:
        for row in rows:
            waiting.append(row)
            yield filter_question(row.dialogue, settings, asker.reserved)

    for answer in asker.ask(questions(), check_verdict, label="filtering"):
        row = waiting.popleft()
        if _kept(row, answer, state):
            yield row


def _sound(ruled: Iterator[_Ruled], state: _Outcome) -> Iterator[_Row]:
    for number, (dialogue, broken) in enumerate(ruled):
        row = _Row(number, dialogue)
        state.read[dialogue.corpus] += 1
        if broken is None:
            yield row
        else:
            state.drop(row, RULES_LAYER, broken.rule, broken.detail)


def _kept(row: _Row, answer: Answer, state: _Outcome) -> bool:
    if answer.text is None:
        state.undecided[answer.problem or "unreadable"] += 1
        return True
    reason = read_verdict(answer.text)
    if reason is not None:
        state.drop(row, MODEL_LAYER, reason)
    return reason is None


# --- Rules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """The rule that a dialogue breaks, and the evidence, which contains no private text."""

    rule: Rule
    detail: str


_HAN = re.compile(r"[\u3400-\u9fff]")
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f]")
_RUN = re.compile(r"([^\W\d_])\1{4,}")
_NOT_A_LETTER = re.compile(r"[\W_]+")
_MARKUP = re.compile(
    r"(?:https?://|www\.\w)\S+"
    r"|</?[a-zA-Z!][^<>]{0,300}>"
    r"|&(?:[a-z]{2,6}|#\d{1,5});"
    r"|```.*?```"
    r"|\{[^{}]{0,3000};[^{}]{0,3000}\}"  # style sheets of text processors
    r"|(?-i:^[ \t]*(?:def \w+\(|class \w+[:({]|import \w+$|function\b|#include\b|[{}];?$)[^\n]*$)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_SPEAKER_WITHIN = re.compile(
    r"(?:^|[。！？…”～）.!?~)\n])\s*(?:求助者|支持者|来访者|心理咨询师|咨询师|倾听者)\s*[：:]"
    r"|(?:^|[.!?\n])\s*(?:seeker|supporter|client|therapist|counsell?or|user|assistant)\s*:",
    re.IGNORECASE,
)
_ACTION = (
    r"(?:laugh|chuckl|giggl|sigh|cry|cries|sob|smil|nod|paus|whisper|cough|sniff|silen|groan|gasp"
    r"|sound|music|applau|crosstalk|unintelligible|inaudible)\w*"
)
_STAGE = re.compile(
    rf"\[[^\[\]]{{0,20}}\b{_ACTION}[^\[\]]{{0,40}}\]"
    rf"|\*\s*{_ACTION}[^*\n]{{0,40}}\*"
    rf"|\(\s*{_ACTION}[^()]{{0,40}}\)"
    r"|[（(【\[](?:轻)?(?:笑|叹气|叹息|沉默|哭|点头|微笑|停顿|音乐|掌声|旁白)[^（）()【】\[\]]{0,20}[)）】\]]",
    re.IGNORECASE,
)
_LIST_ITEM = re.compile(r"\s*(?:[-*•▪]\s+|\d{1,2}\s*[.)、．](?!\d)|[（(]\d{1,2}[)）]|#{1,4}\s)")


def broken_rule(dialogue: SourceDialogue, settings: Settings) -> Broken | None:
    """Return the first rule that the dialogue breaks, in the order of the table, or None."""
    texts = [utterance.text for utterance in dialogue.utterances]
    whole = "\n".join(texts)
    for rule in _shape, _words, _form:
        broken = rule(dialogue, texts, whole, settings)
        if broken is not None:
            return broken
    return None


def _shape(
    dialogue: SourceDialogue, texts: Sequence[str], whole: str, settings: Settings
) -> Broken | None:
    speakers = [utterance.speaker for utterance in dialogue.utterances]
    if len(set(speakers)) == 1:
        return Broken(Rule.ONE_SPEAKER, f"only the {speakers[0]}")
    rounds = sum(
        (before, now) == (Speaker.SEEKER, Speaker.SUPPORTER) for before, now in pairwise(speakers)
    )
    if rounds < settings.min_rounds:
        return Broken(Rule.TOO_FEW_ROUNDS, f"{rounds} rounds")
    longest = max(map(len, texts))
    if len(whole) > settings.max_characters or longest > settings.max_utterance_characters:
        return Broken(Rule.TOO_LONG, f"{len(whole)} characters, {longest} in one utterance")
    return None


def _words(
    dialogue: SourceDialogue, texts: Sequence[str], whole: str, settings: Settings
) -> Broken | None:
    han, latin = len(_HAN.findall(whole)), len(_LATIN.findall(whole))
    if latin + 2 * han < settings.min_letters:
        return Broken(Rule.TOO_SHORT, f"{latin + han} letters")
    all_letters = sum(map(str.isalpha, whole))
    runs = sum(len(run[0]) for run in _RUN.finditer(whole.lower()))
    if runs > settings.max_run_share * all_letters:
        return Broken(Rule.NO_WORDS, f"{runs} of {all_letters} letters")
    own = han if dialogue.language == "zh" else latin
    if own < settings.min_language_share * all_letters:
        return Broken(Rule.LANGUAGE, f"{own} of {all_letters} letters are {dialogue.language}")
    phrase = llm_artifact(whole)
    if phrase is not None:
        return Broken(Rule.LLM_ARTIFACT, phrase)
    return _repetition(texts, settings)


def _repetition(texts: Sequence[str], settings: Settings) -> Broken | None:
    counts = Counter(_NOT_A_LETTER.sub("", text.lower()) for text in texts)
    repetitions = [
        count - 1
        for key, count in counts.items()
        if count > 1 and len(key) + len(_HAN.findall(key)) >= LONG_LETTERS
    ]
    if not repetitions:
        return None
    most, total = max(repetitions) + 1, sum(repetitions)
    if most >= settings.max_same or total > settings.max_repeated_share * len(texts):
        return Broken(Rule.REPEATED, f"{total} of {len(texts)} repeated, one {most} times")
    return None


def _form(
    dialogue: SourceDialogue, texts: Sequence[str], whole: str, settings: Settings
) -> Broken | None:
    named = sum(_SPEAKER_WITHIN.search(text) is not None for text in texts)
    if named:
        return Broken(Rule.NESTED_SPEAKERS, f"in {named} utterances")
    marked = sum(len(mark[0]) for mark in _MARKUP.finditer(whole))
    if marked > settings.max_markup_share * len(whole):
        return Broken(Rule.MARKUP, f"{marked} of {len(whole)} characters")
    directed = sum(_STAGE.search(text) is not None for text in texts)
    if directed > settings.max_stage_share * len(texts):
        return Broken(Rule.STAGE, f"in {directed} of {len(texts)} utterances")
    lines = [line for line in whole.split("\n") if line.strip()]
    items = sum(_LIST_ITEM.match(line) is not None for line in lines)
    if items >= settings.min_list_lines and items > settings.max_list_share * len(lines):
        return Broken(Rule.LIST, f"{items} of {len(lines)} lines")
    return None


LLM_ARTIFACTS = Path(__file__).with_name("llm_artifacts.toml")
"""Phrases that are typical of language models, in both languages."""


def llm_artifact(text: str) -> str | None:
    """Return the first phrase of `llm_artifacts.toml` in a text.

    Example:
        >>> llm_artifact("Well, as an A.I. language model I cannot feel.")
        'as an ai'
        >>> llm_artifact("Was an aide with you?") is None
        True
    """
    plain = text.lower()
    english = f" {' '.join(re.findall(r'[a-z0-9]+', re.sub(_WITHIN_WORDS, '', plain)))} "
    phrases = _artifact_phrases()
    for phrase in phrases["en"]:
        if f" {phrase} " in english:
            return phrase
    if _HAN.search(plain):
        letters = _NOT_A_LETTER.sub("", plain)
        for phrase in phrases["zh"]:
            if phrase in letters:
                return phrase
    return None


_WITHIN_WORDS = re.compile(r"['’]|(?<=\b[a-z])\.(?=[a-z]\b)|(?<=\.[a-z])\.")


@cache
def _artifact_phrases() -> Mapping[str, Sequence[str]]:
    return tomllib.loads(LLM_ARTIFACTS.read_text(encoding="utf-8"))


# --- The model --------------------------------------------------------------------------------

_LEFT_OUT = {"en": "[{count} turns left out]", "zh": "[此处省略 {count} 轮]"}
_FRAME = ("<dialogue>", "</dialogue>")
_OBJECT = re.compile(r"\{[^{}]*\}")
_INCOMPLETE_JSON = "incomplete JSON"
_NO_VERDICT = "no JSON with a boolean keep"
_UNKNOWN_REASON = "unknown reason"


def filter_question(
    dialogue: SourceDialogue, settings: Settings, reserved: Sequence[str] = ()
) -> Question:
    """Return the question whether a dialogue passes. Its key depends on its words."""
    language = "zh" if dialogue.language == "zh" else "en"
    prompt = fill(load("filter", language), transcript=transcript(dialogue, settings, reserved))
    return Question(
        key=f"{dialogue.id}#{text_key(prompt)}",
        messages=(Message("user", (prompt,)),),
        seed=seed_for(0, "filter", dialogue.id),
    )


def transcript(dialogue: SourceDialogue, settings: Settings, reserved: Sequence[str] = ()) -> str:
    """Return the dialogue as it stands in the prompt.

    Every line that does not begin with a space begins with a speaker, whatever the text. A dialogue
    of more than `shown_characters` loses turns from its middle: first and last turns are added
    alternately while there is room, and a line states how many are missing.
    """
    language = "zh" if dialogue.language == "zh" else "en"
    lines = [
        f"{SPEAKER_NAMES[language][each.speaker]}: {_shown(each.text, settings, reserved)}"
        for each in dialogue.utterances
    ]
    space = settings.shown_characters
    first, last = 0, len(lines)
    while first < last:
        from_start = first <= len(lines) - last
        line = lines[first] if from_start else lines[last - 1]
        if len(line) + 1 > space:
            break
        space -= len(line) + 1
        first, last = (first + 1, last) if from_start else (first, last - 1)
    if first == last:
        return "\n".join(lines)
    gap = _LEFT_OUT[language].format(count=last - first)
    return "\n".join([*lines[:first], gap, *lines[last:]])


def _shown(text: str, settings: Settings, reserved: Sequence[str]) -> str:
    most = min(settings.shown_utterance_characters, settings.shown_characters // 4)
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "\n  ".join(neutralise(cut, (*reserved, *_FRAME)).splitlines())


def read_verdict(text: str) -> Reason | None:
    """Return why a dialogue is to be dropped, by a model's answer; None keeps it.

    The last JSON object counts: a model that thinks aloud decides at the end.

    Raises:
        ValueError: The answer is unusable.

    Example:
        >>> read_verdict('Well. {"keep": false, "reason": "artificial"}')
        <Reason.ARTIFICIAL: 'artificial'>
    """
    objects = _OBJECT.findall(text)
    if text.rfind("{") > text.rfind("}"):
        raise ValueError(_INCOMPLETE_JSON)
    try:
        answer = json.loads(objects[-1]) if objects else {}
    except (ValueError, RecursionError):
        raise ValueError(_INCOMPLETE_JSON) from None
    if answer.get("keep") is True:
        return None
    if answer.get("keep") is not False:
        raise ValueError(_NO_VERDICT)
    if answer.get("reason") not in tuple(Reason):
        raise ValueError(_UNKNOWN_REASON)
    return Reason(answer["reason"])


def check_verdict(key: str, text: str) -> str | None:
    """Return why an answer is unusable, or None."""
    try:
        read_verdict(text)
    except ValueError as error:
        return str(error)
    return None
