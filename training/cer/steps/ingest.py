"""From the files of many corpora to one file of dialogues, each in one of three splits.

`collect` reads every file through its loader, makes ids unique and says for each dialogue whether
it is for training, validation or testing. Of dialogues of one source that say the same word by word
only the first stays, with its labels: name the layout with the labels that you want first.

- A corpus's own split counts where it has one (`validation` and `dev` are `valid`).
- Rows that a corpus leaves unsplit are drawn by the name of their source: 80, 10 and 10 per cent.
- All rows of one source, in whatever layouts and files, share a split: where they disagree, `test`
  goes before `valid` and `valid` before `train`, so that nothing that is tested was trained on.
- A file with `use = "evaluate"` is for testing, and with it all rows of its sources.

Reading takes constant memory, except for a few bytes for each source and each row.
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
from training.cer.corpora import LOADERS
from training.cer.corpora.hub import OWN_SPLITS, hub_parts, is_hub_name
from training.cer.records import Dropped, Reason, SourceDialogue, StepReport
from training.cer.requests.seeding import generator_for
from training.common.progress import track
from training.data.samples import read_records, write_records

SHARES: tuple[tuple[Split, float], ...] = (("train", 0.8), ("valid", 0.1), ("test", 0.1))
"""Of the sources that have no split of their own."""
_RANK: dict[Split, int] = {"train": 0, "valid": 1, "test": 2}
_RECORD_IS_KEPT = {Reason.UNKNOWN_EMOTION, Reason.UNKNOWN_STRATEGY, Reason.EMPTY_UTTERANCE}
SAME_AGAIN = "the same dialogue again, word by word"


class CorpusFile(FrozenModel):
    """One file of a corpus, and what it is for."""

    loader: str
    """Its layout: a name of `training.cer.corpora.LOADERS`."""
    path: str
    """Below the folder of corpora; or a data set, `hub:<owner>/<name>[@revision][:config][#split]`."""
    split: str | None = None
    """The corpus's own split that the file holds. A name that is none of train, valid and test,
    like `failed`, is kept in the ids and counts as no split. Of a data set of the hub that does not
    name its split in `path`, all are read, or this one."""
    use: Literal["train", "evaluate"] = "train"
    """`evaluate`: for testing only, whatever its split."""

    @field_validator("loader")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in LOADERS:
            raise ValueError(f"no loader {name!r}; there are {', '.join(sorted(LOADERS))}")
        return name


@dataclass
class _Collected:
    """What is remembered of the rows, by short hashes: never their texts."""

    claimed: dict[str, Split | None] = field(default_factory=dict)
    """By source: the strictest split that a row of it has claimed; None where no row did."""
    contents: set[bytes] = field(default_factory=set)
    ids: Counter[str] = field(default_factory=Counter)
    read: int = 0
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kept_with: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    dialogues: Counter[str] = field(default_factory=Counter)
    utterances: int = 0


def collect(
    corpora: Sequence[CorpusFile], data_dir: Path, output: Path, *, seed: int
) -> StepReport:
    """Write the dialogues of the corpora, each with its split, as JSON lines.

    Args:
        corpora: The files, in the order in which they are read and written.
        data_dir: Where they lie.
        output: One `SourceDialogue` a line, under another name until it is whole.
        seed: For the splits of what has none.

    Returns:
        `read` counts the dialogues that the loaders yield; `dropped` holds what they leave out
        before and what is left out here, by corpus.

    Raises:
        ConfigError: A file is missing, damaged as a whole, or holds no dialogue.
    """
    unsplit = output.with_name(f"{output.name}.unsplit")
    state = _Collected()
    rows = track(_rows(corpora, data_dir, state), "collecting dialogues")
    written = write_records(unsplit, rows)
    splits: Counter[str] = Counter()
    write_records(output, _with_splits(unsplit, state.claimed, seed, splits))
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
                for corpus, reasons in sorted(state.kept_with.items())
                for reason, count in sorted(reasons.items())
            },
        },
    )


@dataclass(frozen=True)
class _Part:
    path: Path
    split: str | None


def _parts(file: CorpusFile, data_dir: Path) -> list[_Part]:
    if not is_hub_name(file.path):
        return [_Part(data_dir / file.path, file.split)]
    return [_Part(part.path, part.split) for part in hub_parts(file.path, file.split)]


def _rows(
    corpora: Iterable[CorpusFile], data_dir: Path, state: _Collected
) -> Iterator[SourceDialogue]:
    for file in corpora:
        for part in _parts(file, data_dir):
            dropped = Dropped()
            corpus = file.loader
            before = state.read
            for dialogue in LOADERS[file.loader](part.path, dropped, part.split):
                corpus = dialogue.corpus
                state.read += 1
                kept = _accepted(dialogue, file.use, state)
                if kept is not None:
                    yield kept
            if state.read == before:
                left_out = ", ".join(f"{count} {why}" for why, count in dropped.reasons.items())
                raise ConfigError(
                    f"{part.path}: the loader '{file.loader}' finds no dialogue in it "
                    f"({left_out or 'nothing of its layout'}); check the path and the loader"
                )
            for reason, count in dropped.reasons.items():
                counts = state.kept_with if reason in _RECORD_IS_KEPT else state.dropped
                counts[corpus][reason] += count


def _accepted(
    dialogue: SourceDialogue, use: Literal["train", "evaluate"], state: _Collected
) -> SourceDialogue | None:
    """Return the dialogue under an id of its own, or None where it has been there.

    A repeated row claims its split all the same: what is in a test set is tested.
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
    # Two files of one corpus count their rows alike.
    return (
        dialogue if number == 1 else dialogue.model_copy(update={"id": f"{dialogue.id}~{number}"})
    )


def _content(dialogue: SourceDialogue) -> bytes:
    hashed = hashlib.blake2b(dialogue.source_id.encode(), digest_size=8)
    for said in dialogue.utterances:
        hashed.update(f"\0{said.speaker}\0{said.text}".encode("utf-8", "surrogatepass"))
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
    """Return the split of a source that has none of its own: always the same for the same seed."""
    at = generator_for(seed, "split", source_id).random()
    for name, share in SHARES:
        if at < share:
            return name
        at -= share
    return SHARES[-1][0]
