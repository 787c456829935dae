"""Contexts and sampled turns: a seed per context that all models share, and resumption after an interruption."""

from pathlib import Path

import pytest

from compeer_core.backends.protocol import Sampling
from compeer_core.cer import Candidate, CerRecord
from compeer_core.row_files import write_rows
from tests.cases import case_of
from tests.checkpoints import build_qwen
from training.data.pictures import Pictures
from training.evaluation.contexts import Contexts, read_contexts, sampled_turns
from training.evaluation.policy_answers import Answerer, PolicySource


def rows_of(path: Path, sources: int, turns: int, split: str = "test") -> Contexts:
    rows = [
        CerRecord(
            id=f"{path.stem}{source}#{turn}",
            case=case_of(
                f"{path.stem}{source}",
                f"Message {turn}",
                id=f"{path.stem}{source}#{turn}",
                split=split,
            ),
            first=Candidate(author="corpus", reply="Oh no."),
        )
        for source in range(sources)
        for turn in range(turns)
    ]
    write_rows(path, rows)
    return Contexts(path=path, count=5)


def test_one_context_of_each_source_dialogue(tmp_path):
    samples = [rows_of(tmp_path / "a.jsonl", 8, 3), rows_of(tmp_path / "b.jsonl", 4, 3)]

    drawn = list(read_contexts(samples, 0, one_per_source=True))

    assert len(drawn) == len({case.source_id for case in drawn}) == 5 + 4
    assert len({case.id.partition("#")[2] for case in drawn}) > 1  # not always the first turn
    assert drawn == list(read_contexts(samples, 0, one_per_source=True))
    assert drawn != list(read_contexts(samples, 1, one_per_source=True))


def test_a_source_is_not_drawn_from_two_files(tmp_path):
    sample = rows_of(tmp_path / "a.jsonl", 8, 2)

    drawn = list(read_contexts([sample, sample], 0, one_per_source=True))

    assert len(drawn) == len({case.source_id for case in drawn}) == 8


@pytest.mark.usefixtures("one_thread")
def test_models_share_the_seed_of_a_context_and_stored_turns_are_reused(tmp_path, monkeypatch):
    policies = [
        PolicySource(name=name, source=str(build_qwen(tmp_path / name))) for name in ("a", "b")
    ]
    contexts = list(read_contexts([rows_of(tmp_path / "rows.jsonl", 3, 1)], 0))
    sampling = Sampling(temperature=0.7, max_new_tokens=4)

    def sample():
        pictures = Pictures(None, None)
        return list(sampled_turns(policies, contexts, pictures, sampling, tmp_path / "run", 3))

    turns = sample()
    assert [turn.policy for turn in turns] == ["a"] * 3 + ["b"] * 3
    seeds = [turn.seed for turn in turns]
    assert seeds[:3] == seeds[3:]
    assert len({*seeds}) == 3

    monkeypatch.setattr(Answerer, "_generate_batch", lambda *_: pytest.fail("generated again"))
    assert sample() == turns
