"""Generate supporter turns with reasoning for the cases.

The paper gives "the conversation history of sampled sentences" to GPT-4o and Qwen2.5-VL, which
write three reasoning steps and a reply. Here any generator can: one that was trained on the output
grammar (`compeer_core.reasoning`) reads the history only, any other gets the policy's prompt with the
grammar. Each of several generators writes turns for each case.

A turn is accepted if it is complete, its labels belong to the vocabularies, and its reply is in the
language of the case and differs from the corpus's own sentence. Other turns are requested again, a
limited number of times (`training.cer.requests.asking`), then counted as failed. The silver edition
keeps incomplete turns, because a judge has to detect a model's real errors.

Seeds depend on the run's seed, the generator, the case and the sample number, and answers are stored
in the generator's response store. So an interrupted run continues and writes the same file.
"""

import queue
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field

from compeer_core.backends.protocol import Message
from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue, language_of
from compeer_core.errors import ConfigError
from compeer_core.policy import Style
from compeer_core.prompts import LANGUAGES, policy_messages
from compeer_core.reasoning import read
from compeer_core.row_files import json_lines, parse_row, write_rows
from training.cer.corpora.reading import letters_of, text_key
from training.cer.records import StepReport
from training.cer.requests.asking import Answer, Asker, Question
from training.cer.requests.generators import GeneratorSettings
from training.cer.requests.seeding import seed_for
from training.data.pictures import Pictures
from training.data.records import read_records

INCOMPLETE = "incomplete"
UNREADABLE = "unreadable label"
WRONG_LANGUAGE = "wrong language"
REPEATED = "repeats the original reply"
UNKNOWN_CASE = "unknown case"
NO_TEXT = "the seeker's last turn has no text"

_AHEAD = 256
"""Answers of one generator that are buffered while another is slower."""
_POLL_SECONDS = 0.2
_FEW_WORDS = 6
"""Below this number of words, languages in Latin script cannot be told apart."""
_LATIN = ("en", "fr", "de", "es", "it", "pt", "nl")


class Settings(FrozenModel):
    """How many turns are written, by whom, and which are accepted."""

    samples_per_case: int = Field(default=1, ge=1)
    """Turns for each case from each generator."""
    keep_incomplete: bool = False
    """Accept a turn that lacks a part or has text outside its parts."""
    keep_unreadable: bool = False
    """Accept a turn with a label that is missing or not in its vocabulary."""
    stored: Path | None = None
    """File of `StoredTurn` rows, relative to the current directory. They were generated earlier with these
    settings and generators; no turn is requested."""


class StoredTurn(FrozenModel):
    """A generated turn without its case, so that it can be published without the corpus."""

    case: str
    """The case's id."""
    author: str
    sample: int = Field(ge=0)
    seed: int
    text: str
    pictures: int = 0
    """The number of pictures in the request."""


class GeneratedTurn(FrozenModel):
    """A turn that a generator wrote for a case."""

    id: str
    """`<case id>/<author>/<sample>`."""
    case: Case
    author: str
    """The generator's name."""
    sample: int = Field(ge=0)
    """Which of the author's turns for this case it is."""
    seed: int
    """The seed of the request; an endpoint may ignore it."""
    text: str
    """The completion: reasoning and reply."""
    reply: str | None
    """None if the text has none."""
    problems: tuple[str, ...] = ()
    """Why the turn is not complete; empty if it is."""
    pictures: int = 0
    """The number of pictures in the request."""
    tries: int = 1
    """The number of requests until the text was accepted."""

    @classmethod
    def of(
        cls,
        case: Case,
        author: str,
        sample: int,
        text: str,
        *,
        seed: int,
        pictures: int,
        tries: int = 1,
    ) -> Self:
        """Return the turn of a completion; for the arguments see the fields."""
        reading = read(text)
        return cls(
            id=f"{case.id}/{author}/{sample}",
            case=case,
            author=author,
            sample=sample,
            text=text,
            reply=reading.reply,
            problems=tuple(map(str, reading.problems)),
            seed=seed,
            pictures=pictures,
            tries=tries,
        )

    @property
    def is_complete(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Author:
    """The settings of a generator that determine its prompt."""

    name: str
    style: Style
    sees_images: bool
    reserved: tuple[str, ...] = ()
    """Its special tokens, see `compeer_core.prompts.neutralise`."""

    @classmethod
    def of(cls, name: str, settings: GeneratorSettings, reserved: tuple[str, ...] = ()) -> Self:
        return cls(name, settings.style, settings.sees_images, reserved)


def generate(
    source: Path,
    output: Path,
    settings: Settings,
    askers: Mapping[str, Asker],
    pictures: Pictures | None = None,
    seed: int = 0,
) -> StepReport:
    """Write the generators' turns, in the order of the cases.

    Args:
        source: `Case` rows.
        output: Receives `GeneratedTurn` rows, whole or not at all.
        settings: Number and acceptance of turns.
        askers: One for each generator, by its name in the rows.
        pictures: The pictures of the cases; needed if a case has any and a generator sees images.
        seed: The seed of the samples.

    Raises:
        ConfigError: A file or a picture is missing, or there is no generator.
        BudgetSpentError: The request budget is spent; the answers so far are stored.
    """
    if not askers:
        raise ConfigError("no generator to write turns: add one to `generators`")
    generating = _Generating(settings, askers, pictures, seed)
    written = write_rows(output, generating.turns(source))
    return StepReport(
        step="generation",
        read=generating.read,
        written=written,
        dropped={corpus: dict(reasons) for corpus, reasons in generating.dropped.items()},
        figures={
            **generating.figures,
            **_retried(askers),
            "unanswered": sum(sum(each.counts.unanswered.values()) for each in askers.values()),
            "pictures unreadable": len(pictures.unreadable) if pictures else 0,
        },
    )


# --- Questions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A turn to be written."""

    case: Case
    author: str
    sample: int
    seed: int

    @property
    def key(self) -> str:
        """The question's key in the journal, with what `TurnCheck` needs of the case.

        A changed case, for example one with a longer history, gets another key.
        """
        original = letters_of(self.case.original or "")
        name = f"{self.case.id}/{self.sample}/{self.seed}/{text_key(self.case.model_dump_json())}"
        return f"{name} {self.case.language} {text_key(original) if original else '-'}"


def wanted(
    cases: Iterable[Case], settings: Settings, authors: Sequence[str], seed: int
) -> Iterator[Wanted]:
    """Yield the turns to be written, in order; cases without a last seeker text have none."""
    for case in cases:
        if not case.history[-1].text.strip():
            continue
        for name in authors:
            for sample in range(settings.samples_per_case):
                yield Wanted(case, name, sample, seed_for(seed, "turn", name, case.id, str(sample)))


def questions(
    source: Path,
    settings: Settings,
    authors: Sequence[str],
    author: Author,
    pictures: Pictures | None = None,
    seed: int = 0,
) -> Iterator[Question]:
    """Yield the questions to one of the generators, without sending them.

    Args:
        source: `Case` rows.
        settings: See `generate`.
        authors: The names of all generators, in order.
        author: The generator in question.
        pictures: See `generate`.
        seed: See `generate`.
    """
    for want in wanted(read_records(source, Case), settings, authors, seed):
        if want.author == author.name:
            yield Question(
                key=want.key, messages=_messages(want.case, author, pictures), seed=want.seed
            )


def _messages(case: Case, author: Author, pictures: Pictures | None) -> tuple[Message, ...]:
    shown = None
    if author.sees_images and any(turn.images for turn in case.history):
        if pictures is None:
            raise ConfigError(
                f"case {case.id} has pictures, but there is no folder of pictures: set `faces`"
            )
        shown = pictures.shown(case.history)
    dialogue = case.dialogue(shown)
    turns = tuple(each for each in dialogue if each.text.strip() or each.images)
    language = case.language if case.language in LANGUAGES else "en"
    return policy_messages(Dialogue(turns, dialogue.id), author.style, language, author.reserved)


# --- Acceptance -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnCheck:
    """Returns why a turn is rejected, or None. The key contains what it needs of the case."""

    keep_incomplete: bool = False
    keep_unreadable: bool = False

    def __call__(self, key: str, text: str) -> str | None:
        _, language, original = key.rsplit(" ", 2)
        reading = read(text)
        if not reading.is_complete and not self.keep_incomplete:
            return INCOMPLETE
        if reading.unreadable and not self.keep_unreadable:
            return UNREADABLE
        if reading.reply and speaks_another(reading.reply, language):
            return WRONG_LANGUAGE
        if reading.reply and text_key(letters_of(reading.reply)) == original:
            return REPEATED
        return None


def speaks_another(reply: str, language: str) -> bool:
    """Whether a reply is clearly in another language than the case.

    Only English and Chinese cases are checked, by `compeer_core.dialogue.language_of`.

    Example:
        >>> [speaks_another(reply, "en") for reply in ("No.", "我在这里。", "What happened then?")]
        [False, True, False]
    """
    detected = language_of(reply)
    if language not in LANGUAGES or detected in (language, "und"):
        return False
    return not (language in _LATIN and detected in _LATIN and len(reply.split()) < _FEW_WORDS)


# --- Parallel generators ----------------------------------------------------------------------


def join_stored(source: Path, stored: Path, output: Path) -> StepReport:
    """Write stored turns with their cases, in the order of the cases.

    Args:
        source: `Case` rows.
        stored: `StoredTurn` rows; those of other cases are left out and counted.
        output: Receives `GeneratedTurn` rows.

    Raises:
        ConfigError: A file is missing, a line of it is no such row, a turn is stored twice, or no turn
            belongs to one of the cases. Nothing is written then.
    """
    turns: dict[str, list[StoredTurn]] = {}
    ids: set[tuple[str, str, int]] = set()
    for where, line in json_lines(stored):
        turn = parse_row(StoredTurn, where, line)
        if (turn_id := (turn.case, turn.author, turn.sample)) in ids:
            raise ConfigError(
                f"{where}: sample {turn.sample} of {turn.author} for {turn.case} is stored twice; delete one"
            )
        ids.add(turn_id)
        turns.setdefault(turn.case, []).append(turn)
    if not any(case.id in turns for case in read_records(source, Case)):
        raise ConfigError(
            f"{stored}: none of the {len(ids)} turns belongs to a case of this run; use the corpora and the seed of "
            "the run that generated them, or remove `generation.stored`"
        )

    def joined() -> Iterator[GeneratedTurn]:
        for case in read_records(source, Case):
            for turn in turns.pop(case.id, ()):
                yield GeneratedTurn.of(
                    case,
                    turn.author,
                    turn.sample,
                    turn.text,
                    seed=turn.seed,
                    pictures=turn.pictures,
                )

    written = write_rows(output, joined())
    unknown = Counter(case.partition("/")[0] for case, of_case in turns.items() for _ in of_case)
    return StepReport(
        step="generation",
        read=len(ids),
        written=written,
        dropped={corpus: {UNKNOWN_CASE: n} for corpus, n in unknown.items()},
    )


class _Generating:
    """Merges the answers of all generators in the order of the cases, and counts."""

    def __init__(
        self,
        settings: Settings,
        askers: Mapping[str, Asker],
        pictures: Pictures | None,
        seed: int,
    ) -> None:
        self.read = 0
        self.dropped: dict[str, Counter[str]] = {}
        self.figures: Counter[str] = Counter({"complete": 0, "incomplete": 0})
        self._settings = settings
        self._askers = askers
        self._names = tuple(askers)
        self._authors = {
            name: Author.of(name, asker.settings, asker.reserved) for name, asker in askers.items()
        }
        self._pictures = pictures
        self._seed = seed

    def turns(self, source: Path) -> Iterator[GeneratedTurn]:
        check = TurnCheck(self._settings.keep_incomplete, self._settings.keep_unreadable)
        with ExitStack() as stack:
            answers = {}
            for name in self._names:
                stream = self._ask(name, source, check)
                context = closing(stream) if len(self._names) == 1 else _ahead(stream)
                answers[name] = stack.enter_context(context)
            for want in wanted(self._counted(source), self._settings, self._names, self._seed):
                answer = next(answers[want.author])
                if answer.key != want.key:
                    raise RuntimeError(f"{want.author} answered {answer.key}, not {want.key}")
                turn = self._turn(want, answer)
                if turn is not None:
                    yield turn

    def _ask(self, name: str, source: Path, check: TurnCheck) -> Generator[Answer, None, None]:
        settings = self._settings
        with source.open("rb") as file:
            total = sum(1 for _ in file) * settings.samples_per_case
        turn_questions = questions(
            source, settings, self._names, self._authors[name], self._pictures, self._seed
        )
        yield from self._askers[name].ask(turn_questions, check, label="turns", total=total)

    def _counted(self, source: Path) -> Iterator[Case]:
        for case in read_records(source, Case):
            self.read += 1
            if not case.history[-1].text.strip():
                self._drop(case, NO_TEXT)
            yield case

    def _turn(self, want: Wanted, answer: Answer) -> GeneratedTurn | None:
        self.figures[f"asked of {want.author}"] += 1
        if answer.text is None:
            self._drop(want.case, answer.problem or "no answer")
            return None
        names = [name for turn in want.case.history for name in turn.images]
        seen = self._seen(names) if self._authors[want.author].sees_images else 0
        turn = GeneratedTurn.of(
            want.case,
            want.author,
            want.sample,
            answer.text,
            seed=want.seed,
            pictures=seen,
            tries=answer.tries,
        )
        self.figures["complete" if turn.is_complete else INCOMPLETE] += 1
        self.figures["pictures left out"] += len(names) - seen
        return turn

    def _seen(self, names: Sequence[str]) -> int:
        unreadable = self._pictures.unreadable if self._pictures else {}
        return sum(name not in unreadable for name in names)

    def _drop(self, case: Case, reason: str) -> None:
        self.dropped.setdefault(case.corpus, Counter())[reason] += 1


@contextmanager
def _ahead(answers: Generator[Answer, None, None]) -> Iterator[Iterator[Answer]]:
    """Read answers in a thread, so that a slow generator does not block the others."""
    buffer: queue.Queue[Answer] = queue.Queue(_AHEAD)
    over = threading.Event()

    def fill() -> None:
        with closing(answers):
            for answer in answers:
                while not over.is_set():
                    with suppress(queue.Full):
                        buffer.put(answer, timeout=_POLL_SECONDS)
                        break
                if over.is_set():
                    return

    with ThreadPoolExecutor(1, "answers") as pool:
        done = pool.submit(fill)

        def drain() -> Iterator[Answer]:
            while not (done.done() and buffer.empty()):
                with suppress(queue.Empty):
                    yield buffer.get(timeout=_POLL_SECONDS)
            done.result()  # raises the error that ended the thread

        try:
            yield drain()
        finally:
            over.set()


def _retried(askers: Mapping[str, Asker]) -> dict[str, int]:
    """Return the number of repeated requests, by generator and reason."""
    return {
        f"asked {name} again: {reason}": count
        for name, asker in askers.items()
        for reason, count in sorted(asker.counts.retried.items())
    }
