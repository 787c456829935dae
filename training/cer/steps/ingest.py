"""Read the files of all corpora into one file of dialogues, each with a split.

`collect` reads every file with its loader, makes ids unique, and assigns each dialogue to train,
valid or test. Of word-for-word equal dialogues of one source only the first is written, with its
labels: list the layout with the labels that you need first.

- A corpus's own split applies if it has one (`validation` and `dev` are `valid`).
- Unsplit rows are assigned by their source's name: 80, 10 and 10 %.
- All rows of a source share a split over all layouts and files: `test` takes precedence over `valid`,
  and `valid` over `train`, so that no tested dialogue is trained on.
- A file with `use = "evaluate"` belongs to test, and with it all rows of its sources.

Memory is constant, apart from a few bytes for each source and row.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from compeer_core.cer import Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from training.cer.corpora import LOADERS
from training.cer.corpora.hub import OWN_SPLITS, CorpusPart, hub_parts, is_hub_name
from training.cer.records import Dropped, Reason, SourceDialogue, StepReport
from training.cer.requests.seeding import generator_for
from training.common.progress import track
from training.data.records import read_records

SHARES: tuple[tuple[Split, float], ...] = (("train", 0.8), ("valid", 0.1), ("test", 0.1))
"""Shares of the sources that have no split of their own."""
_RANK: dict[Split, int] = {"train": 0, "valid": 1, "test": 2}
_RECORD_STAYS = {Reason.UNKNOWN_EMOTION, Reason.UNKNOWN_STRATEGY, Reason.EMPTY_UTTERANCE}
SAME_AGAIN = "repeated word for word"


class CorpusFile(FrozenModel):
    """One file of a corpus, and its use."""

    loader: str
    """Its layout: a name of `training.cer.corpora.LOADERS`."""
    path: str
    """A path below the folder of corpora, or `hub:<owner>/<name>[@revision][:config][#split]`."""
    split: str | None = None
    """The corpus's own split in this file. A name other than train, valid or test, such as `failed`,
    only becomes part of the ids. Of a hub data set without a split in `path`, this split is read, or
    all splits if it is None."""
    use: Literal["train", "evaluate"] = "train"
    """`evaluate`: test only, whatever the file's split."""

    @field_validator("loader")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in LOADERS:
            raise ValueError(f"no loader {name!r}; known: {', '.join(sorted(LOADERS))}")
        return name


@dataclass
class _State:
    """What is remembered of the rows: hashes and counts, no texts."""

    claimed: dict[str, Split | None] = field(default_factory=dict)
    """By source: the strictest split that one of its rows states, or None."""
    contents: set[bytes] = field(default_factory=set)
    ids: Counter[str] = field(default_factory=Counter)
    read: int = 0
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    noted: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    dialogues: Counter[str] = field(default_factory=Counter)
    utterances: int = 0


def collect(
    corpora: Sequence[CorpusFile], data_dir: Path, output: Path, *, seed: int
) -> StepReport:
    """Write the dialogues of the corpora, each with its split, as JSON lines.

    Args:
        corpora: The files, in reading order.
        data_dir: Their folder.
        output: Receives `SourceDialogue` rows, atomically.
        seed: Draws the splits of unsplit sources.

    Returns:
        The report: `read` counts the dialogues that the loaders yield; `dropped` counts, by corpus,
        what the loaders skip and what is repeated.

    Raises:
        ConfigError: A file is missing, damaged, or contains no dialogue.
    """
    unsplit = output.with_name(f"{output.name}.unsplit")
    state = _State()
    rows = track(_rows(corpora, data_dir, state), "ingesting dialogues")
    written = write_rows(unsplit, rows)
    splits: Counter[str] = Counter()
    write_rows(output, _with_splits(unsplit, state.claimed, seed, splits))
    unsplit.unlink()
    return StepReport(
        step="collect",
        read=state.read,
        written=written,
        dropped={corpus: dict(reasons) for corpus, reasons in sorted(state.dropped.items())},
        figures={
            "utterances": state.utterances,
            "sources": len(state.claimed),
            **{f"split {name}": splits[name] for name, _ in SHARES},
            **{f"corpus {name}": count for name, count in sorted(state.dialogues.items())},
            **{
                f"{corpus}: {reason}": count
                for corpus, reasons in sorted(state.noted.items())
                for reason, count in sorted(reasons.items())
            },
        },
    )


def _parts(file: CorpusFile, data_dir: Path) -> list[CorpusPart]:
    if is_hub_name(file.path):
        return hub_parts(file.path, file.split)
    return [CorpusPart(data_dir / file.path, file.split)]


def _rows(corpora: Iterable[CorpusFile], data_dir: Path, state: _State) -> Iterator[SourceDialogue]:
    for file in corpora:
        for part in _parts(file, data_dir):
            dropped = Dropped()
            corpus = file.loader
            before = state.read
            for dialogue in LOADERS[file.loader](part.path, dropped, part.split):
                corpus = dialogue.corpus
                state.read += 1
                accepted = _accepted(dialogue, file.use, state)
                if accepted is not None:
                    yield accepted
            if state.read == before:
                skipped = ", ".join(f"{count} {why}" for why, count in dropped.reasons.items())
                raise ConfigError(
                    f"{part.path}: the loader '{file.loader}' reads no dialogue from it "
                    f"({skipped or 'nothing in its layout'}); check the path and the loader"
                )
            for reason, count in dropped.reasons.items():
                counts = state.noted if reason in _RECORD_STAYS else state.dropped
                counts[corpus][reason] += count


def _accepted(
    dialogue: SourceDialogue, use: Literal["train", "evaluate"], state: _State
) -> SourceDialogue | None:
    """Return the dialogue under a unique id, or None if it is a repetition.

    A repeated row still claims its split: what occurs in a test set is tested.
    """
    own = "test" if use == "evaluate" else _own_split(dialogue.split)
    before = state.claimed.get(dialogue.source_id)
    if before is None or (own is not None and _RANK[own] > _RANK[before]):
        state.claimed[dialogue.source_id] = own
    content = _content(dialogue)
    if content in state.contents:
        state.dropped[dialogue.corpus][SAME_AGAIN] += 1
        return None
    state.contents.add(content)
    state.dialogues[dialogue.corpus] += 1
    state.utterances += len(dialogue.utterances)
    state.ids[dialogue.id] += 1
    number = state.ids[dialogue.id]
    if number == 1:
        return dialogue
    # Two files of a corpus number their rows in the same way.
    return dialogue.model_copy(update={"id": f"{dialogue.id}~{number}"})


def _content(dialogue: SourceDialogue) -> bytes:
    hashed = hashlib.blake2b(dialogue.source_id.encode(), digest_size=8)
    for utterance in dialogue.utterances:
        content = f"\0{utterance.speaker}\0{utterance.text}"
        hashed.update(content.encode("utf-8", "surrogatepass"))
    return hashed.digest()


def _own_split(name: str | None) -> Split | None:
    known: dict[str, Split] = {"train": "train", "valid": "valid", "test": "test"}
    return known.get(OWN_SPLITS.get(name or "", ""))


def _with_splits(
    path: Path, claimed: dict[str, Split | None], seed: int, counts: Counter[str]
) -> Iterator[SourceDialogue]:
    drawn: dict[str, Split] = {}
    for dialogue in read_records(path, SourceDialogue):
        source = dialogue.source_id
        split = claimed[source] or drawn.get(source)
        if split is None:
            split = drawn[source] = drawn_split(source, seed)
        counts[split] += 1
        yield dialogue.model_copy(update={"split": split})


def drawn_split(source_id: str, seed: int) -> Split:
    """Return the split of an unsplit source, which depends on its name and the seed only."""
    at = generator_for(seed, "split", source_id).random()
    for name, share in SHARES:
        if at < share:
            return name
        at -= share
    return SHARES[-1][0]
