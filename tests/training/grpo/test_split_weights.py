"""What a policy needs whose weights are split among processes."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText
from transformers.distributed.fsdp import is_fsdp_managed_module

from training.grpo.trainer import run_equally_often


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("is_adapted", [False, True])
def test_generation_is_told_that_all_processes_must_run_equally_often(policy, is_adapted):
    base = AutoModelForImageTextToText.from_pretrained(policy)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"])) if is_adapted else base
    assert not is_fsdp_managed_module(base)

    run_equally_often(model)

    # of this `generate` asks, and it is the inner model's that is called
    assert is_fsdp_managed_module(base)
