"""Human judgements that public corpora already contain, as CER rows.

These corpora did not ask our four questions. A rule for each corpus maps its judgements to
preferences, and every row names the corpus:

- **empathy_ratings** (Welivita and Pu 2024): three replies to each post, rated by people as bad (1),
  okay (2) or good (3). The higher rating is preferred. Two good or two okay replies are `both`: okay
  is acceptable, and the paper's wording is "almost good". Two bad replies are `neither`.
- **pair** (Min et al. 2022): reflections of high, medium and low quality. The higher tier is
  preferred. The two high ones are `both`. The five low ones are "examples of what not to say" in the
  words of the data set, so two of them are `neither`; one such pair is drawn for each prompt.
- **counselchat**: therapists' answers to one question. The one with more votes is preferred. Weak
  evidence: most answers have no votes, and those with votes are shown above those without. A
  question is listed once for each of its topics with the same answers; they count once.
- **epitome** (Sharma et al. 2020): levels of 0 to 2 for three mechanisms of empathy. A reply is
  preferred if none of its levels is lower and one is higher. Few posts have two replies.
- **ed_pairs**: a person's reply beside a weak model's output or a reply to something else. Nobody
  compared them: the first is better by rule, and the rows say so.

The order of the two replies is drawn for each pair. All pairs of one post are in one split.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from compeer_core.cer import (
    Candidate,
    Case,
    CaseUtterance,
    CerRecord,
    DecidedBy,
    HumanLabels,
    Split,
)
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from training.cer.corpora import LOADERS
from training.cer.corpora.answers import PAIR_TIERS, RATED_REPLIES
from training.cer.corpora.reading import text_key
from training.cer.pairs import pair_of
from training.cer.records import Dropped, SourceDialogue, StepReport
from training.cer.requests.seeding import generator_for
from training.cer.steps.ingest import drawn_split
from training.common.progress import track

SAME_REPLY = "identical replies"
VOTES_TOO_CLOSE = "votes too close"
NOT_DOMINATED = "neither reply dominates"
LABELLED_TWICE = "contradictory labels"
UNPAIRED = "counterpart missing"

Name = Literal["empathy_ratings", "pair", "counselchat", "epitome", "ed_pairs"]


class JudgedCorpus(FrozenModel):
    """A corpus with human judgements, and its use."""

    name: Name
    paths: tuple[str, ...] = Field(min_length=1)
    """Paths below the folder of corpora. EPITOME has three: emotional reactions, interpretations,
    explorations."""
    use: Literal["train", "evaluate"] = "evaluate"
    """`evaluate`: test only. Weights that are distributed may only learn from corpora that state a
    licence: of these, epitome and counselchat."""


def judgements(
    corpora: Sequence[JudgedCorpus],
    data_dir: Path,
    output: Path,
    *,
    seed: int,
) -> StepReport:
    """Write the judged pairs of replies, with the preference.

    The corpora are small and held in memory, one at a time.

    Args:
        corpora: Each at most once.
        data_dir: The folder of corpora.
        output: Receives `CerRecord` rows.
        seed: Draws orders, splits and pairs.

    Raises:
        ConfigError: A file is missing or damaged, or a corpus is listed twice.
    """
    names = [corpus.name for corpus in corpora]
    if len(set(names)) < len(names):
        raise ConfigError(f"judged: a corpus is listed twice: {', '.join(names)}")
    tally = _Tally()
    written = write_rows(output, _records(corpora, data_dir, tally, seed))
    return StepReport(
        step="human",
        read=tally.read,
        written=written,
        dropped=tally.dropped,
        figures=dict(sorted(tally.figures.items())),
    )


# --- From a judged pair to a row --------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """An answer: the last utterance of a dialogue whose others are the history."""

    source: SourceDialogue
    author: str = "corpus"

    @property
    def text(self) -> str:
        return self.source.utterances[-1].text


@dataclass(frozen=True)
class Judged:
    """Two replies to the same history, in the order of the corpus."""

    left: Reply
    right: Reply
    preference: Preference
    by: DecidedBy
    original: str | None = None
    """The reply of the dialogue, if the other was written for comparison."""


@dataclass
class _Tally:
    read: int = 0
    dropped: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    figures: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Reading:
    """The context of the rule of a corpus."""

    name: Name
    paths: Sequence[Path]
    tally: _Tally
    seed: int
    claimed: dict[str, set[str]] = field(default_factory=dict)
    """The corpus's own splits of each source, over all its rows."""

    def drop(self, reason: str, count: int = 1) -> None:
        self.tally.dropped[self.name][reason] += count

    def load(self, loader: str, path: Path) -> Iterator[SourceDialogue]:
        dropped = Dropped()
        for dialogue in LOADERS[loader](path, dropped, None):
            self.tally.read += 1
            if dialogue.split is not None:
                self.claimed.setdefault(dialogue.source_id, set()).add(dialogue.split)
            yield dialogue
        for reason, count in dropped.reasons.items():
            self.drop(reason, count)


def _records(
    corpora: Iterable[JudgedCorpus], data_dir: Path, tally: _Tally, seed: int
) -> Iterator[CerRecord]:
    for corpus in corpora:
        paths = [data_dir / path for path in corpus.paths]
        reading = _Reading(corpus.name, paths, tally, seed)
        pairs: dict[str, list[Judged]] = {}
        for pair in track(_RULES[corpus.name](reading), f"reading {corpus.name}", unit="pairs"):
            tally.figures[f"{corpus.name}, in the corpus's order: {pair.preference}"] += 1
            pairs.setdefault(pair.left.source.source_id, []).append(pair)
        for source_id, judged in pairs.items():
            split = _split(corpus, source_id, reading.claimed.get(source_id, set()), seed)
            for pair in judged:
                record = _record(pair, split, seed)
                tally.figures[f"{corpus.name} {split}: {record.preference}"] += 1
                yield record


def _split(corpus: JudgedCorpus, source_id: str, own: Set[str], seed: int) -> Split:
    """Return the split of all pairs of one post: the strictest of the corpus's own, else drawn."""
    if corpus.use == "evaluate":
        return "test"
    strictest: tuple[Split, ...] = ("test", "valid", "train")
    return next((split for split in strictest if split in own), drawn_split(source_id, seed))


def _record(pair: Judged, split: Split, seed: int) -> CerRecord:
    record_id = f"{pair.left.source.id}+{pair.right.source.id}"
    left, right = (
        Candidate(author=each.author, reply=each.text) for each in (pair.left, pair.right)
    )
    return pair_of(
        *(record_id, _case(pair, split), left, right),
        preference=pair.preference,
        by=pair.by,
        swapped=generator_for(seed, "order", record_id).random() < 0.5,
    )


def _case(pair: Judged, split: Split) -> Case:
    source = pair.left.source
    history: list[CaseUtterance] = []
    for utterance in source.utterances[:-1]:
        text = utterance.text
        if history and history[-1].speaker is utterance.speaker:
            text = f"{history.pop().text}\n{text}"
        history.append(CaseUtterance(speaker=utterance.speaker, text=text))
    # A source may have several posts: a growing history, or another wording of a question.
    dialogue_id = f"{source.source_id}/{text_key(chr(0).join(turn.text for turn in history))}"
    number = sum(
        a.speaker is Speaker.SEEKER and b.speaker is Speaker.SUPPORTER for a, b in pairwise(history)
    )
    return Case(
        id=f"{dialogue_id}#{number}",
        dialogue_id=dialogue_id,
        source_id=source.source_id,
        corpus=source.corpus,
        language=source.language,
        split=split,
        licence=source.licence,
        round=number,
        rounds=number + 1,
        history=tuple(history),
        original=pair.original,
        labels=HumanLabels(problem=source.problem),
    )


def _same(left: str, right: str) -> bool:
    return "".join(left.lower().split()) == "".join(right.lower().split())


def _higher(left: int, right: int) -> Preference:
    return Preference.FIRST if left > right else Preference.SECOND


# --- A rule for each corpus -----------------------------------------------------------------------

_TIED_RATING = {1: Preference.NEITHER, 2: Preference.BOTH, 3: Preference.BOTH}
_RATED_AUTHORS = {"human": "corpus"}


def _empathy_ratings(reading: _Reading) -> Iterator[Judged]:
    by = DecidedBy(kind="person", name="empathy_ratings: each reply rated 1 to 3")
    for replies in _by_post(reading, "empathy_ratings").values():
        known = sorted(replies, key=lambda reply: RATED_REPLIES.index(reply.labels["reply_of"]))
        original = next(
            (each.utterances[-1].text for each in known if each.labels["reply_of"] == "human"), None
        )
        for left, right in combinations(known, 2):
            a, b = int(left.labels["rating"]), int(right.labels["rating"])
            if a == b == 2:
                reading.tally.figures["empathy_ratings: both rated 2"] += 1
            authors = [
                _RATED_AUTHORS.get(name := each.labels["reply_of"], name) for each in (left, right)
            ]
            yield Judged(
                Reply(left, authors[0]),
                Reply(right, authors[1]),
                _TIED_RATING[a] if a == b else _higher(a, b),
                by,
                original,
            )


def _pair(reading: _Reading) -> Iterator[Judged]:
    by = DecidedBy(kind="person", name="pair: written as high, medium or low quality")
    rank = {"hq": 2, "mq": 1, "lq": 0}
    for post, replies in _by_post(reading, "pair").items():
        known = sorted(replies, key=lambda reply: PAIR_TIERS.index(reply.labels["tier"]))
        low: list[Judged] = []
        for left, right in combinations(known, 2):
            if _same(left.utterances[-1].text, right.utterances[-1].text):
                reading.drop(SAME_REPLY)
                continue
            a, b = (rank[each.labels["tier"][:2]] for each in (left, right))
            if a != b:
                yield Judged(Reply(left), Reply(right), _higher(a, b), by)
            elif a == rank["hq"]:
                yield Judged(Reply(left), Reply(right), Preference.BOTH, by)
            else:
                low.append(Judged(Reply(left), Reply(right), Preference.NEITHER, by))
        if low:
            yield low[int(generator_for(reading.seed, "low pair", *post).integers(len(low)))]


def _counselchat(reading: _Reading) -> Iterator[Judged]:
    for answers in _by_post(reading, "counselchat").values():
        distinct: dict[str, SourceDialogue] = {}
        for answer in answers:
            key = text_key("".join(answer.utterances[-1].text.split()))
            if key in distinct:
                reading.drop(SAME_REPLY)
            elif answer.labels.get("upvotes", "").isdigit():
                distinct[key] = answer
        for left, right in combinations(distinct.values(), 2):
            a, b = int(left.labels["upvotes"]), int(right.labels["upvotes"])
            if a == b:
                reading.drop(VOTES_TOO_CLOSE)
                continue
            by = DecidedBy(
                kind="people" if abs(a - b) > 1 else "person", name="counselchat: more votes"
            )
            yield Judged(Reply(left), Reply(right), _higher(a, b), by)


def _empathy_levels(reading: _Reading) -> Iterator[tuple[SourceDialogue, tuple[int, ...]]]:
    """Yield the replies that have one level for each mechanism, and their levels."""
    if len(reading.paths) != 3:
        raise ConfigError(
            "epitome needs three files (emotional reactions, interpretations, explorations), got "
            f"{len(reading.paths)}"
        )
    replies: dict[tuple[str, str], list[list[SourceDialogue]]] = {}
    for mechanism, path in enumerate(reading.paths):
        for reply in reading.load("epitome", path):
            key = (reply.source_id, reply.labels["rp_id"])
            replies.setdefault(key, [[], [], []])[mechanism].append(reply)
    for of_mechanisms in replies.values():
        if not all(of_mechanisms):
            reading.drop(UNPAIRED)
            continue
        levels = [{int(reply.labels["level"]) for reply in each} for each in of_mechanisms]
        if any(len(each) > 1 for each in levels):
            reading.drop(LABELLED_TWICE)
            continue
        yield of_mechanisms[0][0], tuple(min(each) for each in levels)


def _epitome(reading: _Reading) -> Iterator[Judged]:
    by = DecidedBy(kind="person", name="epitome: no level lower, one higher")
    posts: dict[str, list[tuple[SourceDialogue, tuple[int, ...]]]] = {}
    for reply, levels in _empathy_levels(reading):
        posts.setdefault(reply.source_id, []).append((reply, levels))
    for replies in posts.values():
        for (left, of_left), (right, of_right) in combinations(replies, 2):
            differences = {a - b for a, b in zip(of_left, of_right, strict=True)}
            if min(differences) >= 0 and max(differences) > 0:
                preference = Preference.FIRST
            elif max(differences) <= 0 and min(differences) < 0:
                preference = Preference.SECOND
            else:
                reading.drop(NOT_DOMINATED)
                continue
            yield Judged(Reply(left), Reply(right), preference, by)


def _ed_pairs(reading: _Reading) -> Iterator[Judged]:
    by = DecidedBy(kind="rule", name="ed_pairs: a person's reply before a made or misplaced one")
    for path in reading.paths:
        waiting: SourceDialogue | None = None
        for reply in reading.load("ed_pairs", path):
            # The files number their rows in the same way.
            named = reply.model_copy(update={"id": f"{reply.id}@{path.name.split('.')[0]}"})
            if named.labels["label"] == "0":
                if waiting is not None:
                    reading.drop(UNPAIRED)
                waiting = named
                continue
            if waiting is None or waiting.utterances[0].text != named.utterances[0].text:
                reading.drop(UNPAIRED)
            elif _same(waiting.utterances[-1].text, named.utterances[-1].text):
                reading.drop(SAME_REPLY)
            else:
                yield Judged(
                    Reply(waiting),
                    Reply(named, "negative"),
                    Preference.FIRST,
                    by,
                    waiting.utterances[-1].text,
                )
            waiting = None
        if waiting is not None:
            reading.drop(UNPAIRED)


def _by_post(reading: _Reading, loader: str) -> Mapping[tuple[str, str], Sequence[SourceDialogue]]:
    """Return the answers to each post, by source and words of the post."""
    posts: dict[tuple[str, str], list[SourceDialogue]] = {}
    for path in reading.paths:
        for answer in reading.load(loader, path):
            key = (answer.source_id, text_key(answer.utterances[0].text))
            posts.setdefault(key, []).append(answer)
    return posts


_RULES: Mapping[str, Callable[[_Reading], Iterator[Judged]]] = MappingProxyType(
    {
        "empathy_ratings": _empathy_ratings,
        "pair": _pair,
        "counselchat": _counselchat,
        "epitome": _epitome,
        "ed_pairs": _ed_pairs,
    }
)
