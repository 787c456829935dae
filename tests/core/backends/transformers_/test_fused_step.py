"""Passes of our own: the logits of transformers, whatever adapter is in force."""

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_ import fused_step
from compeer_core.backends.transformers_.fused_step import FusedTextModel, speed_up
from compeer_core.backends.transformers_.kv_cache import joined, restore_cache
from compeer_core.processing import load_processor

pytestmark = pytest.mark.usefixtures("one_core")

PROMPT = torch.arange(100, 112)[None]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def plain(qwen_folder) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(qwen_folder)
    return model.float().eval().requires_grad_(False)


@pytest.fixture
def fused(plain) -> Any:
    model = copy.deepcopy(plain)
    speed_up(model)
    return model


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Grows with every pass that is ours, by its number of rows."""
    taken: list[int] = []
    step = FusedTextModel._step

    def counted(self, embedded, *rest):
        taken.append(embedded.shape[0])
        return step(self, embedded, *rest)

    monkeypatch.setattr(FusedTextModel, "_step", counted)
    return taken


def adapted(model: Any, **adapters: Any) -> Any:
    """Put adapters around a model; the same names give the same matrices."""
    whole = None
    for number, (name, targets) in enumerate(adapters.items()):
        whole = with_adapter(whole or model, name, targets, number)
    return whole


def with_adapter(model: Any, name: str, targets: list[str], seed: int, **settings: Any) -> Any:
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # peft 0.21 still reads a property that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, lora)
        else:
            model = peft.PeftModel(model, lora, adapter_name=name)
    for key, parameter in model.named_parameters():
        if f"lora_B.{name}" in key:
            parameter.data.normal_(std=0.3)
    return model.eval()


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor = PROMPT, count: int = 4, **given: Any) -> torch.Tensor:
    """Read a prompt at once, then tokens one by one; the logits of these, shape (rows, count, _)."""
    cache = DynamicCache(config=model.config)
    mask = given.pop("attention_mask", torch.ones_like(ids))
    names = {k: v for k, v in given.items() if k == "adapter_names"}
    model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given)
    seen = []
    for token in range(count):
        mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=1)
        outputs = model(
            input_ids=torch.full((len(ids), 1), 120 + token),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **names,
        )
        seen.append(outputs.logits[:, -1])
    return torch.stack(seen, dim=1)


def check_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """To the fifth digit of the largest logit: sums are added up in another order."""
    assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_a_step_gives_the_logits_of_transformers(plain, fused, steps):
    check_same(logits(fused), logits(plain))

    assert steps == [1] * 5  # the prompt and four tokens


def test_a_long_prompt_is_left_to_transformers(plain, fused, steps, monkeypatch):
    monkeypatch.setattr(fused_step, "LONGEST", PROMPT.shape[1] - 1)

    check_same(logits(fused), logits(plain))

    assert steps == [1] * 4


@torch.inference_mode()
def test_several_tokens_after_others_see_those_before_them(plain, fused, steps):
    pieces, ends = PROMPT.repeat(2, 1).split([5, 4, 3], dim=1), []
    for model in (fused, plain):
        cache = DynamicCache(config=model.config)
        outputs = [model(input_ids=ids, past_key_values=cache, use_cache=True) for ids in pieces]
        ends.append(torch.cat([each.logits for each in outputs], dim=1))
        assert cache.get_seq_length() == PROMPT.shape[1]

    check_same(*ends)
    check_same(ends[0], plain(input_ids=PROMPT.repeat(2, 1)).logits)
    assert steps == [2] * 3


@torch.inference_mode()
def test_several_tokens_see_what_their_mask_shows(plain, fused, steps):
    shown = torch.rand((3, 1, 4, 16), generator=torch.Generator().manual_seed(0)) < 0.5
    shown[..., 12:] |= torch.eye(4, dtype=torch.bool)  # each sees itself
    given = {
        "input_ids": torch.arange(12).view(3, 4) + 130,
        "attention_mask": torch.zeros(shown.shape).masked_fill(~shown, torch.finfo().min),
        "position_ids": torch.tensor([12, 13, 12, 14]).expand(3, 3, 4),
    }
    ends = []
    for model in (fused, plain):
        cache = DynamicCache(config=model.config)
        model(input_ids=PROMPT.repeat(3, 1), past_key_values=cache, use_cache=True)
        ends.append(model(**given, past_key_values=cache, use_cache=True).logits)

    check_same(*ends)
    assert steps == [3, 3]


@pytest.mark.parametrize("has_onednn", [fused_step.HAS_ONEDNN, False])
def test_several_rows_read_blocked_copies_where_they_can_be_made(
    plain, fused, monkeypatch, has_onednn
):
    monkeypatch.setattr(fused_step, "HAS_ONEDNN", has_onednn)
    text, several = fused.model.language_model, PROMPT.repeat(3, 1)

    check_same(logits(fused), logits(plain))
    assert text._blocked is None
    check_same(logits(fused, several), logits(plain, several))
    assert (text._blocked is not None) is has_onednn


def test_weights_are_held_once(plain, fused):
    text = fused.model.language_model
    attention, mlp = text.layers[0].self_attn, text.layers[0].mlp
    storages = {
        name: {part.weight.untyped_storage().data_ptr() for part in parts}
        for name, parts in {
            "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "gate_up": (mlp.gate_proj, mlp.up_proj),
        }.items()
    }

    assert storages["qkv"] == {text._layers[0].qkv.untyped_storage().data_ptr()}
    assert storages["gate_up"] == {text._layers[0].gate_up.untyped_storage().data_ptr()}
    assert fused.lm_head.weight is text.embed_tokens.weight
    for (name, old), (same, new) in zip(
        plain.state_dict().items(), fused.state_dict().items(), strict=True
    ):
        assert name == same
        assert torch.equal(old, new)


def test_long_texts_outgrow_their_room(plain, fused):
    check_same(logits(fused, count=70), logits(plain, count=70))


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj", "down_proj"], ["up_proj"]])
def test_an_adapter_is_applied_as_peft_does(plain, fused, steps, targets):
    bare = logits(fused)

    with_it = logits(adapted(fused, warm=targets))

    assert len(steps) == 10
    check_same(with_it, logits(adapted(plain, warm=targets)))
    assert not torch.allclose(with_it, bare, atol=1e-2)


def test_adapters_are_switched_and_disabled(plain, fused, steps):
    bare = logits(plain)
    ours, theirs = (adapted(model, warm=ALL, cool=["v_proj"]) for model in (fused, plain))

    for name in ("warm", "cool", "warm"):
        for model in (ours, theirs):
            model.set_adapter(name)
        check_same(logits(ours), logits(theirs))
    ours.base_model.disable_adapter_layers()
    check_same(logits(ours), bare)
    ours.base_model.enable_adapter_layers()
    ours.set_adapter("cool")
    theirs.set_adapter("cool")
    check_same(logits(ours), logits(theirs))

    assert len(steps) == 25


def test_an_adapter_that_replaces_a_deleted_one_counts(plain, fused):
    ours, theirs = (adapted(model, warm=ALL, cool=ALL) for model in (fused, plain))
    ours.set_adapter("cool")
    before = logits(ours)

    for model in (ours, theirs):
        model.set_adapter("warm")
        model.delete_adapter("cool")
        with_adapter(model, "cool", ALL, 7)
        model.set_adapter("cool")

    check_same(logits(ours), logits(theirs))
    assert not torch.allclose(logits(ours), before, atol=1e-2)


def test_weights_that_change_in_place_are_seen(plain, fused):
    ours, theirs = (adapted(model, warm=ALL) for model in (fused, plain))
    logits(ours)

    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "lora_" in name or "k_proj.base" in name:
                parameter.data.mul_(1.5)

    check_same(logits(ours), logits(theirs))


def test_rows_with_different_adapters_are_left_to_peft(plain, fused, steps):
    ours, theirs = (adapted(model, warm=ALL, cool=ALL) for model in (fused, plain))
    logits(ours)
    del steps[:]
    names = ["warm", "cool", "__base__"]

    mixed = logits(ours, PROMPT.repeat(3, 1), adapter_names=names)

    assert not steps
    check_same(mixed, logits(theirs, PROMPT.repeat(3, 1), adapter_names=names))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}, {"merge": True}])
def test_what_is_more_than_two_matrices_is_left_to_peft(plain, fused, steps, settings):
    merge = settings.get("merge", False)
    settings = {} if merge else settings
    ours, theirs = (
        with_adapter(model, "warm", ["q_proj", "v_proj"], 1, **settings) for model in (fused, plain)
    )
    if merge:
        ours.merge_adapter()

    result = logits(ours)

    assert not steps
    check_same(result, logits(theirs))


def test_rows_of_different_lengths_are_one_batch(plain, fused, steps):
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0

    both = logits(fused, ids, attention_mask=mask)

    assert steps == [2] * 4  # transformers read the padded prompts
    check_same(both, logits(plain, ids, attention_mask=mask))


def test_a_cropped_cache_goes_on_where_it_ends(plain, fused):
    ends = []
    with torch.inference_mode():
        for model in (plain, fused):
            cache = model(input_ids=PROMPT, use_cache=True).past_key_values
            seen = []
            for token in (120, 121, 122, None, 123, 124):
                if token is None:
                    cache.crop(-2)
                    continue
                outputs = model(
                    input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True
                )
                seen.append(outputs.logits[:, -1])
            ends.append(torch.stack(seen))
            assert cache.get_seq_length() == PROMPT.shape[1] + 3

    check_same(ends[1], ends[0])


def test_a_copied_cache_is_a_cache_of_its_own(plain, fused):
    ends = []
    with torch.inference_mode():
        for model in (plain, fused):
            cache = model(input_ids=PROMPT, use_cache=True).past_key_values
            model(input_ids=PROMPT[:, :1], past_key_values=cache, use_cache=True)
            copied = copy.deepcopy(cache)
            copied.batch_repeat_interleave(2)
            whole = joined([cache, cache], [1, 1], 8)
            for tokens, memory in (([[120], [121]], copied), ([[122], [123]], whole)):
                model(input_ids=torch.tensor(tokens), past_key_values=memory, use_cache=True)
            restore_cache(whole, 1, 0, cache)
            ends.append(
                torch.cat(
                    [
                        model(
                            input_ids=torch.full((rows, 1), 124),
                            past_key_values=memory,
                            use_cache=True,
                        ).logits[:, -1]
                        for rows, memory in ((2, copied), (2, whole), (1, cache))
                    ]
                )
            )

    check_same(ends[1], ends[0])


def test_pictures_shift_positions_as_they_should(qwen_folder, plain, fused, steps, picture):
    processor = load_processor(str(qwen_folder))
    message = Message("user", (picture(), "What is it?"))
    text = f"{processor.image_token} What is it?"
    inputs = processor(
        text=[text], images=[[part.to_pil() for part in message.content[:1]]], return_tensors="pt"
    )
    ids = [
        model.generate(
            **inputs,
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for model in (fused, plain)
    ]

    assert fused.model.rope_deltas.any()
    assert len(steps) == len(ids[0].logits)
    check_same(torch.stack(ids[0].logits), torch.stack(ids[1].logits))


def test_training_is_left_to_transformers(fused, steps):
    cache = fused(input_ids=PROMPT, use_cache=True).past_key_values

    fused(input_ids=PROMPT[:, :1], past_key_values=cache, use_cache=True)  # with gradients on

    assert not steps


def test_a_model_that_is_converted_gets_its_own_steps_back(plain, fused, steps):
    check_same(logits(fused.double()).float(), logits(plain))

    assert not isinstance(fused.model.language_model, FusedTextModel)
    assert not steps


def test_other_models_are_left_alone(llava_folder, plain):
    llava = AutoModelForImageTextToText.from_pretrained(llava_folder).eval()
    before = {name: weight.data_ptr() for name, weight in llava.state_dict().items()}
    half = copy.deepcopy(plain).bfloat16()
    kinds = type(llava.model.language_model), type(half.model.language_model)

    speed_up(llava)
    speed_up(half)

    assert kinds == (type(llava.model.language_model), type(half.model.language_model))
    assert before == {name: weight.data_ptr() for name, weight in llava.state_dict().items()}


def test_joined_matrices_are_kept_for_a_few_adapters(fused, monkeypatch):
    monkeypatch.setattr(fused_step, "PLANS", 2)
    model = adapted(fused, one=ALL, two=ALL, three=ALL)

    for name in ("one", "two", "three", "two"):
        model.set_adapter(name)
        logits(model)

    assert [plan.active for plan in fused.model.language_model._plans] == [["two"], ["three"]]
