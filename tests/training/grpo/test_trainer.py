"""The overrides of trl's trainer: its advantages and loss, and completions sampled from the policy."""

import threading
from typing import Any

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.batch_generation import Prompt, generate_turns
from training.data.histories import has_pictures
from training.grpo.trainer import GroupTrainer, _runs

pytestmark = [
    pytest.mark.usefixtures("one_thread", "words"),
    # trl 1.16 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


def inputs_of(one: GroupTrainer) -> list[dict[str, Any]]:
    return next(iter(one.get_train_dataloader()))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls_where_the_floor_does_not_act(trainer, scale, monkeypatch):
    theirs: list[torch.Tensor] = []
    generate = GRPOTrainer._generate_and_score_completions

    def kept(self: Any, inputs: Any) -> Any:
        output = generate(self, inputs)
        theirs.append(output["advantages"].clone())
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", kept)
    one = trainer(scale=scale, group_size=4, accumulation=4, std_floor=1e-3)
    rewards = torch.tensor([[3.0], [1.0], [-5.0], [3.0], [1.5], [float("nan")], [2.5], [-0.5]])
    monkeypatch.setattr(one._reward, "__call__", None, raising=False)

    def paid(*arguments: Any) -> torch.Tensor:
        one._rewards = rewards
        return rewards

    monkeypatch.setattr(one, "_calculate_rewards", paid)
    one.model.train()

    ours = one._generate_and_score_completions(inputs_of(one))["advantages"]

    # trl adds 1e-4 to the standard deviation; ours does not
    assert ours.tolist() == pytest.approx(theirs[0].tolist(), rel=2e-4, abs=1e-6)
    assert ours[5] == 0 and ours.abs().sum() > 3


def test_the_floor_keeps_noise_small_where_trl_does_not(trainer, monkeypatch):
    one = trainer(group_size=4, accumulation=2)
    rewards = torch.tensor([[2.000], [2.001], [2.002], [2.003]])

    def paid(*arguments: Any) -> torch.Tensor:
        one._rewards = rewards
        return rewards

    monkeypatch.setattr(one, "_calculate_rewards", paid)
    one.model.train()

    output = one._generate_and_score_completions(inputs_of(one))

    assert output["advantages"].abs().max() < 0.02
    # and it is these that the loss is made of
    assert one._buffered_inputs is None
    inputs = one._prepare_inputs(inputs_of(one))
    assert inputs["advantages"].abs().max() < 0.02


def test_what_is_trained_on_is_what_was_written_after_the_prompt(trainer):
    one = trainer(group_size=2, accumulation=4, max_new_tokens=8)
    one.model.train()
    inputs = inputs_of(one)

    output = one._generate_and_score_completions(inputs)

    rows = [row["row"] for row in inputs]
    assert rows[0] == rows[1] != rows[2]
    shown = [has_pictures(one._book.records[row]) for row in rows]
    processor = one.processing_class
    for place, row in enumerate(rows):
        mask = output["prompt_mask"][place].bool()
        said = processor.tokenizer.decode(output["prompt_ids"][place][mask])
        assert said.count("<|im_start|>user") == 2
        assert f"number {one._book.records[row].case.source_id[1:]}" in said
        assert ("<|image_pad|>" in said) == shown[place]
        ids = output["completion_ids"][place][output["completion_mask"][place].bool()]
        text = processor.tokenizer.decode(ids, skip_special_tokens=True)
        assert one._reward.last[place].text == text
    assert one.model.training
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_a_prompt_with_a_picture_is_read_alike_beside_a_longer_one(trainer):
    one = trainer(group_size=2, accumulation=4, rollouts="shared")
    one.model.train()
    inputs = inputs_of(one)
    shown = [has_pictures(one._book.records[row["row"]]) for row in inputs]
    begin = shown.index(True)

    def log_probabilities(output: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
        return one._get_per_token_logps_and_entropies(
            one.model,
            ids,
            mask,
            output["completion_ids"].size(1),
            **{name: output.get(name) for name in names},
        )[0]

    together = one._generate_and_score_completions(inputs)
    alone = one._generate_and_score_completions(inputs[begin : begin + 2])
    assert together["prompt_ids"].size(1) > alone["prompt_ids"].size(1)
    for name in ("completion_ids", "completion_mask"):
        alone[name] = together[name][begin : begin + 2]

    beside = log_probabilities(together)[begin : begin + 2]
    assert torch.allclose(log_probabilities(alone), beside, atol=1e-4)


def test_completions_come_from_the_weights_of_the_step(trainer):
    one = trainer(rollouts="shared")
    one.model.train()
    inputs = inputs_of(one)
    first = one._generate_and_score_completions(inputs)["completion_ids"]
    again = one._generate_and_score_completions(inputs)["completion_ids"]
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.mul_(-1.0)
    other = one._generate_and_score_completions(inputs)["completion_ids"]

    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_completions_are_those_that_the_demo_would_write_from_the_same_seeds(trainer):
    one = trainer(rollouts="shared", temperature=0.7, top_p=0.9)
    one.model.train()
    inputs = inputs_of(one)
    output = one._generate_and_score_completions(inputs)
    rows = [row["row"] for row in inputs]

    one._rows = rows
    prompts = [
        Prompt(one._book.messages(rows[a]), tuple(one._seed(n) for n in range(a, b)))
        for a, b in _runs(rows)
    ]
    with one._for_generation() as chat:
        sampling = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=12)
        turns = generate_turns(chat, None, prompts, sampling, threading.Event())

    written = [turn.ids for of_prompt in turns for turn in of_prompt]
    for place, ids in enumerate(written):
        mask = output["completion_mask"][place].bool()
        assert tuple(output["completion_ids"][place][mask].tolist()) == ids


def test_writing_leaves_the_model_as_it_was(trainer):
    one = trainer(lora={"rank": 2, "dropout": 0.5})
    one.model.train()
    inner = one.model.get_base_model()
    before = (inner.generation_config, inner.config.use_cache)

    one._generate_and_score_completions(inputs_of(one))

    assert (inner.generation_config, inner.config.use_cache) == before
    assert all(module.training for module in one.model.modules())
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    offsets = [m.rope_deltas for m in inner.modules() if "rope_deltas" in vars(m)]
    assert offsets and all(o is None or not o.is_inference() for o in offsets)
    one.current_gradient_accumulation_steps = 2  # the training loop says it
    output = one._prepare_inputs(inputs_of(one))
    one.compute_loss(one.model, output).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in one.model.parameters())


def test_each_step_of_training_draws_anew_and_held_out_prompts_are_answered_alike(trainer):
    one = trainer(rollouts="shared")
    inputs = inputs_of(one)

    def written(step: int) -> Any:
        one.state.global_step = step
        return one._generate_and_score_completions(inputs)["completion_ids"]

    one.model.train()
    first, second = written(0), written(1)
    one.model.eval()
    held_out, again = written(0), written(1)

    assert first.shape != second.shape or not torch.equal(first, second)
    assert torch.equal(held_out, again)


def test_a_seed_depends_on_the_step_and_the_place_and_of_held_out_prompts_on_neither(trainer):
    one = trainer()
    one.model.train()
    one._rows = [0, 0, 1, 1]
    alone = [one._seed(place) for place in range(4)]
    assert len({*alone}) == 4

    one._rows = [1, 1]
    one.state.global_step = 1
    assert one._seed(0) not in alone
    one.model.eval()
    held_out = [one._seed(0), one._seed(1)]
    one.state.global_step = 2
    assert held_out == [one._seed(0), one._seed(1)]
    assert len({*held_out, *alone}) == 6


# With epsilon 0.2 the clip goes from 0.8 to 1.2. The value is min(ratio A, clipped ratio A) / A; the
# last two columns are the derivatives by the log-probability: the ratio, or 0 where the clip holds.
EQ_2 = {
    # ratio: value for A > 0, for A < 0, derivative for A > 0, for A < 0
    0.5: (0.5, 0.8, 0.5, 0.0),
    0.9: (0.9, 0.9, 0.9, 0.9),
    1.1: (1.1, 1.1, 1.1, 1.1),
    1.6: (1.2, 1.6, 0.0, 1.6),
}


def test_the_loss_of_eq_2_and_its_gradient_by_hand_on_both_sides_of_the_clip(trainer, monkeypatch):
    one = trainer(accumulation=2, epsilon=0.2)
    one.model.train()
    one.current_gradient_accumulation_steps = 2
    batch = one._prepare_inputs(inputs_of(one))
    lengths = batch["completion_mask"].sum(1).tolist()
    assert len(lengths) == 2 and min(lengths) >= len(EQ_2)
    ratios = [list(EQ_2)[index % len(EQ_2)] for index in range(batch["completion_mask"].shape[1])]
    logprobs = torch.full(batch["completion_mask"].shape, -2.0, requires_grad=True)
    batch["old_per_token_logps"] = (logprobs - torch.tensor(ratios).log()).detach()
    batch["advantages"] = torch.tensor([0.7, -0.2])
    monkeypatch.setattr(
        one,
        "_get_per_token_logps_and_entropies",
        lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )

    loss = one.compute_loss(one.model, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    # each turn is the mean over its tokens, whatever their number; two turns and two passes a step
    expected, derivatives = 0.0, torch.zeros_like(gradient)
    for row, (advantage, length) in enumerate(zip((0.7, -0.2), lengths, strict=True)):
        for token in range(length):
            values = EQ_2[ratios[token]]
            share = -advantage / length / 2 / 2
            expected += share * values[row]
            derivatives[row, token] = share * values[2 + row]
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, derivatives)


def test_a_failure_while_writing_is_not_swallowed(trainer, monkeypatch):
    one = trainer()
    one.model.train()

    def fails(prompt_ids: Any) -> Any:
        raise MemoryError("no room for a cache")

    monkeypatch.setattr(one, "_generate_shared", fails)
    with pytest.raises(MemoryError, match="no room for a cache"):
        one._generate_and_score_completions(inputs_of(one))


# --- the update ----------------------------------------------------------------------------------


def probabilities(one: GroupTrainer, output: dict[str, Any], update: str) -> tuple[Any, Any]:
    one._settings = one._settings.model_copy(update={"update": update})
    names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
    logs, entropies, _ = one._get_per_token_logps_and_entropies(
        one.model,
        torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
        torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
        output["completion_ids"].size(1),
        compute_entropy=True,
        **{name: output.get(name) for name in names},
    )
    mask = output["completion_mask"].bool()
    return logs[mask], entropies[mask]


@pytest.mark.parametrize("lora", [False, True])
def test_prompts_read_once_give_trls_probabilities_entropies_and_gradients(trainer, lora):
    changes = {"lora": {"rank": 2}} if lora else {}
    one = trainer(group_size=4, batch_size=8, accumulation=1, temperature=0.7, **changes)
    one.model.train()
    plain_ones = [r for r in one.train_dataset if not has_pictures(one._book.records[r["row"]])]
    inputs = [row for row in plain_ones[:2] for _ in range(4)]
    output = one._generate_and_score_completions([inputs[n] for n in (4, 0, 1, 5, 2, 6, 7, 3)])
    # trl shuffles what it trains on: the completions of a prompt need not stand together
    assert len({tuple(row) for row in output["prompt_ids"].tolist()}) == 2

    def learnt(update: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        one.model.zero_grad()
        logs, entropies = probabilities(one, output, update)
        (logs.mean() + entropies.mean()).backward()
        named = one.model.named_parameters()
        return logs, entropies, {n: p.grad.clone() for n, p in named if p.grad is not None}

    logs, entropies, gradients = learnt("plain")
    found, of_entropies, moved = learnt("shared")

    torch.testing.assert_close(found, logs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_entropies, entropies, rtol=1e-4, atol=1e-4)
    assert moved.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(moved[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_prompts_with_pictures_are_read_once_too(trainer):
    one = trainer(group_size=2, batch_size=8, accumulation=1)
    one.model.train()
    output = one._generate_and_score_completions(inputs_of(one))
    assert 0 < len(output["image_grid_thw"]) == sum(output["num_images"]) < 8

    with torch.no_grad():
        plain, shared = (probabilities(one, output, update) for update in ("plain", "shared"))

    torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-4)
    # the model's own attention is there again for the next completions
    assert one.model.model.language_model.config._attn_implementation == "sdpa"
