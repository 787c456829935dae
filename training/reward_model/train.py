"""UnifiReward as multi-turn SFT on its verdicts (COMPEER, Eq. 4).

Run as `python -m training reward <config.toml>`. The loss is on the verdict words alone, all four
of a turn in one pass. The conversation is laid out by the functions that the judge itself uses.
"""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from compeer_core.backends.protocol import Message
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.prompts import judge_messages, neutralise, reply_question, step_question
from compeer_core.reasoning import parse, part_of, render_step
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import PREFERENCES, VERDICTS
from training.faces import read_faces
from training.fine_tuning import FineTuning, Row, fine_tune, message_rows
from training.reward_model.dataset import judged_turns
from training.run_directory import RunDirectory
from training.samples import SPLITS, JudgedTurn, Sample, drawn, read_records, write_records

_log = logging.getLogger(__name__)

TRAINING_TEMPLATE = Path(__file__).with_name("chatml_training.jinja")


class Config(FrozenModel):
    """`[reward]`: which turns, which base, how long."""

    samples: Path
    """Run directory of an SFT run: its `samples.<split>.jsonl` are read."""
    faces: Path
    """Folder of the packed faces."""
    base: Path
    """Checkpoint that the adapter is trained on: the policy's, so that both share one base."""
    output: Path
    """Run directory: `judged.<split>.jsonl`, then `adapter`, or `model` without LoRA."""
    false_share: float = 0.3
    """Share of wrong steps. Paper: 23 % of all step labels are False."""
    row_share: float = 1.0
    """Share of the judged turns that is trained on, drawn by the seed."""
    training: FineTuning = FineTuning()


def judge_conversation(turn: JudgedTurn, faces: dict[str, bytes]) -> tuple[Message, ...]:
    """Return the whole conversation with the judge, its answers included."""
    messages = list(judge_messages(turn.sample.dialogue(faces)))
    reasoning = parse(turn.sample.completion).reasoning
    steps = (reasoning.history, reasoning.emotion, reasoning.strategy)
    questions = [step_question(part_of(step), neutralise(render_step(step))) for step in steps]
    questions.append(reply_question(neutralise(turn.first), neutralise(turn.second)))
    answers = [VERDICTS[0] if right else VERDICTS[1] for right in turn.step_labels]
    answers.append(PREFERENCES[list(Preference).index(turn.preference)])
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        if number == 0:  # the first question ends the message that holds the history
            last = messages.pop()
            messages.append(Message("user", (*last.content, question)))
        else:
            messages.append(Message("user", (question,)))
        messages.append(Message("assistant", (answer,)))
    return tuple(messages)


def prepare_judged_turns(config: Config, output: Path, *, keep: bool = False) -> None:
    """Write the judged turns of every split.

    Args:
        config: The samples and the share of mistakes.
        output: Folder that receives `judged.<split>.jsonl`.
        keep: Leave the files that are there: a run that is resumed has already used them.
    """
    for split in SPLITS:
        path = output / f"judged.{split}.jsonl"
        if keep and path.exists():
            continue
        source = config.samples / f"samples.{split}.jsonl"
        samples = list(read_records(source, Sample))
        if len({sample.problem for sample in samples}) < 2:
            raise ConfigError(f"{source}: mistakes need dialogues about more than one problem")
        turns = list(
            judged_turns(samples, false_share=config.false_share, seed=config.training.seed)
        )
        write_records(path, turns)
        wrong = [f"{sum(not t.step_labels[i] for t in turns) / len(turns):.2f}" for i in range(3)]
        _log.info("%s: %d judged turns, share of wrong steps %s", split, len(turns), wrong)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Make the judged turns and train; a dry run only counts them."""
    if dry_run:
        with TemporaryDirectory() as scratch:
            prepare_judged_turns(config, Path(scratch))
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    prepare_judged_turns(config, directory.path, keep=resume is not None)
    turns = list(read_records(directory.path / "judged.train.jsonl", JudgedTurn))
    count = max(1, round(config.row_share * len(turns)))
    photos = {face.file: face.data for face in read_faces(config.faces)}
    rows: list[Row] = []
    for turn in drawn(turns, count, config.training.seed):
        messages, images = message_rows(judge_conversation(turn, photos))
        length = sum(len(block["text"] or "") for m in messages for block in m["content"])
        rows.append({"messages": messages, "images": images, "length": length})
    fine_tune(
        config.base,
        rows,
        config.training,
        directory,
        training_template=TRAINING_TEMPLATE,
        resume=resume is not None,
    )
