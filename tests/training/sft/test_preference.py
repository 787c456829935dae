"""DPO of an adapter: the loss by hand, rows against separate samples, and runs stopped and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from compeer_core.cer import CerRecord, DecidedBy, StepLabels
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse, render
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from tests.training.runs import SHORT_SCHEDULE, interrupt_at_step_3, metrics_of, weights
from tests.training.sft.test_adapter import turn_of
from training.data.pictures import Pictures
from training.finetune.base_model import LoraShape
from training.finetune.shared_prefix import (
    ATTENTION,
    TokenisedSample,
    predicted_logits,
    shared_prefix_row,
)
from training.finetune.small_adapter import add_adapter, load_small_base, save_adapter
from training.finetune.tokenise import SampleReader
from training.sft import preference
from training.sft.preference import (
    Config,
    PairRow,
    TurnPair,
    log_probabilities,
    preference_loss,
    read_pairs,
    without_shared_beginning,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

LORA = LoraShape(rank=4, alpha=8)


def pair_of(number: int, *, preferred: Preference = Preference.FIRST, **changes: Any) -> CerRecord:
    """The turn of dialogue `number`, and the same with another reply."""
    row = turn_of(number, 0, **changes)
    turn = parse(row.first.turn)
    worse = render(turn.__class__(turn.reasoning, f"What do you like about it, {number}?"))
    second = row.first.model_copy(update={"turn": worse, "reply": parse(worse).reply})
    return row.model_copy(
        update={
            "second": second,
            "preference": preferred,
            "preference_by": DecidedBy(kind="model", name="a reader"),
        }
    )


def without_preference(row: CerRecord, *steps: StepLabels) -> CerRecord:
    """The row with step labels alone."""
    first, second = (
        candidate.model_copy(update={"steps": labels, "steps_by": row.preference_by})
        for candidate, labels in zip((row.first, row.second), steps, strict=True)
    )
    changes = {"first": first, "second": second, "preference": None, "preference_by": None}
    return row.model_copy(update=changes)


@pytest.fixture
def config(tiny_base: Path, tmp_path: Path) -> Config:
    """Ten pairs, four a step, from an adapter that changes nothing."""
    rows = [pair_of(n) for n in range(10)]
    rows += [pair_of(n, split="valid") for n in range(10, 13)]
    write_rows(tmp_path / "rows.jsonl", rows)
    model = load_small_base(tiny_base, "fp32")
    save_adapter(add_adapter(model, LORA, tiny_base), tiny_base, tmp_path / "start")
    return Config(
        records=(tmp_path / "rows.jsonl",),
        base=tiny_base,
        start=tmp_path / "start",
        output=tmp_path / "run",
        lora=LORA,
        compute="fp32",
        pairs_per_step=4,
        steps=5,
        **SHORT_SCHEDULE,
        validation_pairs=3,
    )


def changed(config: Config, **changes: Any) -> Config:
    return config.model_copy(update=changes)


# --- the loss ------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """The better turn gained 2 nats, the worse lost 3: -ln sigmoid(0.1 * 5) = ln(1 + e^-0.5)."""
    policy, reference = torch.tensor([-8.0, -15.0]), torch.tensor([-10.0, -12.0])

    assert preference_loss(policy, reference, 0.1).item() == pytest.approx(0.47408, abs=1e-5)


@given(st.lists(st.floats(-50, 0), min_size=4, max_size=4), st.floats(0.01, 1), st.floats(0.1, 20))
def test_the_loss_falls_as_the_better_turn_gains_and_ignores_what_both_gain(values, beta, gain):
    policy, reference = torch.tensor(values, dtype=torch.float64).chunk(2)
    loss = preference_loss(policy, reference, beta)

    assert preference_loss(policy + gain, reference, beta) == pytest.approx(loss.item())
    better = policy + torch.tensor([gain, 0.0])
    assert preference_loss(better, reference, beta) <= loss


def test_log_probabilities_are_split_between_the_turns():
    samples = [
        TokenisedSample((1, 2), (3, 4), torch.arange(4).expand(3, 4)),
        TokenisedSample((1, 2), (5,), torch.arange(3).expand(3, 3)),
    ]
    logits = torch.randn((3, 8), generator=torch.Generator().manual_seed(0))
    of_token = logits.log_softmax(-1)

    (turns,) = log_probabilities(PairRow((0,), shared_prefix_row(samples), ((2, 1),)), logits)

    expected = [of_token[0, 3] + of_token[1, 4], of_token[2, 5]]
    assert turns.tolist() == pytest.approx([value.item() for value in expected], abs=1e-5)


# --- rows ----------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_the_shared_beginning_moves_to_the_prompt(one, other):
    one, other = [*one, 9], [*other, 9]  # both end with the end-of-turn token
    samples = [
        TokenisedSample((7, 8), tuple(c), torch.arange(2 + len(c)).expand(3, -1))
        for c in (one, other)
    ]

    better, worse = without_shared_beginning(*samples)

    assert better.prompt == worse.prompt
    for sample, completion in ((better, one), (worse, other)):
        assert (*sample.prompt, *sample.completion) == (7, 8, *completion)
        assert sample.completion
    if one != other:
        assert better.completion[0] != worse.completion[0] or 1 in (
            len(better.completion),
            len(worse.completion),
        )


def test_a_row_has_the_difference_of_separate_turns(tiny_base):
    model = load_small_base(tiny_base, "fp32")
    reader = SampleReader(tiny_base, model)
    row = pair_of(1)
    pair = TurnPair(row.case, row.first.turn, row.second.turn)
    dialogue = Pictures(None, None).dialogue(pair.case)
    whole = []
    for text in (pair.better, pair.worse):
        sample = reader.read_turn(dialogue, text)
        tokens = torch.tensor([[*sample.prompt, *sample.completion]])
        logits = model(input_ids=tokens, position_ids=sample.positions[:, None]).logits
        predicted = logits[0, len(sample.prompt) - 1 : -1]
        targets = torch.tensor(sample.completion)
        whole.append(-functional.cross_entropy(predicted, targets, reduction="sum").item())
    packed = preference._RowBuilder(reader, Pictures(None, None)).row(0, pair)
    model.model.language_model.set_attn_implementation(ATTENTION)

    [(better, worse)] = log_probabilities(packed, predicted_logits(model, packed.row)).tolist()

    assert packed.sizes[0][0] < len(reader.read_turn(dialogue, pair.better).completion)
    assert better - worse == pytest.approx(whole[0] - whole[1], abs=1e-3)


def test_the_better_turn_has_the_preferred_reply_or_no_wrong_step(tmp_path):
    rows = [
        pair_of(0, preferred=Preference.SECOND),
        pair_of(1, preferred=Preference.BOTH),
        pair_of(2, split="valid"),
        turn_of(3, 0),
        without_preference(pair_of(4), (True, None, True), (True, False, None)),
        without_preference(pair_of(5), (True, True, True), (True, None, True)),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)

    by_reply, by_step = read_pairs([tmp_path / "rows.jsonl"], "train")

    assert (by_reply.better, by_reply.worse) == (rows[0].second.turn, rows[0].first.turn)
    assert (by_step.better, by_step.worse) == (rows[4].first.turn, rows[4].second.turn)


def test_rows_without_pairs_are_refused(config, tmp_path):
    write_rows(tmp_path / "single.jsonl", [turn_of(0, 0)])

    with pytest.raises(
        ConfigError,
        match=r"single.jsonl: no row of the train split has two turns of which one is better",
    ):
        preference.run(changed(config, records=(tmp_path / "single.jsonl",)))
    assert not config.output.exists()


# --- runs ----------------------------------------------------------------------------------------


def test_the_better_turns_gain_against_the_worse_ones(config):
    preference.run(config)

    measured = metrics_of(config.output)
    assert [row["step"] for row in measured] == [1, 2, 3, 4, 5]
    # before the first update nothing has moved: ln 2, and 0.1 times ln 600 for 600 tokens
    assert measured[0]["loss"] == pytest.approx(0.693 + 0.1 * 6.4, abs=0.05)
    last = measured[-1]
    assert last["validation_loss"] < 0.68
    assert last["better_gained_more"] == 1
    assert weights(config.output / "adapter")


def test_pairs_that_are_padded_together_teach_the_same(config, tmp_path):
    padded = changed(config, batch_tokens=1000, output=tmp_path / "padded")
    preference.run(config)
    preference.run(padded)

    for one, other in zip(metrics_of(config.output), metrics_of(padded.output), strict=True):
        for name in ("loss", "validation_loss", "better_gained_more", "better_nll"):
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-3)


def test_a_dry_run_counts_and_writes_nothing(config, caplog):
    caplog.set_level("INFO")

    preference.run(config, dry_run=True)

    assert "10 pairs to learn, 3 held out" in caplog.text
    assert not config.output.exists()


def test_an_interrupted_run_continues_with_the_reference_it_began_with(config, monkeypatch):
    preference.run(config)
    stopped = changed(config, output=config.output.with_name("stopped"))
    with interrupt_at_step_3(monkeypatch):
        preference.run(stopped)
    preference.run(stopped, resume=stopped.output)

    whole, continued = weights(config.output / "adapter"), weights(stopped.output / "adapter")
    assert all(torch.equal(continued[name], weight) for name, weight in whole.items())
    kept = ("loss", "validation_loss")
    assert [{k: row[k] for k in kept if k in row} for row in metrics_of(config.output)] == [
        {k: row[k] for k in kept if k in row} for row in metrics_of(stopped.output)
    ]
