"""SFT of a policy on turns in the output grammar: `python -m training sft <config.toml>`.

The loss is on the completion alone: three steps and the reply, never the history.
"""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import Field

from compeer_core.backends.protocol import Message
from compeer_core.cer import SPLITS
from compeer_core.config import FrozenModel
from compeer_core.prompts import policy_messages
from training.esconv import read_esconv
from training.faces import face_class_of, read_faces
from training.fine_tuning import FineTuning, Row, fine_tune, message_rows
from training.processes import first_goes_ahead, is_first
from training.run_directory import RunDirectory
from training.samples import Sample, drawn, read_records, write_records
from training.sft.dataset import build_samples

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[sft]`: which dialogues, which base, how long."""

    esconv: Path
    """Folder with ESConv's `train.txt.gz`, `valid.txt.gz` and `test.txt.gz`."""
    faces: Path
    """Folder of the packed faces."""
    base: Path
    """Checkpoint to start from."""
    output: Path
    """Run directory: `samples.<split>.jsonl`, then `model` or `adapter`."""
    face_share: float = 0.25
    """Share of turns whose last seeker message gets a photo that fits the emotion."""
    told_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the turns after a mere greeting in which a face tells the emotion."""
    history_characters: int = 1200
    """Older turns are left out beyond this."""
    row_share: float = 1.0
    """Share of the samples that is trained on, drawn by the seed."""
    training: FineTuning = FineTuning()


def prepare_samples(config: Config, output: Path, *, keep: bool = False) -> None:
    """Write the samples of every split; photos never cross splits.

    Args:
        config: The dialogues, the photos and how many of them.
        output: Folder that receives `samples.<split>.jsonl`.
        keep: Leave the files that are there: a run that is resumed has already used them.
    """
    photos = read_faces(config.faces)
    class_of = face_class_of(config.faces)
    for split in SPLITS:
        path = output / f"samples.{split}.jsonl"
        if keep and path.exists():
            continue
        by_class: dict[str, list[str]] = {}
        for photo in photos:
            if photo.split == ("train" if split == "train" else "valid"):
                by_class.setdefault(photo.face_class, []).append(photo.file)
        count = write_records(
            path,
            build_samples(
                read_esconv(config.esconv / f"{split}.txt.gz", split),
                by_class,
                class_of,
                face_share=config.face_share,
                history_characters=config.history_characters,
                seed=config.training.seed,
                told_share=config.told_share,
            ),
        )
        _log.info("%s: %d samples", split, count)


def sample_row(sample: Sample, faces: dict[str, bytes]) -> Row:
    """Return one sample in trl's columns; `length` is an estimate in characters."""
    prompt, images = message_rows(policy_messages(sample.dialogue(faces), "trained"))
    completion, _ = message_rows([Message("assistant", (sample.completion,))])
    length = sum(len(turn.text) for turn in sample.history) + len(sample.completion)
    return {"prompt": prompt, "completion": completion, "images": images, "length": length}


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Build the samples and train; a dry run only counts the samples."""
    if dry_run:
        with TemporaryDirectory() as scratch:
            prepare_samples(config, Path(scratch))
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    with first_goes_ahead():
        prepare_samples(config, directory.path, keep=resume is not None or not is_first())
    samples = list(read_records(directory.path / "samples.train.jsonl", Sample))
    count = max(1, round(config.row_share * len(samples)))
    chosen = drawn(samples, count, config.training.seed)
    directory.log("%d samples, %d of them used", len(samples), len(chosen))
    photos = {face.file: face.data for face in read_faces(config.faces)}
    rows = [sample_row(sample, photos) for sample in chosen]
    fine_tune(config.base, rows, config.training, directory, resume=resume is not None)
