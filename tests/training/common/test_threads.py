"""The models of a stage use as many threads as the stage."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compeer_core.backends.transformers_.scoring import TransformersScorer
from tests.checkpoints import build_qwen
from training.common.judge_source import JudgeSource
from training.evaluation.policy_answers import PolicySource, loaded_policy


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads of the stage."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_local_judge_uses_the_threads_of_the_stage(tmp_path: Path, threads: int):
    judge = JudgeSource(source=str(build_qwen(tmp_path / "judge"))).load()

    assert isinstance(judge.scorer, TransformersScorer)
    try:
        assert judge.scorer.chat.owner.call(torch.get_num_threads) == threads
    finally:
        judge.close()


def test_policy_uses_the_threads_of_the_stage(tmp_path: Path, threads: int):
    policy = PolicySource(name="policy", source=str(build_qwen(tmp_path / "policy")))

    with loaded_policy(policy, device="cpu") as answerer:
        assert answerer._lease.chat.owner.call(torch.get_num_threads) == threads
