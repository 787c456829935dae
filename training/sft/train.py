"""SFT of a policy on turns in the output grammar: `python -m training sft <config.toml>`.

The loss is on the completion alone: three steps and the reply, never the history.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from compeer_core.backends.protocol import Message
from compeer_core.dialogue import Dialogue
from compeer_core.prompts import policy_messages
from training.common.processes import first_process_first, is_first
from training.common.run_directory import RunDirectory
from training.data.faces import read_faces
from training.data.samples import Sample, drawn, read_records
from training.finetune.sft_trainer import FineTuning, Row, fine_tune, message_rows
from training.sft.source import SampleSource, prepare_samples


class Config(SampleSource):
    """`[sft]`: which dialogues, which base, how long."""

    base: Path
    """Checkpoint to start from."""
    output: Path
    """Run directory: `samples.<split>.jsonl`, then `model` or `adapter`."""
    row_share: float = 1.0
    """Share of the samples that is trained on, drawn by the seed."""
    training: FineTuning = FineTuning()


def sample_row(sample: Sample, faces: dict[str, bytes]) -> Row:
    """Return one sample in trl's columns."""
    return turn_row(sample.dialogue(faces), sample.completion)


def turn_row(dialogue: Dialogue, completion: str) -> Row:
    """Return a history and the turn that answers it in trl's columns; `length` is in characters."""
    prompt, images = message_rows(policy_messages(dialogue, "trained"))
    answer, _ = message_rows([Message("assistant", (completion,))])
    length = sum(len(said.text) for said in dialogue) + len(completion)
    return {"prompt": prompt, "completion": answer, "images": images, "length": length}


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Build the samples and train; a dry run only counts the samples."""
    if dry_run:
        with TemporaryDirectory() as scratch:
            prepare_samples(config, config.training.seed, Path(scratch))
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    with first_process_first():
        keep = resume is not None or not is_first()
        prepare_samples(config, config.training.seed, directory.path, keep=keep)
    samples = list(read_records(directory.path / "samples.train.jsonl", Sample))
    count = max(1, round(config.row_share * len(samples)))
    chosen = drawn(samples, count, config.training.seed)
    directory.log("%d samples, %d of them used", len(samples), len(chosen))
    photos = {face.file: face.data for face in read_faces(config.faces)}
    rows = [sample_row(sample, photos) for sample in chosen]
    fine_tune(config.base, rows, config.training, directory, resume=resume is not None)
