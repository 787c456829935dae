"""SFT of the small seeker: `python -m training sft seeker <config.toml>`.

The seeker is an adapter beside the policies on the same small frozen base. In `evaluate esc-eval` and
`evaluate sage` it plays the person who seeks support, so that both run on a CPU: a small simulation.

A dialogue is rebuilt from the CER rows of its rounds and becomes one row, in which the seeker's turns are
learnt (`training.data.seeker_prompt`). Where a corpus has the seeker's ratings of the distress, the one
before the dialogue and the one after it are learnt too. Photos are left out, and so are dialogues without
a situation. `sft adapter` describes several processes and how a run is continued.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compeer_core.cer import Case, CerRecord, Split, Variant
from compeer_core.dialogue import Dialogue, Speaker
from compeer_core.errors import ConfigError
from compeer_core.messages import Message
from training.data.records import drawn, read_records
from training.data.seeker_prompt import rating_messages, seeker_messages
from training.finetune.shared_prefix import SharedPrefixRow, row_of_places
from training.finetune.small_adapter import AdapterRun, check_folders
from training.finetune.tokenise import SampleReader
from training.sft import adapter

_log = logging.getLogger(__name__)


class Config(adapter.DialogueConfig):
    """`[sft seeker]`: rows, base and schedule. `faces` is not read, since the seeker learns without photos."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts dialogues."""
    check_folders(config)
    dialogues = read_dialogues(config.records, "train")
    held_out = read_dialogues(config.records, "valid")
    _log.info("%d dialogues to learn, %d held out", len(dialogues), len(held_out))
    for split, of_split in (("train", dialogues), ("valid", held_out)):
        if not of_split:
            files = ", ".join(map(str, config.records))
            raise ConfigError(
                f"{files}: no English dialogue of the {split} split with a situation; make the rows again with "
                "`cer rules` or `cer written`"
            )
    if dry_run:
        return
    training = AdapterRun(config)
    training.open(resume)
    builder = RowBuilder(training.reader, training.limit)
    validation = [
        row
        for dialogue in drawn(held_out, config.validation_dialogues, config.seed)
        for row in builder.rows(dialogue)
    ]
    if not validation:
        raise ConfigError(f"longest: no turn of the valid split fits into {training.limit} tokens")
    adapter.train_rows(
        config, training, len(dialogues), lambda number: builder.rows(dialogues[number]), validation
    )
    if builder.cut:
        training.directory.log(
            "dialogues of more than %d tokens, whose ends are left out, were met %d times",
            *(training.limit, builder.cut),
        )
    training.save()


@dataclass(frozen=True)
class SeekerDialogue:
    """A dialogue to learn the seeker's turns of."""

    situation: str
    turns: tuple[tuple[Speaker, str], ...]
    """The speakers, which alternate, and their texts; the supporter's turn is the last."""
    before: int | None
    """The seeker's rating of the distress before the dialogue, 1 to 5; None if there is none."""
    after: int | None


def read_dialogues(records: Sequence[Path], split: Split) -> list[SeekerDialogue]:
    """Return the English dialogues of a split that have a situation, in the order of the files.

    Raises:
        ConfigError: A file is missing or a line is no row of CER.
    """
    longest: dict[str, Case] = {}
    for path in records:
        for record in read_records(path, CerRecord):
            case = record.case
            if case.split != split or record.variant is not Variant.ORIGINAL:
                continue
            if case.situation is None or case.original is None or case.language != "en":
                continue
            known = longest.get(case.dialogue_id)
            if known is None or case.round > known.round:
                longest[case.dialogue_id] = case
    return [_dialogue(case) for case in longest.values()]


def _dialogue(case: Case) -> SeekerDialogue:
    assert case.situation is not None and case.original is not None  # see `read_dialogues`
    said = Dialogue(tuple(turn for turn in case.dialogue() if turn.text)).merged()
    turns = ((turn.speaker, turn.text) for turn in said)
    return SeekerDialogue(
        case.situation,
        (*turns, (Speaker.SUPPORTER, case.original)),
        case.labels.intensity_before,
        case.labels.intensity_after,
    )


class RowBuilder:
    """Makes rows of dialogues.

    Attributes:
        cut: How many dialogues were shortened because they are longer than a row may be.
    """

    def __init__(self, reader: SampleReader, longest: int) -> None:
        self.cut = 0
        self._reader = reader
        self._longest = longest

    def rows(self, dialogue: SeekerDialogue) -> list[SharedPrefixRow]:
        """Return the row of a dialogue; none if not even its first seeker turn fits."""
        conversations = [_conversation(dialogue)]
        if dialogue.before is not None:
            opening = rating_messages(seeker_messages(dialogue.situation, ()))
            conversations.append(_answered(opening, str(dialogue.before)))
        row = self._row(conversations)
        if row.length <= self._longest:
            return [row]
        self.cut += 1
        while row.length > self._longest:
            *earlier, _ = (
                number
                for number, message in enumerate(conversations[0])
                if message.role == "assistant"
            )
            if not earlier:
                return []
            conversations = [conversations[0][: earlier[-1] + 1], *conversations[1:]]
            row = self._row(conversations)
        return [row]

    def _row(self, conversations: Sequence[Sequence[Message]]) -> SharedPrefixRow:
        samples, places = zip(*map(self._reader.read_answers, conversations), strict=True)
        return row_of_places(samples, places)


def _conversation(dialogue: SeekerDialogue) -> tuple[Message, ...]:
    """Return a dialogue up to the seeker's last answer, which is the rating after it if there is one."""
    messages = seeker_messages(dialogue.situation, dialogue.turns)
    if dialogue.after is not None:
        return _answered(rating_messages(messages), str(dialogue.after))
    return messages[:-1]


def _answered(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    return (*messages, Message("assistant", (answer,)))
