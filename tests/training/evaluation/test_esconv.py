"""Evaluation of a policy on ESConv's test split: metrics by hand, and the stage end to end."""

import json
from pathlib import Path

import pytest

from compeer_core.cer import CerRecord
from compeer_core.errors import ConfigError
from compeer_core.model_pool import ModelPool
from compeer_core.reasoning import parse, read
from compeer_core.row_files import write_rows
from tests.checkpoints import build_qwen
from tests.training.corpora_fixture import write_faces
from tests.training.evaluation.test_face_swap import sample
from tests.training.grpo.world import record
from training.common import results
from training.evaluation import esconv
from training.evaluation.esconv import Config
from training.evaluation.esconv_measures import (
    Answer,
    label_metrics,
    picture_metrics,
    reply_metrics,
)
from training.evaluation.face_swap import Condition, with_face
from training.evaluation.policy_answers import Answerer

pytestmark = pytest.mark.usefixtures("one_thread")

TURN = (
    "<history>A talk.\nStage: {stage}</history>\n"
    "<emotion>A word.\nSentiment: {sentiment}\nEmotion: {emotion}\nIntensity: 3</emotion>\n"
    "<strategy>Ask.\nStrategy: {strategy}</strategy>\n<reply>{reply}</reply>"
)


def turn(**parts: str) -> str:
    defaults = {"stage": "Exploration", "sentiment": "Negative", "emotion": "Anxiety"}
    return TURN.format(**defaults | {"strategy": "Question", "reply": "Why is that so?"} | parts)


def numbered(row: CerRecord, dialogue_id: str) -> CerRecord:
    case = row.case.model_copy(update={"dialogue_id": dialogue_id})
    return row.model_copy(update={"id": f"{dialogue_id}#2", "case": case})


def answer(number: int, written: str, **gold: str) -> Answer:
    completion = turn(**gold)
    row = numbered(sample("Anxiety", "Negative"), f"d{number}")
    true = parse(completion)
    return Answer(row, read(written), true.reasoning, true.reply)


def table(metrics) -> dict[tuple[str, str, str], results.Metric]:
    return {(metric.about, metric.of, metric.name): metric for metric in metrics}


def test_labels_and_majority_class_by_hand():
    answers = [
        answer(0, turn(strategy="Question"), strategy="Question"),
        answer(1, turn(strategy="Question"), strategy="Others"),
        answer(2, turn(strategy="Others"), strategy="Question"),
        answer(3, "nothing of the kind", strategy="Question"),
    ]

    found = table(label_metrics({"greedy": answers}))

    assert found["strategy", "policy, greedy", "accuracy"].value == 25.0
    # Question: 1 hit, 3 true, 2 predicted: F1 2/5; Others: F1 0. (3 * 0.4 + 0) / 4, (0.4 + 0) / 2
    assert found["strategy", "policy, greedy", "macro F1"].value == pytest.approx(20.0)
    assert found["strategy", "policy, greedy", "weighted F1"].value == pytest.approx(30.0)
    assert found["strategy", "majority class", "accuracy"].value == 75.0
    # 2 * 3 / (3 + 4), weighted by 3 of 4
    assert found["strategy", "majority class", "weighted F1"].value == pytest.approx(
        100 * 6 / 7 * 3 / 4
    )
    assert found["emotion", "policy, greedy", "accuracy"].value == 75.0
    assert found["stage", "policy, greedy", "accuracy"].n == 4


def test_replies_by_hand():
    loop = "I am so sorry. I am so sorry. I am so sorry."
    answers = [
        answer(0, turn(reply="Why is that so?"), reply="Why is that so?"),
        answer(1, turn(reply=loop), reply="Oh no."),
        answer(2, turn(reply="Oh no.").removesuffix("</reply>"), reply="Oh no."),
    ]

    found = table(reply_metrics({"sampled": answers}))

    who = "policy, sampled"
    # the loop has only its full stop in common with "Oh no.": P 1/15, R 1/3
    third = 2.44 / 45 / (1 / 3 + 1.44 / 15)
    assert found["replies", who, "ROUGE-L"].value == pytest.approx(100 * (2 + third) / 3)
    # words: why is that so / i am so sorry x3 / oh no: 9 distinct of 18
    assert found["replies", who, "distinct-1"].value == pytest.approx(100 * 9 / 18)
    assert found["whole turns", who, "complete"].value == pytest.approx(200 / 3)
    assert found["whole turns", who, "repetition rate (4-gram >= 3x)"].value == pytest.approx(
        100 / 3
    )


def test_photos_by_hand():
    def under(condition: Condition, *written: tuple[str, str]) -> list[Answer]:
        gold = [("Anxiety", "Negative"), ("Sadness", "Negative"), ("Joy", "Positive")]
        return [
            answer(
                number,
                turn(emotion=emotion, sentiment=sentiment),
                emotion=true[0],
                sentiment=true[1],
            )
            for number, ((emotion, sentiment), true) in enumerate(zip(written, gold, strict=True))
        ]

    anxious, joyful = ("Anxiety", "Negative"), ("Joy", "Positive")
    written = {
        Condition.NONE: under(Condition.NONE, anxious, anxious, anxious),
        Condition.FITS: under(Condition.FITS, anxious, ("Sadness", "Negative"), anxious),
        Condition.CONTRADICTS: under(Condition.CONTRADICTS, joyful, anxious, anxious),
    }

    found = table(picture_metrics(written))

    about = "emotion and photos"
    assert found[about, "without a photo", "accuracy"].value == pytest.approx(100 / 3)
    assert found[about, "with a matching photo", "accuracy"].value == pytest.approx(200 / 3)
    assert found[about, "difference", "accuracy"].value == pytest.approx(100 / 3)
    about = "sentiment label where photo and text contradict"
    # happy for anxiety: Positive with the photo only; sad for joy: Negative in both cases
    assert found[about, "without a photo", "share"].value == pytest.approx(100 / 3)
    assert found[about, "with the photo", "share"].value == pytest.approx(200 / 3)
    assert found[about, "label changes to the photo's", "share"].value == pytest.approx(100 / 3)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    faces = write_faces(tmp_path / "faces", train=1, valid=2, muxspace=1)
    rows = [
        numbered(with_face(sample("Anxiety", "Negative"), None), f"esconv/test/{n}")
        for n in range(3)
    ]
    other_split = record(9, "valid").model_copy(update={"first": rows[0].first})
    write_rows(tmp_path / "rows.jsonl", [*rows, other_split])
    return Config(
        samples=tmp_path / "rows.jsonl",
        faces=faces,
        policy={"name": "tiny", "source": str(build_qwen(tmp_path / "policy"))},
        sampling={"max_new_tokens": 6},
        picture_turns=2,
        perplexity_turns=2,
        printed=2,
        folder=tmp_path / "run",
        output=tmp_path / "results",
        device="cpu",
    )


def test_stage_writes_turns_table_and_replies(config, tmp_path):
    esconv.run(config)

    found = table(results.load(tmp_path / "results" / "esconv.json").metrics)
    # an untrained model writes no complete turn and no label
    assert found["whole turns", "policy, greedy", "complete"].value == 0.0
    assert found["strategy", "policy, sampled", "accuracy"].value == 0.0
    assert found["strategy", "majority class", "accuracy"].value == 100.0
    assert found["emotion and photos", "difference", "accuracy"].n == 2
    of = "whole turns (reasoning is rule-made)"
    assert found["the corpus's own turns", of, "perplexity"].value > 1
    lines = (tmp_path / "run" / "turns.sampled.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"esconv/test/{n}#2" for n in range(3)]
    printed = (tmp_path / "run" / "replies.md").read_text(encoding="utf-8")
    assert printed.count("## esconv/test/") == 2 and "In the corpus: Why?" in printed


def test_sampled_turns_can_be_left_out(config, tmp_path):
    esconv.run(config.model_copy(update={"sampled": False}))

    of = {metric.of for metric in results.load(tmp_path / "results" / "esconv.json").metrics}
    assert "policy, greedy" in of and "policy, sampled" not in of
    assert not (tmp_path / "run" / "turns.sampled.jsonl").exists()
    assert "## esconv/test/" in (tmp_path / "run" / "replies.md").read_text(encoding="utf-8")


def test_photos_can_be_measured_alone(config, tmp_path):
    esconv.run(config.model_copy(update={"turns": 0, "perplexity_turns": 0}))

    about = {each.about for each in results.load(tmp_path / "results" / "esconv.json").metrics}
    assert about == {"emotion and photos", "sentiment label where photo and text contradict"}
    assert not (tmp_path / "run" / "replies.md").exists()


def test_turns_are_reproducible(config, tmp_path):
    esconv.run(config)
    before = (tmp_path / "run" / "turns.sampled.jsonl").read_bytes()
    greedy = (tmp_path / "run" / "turns.greedy.jsonl").read_bytes()

    esconv.run(config)

    assert (tmp_path / "run" / "turns.sampled.jsonl").read_bytes() == before
    assert greedy != before


def test_interrupted_evaluation_resumes(config, tmp_path, monkeypatch):
    esconv.run(config)
    expected = (tmp_path / "run" / "table.md").read_text(encoding="utf-8")
    batches: list[int] = []
    generate = Answerer._generate_batch

    def interrupted_at(call: int):
        def counted(self, prompts, sampling):
            if len(batches) == call:
                raise KeyboardInterrupt
            batches.append(len(prompts))
            return generate(self, prompts, sampling)

        return counted

    monkeypatch.setattr(Answerer, "_generate_batch", interrupted_at(2))
    with pytest.raises(KeyboardInterrupt):
        esconv.run(config)
    monkeypatch.setattr(Answerer, "_generate_batch", interrupted_at(99))
    esconv.run(config)

    assert (tmp_path / "run" / "table.md").read_text(encoding="utf-8") == expected
    assert len(batches) == 5  # two sampling settings and three kinds of photos, once each
    assert not (tmp_path / "run" / "answers").exists()


def test_dry_run_writes_nothing_and_resume_is_rejected(config, tmp_path):
    esconv.run(config, dry_run=True)

    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="leave out --resume"):
        esconv.run(config, resume=tmp_path)


def test_policy_is_loaded_once(config, monkeypatch):
    loaded = []
    lease = ModelPool.lease

    def counted(self, *arguments):
        loaded.append(arguments[0])
        return lease(self, *arguments)

    monkeypatch.setattr(ModelPool, "lease", counted)

    esconv.run(config)

    assert loaded == [config.policy.source]
