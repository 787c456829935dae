"""Pre-training: its schedule and its order by hand, and that an interruption changes nothing."""

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
    """Six steps of two short blocks; a checkpoint at 2, 4 and 6, the validation loss at 3 and 6."""
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


# --- the schedule and the order ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.25),  # warm-up: (0 + 1) / 4
        (2, 0.75),
        (3, 1.0),  # plateau
        (6, 1.0),  # (10 - 6) / 4 are left: the decay begins
        (7, 0.75),
        (9, 0.25),  # the last step made
        (10, 0.0),  # the end
    ],
)
def test_the_learning_rate_warms_up_stays_and_falls(config, step, factor):
    config = config.model_copy(update={"steps": 10, "warmup_steps": 4, "decay_steps": 4})

    assert learning_rate_factor(step, config) == pytest.approx(factor)


def test_warm_up_and_decay_may_overlap_or_be_left_out(config):
    overlap = config.model_copy(update={"steps": 4, "warmup_steps": 4, "decay_steps": 4})
    without = config.model_copy(update={"steps": 4, "warmup_steps": 0, "decay_steps": 0})

    # 2/4 warm times 3/4 left; the product, so that neither limit is broken
    assert learning_rate_factor(1, overlap) == pytest.approx(0.375)
    assert [learning_rate_factor(step, without) for step in (0, 3, 4)] == [1.0, 1.0, 0.0]


def test_every_epoch_holds_each_block_once_in_an_order_of_its_own():
    order = block_order(20, seed=1)
    epochs = [list(itertools.islice(order, 20)) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(itertools.islice(block_order(20, seed=1), 60)) == [*itertools.chain(*epochs)]
    assert list(itertools.islice(block_order(20, seed=2), 20)) != epochs[0]


def test_the_stream_ends_each_document_with_its_token(tokenizer):
    stream = tokenise(["one", "two"], tokenizer)

    end = tokenizer.get_vocab()["<|endoftext|>"]
    assert stream.dtype == np.uint16
    assert stream.tolist() == [*tokenizer("one").input_ids, end, *tokenizer("two").input_ids, end]


def test_the_loss_is_the_models_own(tokenizer, tiny_shape):
    # the shortcut past the image half must not change what is learnt
    model = build_model(tiny_shape, tokenizer)
    block = torch.randint(0, len(tokenizer) - 10, (2, 17), generator=torch.manual_seed(0))

    whole = model(input_ids=block, attention_mask=torch.ones_like(block), labels=block).loss

    assert language_loss(model, block).item() == pytest.approx(whole.item(), rel=1e-5)


# --- who is trained by what ----------------------------------------------------------------------


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
    # per layer q, k, v, o and three of the MLP; biases, norms and the embedding are no matrices of it
    assert len(by_muon) == 2 * 7
    assert all(".layers." in name and name.endswith("_proj.weight") for name in by_muon)
    assert "model.language_model.embed_tokens.weight" in by_adamw


# --- interruptions -------------------------------------------------------------------------------


class PowerCut(BaseException):
    """Not an Exception: nothing may catch it on the way."""


def rows(run: Path) -> list[dict[str, Any]]:
    """What was measured, without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"time", "tokens_per_second"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def at_pass(number: int, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen in the middle of a forward pass, counted from 1."""
    made = itertools.count(1)

    def loss(*arguments: Any) -> torch.Tensor:
        if next(made) == number:
            happens()
        return language_loss(*arguments)

    monkeypatch.setattr(pretrain, "language_loss", loss)


def cut() -> None:
    raise PowerCut


def ask_to_stop() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def uninterrupted(config: Config, tmp_path: Path) -> Path:
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    pretrain.run(whole)
    return whole.output


def test_a_run_interrupted_anywhere_ends_as_an_uninterrupted_one(
    config, uninterrupted, monkeypatch, tmp_path
):
    expected, end = rows(uninterrupted), weights(uninterrupted)
    assert [row["step"] for row in expected] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in expected if "validation_loss" in row] == [3, 6]

    # forward passes 1, 2, 3 make steps 1, 2, 3; 4 and 5 are validation; 6, 7, 8 make steps 4, 5, 6
    for happens, error in ((cut, PowerCut), (ask_to_stop, StoppedEarly)):
        for number in (1, 2, 3, 4, 6, 7, 8):
            output = tmp_path / f"{error.__name__}-{number}"
            broken = config.model_copy(update={"output": output})
            with monkeypatch.context() as patch:
                at_pass(number, patch, happens)
                with pytest.raises(error):
                    pretrain.run(broken)
            pretrain.run(broken, resume=output)

            assert rows(output) == expected, (happens, number)
            assert end.keys() == weights(output).keys()
            assert all(torch.equal(end[name], w) for name, w in weights(output).items())


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(config, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    at_pass(3, monkeypatch, ask_to_stop)

    with pytest.raises(StoppedEarly, match=f"saved at step 3; resume with --resume {config.output}"):
        pretrain.run(config)

    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(config.output / "checkpoint" / "state.pt")["step"] == 3
    assert not (config.output / "model").exists()


def test_a_second_ctrl_c_is_not_held_back(config, monkeypatch):
    def twice() -> None:
        ask_to_stop()
        ask_to_stop()

    at_pass(2, monkeypatch, twice)
    # A shell starts what runs in the background with Ctrl-C ignored, and tests inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(config)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_resumed_run_may_be_longer_and_no_different_otherwise(config):
    pretrain.run(config)
    longer = config.model_copy(update={"steps": STEPS + 1, "decay_steps": 1})
    other = config.model_copy(update={"batch_size": 4, "muon_lr": 0.5})

    with pytest.raises(ConfigError, match=r"batch_size \(was 2, now 4\), muon_lr \(was 0.02"):
        pretrain.run(other, resume=config.output)
    with pytest.raises(ConfigError, match="a run is already there"):
        pretrain.run(config)
    pretrain.run(longer, resume=config.output)

    assert [row["step"] for row in rows(config.output)] == list(range(1, STEPS + 2))
    summary = json.loads((config.output / "model" / "pretraining.json").read_text("utf-8"))
    assert summary == {"steps": 7, "tokens": 7 * 2 * 16}


def test_a_start_that_made_no_step_leaves_nothing_to_the_next(config, monkeypatch, uninterrupted):
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


# --- the checkpoint at any moment ----------------------------------------------------------------


def state(step: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model whose only weight is the number of its step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, step)
    return model, [torch.optim.SGD(model.parameters(), lr=1.0)]


def save(folder: Path, step: int) -> None:
    save_checkpoint(folder, *state(step), step)


def load(folder: Path) -> int:
    """Return the step that is found, once the weights are known to be that step's."""
    model, optimizers = state(-1)
    step = load_checkpoint(folder, model, optimizers)
    assert step == 0 or model.weight.item() == step
    return step


def save_until(folder: Path, step: int, moment: int) -> bool:
    """Save, but lose power before the operation on the disk with that number; was it reached?"""
    done = itertools.count()

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if next(done) == moment:
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


def test_a_power_cut_at_any_moment_leaves_the_last_checkpoint_or_the_new_one(tmp_path):
    for first in range(10):
        for second in range(10):
            folder = tmp_path / f"{first}-{second}" / "checkpoint"
            save(folder, 1)
            was_cut = save_until(folder, 2, first)
            found = load(folder)
            assert found == 2 if not was_cut else found in {1, 2}

            # the run goes on from what was found, and dies in its next save, too
            was_cut = save_until(folder, found + 1, second)
            assert load(folder) == found + 1 if not was_cut else load(folder) in {found, found + 1}

            save(folder, 9)
            assert load(folder) == 9
    assert not save_until(folder, 10, 9), "ten moments are all there are"


def test_without_a_checkpoint_a_run_begins_at_its_first_step(tmp_path):
    assert load(tmp_path / "checkpoint") == 0


# --- what is refused before anything is trained --------------------------------------------------


def test_a_dry_run_checks_the_files_and_writes_nothing(config):
    pretrain.run(config, dry_run=True)
    assert not config.output.exists()

    missing = (*config.sources, Source(path="english/missing.txt.gz", kind=SourceKind.PLAIN))
    with pytest.raises(ConfigError, match=r"missing\.txt\.gz: no such corpus file"):
        pretrain.run(config.model_copy(update={"sources": missing}), dry_run=True)


def test_a_missing_tokenizer_is_named(config, tmp_path):
    with pytest.raises(ConfigError, match=r"elsewhere: no tokenizer there"):
        pretrain.run(config.model_copy(update={"tokenizer": tmp_path / "elsewhere"}))


@pytest.mark.parametrize("part", ["sources", "validation"])
def test_too_little_text_is_refused_before_the_first_step(config, tmp_path, part):
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


# --- what is tested ------------------------------------------------------------------------------

TESTED = (
    ("usr", "My manager told the whole team yesterday that I had failed again."),
    ("sys", "That sounds like a hard thing to hear in front of all of them.", "Others"),
)


def test_what_repeats_a_tested_dialogue_is_left_out_and_counted(config, tmp_path):
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

    found = json.loads((config.output / "left_out.json").read_text(encoding="utf-8"))
    assert found == {"tested": 1, "seen": 16, "left_out": 8}
    tokens = np.load(config.output / "train.uint16.npy")
    text = AutoTokenizer.from_pretrained(config.tokenizer).decode(tokens)
    assert "friends" in text and "manager" not in text
    assert "8 of 16 documents left out" in (config.output / "log.txt").read_text(encoding="utf-8")


def test_a_missing_file_of_what_is_tested_is_named(config):
    missing = config.model_copy(
        update={"held_out": (Source(path="nowhere.txt.gz", kind=SourceKind.ESCONV),)}
    )
    with pytest.raises(ConfigError, match="nowhere"):
        pretrain.run(missing, dry_run=True)
