"""Sharing weights, and saying what is wrong with a checkpoint."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, CLIPVisionConfig

from compeer_core import model_pool
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import BackendError, CheckpointError, ConfigError
from compeer_core.model_pool import (
    ModelPool,
    as_folder,
    load_label_scorer,
    load_transformers,
    resolve_device,
)
from tests.checkpoints import build_adapter, build_qwen, edit_json

HELLO = [Message("user", ("I feel sad",))]
GREEDY = Sampling(temperature=0, max_new_tokens=12)


def written(backend) -> str:
    return "".join(backend.open(HELLO, GREEDY, threading.Event()).generate())


@pytest.fixture
def copy(qwen_folder, tmp_path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(qwen_folder, tmp_path / "copy"))


def load(folder, **settings):
    return load_transformers(str(folder), pool=ModelPool(), **settings)


# --- sharing -----------------------------------------------------------------------------------


def test_a_policy_and_a_judge_share_weights_and_thread(qwen_folder, adapter_folders):
    pool = ModelPool()
    policy = load_transformers(str(qwen_folder), pool=pool)
    judge = load_label_scorer(str(qwen_folder), adapter=adapter_folders[0], pool=pool)

    assert policy._chat is judge.chat
    assert policy.name == "tiny-qwen"
    assert judge.name == "tiny-qwen+warm"


def test_a_path_written_in_two_ways_is_one_checkpoint(qwen_folder, monkeypatch):
    pool = ModelPool()
    monkeypatch.chdir(qwen_folder.parent)

    first = load_transformers(str(qwen_folder), pool=pool)
    second = load_transformers("./tiny-qwen", pool=pool, device="cpu")

    assert first._chat is second._chat


def test_concurrent_requests_load_once(qwen_folder, monkeypatch):
    pool, loads, backends = ModelPool(), [], []
    load_base = model_pool._load_base
    monkeypatch.setattr(
        model_pool, "_load_base", lambda *given: (loads.append(given), load_base(*given))[1]
    )

    def visit():
        backends.append(load_transformers(str(qwen_folder), pool=pool))

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(loads) == 1
    assert len(backends) == 4


def test_weights_stay_until_their_last_user_has_closed(qwen_folder):
    pool = ModelPool()
    first = load_transformers(str(qwen_folder), pool=pool)
    second = load_transformers(str(qwen_folder), pool=pool)

    first.close()
    first.close()
    assert written(second)
    second.close()

    assert not pool._bases
    with pytest.raises(BackendError, match="closed"):
        written(second)


def test_an_adapter_changes_only_its_own_model(qwen_folder, adapter_folders):
    pool = ModelPool()
    bare = load_transformers(str(qwen_folder), pool=pool)
    before = written(bare)
    warm, cool = (
        load_transformers(str(qwen_folder), adapter=folder, pool=pool) for folder in adapter_folders
    )

    texts = [written(warm), written(cool), written(bare), written(warm)]

    assert texts[2] == before
    assert texts[0] == texts[3]
    assert len({*texts}) == 3


def test_an_adapter_is_loaded_once(qwen_folder, adapter_folders):
    pool = ModelPool()
    models = [
        load_transformers(str(qwen_folder), adapter=adapter_folders[0], pool=pool) for _ in range(2)
    ]

    assert models[0]._adapter == models[1]._adapter
    assert len(models[0]._chat.adapted.peft_config) == 1


def test_the_base_named_by_an_adapter_is_not_searched(qwen_folder, adapter_folders, tmp_path):
    folder = Path(shutil.copytree(adapter_folders[0], tmp_path / "adapter"))
    edit_json(folder / "adapter_config.json", base_model_name_or_path="../base")
    pool = ModelPool()

    moved = load_transformers(str(qwen_folder), adapter=folder, pool=pool)  # warns if it looks
    named = load_transformers(str(qwen_folder), adapter=adapter_folders[0], pool=pool)

    assert written(moved) == written(named)


def test_the_pool_of_the_process_is_one():
    assert model_pool.shared_pool() is model_pool.shared_pool()


# --- devices and precision ----------------------------------------------------------------------


def test_small_models_run_in_32_bits_and_read_with_every_core_but_write_with_one(copy, monkeypatch):
    monkeypatch.setattr(model_pool, "TORCH_THREADS", 3)
    model = AutoModelForImageTextToText.from_pretrained(copy, dtype=torch.bfloat16)
    model.save_pretrained(copy)

    backend = load(copy)

    chat = backend._chat
    assert chat.model.dtype == torch.float32
    threads: list[tuple[int, int]] = []
    chat.model.register_forward_pre_hook(
        lambda _, args, named: threads.append(
            (named["input_ids"].shape[1], torch.get_num_threads())
        ),
        with_kwargs=True,
    )
    assert written(backend)
    (prompt, reading), *steps = threads
    assert prompt > 1
    assert reading == 3
    assert {*steps} == {(1, 1)}


def test_large_models_keep_16_bits_and_use_every_core(copy, monkeypatch):
    monkeypatch.setattr(model_pool, "HALF_PRECISION_FROM", 0)
    monkeypatch.setattr(model_pool, "SMALL", 0)
    model = AutoModelForImageTextToText.from_pretrained(copy, dtype=torch.bfloat16)
    model.save_pretrained(copy)

    backend = load(copy)

    assert backend._chat.model.dtype == torch.bfloat16
    assert backend._chat.owner.call(torch.get_num_threads) == model_pool.TORCH_THREADS
    assert written(backend)


@pytest.mark.parametrize("name", [None, "", "auto"])
def test_the_default_device_is_cuda_if_available(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(name) == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(name) == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta", "mps:7"])
def test_an_unavailable_device_is_an_invalid_flag(name):
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name)


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_quantized_weights_write(quantize, qwen_folder, picture):
    backend = load(qwen_folder, quantize=quantize)
    messages = [Message("user", ("Look ", picture(1)))]
    completion = backend.open(messages, GREEDY, threading.Event())

    assert len("".join(completion.generate())) > 0
    assert any("bit" in type(module).__name__ for module in backend._chat.model.modules())


def test_weights_that_cannot_be_quantized_here_say_what_to_do(copy, monkeypatch):
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", _model_without_head)

    with pytest.raises(CheckpointError, match=r"in 4bit \(.*without --quantize"):
        load(copy, quantize="4bit")


# --- what is wrong with a checkpoint -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config.json", "defines the model"),
        ("tokenizer.json", "defines the tokenizer"),
        ("model.safetensors", "copy the whole checkpoint"),
    ],
)
def test_a_missing_file_is_named(name, reason, copy):
    (copy / name).unlink()

    with pytest.raises(CheckpointError, match=f"{name} is missing.*{reason}"):
        load(copy)


def test_a_folder_that_cannot_prepare_pictures_is_named(copy):
    (copy / "processor_config.json").unlink()
    (copy / "preprocessor_config.json").unlink()

    with pytest.raises(CheckpointError, match=r"processor_config.json is missing.*images"):
        load(copy)


def test_a_missing_chat_template_is_named(copy):
    (copy / "chat_template.jinja").unlink()

    with pytest.raises(CheckpointError, match="no chat template"):
        load(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "processor_config.json"])
def test_broken_json_is_named(name, copy):
    content = (copy / name).read_text(encoding="utf-8")
    (copy / name).write_text(content[: len(content) // 2], encoding="utf-8")

    with pytest.raises(CheckpointError, match=f"{name} is not valid JSON"):
        load(copy)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_weights_are_named(kept, copy):
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:kept])

    with pytest.raises(
        CheckpointError, match=r"model.safetensors is (truncated|not a safetensors)"
    ):
        load(copy)


def test_a_missing_shard_is_named(copy):
    model = AutoModelForImageTextToText.from_pretrained(copy)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="200KB")
    shards = sorted(copy.glob("model-*.safetensors"))
    assert written(load(copy))
    shards[1].unlink()

    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing"):
        load(copy)


def test_pickled_weights_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")

    with pytest.raises(
        CheckpointError, match=r"pickled weights \(pytorch_model.bin\).*safetensors"
    ):
        load(copy)


def test_missing_weights_are_an_error_not_random_numbers(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"1 weights are missing.*language_model.norm.weight"):
        load(copy)


def test_weights_of_another_shape_are_an_error(copy):
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["text_config"]["intermediate_size"] = 64
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"cannot be loaded|wrong shape"):
        load(copy)


def test_a_model_that_does_not_chat_is_refused(copy):
    config = CLIPVisionConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    config.save_pretrained(copy)

    with pytest.raises(CheckpointError, match="is a clip_vision_model model; COMPEER needs"):
        load(copy)


def test_an_unknown_kind_of_model_is_an_error_and_its_code_is_not_run(copy):
    (copy / "evil.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    edit_json(copy / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})

    with pytest.raises(CheckpointError, match="copy cannot be loaded"):
        load(copy)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    for source in (str(tmp_path / "nothing"), "./nothing", "", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            as_folder(source)


def test_a_name_that_the_hub_cannot_give_is_an_error():
    with pytest.raises(
        CheckpointError, match=r"nobody/nothing: neither.*hf download nobody/nothing"
    ):
        load("nobody/nothing")


def test_a_repaired_checkpoint_can_be_loaded(copy):
    pool = ModelPool()
    content = (copy / "config.json").read_text(encoding="utf-8")
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError):
        load_transformers(str(copy), pool=pool)

    (copy / "config.json").write_text(content, encoding="utf-8")

    assert written(load_transformers(str(copy), pool=pool))


def test_a_model_that_cannot_generate_is_refused_when_it_is_loaded(copy, monkeypatch):
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", _model_without_head)

    with pytest.raises(CheckpointError, match=r"copy cannot be loaded \(RuntimeError: mat1"):
        load(copy)


def _model_without_head(location, **_):
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(location)
    model.lm_head = torch.nn.Linear(3, 3)
    return model, {"missing_keys": [], "mismatched_keys": []}


# --- adapters ----------------------------------------------------------------------------------


def test_an_adapter_without_weights_is_named(qwen_folder, adapter_folders, tmp_path):
    folder = Path(shutil.copytree(adapter_folders[0], tmp_path / "adapter"))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    with pytest.raises(CheckpointError, match=r"pickled weights \(adapter_model.bin\)"):
        load(qwen_folder, adapter=folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing"):
        load(qwen_folder, adapter=folder)


def test_an_adapter_that_is_not_there_is_named(qwen_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config.json is missing"):
        load(qwen_folder, adapter=tmp_path / "nothing")


def test_an_adapter_of_another_model_is_refused_and_the_model_goes_on(
    qwen_folder, adapter_folders, llava_folder, tmp_path
):
    pool = ModelPool()
    other = build_adapter(llava_folder, tmp_path / "other", seed=3)
    bare = load_transformers(str(qwen_folder), pool=pool)
    before = written(bare)

    with pytest.raises(CheckpointError, match=r"other does not fit tiny-qwen.*trained on"):
        load_transformers(str(qwen_folder), adapter=other, pool=pool)

    assert written(bare) == before
    warm = load_transformers(str(qwen_folder), adapter=adapter_folders[0], pool=pool)
    alone = load(qwen_folder, adapter=adapter_folders[0])
    assert written(warm) == written(alone) != before
    assert written(bare) == before


def test_an_adapter_that_lacks_a_weight_is_refused(qwen_folder, adapter_folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(adapter_folders[0], tmp_path / "adapter"))
    weights = load_file(folder / "adapter_model.safetensors")
    weights.pop(sorted(weights)[0])
    save_file(weights, folder / "adapter_model.safetensors")

    with pytest.raises(CheckpointError, match="1 weights differ"):
        load(qwen_folder, adapter=folder)


def test_a_shorter_limit_is_read_from_the_checkpoint(tmp_path):
    backend = load(build_qwen(tmp_path / "short", max_position_embeddings=64))

    assert backend._chat.limit == 64
