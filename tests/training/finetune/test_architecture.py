"""Small models have the Qwen2.5-VL architecture with smaller sizes."""

import pytest
import torch

from training.finetune.architecture import ModelShape, build_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rotary_sections_have_the_ratios_of_qwen2_5_vl(tokenizer, tiny_shape):
    # 384 / 6 = 64 per head, half of it is 32 = 8 + 12 + 12, and 16 : 24 : 24 is 8 : 12 : 12
    wide = tiny_shape.model_copy(
        update={"hidden_size": 384, "attention_heads": 6, "key_value_heads": 2}
    )
    # 32 / 2 = 16 per head, half of it is 8 = 2 + 3 + 3
    for shape, sections in ((wide, [8, 12, 12]), (tiny_shape, [2, 3, 3])):
        text = build_model(shape, tokenizer).config.text_config
        assert text.rope_parameters["mrope_section"] == sections


def test_default_shape_has_the_expected_parameter_count(tokenizer):
    model = build_model(ModelShape(), tokenizer)

    # by hand: embedding 600 x 384; a layer: q 384 x 384 + 384, k and v 384 x 128 + 128 each,
    # o 384 x 384, MLP 3 x 384 x 768, two norms of 384; one norm at the end
    layer = 384 * 384 + 384 + 2 * (384 * 128 + 128) + 384 * 384 + 3 * 384 * 768 + 2 * 384
    assert sum(p.numel() for p in model.model.language_model.parameters()) == (
        600 * 384 + 6 * layer + 384
    )
    assert sum(p.numel() for p in model.parameters()) < 30_000_000


def test_special_token_ids_come_from_the_tokenizer(tokenizer, tiny_shape):
    model = build_model(tiny_shape, tokenizer)
    token = tokenizer.get_vocab()

    assert model.config.image_token_id == token["<|image_pad|>"]
    assert model.config.vision_start_token_id == token["<|vision_start|>"]
    assert model.config.text_config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == [token["<|im_end|>"]]
    assert model.generation_config.pad_token_id == token["<|endoftext|>"]


def test_input_and_output_embeddings_are_tied(tokenizer, tiny_shape):
    model = build_model(tiny_shape, tokenizer)

    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_weights_depend_only_on_the_seed(tokenizer, tiny_shape):
    torch.manual_seed(123)
    first = build_model(tiny_shape, tokenizer, seed=5).state_dict()
    again = build_model(tiny_shape, tokenizer, seed=5).state_dict()
    other = build_model(tiny_shape, tokenizer, seed=6).state_dict()

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
