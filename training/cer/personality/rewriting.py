"""Write variants of CER rows: duplicates, rewritten rows, and rows rewritten after a persona.

The paper compares three ways to enlarge a data set (Table 1): UnifiReward-D repeats its rows, -R
rewrites them without a persona, -P rewrites them "in alignment with the new persona", which is drawn
from the cluster of the speaker's own. "All variants use an equal number of training samples": a row
that fails in one variant is dropped from all three, so that ``duplicate.jsonl``, ``rewrite.jsonl`` and
``persona.jsonl`` contain the same rows in the same order.

The utterances of the history and the replies are rewritten, each speaker in one manner over the whole
dialogue. The reasoning stays unchanged, with its labels and its quotes of the seeker (which may no
longer match the history word for word), and so do the verdicts: the meaning of a row stays, and rows
whose meaning changes are filtered out (`drift`).

A generator rewrites a row with one question (prompt ``rewrite.<language>.md``), and another may check
the result (``drift.<language>.md``). Without a generator, the rules of `manner` **simulate** this
step: -R is one fixed manner for all, -P the manner of the drawn persona's scores.

Only original rows of the train split get variants. As in the paper, a persona is drawn once for each
speaker of a dialogue, seeded with the speaker's own id.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from compeer_core.backends.protocol import Message
from compeer_core.cer import Candidate, CerRecord, Variant
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker, language_of
from compeer_core.prompts import LANGUAGES, SPEAKER_NAMES, fill, neutralise
from compeer_core.reasoning import Part, StrategyStep, read
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Strategy
from training.cer.personality import drift, manner
from training.cer.personality.clusters import Cast, ClusteredPersona
from training.cer.personality.drift import Reason
from training.cer.personality.traits import Persona, json_object, persona_id
from training.cer.personality.wording import words
from training.cer.prompts import load
from training.cer.records import StepReport
from training.cer.requests.asking import Asker, Question
from training.cer.requests.engines import LOCAL, Engine
from training.cer.requests.seeding import generator_for, seed_for
from training.common.progress import track
from training.data.records import read_records

VARIANTS = (Variant.DUPLICATE, Variant.REWRITE, Variant.PERSONA)

_DIVERSITY_PAIRS = 100_000


_REMEMBERED = 50_000
"""Cache size in utterances: rows of one dialogue share most of theirs."""


class DroppedRow(FrozenModel):
    """A row that is in no variant."""

    id: str
    corpus: str
    variant: Variant
    """The variant that it failed in."""
    reason: str


# --- Rewritten texts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One utterance or reply of a row.

    Attributes:
        strategies: The known strategies of a reply.
    """

    speaker: Speaker
    text: str
    strategies: tuple[Strategy, ...] = ()


def pieces(record: CerRecord) -> tuple[Piece, ...]:
    """Return the texts of a row: its utterances, then its replies, including empty ones."""
    turns = [Piece(turn.speaker, turn.text) for turn in record.case.history]
    return (*turns, *(_reply(record, candidate) for candidate in record.candidates))


def _reply(record: CerRecord, candidate: Candidate) -> Piece:
    if candidate.author == "corpus" and record.case.labels.strategies:
        strategies = record.case.labels.strategies
    else:
        strategies = _own_strategies(candidate)
    return Piece(Speaker.SUPPORTER, candidate.reply, strategies)


def _own_strategies(candidate: Candidate) -> tuple[Strategy, ...]:
    step = None if candidate.turn is None else read(candidate.turn).strategy
    if isinstance(step, StrategyStep) and step.strategy in set(Strategy):
        return (Strategy(str(step.strategy)),)
    return ()


def with_texts(
    record: CerRecord, texts: Sequence[str], variant: Variant, persona: str | None = None
) -> CerRecord:
    """Return the variant of a row with other texts in the place of its `pieces`.

    The id of the row is `<id>~<variant>`. Of a candidate's turn only the text of its reply changes; a
    turn without a reply stays.

    Raises:
        ValueError: The number of texts differs from the number of pieces.
    """
    history, replies = texts[: len(record.case.history)], texts[len(record.case.history) :]
    candidates = [
        candidate.model_copy(
            update={"reply": reply, "turn": _turn_with(candidate.turn, candidate.reply, reply)}
        )
        for candidate, reply in zip(record.candidates, replies, strict=True)
    ]
    new_reply = dict(zip((each.reply for each in record.candidates), replies, strict=True))
    original = record.case.original
    case = record.case.model_copy(
        update={
            "history": tuple(
                turn.model_copy(update={"text": text})
                for turn, text in zip(record.case.history, history, strict=True)
            ),
            "original": None if original is None else new_reply.get(original, original),
        }
    )
    return record.model_copy(
        update={
            "id": f"{record.id}~{variant}",
            "case": case,
            "first": candidates[0],
            "second": candidates[1] if len(candidates) > 1 else None,
            "variant": variant,
            "persona": persona,
            "rewritten_from": record.id,
        }
    )


def _turn_with(turn: str | None, before: str, after: str) -> str | None:
    if turn is None or before == after:
        return turn
    start = turn.find(Part.REPLY.opening)
    if start < 0:
        return turn
    start += len(Part.REPLY.opening)
    end = turn.find(Part.REPLY.closing, start)
    inside = turn[start:] if end < 0 else turn[start:end]
    if inside.strip() != before.strip():
        return turn
    return f"{turn[:start]}{after}{turn[start + len(inside) :]}"


# --- The step ---------------------------------------------------------------------------------


def rewrite(
    source: Path,
    personas: Path,
    output: Path,
    asker: Asker | None = None,
    checker: Asker | None = None,
    *,
    seed: int = 0,
    engine: Engine = LOCAL,
) -> StepReport:
    """Write the three variants of the original train rows of a file.

    Args:
        source: `CerRecord` rows.
        personas: `ClusteredPersona` rows from `clusters.cluster`.
        output: The folder that receives the three variants and ``dropped.jsonl`` (`DroppedRow`).
        asker: The generator that rewrites; None: the rules of `manner`.
        checker: The generator that checks rewritings; None: the rules of `drift` only.
        seed: The seed of all draws.
        engine: Applies the rules of `manner` and `drift`; askers have their own.
    """
    output.mkdir(parents=True, exist_ok=True)
    cast = Cast(read_records(personas, ClusteredPersona))
    job = _Job(source, _Drawing(cast, seed), asker, checker, seed, engine)
    drafts = {variant: output / f"{variant}.draft" for variant in VARIANTS[1:]}
    reasons: dict[str, Counter[str]] = {}
    failed = (row for variant, draft in drafts.items() for row in job.write_draft(variant, draft))
    write_rows(output / "dropped.jsonl", _counted(failed, reasons))
    figures: dict[str, float | int | str | None] = {
        "by": manner.NAME if asker is None else asker.name,
        "checked_by": "rules" if checker is None else checker.name,
        "speakers_given_a_persona_of_another_cluster": job.drawing.not_of_the_cluster,
    }
    written = 0
    for variant in VARIANTS:
        measure = _Measure()
        rows = _duplicates(job.rows()) if variant is Variant.DUPLICATE else _read(drafts[variant])
        complete = (row for row in rows if row.rewritten_from not in job.dropped)
        written += write_rows(
            output / f"{variant}.jsonl", measure.each(_with_originals(job.rows(), complete))
        )
        figures |= {f"{name}.{variant}": value for name, value in measure.figures().items()}
    for draft in drafts.values():
        draft.unlink()
    return StepReport(
        step="personality.rewriting",
        read=written // len(VARIANTS) + len(job.dropped),
        written=written,
        dropped=reasons,
        figures=figures,
    )


def _counted(rows: Iterable[DroppedRow], reasons: dict[str, Counter[str]]) -> Iterator[DroppedRow]:
    for row in rows:
        reasons.setdefault(row.corpus, Counter())[f"{row.variant}: {row.reason}"] += 1
        yield row


def _read(path: Path) -> Iterator[CerRecord]:
    return read_records(path, CerRecord)


def _duplicates(rows: Iterable[CerRecord]) -> Iterator[CerRecord]:
    for row in rows:
        yield with_texts(row, [piece.text for piece in pieces(row)], Variant.DUPLICATE)


def _with_originals(
    originals: Iterable[CerRecord], rewritten: Iterable[CerRecord]
) -> Iterator[tuple[CerRecord, CerRecord]]:
    """Yield each rewritten row with its original; both are in the same order."""
    remaining = iter(originals)
    for row in rewritten:
        yield next(each for each in remaining if each.id == row.rewritten_from), row


@dataclass
class _Drawing:
    """Draws one persona for each speaker of a dialogue."""

    cast: Cast
    seed: int
    _counted: set[str] = field(default_factory=set)

    @property
    def not_of_the_cluster(self) -> int:
        """The number of speakers whose cluster has no other persona."""
        return len(self._counted)

    def __call__(self, own: str) -> Persona | None:
        drawn = self.cast.draw(own, generator_for(self.seed, "persona", own))
        if drawn is None:
            return None
        if not drawn.from_cluster:
            self._counted.add(own)
        return drawn.persona


@dataclass(frozen=True)
class _Draft:
    """New texts for the pieces of a row, or why there are none."""

    row: CerRecord
    texts: tuple[str, ...] | Reason
    persona: str | None = None


@dataclass
class _Job:
    source: Path
    drawing: _Drawing
    asker: Asker | None
    checker: Asker | None
    seed: int
    engine: Engine
    dropped: set[str] = field(default_factory=set)
    """Ids of the rows that failed in a variant."""

    def __post_init__(self) -> None:
        texts = (piece.text for row in self.rows() for piece in pieces(row))
        self._filter = _Filter(drift.TfidfSimilarity(texts), is_exact=self.asker is None)

    def rows(self) -> Iterator[CerRecord]:
        """Yield the rows that get variants."""
        for row in read_records(self.source, CerRecord):
            if row.case.split == "train" and row.variant is Variant.ORIGINAL:
                yield row

    def write_draft(self, variant: Variant, path: Path) -> Iterator[DroppedRow]:
        """Write the rows of a variant, then yield those that fail.

        Rows that failed in an earlier variant are skipped.
        """
        failed: list[DroppedRow] = []
        drafts = self._drafts(variant)
        write_rows(path, track(self._rows_of(drafts, variant, failed), f"variant {variant}"))
        if self.checker is not None:
            judged = self._judged(path, variant, self.checker)
            write_rows(path, track(self._rows_of(judged, variant, failed), f"checking {variant}"))
        self.dropped.update(row.id for row in failed)
        yield from failed

    def _rows_of(
        self, drafts: Iterable[_Draft], variant: Variant, failed: list[DroppedRow]
    ) -> Iterator[CerRecord]:
        for draft in drafts:
            row = draft.row
            if isinstance(draft.texts, Reason):
                failed.append(
                    DroppedRow(
                        id=row.id,
                        corpus=row.case.corpus,
                        variant=variant,
                        reason=draft.texts.value,
                    )
                )
            else:
                yield with_texts(row, draft.texts, variant, draft.persona)

    def _remaining(self) -> Iterator[CerRecord]:
        return (row for row in self.rows() if row.id not in self.dropped)

    # --- Drafts

    def _drafts(self, variant: Variant) -> Iterator[_Draft]:
        if self.asker is None:
            return self.engine.map(_Rule(self.seed, self._filter), self._parts(variant))
        return self.engine.map(self._filter, self._asked(variant, self.asker))

    def _parts(self, variant: Variant) -> Iterator["_Part"]:
        return (_Part(row, self._personas(row, variant)) for row in self._remaining())

    def _personas(self, row: CerRecord, variant: Variant) -> "_Pair | Reason | None":
        if variant is not Variant.PERSONA:
            return None
        speakers = {piece.speaker for piece in pieces(row) if piece.text.strip()}
        drawn = {speaker: self.drawing(persona_id(row.case, speaker)) for speaker in speakers}
        if None in drawn.values():
            return Reason.NOBODY_ELSE
        return _Pair(drawn.get(Speaker.SEEKER), drawn.get(Speaker.SUPPORTER))

    def _asked(self, variant: Variant, asker: Asker) -> Iterator[_Draft]:
        def questions() -> Iterator[Question]:
            for row in self._remaining():
                pair = self._personas(row, variant)
                if not isinstance(pair, Reason):
                    yield rewriting_question(row, variant, pair, self.seed, asker.reserved)

        answers = asker.ask(questions(), check_rewriting, label=f"rewriting {variant}", total=None)
        for row in self._remaining():
            pair = self._personas(row, variant)
            if isinstance(pair, Reason):
                yield _Draft(row, pair)
                continue
            text = next(answers).text
            if text is None:
                yield _Draft(row, Reason.NOT_REWRITTEN)
                continue
            rewritten = iter(map(neutralise, read_rewriting(text)))
            texts = tuple(
                next(rewritten) if piece.text.strip() else piece.text for piece in pieces(row)
            )
            yield _Draft(row, texts, None if pair is None else pair.name)

    # --- The checker

    def _judged(self, path: Path, variant: Variant, checker: Asker) -> Iterator[_Draft]:
        def drafts() -> Iterator[tuple[_Draft, Question | None]]:
            for original, row in _with_originals(self._remaining(), _read(path)):
                texts = tuple(piece.text for piece in pieces(row))
                question = drift_question(original, texts, variant, self.seed, checker.reserved)
                yield _Draft(original, texts, row.persona), question

        questions = (question for _, question in drafts() if question is not None)
        answers = checker.ask(questions, check_verdict, label=f"checking {variant}", total=None)
        for draft, question in drafts():
            reason = None if question is None else verdict(next(answers).text)
            yield draft if reason is None else _Draft(draft.row, reason)


@dataclass(frozen=True)
class _Pair:
    """The personas of a row's speakers; None for a silent one."""

    seeker: Persona | None
    supporter: Persona | None

    def of(self, speaker: Speaker) -> Persona | None:
        return self.seeker if speaker is Speaker.SEEKER else self.supporter

    @property
    def name(self) -> str:
        """Their ids, the seeker's first."""
        return " + ".join(each.id for each in (self.seeker, self.supporter) if each is not None)


# --- Rules, row by row ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A row and its speakers: no personas (None), a pair, or why there is none."""

    row: CerRecord
    pair: _Pair | Reason | None


@dataclass(frozen=True)
class _Filter:
    """Replaces a draft's texts by the reason if it breaks a rule of `drift`."""

    similarity: drift.TfidfSimilarity
    is_exact: bool

    def __call__(self, drafts: Iterator[_Draft]) -> Iterator[_Draft]:
        # Texts are checked independently, so one that passed in a row passes in others.
        passed: set[drift.Rewriting] = set()
        for draft in drafts:
            yield self._filtered(draft, passed)

    def _filtered(self, draft: _Draft, passed: set[drift.Rewriting]) -> _Draft:
        if isinstance(draft.texts, Reason):
            return draft
        language = draft.row.case.language
        new = [
            pair
            for piece, text in zip(pieces(draft.row), draft.texts, strict=True)
            if (pair := drift.Rewriting(piece.text, text, piece.strategies, language)) not in passed
        ]
        reason = drift.drifted(new, self.similarity, is_exact=self.is_exact)
        if reason is not None:
            return _Draft(draft.row, reason)
        if len(passed) >= _REMEMBERED:
            passed.clear()
        passed.update(new)
        return draft


@dataclass(frozen=True)
class _Rule:
    """Rewrites rows by the rules of `manner`, and filters the result."""

    seed: int
    filter: _Filter

    def __call__(self, parts: Iterator[_Part]) -> Iterator[_Draft]:
        return self.filter(self._drafts(parts))

    def _drafts(self, parts: Iterator[_Part]) -> Iterator[_Draft]:
        rewritten = lru_cache(_REMEMBERED)(self._rewritten)
        for part in parts:
            row, pair = part.row, part.pair
            if isinstance(pair, Reason):
                yield _Draft(row, pair)
                continue
            texts = tuple(
                rewritten(
                    None if pair is None else pair.of(piece.speaker),
                    persona_id(row.case, piece.speaker),
                    piece.text,
                    row.case.language,
                )
                for piece in pieces(row)
            )
            yield _Draft(row, texts, None if pair is None else pair.name)

    def _rewritten(self, persona: Persona | None, own: str, text: str, language: str) -> str:
        how = manner.FIXED if persona is None else manner.Manner.of(persona.scores)
        name = "fixed" if persona is None else persona.id
        # Seeded by the text, so that an utterance is the same in every row of its dialogue.
        rng = generator_for(self.seed, "manner", own, name, text)
        return manner.rewritten(text, how, rng, language)


# --- Questions to generators ------------------------------------------------------------------


def _language(row: CerRecord) -> str:
    return row.case.language if row.case.language in LANGUAGES else "en"


def _numbered(texts: Iterable[tuple[Speaker, str]], language: str) -> str:
    return "\n".join(
        f"{number}. {SPEAKER_NAMES[language][speaker]}: {json.dumps(text, ensure_ascii=False)}"
        for number, (speaker, text) in enumerate(texts, start=1)
    )


def rewriting_question(
    row: CerRecord,
    variant: Variant,
    pair: "_Pair | None",
    seed: int,
    reserved: Iterable[str] = (),
) -> Question:
    """Return the question that asks for the rewriting of a row.

    Args:
        row: The row.
        variant: The variant, as part of the key.
        pair: The personas, or None.
        seed: The run's seed.
        reserved: The generator's special tokens.
    """
    language = _language(row)
    texts = [
        (piece.speaker, neutralise(piece.text, reserved))
        for piece in pieces(row)
        if piece.text.strip()
    ]
    if pair is None:
        how = load("manner_free", language)
    else:
        how = fill(
            load("manner_persona", language),
            **{
                speaker.value: neutralise(who.description) if (who := pair.of(speaker)) else "-"
                for speaker in Speaker
            },
        )
    filled = fill(
        load("rewrite", language),
        count=len(texts),
        manner=how,
        utterances=_numbered(texts, language),
    )
    key = f"rewrite:{language}:{len(texts)}:{variant}:{row.id}"
    return Question(key, (Message("user", (filled,)),), seed_for(seed, key))


def read_rewriting(text: str) -> tuple[str, ...]:
    """Read the utterances of a generator's answer.

    Raises:
        ValueError: It is not one JSON object with a list of strings, none empty.
    """
    utterances = json_object(text).get("utterances")
    if not isinstance(utterances, list) or not all(isinstance(each, str) for each in utterances):
        raise ValueError("no list of utterances")
    if not all(each.strip() for each in utterances):
        raise ValueError("an empty utterance")
    return tuple(each.strip() for each in utterances)


def check_rewriting(key: str, text: str) -> str | None:
    """Return why an answer is unusable, or None. The key contains language and number."""
    _, language, count, *_ = key.split(":")
    try:
        utterances = read_rewriting(text)
    except ValueError as error:
        return str(error)
    if len(utterances) != int(count):
        return "wrong number of utterances"
    detected = language_of("\n".join(utterances))
    return None if detected in (language, "und") else "wrong language"


def drift_question(
    row: CerRecord,
    texts: Sequence[str],
    variant: Variant,
    seed: int,
    reserved: Iterable[str] = (),
) -> Question | None:
    """Return the question that checks a rewriting; None if nothing changed."""
    changed = [
        (piece.speaker, piece.text, text)
        for piece, text in zip(pieces(row), texts, strict=True)
        if piece.text != text
    ]
    if not changed:
        return None
    language = _language(row)
    words_for = {"en": ("before", "after"), "zh": ("改写前", "改写后")}[language]
    pairs = "\n".join(
        f"{number}. {SPEAKER_NAMES[language][speaker]}\n"
        + "\n".join(
            f"   {name}: {json.dumps(neutralise(text, reserved), ensure_ascii=False)}"
            for name, text in zip(words_for, (before, after), strict=True)
        )
        for number, (speaker, before, after) in enumerate(changed, start=1)
    )
    filled = fill(load("drift", language), count=len(changed), pairs=pairs)
    # The key depends on the texts: another rewriting of the row is another question.
    version = generator_for(0, *texts).bytes(4).hex()
    key = f"drift:{language}:{len(changed)}:{variant}:{version}:{row.id}"
    return Question(key, (Message("user", (filled,)),), seed_for(seed, key))


class Verdict(FrozenModel):
    """The numbers of the faulty pairs, by kind of fault."""

    meaning: tuple[int, ...]
    strategy: tuple[int, ...]
    artefact: tuple[int, ...]


def check_verdict(key: str, text: str) -> str | None:
    """Return why an answer is unusable, or None. The key contains the number of pairs."""
    count = int(key.split(":")[2])
    try:
        faults = Verdict.model_validate(json_object(text))
    except ValueError as error:
        return str(error) if str(error) in {"incomplete JSON", "no JSON"} else "unexpected JSON"
    named = (*faults.meaning, *faults.strategy, *faults.artefact)
    return None if all(1 <= number <= count for number in named) else "no such pair"


def verdict(text: str | None) -> Reason | None:
    """Return the first fault in an answer that passed `check_verdict`, or None."""
    if text is None:
        return Reason.NOT_CHECKED
    faults = Verdict.model_validate(json_object(text))
    if faults.meaning:
        return Reason.MEANING
    if faults.strategy:
        return Reason.STRATEGY
    return Reason.ARTIFACT if faults.artefact else None


# --- Figures ----------------------------------------------------------------------------------


@dataclass
class _Measure:
    """Measures how much rewriting changed, and lexical diversity."""

    rows: int = 0
    unchanged: int = 0
    utterances: int = 0
    edits: int = 0
    tokens: int = 0
    _pairs: set[tuple[str, str]] = field(default_factory=set)
    _pair_count: int = 0

    def each(self, rows: Iterable[tuple[CerRecord, CerRecord]]) -> Iterator[CerRecord]:
        """Yield the rewritten rows, measured against their originals."""
        for original, row in rows:
            self._add(original, row)
            yield row

    def _add(self, original: CerRecord, row: CerRecord) -> None:
        language = row.case.language
        changed = 0
        for before, after in zip(pieces(original), pieces(row), strict=True):
            tokens = words(after.text, language)
            if self._pair_count < _DIVERSITY_PAIRS:
                bigrams = list(pairwise(tokens))
                self._pairs.update(bigrams)
                self._pair_count += len(bigrams)
            self.utterances += 1
            self.tokens += len(tokens)
            if before.text != after.text:
                changed += 1
                self.edits += edits(before.text, after.text)
        self.rows += 1
        self.unchanged += not changed

    def figures(self) -> dict[str, float | int]:
        return {
            "rows": self.rows,
            "unchanged_rows": self.unchanged,
            "edits_per_utterance": round(self.edits / max(self.utterances, 1), 3),
            "share_of_changed_tokens": round(self.edits / max(self.tokens, 1), 4),
            "distinct_2": round(len(self._pairs) / max(self._pair_count, 1), 4),
        }


_TOKEN = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+(?:['’]\w+)*|[^\w\s]")


@lru_cache(4096)
def edits(before: str, after: str) -> int:
    """Return the number of tokens (words, marks, Chinese characters) added, removed or replaced.

    Case matters. The alignment is difflib's, so the number may exceed the minimum.

    Example:
        >>> edits("I'm glad.", "I am glad!")
        3
    """
    matcher = SequenceMatcher(None, _TOKEN.findall(before), _TOKEN.findall(after), autojunk=False)
    return sum(
        max(end_a - start_a, end_b - start_b)
        for tag, start_a, end_a, start_b, end_b in matcher.get_opcodes()
        if tag != "equal"
    )
