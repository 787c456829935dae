"""Pre-training: schedule and data order by hand, and resumption after interrupts at any point."""

import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from compeer_core.errors import ConfigError
from tests.training.corpora_fixture import esconv_row, write_blocks, write_esconv
from training.data.corpus import Source, SourceKind
from training.finetune.architecture import build_model
from training.finetune.optimisation import (
    Optimisers,
    learning_rate_factor,
    load_checkpoint,
    save_checkpoint,
)
from training.nano import pretrain
from training.nano.pretrain import (
    Config,
    block_order,
    language_loss,
    tokenise,
)
from training.stages import StoppedEarly

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6


@pytest.fixture
def config(small_corpora: Path, tokenizer_folder: Path, tiny_shape: Any, tmp_path: Path) -> Config:
    """Six steps of two short blocks; checkpoints at 2, 4 and 6, validation at 3 and 6."""
    return Config(
        data_dir=small_corpora,
        tokenizer=tokenizer_folder,
        output=tmp_path / "run",
        sources=(Source(path="esconv/valid.txt.gz", kind=SourceKind.ESCONV),),
        validation=(Source(path="english/dream.txt.gz", kind=SourceKind.DIALOGUE),),
        shape=tiny_shape,
        steps=STEPS,
        warmup_steps=2,
        decay_steps=2,
        batch_size=2,
        block_size=16,
        save_every=2,
        evaluate_every=3,
        validation_blocks=2,
    )


# --- schedule and data order ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.25),  # warm-up: (0 + 1) / 4
        (2, 0.75),
        (3, 1.0),  # plateau
        (6, 1.0),  # (10 - 6) / 4: the decay starts
        (7, 0.75),
        (9, 0.25),  # the last step
        (10, 0.0),  # the end
    ],
)
def test_learning_rate_warms_up_stays_and_decays(config, step, factor):
    config = config.model_copy(update={"steps": 10, "warmup_steps": 4, "decay_steps": 4})

    assert learning_rate_factor(step, config) == pytest.approx(factor)


def test_warm_up_and_decay_may_overlap_or_be_zero(config):
    overlap = config.model_copy(update={"steps": 4, "warmup_steps": 4, "decay_steps": 4})
    without = config.model_copy(update={"steps": 4, "warmup_steps": 0, "decay_steps": 0})

    # warm-up 2/4 times decay 3/4
    assert learning_rate_factor(1, overlap) == pytest.approx(0.375)
    assert [learning_rate_factor(step, without) for step in (0, 3, 4)] == [1.0, 1.0, 0.0]


def test_each_epoch_has_every_block_once_in_a_new_order():
    order = block_order(20, seed=1)
    epochs = [list(itertools.islice(order, 20)) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(itertools.islice(block_order(20, seed=1), 60)) == [*itertools.chain(*epochs)]
    assert list(itertools.islice(block_order(20, seed=2), 20)) != epochs[0]


def test_documents_end_with_the_end_token(tokenizer):
    stream = tokenise(["one", "two"], tokenizer)

    end = tokenizer.get_vocab()["<|endoftext|>"]
    assert stream.dtype == np.uint16
    assert stream.tolist() == [*tokenizer("one").input_ids, end, *tokenizer("two").input_ids, end]


def test_loss_equals_that_of_the_model(tokenizer, tiny_shape):
    # bypassing the image tower must not change the loss
    model = build_model(tiny_shape, tokenizer)
    block = torch.randint(0, len(tokenizer) - 10, (2, 17), generator=torch.manual_seed(0))

    whole = model(input_ids=block, attention_mask=torch.ones_like(block), labels=block).loss

    assert language_loss(model, block).item() == pytest.approx(whole.item(), rel=1e-5)


# --- optimisers ----------------------------------------------------------------------------------


def test_every_language_parameter_has_exactly_one_optimiser(config, tokenizer, tiny_shape):
    model = build_model(tiny_shape, tokenizer)
    muon, adamw = Optimisers.of_model(model, config).all

    name_of = {id(p): name for name, p in model.named_parameters()}
    by_muon, by_adamw = (
        [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        for optimizer in (muon, adamw)
    )
    language = [name for name in name_of.values() if ".visual." not in name]
    assert sorted(by_muon + by_adamw) == sorted(language)
    assert isinstance(muon, torch.optim.Muon)
    # per layer q, k, v, o and three of the MLP
    assert len(by_muon) == 2 * 7
    assert all(".layers." in name and name.endswith("_proj.weight") for name in by_muon)
    assert "model.language_model.embed_tokens.weight" in by_adamw


# --- interruptions -------------------------------------------------------------------------------


class PowerCut(BaseException):
    """Not an Exception, so that no handler catches it."""


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on time."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"time", "tokens_per_second"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def at_pass(number: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call `action` during a forward pass, counted from 1."""
    passes = itertools.count(1)

    def loss(*arguments: Any) -> torch.Tensor:
        if next(passes) == number:
            action()
        return language_loss(*arguments)

    monkeypatch.setattr(pretrain, "language_loss", loss)


def cut() -> None:
    raise PowerCut


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def uninterrupted(config: Config, tmp_path: Path) -> Path:
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    pretrain.run(whole)
    return whole.output


def test_resumed_run_equals_an_uninterrupted_one(config, uninterrupted, monkeypatch, tmp_path):
    expected, end = rows(uninterrupted), weights(uninterrupted)
    assert [row["step"] for row in expected] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in expected if "validation_loss" in row] == [3, 6]

    # forward passes 1 to 3 are steps 1 to 3; 4 and 5 are validation; 6 to 8 are steps 4 to 6
    for action, error in ((cut, PowerCut), (interrupt, StoppedEarly)):
        for number in (1, 2, 3, 4, 6, 7, 8):
            output = tmp_path / f"{error.__name__}-{number}"
            broken = config.model_copy(update={"output": output})
            with monkeypatch.context() as patch:
                at_pass(number, patch, action)
                with pytest.raises(error):
                    pretrain.run(broken)
            pretrain.run(broken, resume=output)

            assert rows(output) == expected, (action, number)
            assert end.keys() == weights(output).keys()
            assert all(torch.equal(end[name], w) for name, w in weights(output).items())


def test_ctrl_c_saves_the_step_and_reports_how_to_resume(config, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    at_pass(3, monkeypatch, interrupt)

    with pytest.raises(
        StoppedEarly, match=f"saved at step 3; resume with --resume {config.output}"
    ):
        pretrain.run(config)

    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(config.output / "checkpoint" / "state.pt")["step"] == 3
    assert not (config.output / "model").exists()


def test_second_ctrl_c_stops_immediately(config, monkeypatch):
    def twice() -> None:
        interrupt()
        interrupt()

    at_pass(2, monkeypatch, twice)
    # Background jobs of a shell ignore SIGINT, and tests inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(config)
    finally:
        signal.signal(signal.SIGINT, before)


def test_resumed_run_may_change_only_its_length(config):
    pretrain.run(config)
    longer = config.model_copy(update={"steps": STEPS + 1, "decay_steps": 1})
    other = config.model_copy(update={"batch_size": 4, "muon_lr": 0.5})

    with pytest.raises(ConfigError, match=r"batch_size \(was 2, now 4\), muon_lr \(was 0.02"):
        pretrain.run(other, resume=config.output)
    with pytest.raises(ConfigError, match="there is already a run"):
        pretrain.run(config)
    pretrain.run(longer, resume=config.output)

    assert [row["step"] for row in rows(config.output)] == list(range(1, STEPS + 2))
    summary = json.loads((config.output / "model" / "pretraining.json").read_text("utf-8"))
    assert summary == {"steps": 7, "tokens": 7 * 2 * 16}


def test_run_without_steps_leaves_no_caches_behind(config, monkeypatch, uninterrupted):
    other = config.model_copy(
        update={"sources": (Source(path="english/grimm_tales.txt.gz", kind=SourceKind.PLAIN),)}
    )
    with monkeypatch.context() as patch:
        at_pass(1, patch, cut)
        with pytest.raises(PowerCut):
            pretrain.run(other)
    assert (other.output / "train.uint16.npy").exists()

    pretrain.run(config)

    assert rows(config.output) == rows(uninterrupted)


# --- atomic checkpoints --------------------------------------------------------------------------


def state(step: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a model whose only weight is its step number, and an optimiser."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, step)
    return model, [torch.optim.SGD(model.parameters(), lr=1.0)]


def save(folder: Path, step: int) -> None:
    save_checkpoint(folder, *state(step), step)


def load(folder: Path) -> int:
    """Return the step of the checkpoint, after checking its weights."""
    model, optimizers = state(-1)
    step = load_checkpoint(folder, model, optimizers)
    assert step == 0 or model.weight.item() == step
    return step


def save_until(folder: Path, step: int, moment: int) -> bool:
    """Save, and simulate a power cut before a numbered disk operation; whether it was reached."""
    operations = itertools.count()

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if next(operations) == moment:
                raise PowerCut
            return operation(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        patch.setattr(Path, "replace", dying(Path.replace))
        patch.setattr(torch, "save", dying(torch.save))
        try:
            save(folder, step)
        except PowerCut:
            return True
    return False


def test_power_cut_leaves_the_old_or_the_new_checkpoint(tmp_path):
    for first in range(10):
        for second in range(10):
            folder = tmp_path / f"{first}-{second}" / "checkpoint"
            save(folder, 1)
            was_cut = save_until(folder, 2, first)
            step = load(folder)
            assert step == 2 if not was_cut else step in {1, 2}

            # the run resumes, and is killed in its next save as well
            was_cut = save_until(folder, step + 1, second)
            assert load(folder) == step + 1 if not was_cut else load(folder) in {step, step + 1}

            save(folder, 9)
            assert load(folder) == 9
    assert not save_until(folder, 10, 9), "there are at most ten disk operations"


def test_without_a_checkpoint_the_step_is_0(tmp_path):
    assert load(tmp_path / "checkpoint") == 0


# --- checks before training ----------------------------------------------------------------------


def test_dry_run_checks_the_files_and_writes_nothing(config):
    pretrain.run(config, dry_run=True)
    assert not config.output.exists()

    missing = (*config.sources, Source(path="english/missing.txt.gz", kind=SourceKind.PLAIN))
    with pytest.raises(ConfigError, match=r"missing\.txt\.gz: no such corpus file"):
        pretrain.run(config.model_copy(update={"sources": missing}), dry_run=True)


def test_reports_a_missing_tokenizer(config, tmp_path):
    with pytest.raises(ConfigError, match=r"elsewhere: contains no tokenizer"):
        pretrain.run(config.model_copy(update={"tokenizer": tmp_path / "elsewhere"}))


@pytest.mark.parametrize("part", ["sources", "validation"])
def test_rejects_too_little_text_before_the_first_step(config, tmp_path, part):
    write_blocks(tmp_path / "little.txt.gz", ["A word."])
    little = config.model_copy(
        update={
            "data_dir": tmp_path if part == "sources" else config.data_dir,
            part: (Source(path=str(tmp_path / "little.txt.gz"), kind=SourceKind.PLAIN),),
            "validation" if part == "sources" else "sources": (
                Source(path=str(config.data_dir / "esconv/valid.txt.gz"), kind=SourceKind.ESCONV),
            ),
        }
    )

    with pytest.raises(ConfigError, match=rf"{part}: \d+ tokens, at least 32 are needed"):
        pretrain.run(little)

    assert not (config.output / "metrics.jsonl").exists()


# --- decontamination -----------------------------------------------------------------------------

TESTED = (
    ("usr", "My manager told the whole team yesterday that I had failed again."),
    ("sys", "That sounds like a hard thing to hear in front of all of them.", "Others"),
)


def test_near_duplicates_of_test_documents_are_removed_and_counted(config, tmp_path):
    fresh = [
        ("usr", "Another day without a word from any one of my friends."),
        ("sys", "Oh.", "Others"),
    ]
    write_esconv(tmp_path / "corpora" / "train.txt.gz", [esconv_row(TESTED), esconv_row(fresh)] * 8)
    write_esconv(tmp_path / "corpora" / "test.txt.gz", [esconv_row(TESTED)])
    tested = Source(path="test.txt.gz", kind=SourceKind.ESCONV)
    changed = config.model_copy(
        update={
            "data_dir": tmp_path / "corpora",
            "sources": (Source(path="train.txt.gz", kind=SourceKind.ESCONV),),
            "validation": (Source(path="train.txt.gz", kind=SourceKind.ESCONV),),
            "held_out": (tested,),
            "steps": 1,
        }
    )

    pretrain.run(changed)

    counts = json.loads((config.output / "left_out.json").read_text(encoding="utf-8"))
    assert counts == {"tested": 1, "seen": 16, "left_out": 8}
    tokens = np.load(config.output / "train.uint16.npy")
    text = AutoTokenizer.from_pretrained(config.tokenizer).decode(tokens)
    assert "friends" in text and "manager" not in text
    assert "8 of 16 documents removed" in (config.output / "log.txt").read_text(encoding="utf-8")


def test_reports_a_missing_held_out_file(config):
    missing = config.model_copy(
        update={"held_out": (Source(path="nowhere.txt.gz", kind=SourceKind.ESCONV),)}
    )
    with pytest.raises(ConfigError, match="nowhere"):
        pretrain.run(missing, dry_run=True)
