"""Reward models as multi-turn SFT on their verdicts (COMPEER, Eq. 4).

Run `python -m training reward <config.toml>`. The loss is on the verdict words alone. `kind` selects one
of the paper's three models: UnifiReward, or the PRM and the ORM that it is compared with.

The base is checked before step 0: each verdict must be one token for its tokenizer, and the training
template must produce what the judge reads in use.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.backends.transformers_.tokens import LabelTokens
from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.unifireward import PREFERENCES, VERDICTS
from training.common.run_directory import RunDirectory
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.finetune.sft_trainer import FineTuning, Row, fine_tune, message_rows
from training.finetune.trl_common import open_processor
from training.reward_model.conversations import Kind, conversations
from training.reward_model.template import training_template

_log = logging.getLogger(__name__)

WORDS = {
    Kind.UNIFIED: VERDICTS + PREFERENCES,
    Kind.PROCESS: VERDICTS,
    Kind.OUTCOME: PREFERENCES,
}
"""The verdicts of each kind of reward model."""


class Config(FrozenModel):
    """`[reward]`: which rows, which base, how long."""

    records: tuple[Path, ...]
    """Files of CER rows: `train.jsonl` of the cer stage, and for the paper's -D, -R and -P one of
    `variants/`. Only rows of the train split are used."""
    kind: Kind = Kind.UNIFIED
    """`unified` (UnifiReward), `process` (PRM) or `outcome` (ORM)."""
    base: Path | str
    """Checkpoint, or name on the Hub, to train or to train the adapter on."""
    output: Path
    """Run directory: `adapter`, or `model` without LoRA."""
    data_dir: Path | None = None
    """Folder of corpora, for rows with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    row_limit: int | None = None
    """Number of conversations to use, drawn by the seed; None uses all."""
    longest: int | None = None
    """Skip and count conversations of more characters; None skips none. Truncation could cut a picture
    in two."""
    training_template: Path | None = None
    """The chat template of `base` with `{% generation %}` around the assistant's text; None tries known
    templates, which fit the small models and Qwen2.5-VL."""
    training: FineTuning = FineTuning()


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Format the conversations and train; a dry run checks the base and counts them."""
    template = template_for(config)
    if dry_run:
        _report(training_rows(config))
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    rows = drawn(list(training_rows(config)), config.row_limit, config.training.seed)
    if not rows:
        raise ConfigError(
            f"{', '.join(map(str, config.records))}: no row of the train split teaches a reward "
            f"model of kind '{config.kind}'"
        )
    _report(rows)
    fine_tune(
        config.base,
        rows,
        config.training,
        directory,
        training_template=template,
        resume=resume is not None,
    )


def template_for(config: Config) -> str:
    """Return the training template, after checking the base.

    Raises:
        CheckpointError: The base cannot be loaded, or has no chat template.
        ConfigError: A verdict is not one token for its tokenizer, or no training template fits.
    """
    processor = open_processor(config.base)
    name = str(config.base)
    LabelTokens(name, ChatTemplate(name, processor), processor.tokenizer)(WORDS[config.kind])
    return training_template(config.base, processor, config.training_template)


def training_rows(config: Config) -> Iterator[Row]:
    """Yield the conversations of all files, in order.

    Raises:
        ConfigError: A file is missing, a line is not a CER row, or a picture cannot be opened.
    """
    pictures = Pictures(config.data_dir, config.faces)
    too_long = 0
    for path in config.records:
        for record in read_records(path, CerRecord):
            if record.case.split != "train":
                continue
            shown = pictures.shown(record.case.history)
            for messages in conversations(record, config.kind, shown):
                blocks, images = message_rows(messages)
                length = sum(len(block["text"] or "") for m in blocks for block in m["content"])
                if config.longest is not None and length > config.longest:
                    too_long += 1
                    continue
                yield {"messages": blocks, "images": images, "length": length}
    if too_long:
        _log.info("skipped %d conversations of more than %s characters", too_long, config.longest)


def _report(rows: Iterable[Row]) -> None:
    count = 0
    words: Counter[str] = Counter()
    for row in rows:
        count += 1
        words.update(
            message["content"][0]["text"]
            for message in row["messages"]
            if message["role"] == "assistant"
        )
    counts = ", ".join(f"{word} {number}" for word, number in sorted(words.items()))
    _log.info("%d conversations; verdicts: %s", count, counts or "none")
