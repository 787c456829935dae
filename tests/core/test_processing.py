"""The image-only Qwen2.5-VL processor: the library's own, without videos."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlavaProcessor

from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor, load_processor

MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<history> True"}]}
]


def encoded(processor, picture):
    text = processor.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=[[picture().to_pil()]], return_tensors="pt")


def test_a_saved_processor_loads_and_prepares_the_same_inputs(qwen_folder, picture, tmp_path):
    first = load_processor(qwen_folder)
    first.save_pretrained(tmp_path)
    shutil.copy(qwen_folder / "config.json", tmp_path)

    second = load_processor(tmp_path)

    before, after = encoded(first, picture), encoded(second, picture)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert second.chat_template == first.chat_template


def test_a_picture_becomes_as_many_tokens_as_patches_merged(qwen_folder, picture):
    inputs = encoded(load_processor(qwen_folder), picture)

    # 90 x 60 pixels at patches of 14, merged 2 x 2: 84 x 56 pixels are 6 x 4 patches, 6 tokens.
    pad = load_processor(qwen_folder).image_token_id
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert (inputs["input_ids"] == pad).sum() == 6
    assert inputs["mm_token_type_ids"].sum() == 6


def test_the_folder_speaks_of_the_librarys_own_classes_only(qwen_folder):
    def read(name):
        return json.loads((qwen_folder / name).read_text(encoding="utf-8"))

    assert read("tokenizer_config.json")["processor_class"] == "Qwen2_5_VLProcessor"
    assert read("tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    nested = read("processor_config.json")
    assert nested["processor_class"] == "Qwen2_5_VLProcessor"
    assert nested["image_processor"]["image_processor_type"] == "Qwen2VLImageProcessor"
    assert nested["video_processor"]["video_processor_type"] == "Qwen2VLVideoProcessor"
    assert nested["video_processor"]["size"] == nested["image_processor"]["size"]
    older = read("preprocessor_config.json")
    assert older["image_processor_type"] == "Qwen2VLImageProcessor"
    assert older["processor_class"] == "Qwen2_5_VLProcessor"


def test_what_is_loaded_again_is_saved_again_without_a_trace(qwen_folder, tmp_path):
    ImageOnlyQwen2_5_VLProcessor.from_pretrained(qwen_folder).save_pretrained(tmp_path)

    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text("utf-8") == (qwen_folder / name).read_text("utf-8")


def test_the_tokenizers_template_is_used_where_none_is_given(qwen_folder):
    known = load_processor(qwen_folder)
    known.tokenizer.chat_template = "{{ messages[0]['content'] }}"

    processor = ImageOnlyQwen2_5_VLProcessor(known.image_processor, known.tokenizer)

    assert processor.chat_template == "{{ messages[0]['content'] }}"


def test_text_alone_needs_no_picture(qwen_folder):
    inputs = load_processor(qwen_folder)(text=["I feel sad"], return_tensors="pt")

    assert "pixel_values" not in inputs
    assert inputs["mm_token_type_ids"].sum() == 0


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="has torchvision")
def test_qwen_gets_the_image_only_processor_where_torchvision_is_missing(qwen_folder):
    assert isinstance(load_processor(qwen_folder), ImageOnlyQwen2_5_VLProcessor)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")
def test_the_same_folder_loads_with_the_librarys_processor(qwen_folder):
    assert type(load_processor(qwen_folder)).__name__ == "Qwen2_5_VLProcessor"


def test_other_architectures_get_their_own_processor(llava_folder: Path):
    assert isinstance(load_processor(llava_folder), LlavaProcessor)
