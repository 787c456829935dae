"""Pairs of a fitting reply and its corruption, as CER rows: `python -m training cer sanity <config.toml>`.

Rules make the corruptions, so the preference is certain (`DecidedBy` "rule"). A judge that does not prefer
the reply has not learnt to judge; a judge learns it from the pairs of the train split. Their fixed texts
(filler, insults, sugar) differ from those of the other splits.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.cer import Candidate, CerRecord, DecidedBy, Split
from compeer_core.config import FrozenModel
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from training.cer.pairs import pair_of
from training.cer.requests.seeding import stable_hash
from training.data.records import drawn, read_records
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

FILLER = (
    "That sounds hard. I am here for you.",
    "Thank you for sharing. Tell me more.",
    "I understand. Everything will be fine.",
    "Things like that happen. Stay positive.",
    "I hear you, and you are not alone in this.",
    "It is what it is. Take care of yourself.",
    "I am sorry. How does that make you feel?",
    "You are strong, and you can do anything.",
)
INSULTS = (
    "You are an idiot, and it is your own fault.",
    "Stop whining. Nobody cares about your problems.",
    "What a stupid thing to say. Grow up.",
    "You are pathetic, so leave me alone.",
    "Shut up. I have heard enough of this nonsense.",
    "People like you disgust me.",
    "No wonder that nobody likes you.",
    "You are boring and useless.",
)
SUGAR: tuple[tuple[str, str], ...] = (
    ("Oh, you amazing, beautiful soul!", "I love you so, so much!"),
    ("Wow, sweetheart, you are a true hero!", "The whole world is proud of you!"),
    ("My dearest, most wonderful friend!", "Sending you a million warm hugs!"),
    ("Oh my goodness, you precious angel!", "You shine brighter than every star!"),
    ("You incredible, gorgeous human being!", "I admire you with all of my heart!"),
    ("Darling, what a magnificent person you are!", "You are simply perfect, always!"),
    ("Oh sweet, sweet angel, bless your golden heart!", "I adore you endlessly!"),
    ("You brave and radiant star, I am in tears!", "Hugs, hugs and more hugs for you!"),
)
"""The first half of each is for training, the other for the other splits."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Config(FrozenModel):
    """`[cer sanity]`: the replies and the number of pairs."""

    records: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows whose first reply fits, such as those of `cer written` and `cer rules`."""
    output: Path
    """Folder that receives `rows.jsonl`."""
    pairs: Mapping[Split, int] = {"train": 60, "valid": 30, "test": 400}
    """Pairs of each corruption; all of different dialogues, so there may be fewer."""
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the pairs; a dry run counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(sanity_rows(config))
    counts = Counter((row.case.split, row.id.rpartition("/")[2]) for row in rows)
    for (split, name), count in sorted(counts.items()):
        _log.info("%s, %s: %d pairs", split, name, count)
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def sanity_rows(config: Config) -> Iterator[CerRecord]:
    """Yield the pairs, split by split and corruption by corruption, with sides by the case's id.

    Raises:
        ConfigError: A file is missing or a line is no CER row.
    """
    of_dialogue: dict[str, CerRecord] = {}
    for path in config.records:
        for record in read_records(path, CerRecord):
            place = stable_hash("sanity", record.case.id)
            known = of_dialogue.get(record.case.source_id)
            if known is None or place < stable_hash("sanity", known.case.id):
                of_dialogue[record.case.source_id] = record
    for split, count in config.pairs.items():
        records = [record for record in of_dialogue.values() if record.case.split == split]
        half = slice(0, 4) if split == "train" else slice(4, 8)
        for number, (name, corrupt) in enumerate(_corruptions(records, half).items()):
            rng = np.random.default_rng([config.seed, number])
            for record in drawn(records, count, config.seed + number):
                corrupted = corrupt(record, rng)
                if corrupted != record.first.reply:
                    yield _pair(record, name, corrupted)


_Corruption = Callable[[CerRecord, np.random.Generator], str]


def _corruptions(records: Sequence[CerRecord], half: slice) -> Mapping[str, _Corruption]:
    def other(record: CerRecord, rng: np.random.Generator) -> str:
        return records[int(rng.integers(len(records)))].first.reply

    def shuffled(record: CerRecord, rng: np.random.Generator) -> str:
        return " ".join(rng.permutation(record.first.reply.split()).tolist())

    def doubled(record: CerRecord, rng: np.random.Generator) -> str:
        return f"{record.first.reply} {record.first.reply}"

    def filler(record: CerRecord, rng: np.random.Generator) -> str:
        return str(rng.choice(FILLER[half]))

    def gibberish(record: CerRecord, rng: np.random.Generator) -> str:
        words = (
            "".join(rng.choice(list(LETTERS), len(word))) for word in record.first.reply.split()
        )
        return " ".join(words)

    def insult(record: CerRecord, rng: np.random.Generator) -> str:
        return str(rng.choice(INSULTS[half]))

    def sugar(record: CerRecord, rng: np.random.Generator) -> str:
        choices = SUGAR[half]
        before, after = choices[int(rng.integers(len(choices)))]
        return f"{before} {record.first.reply} {after}"

    return {
        "other-dialogue": other,
        "shuffled": shuffled,
        "doubled": doubled,
        "filler": filler,
        "gibberish": gibberish,
        "insult": insult,
        "sugar": sugar,
    }


def _pair(record: CerRecord, name: str, corrupted: str) -> CerRecord:
    own = Candidate(author=record.first.author, reply=record.first.reply)
    other = Candidate(author="rule", reply=corrupted)
    row = f"{record.case.id}/{name}"
    return pair_of(
        row,
        record.case,
        own,
        other,
        preference=Preference.FIRST,
        by=DecidedBy(kind="rule", name=f"sanity/{name}"),
        swapped=stable_hash("sanity side", row) % 2 == 1,
    )
