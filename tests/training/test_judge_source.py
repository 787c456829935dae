"""A judge of a stage computes on as many threads as the stage, which waits for it."""

from pathlib import Path

import pytest
import torch

from compeer_core.backends.transformers_.scoring import TransformersScorer
from tests.checkpoints import build_qwen
from training.judge_source import JudgeSource


@pytest.mark.parametrize("threads", [1, 3])
def test_a_judge_in_this_process_has_the_threads_of_the_stage(tmp_path: Path, threads: int):
    folder = build_qwen(tmp_path / "judge")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        judge = JudgeSource(source=str(folder)).load()
    finally:
        torch.set_num_threads(before)

    assert isinstance(judge.scorer, TransformersScorer)
    try:
        assert judge.scorer.chat.owner.call(torch.get_num_threads) == threads
    finally:
        judge.close()
