"""Replies read without names: the sheet hides who wrote what, and shares are counted by hand."""

import json

import pytest

from compeer_core.errors import ConfigError
from training.data.quotations import invented
from training.evaluation import reading
from training.evaluation.blind_reading import (
    Config,
    Judgement,
    ReplyJudgement,
    WrittenTurn,
    counted_metrics,
    reader_metrics,
)
from training.stages import WaitingForPeople

TURN = (
    "<history>They say {quoted}.\nStage: Exploration</history>\n"
    "<emotion>They feel sad.\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
    "<strategy>Ask.\nStrategy: Question</strategy>\n<reply>{reply}</reply>"
)


def turn(policy: str, context: str, reply: str = "Why?", quoted: str = '"my boss"') -> WrittenTurn:
    return WrittenTurn(
        policy=policy,
        context=context,
        source=context,
        corpus="",
        conversation=("seeker: I hate my boss",),
        messages=("I hate my boss",),
        text=TURN.format(reply=reply, quoted=quoted),
    )


def judged(answers: bool, rank: int) -> ReplyJudgement:
    return ReplyJudgement(
        grammatical=True, answers=answers, may_hurt=False, claims_human=False, rank=rank
    )


def values(metrics, name: str) -> dict[str, float]:
    return {metric.of: metric.value for metric in metrics if metric.name == name}


@pytest.fixture
def config(tmp_path) -> Config:
    (tmp_path / "first.txt").write_text("I hate my boss\n\nhi\n", encoding="utf-8")
    return Config(
        policies=({"name": "a", "source": "x"}, {"name": "b", "source": "y"}),
        contexts=({"path": tmp_path / "first.txt", "count": 5},),
        output=tmp_path / "run",
        results=tmp_path / "results",
        name="reading_test",
        reader="a test",
        label_source="llm",
    )


def test_shares_and_pairs_by_hand():
    key = {
        "c001": {"context": "x", "source": "x", "policies": ["a", "b"]},
        "c002": {"context": "y", "source": "y", "policies": ["b", "a"]},
    }
    said = [
        Judgement(id="c001", replies=(judged(True, 1), judged(False, 2))),
        Judgement(id="c002", replies=(judged(True, 1), judged(True, 1))),
    ]
    metrics = list(reader_metrics(["a", "b"], key, said))

    assert values(metrics, "answers what was said") == {"a": 100.0, "b": 50.0}
    assert values(metrics, "preferred to b (a tie is half)") == {"a": 75.0}  # a win and a tie


def test_what_is_counted_without_a_reader_by_hand():
    turns = [
        turn("a", "x"),
        turn("a", "y", quoted='"my job"'),
        turn("b", "x", reply="go on and on now " * 4),
        turn("b", "y").model_copy(update={"text": "Hello"}),
    ]
    metrics = list(counted_metrics(turns))

    assert values(metrics, "no invented quotation, of complete turns") == {"a": 50.0, "b": 100.0}
    assert values(metrics, "complete") == {"a": 100.0, "b": 50.0}
    assert values(metrics, "loops (a 4-gram three times)") == {"a": 0.0, "b": 50.0}


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ('"I hate" it', []),
        ('"i hate" it', []),
        ('"hate my Boss"', ["hate my Boss"]),
        ('"hate my boss."', ["hate my boss."]),
    ],
)
def test_a_quotation_is_letter_for_letter(text, odd):
    assert list(invented(text, ["I hate my boss"])) == odd


def test_the_sheet_hides_who_wrote_what_and_the_second_run_counts(config, monkeypatch):
    replies = {"a": "Why do you?", "b": "Oh."}
    written = [
        turn(name, f"first-{number}", reply=replies[name]) for name in "ab" for number in (1, 2)
    ]
    monkeypatch.setattr(reading, "_written", lambda *_: written)
    with pytest.raises(WaitingForPeople, match="is to be read by"):
        reading.run(config)

    sheet = (config.output / "sheet.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in sheet.splitlines()]
    assert [line.keys() for line in lines] == [{"id", "conversation", "replies"}] * 2
    key = json.loads((config.output / "key.json").read_text(encoding="utf-8"))["lines"]
    for line in lines:
        policies = key[line["id"]]["policies"]
        assert line["replies"] == [replies[policy] for policy in policies]
    said = "".join(
        Judgement(id=line["id"], replies=(judged(True, 1), judged(True, 2))).model_dump_json()
        + "\n"
        for line in lines
    )
    (config.output / "judgements.jsonl").write_text(said, encoding="utf-8")
    reading.run(config)

    (file,) = config.results.iterdir()
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["name"] == "reading_test"
    assert result["label_source"].startswith("llm")
    told = (config.output / "replies.md").read_text(encoding="utf-8")
    assert told.count("> seeker: I hate my boss") == 2
    assert told.count("- a (rank ") == told.count("- b (rank ") == 2
    assert "rank 2; no fault): Oh." in told or "rank 1; no fault): Oh." in told


def test_a_sheet_is_not_counted_under_other_settings(config, monkeypatch):
    monkeypatch.setattr(reading, "_written", lambda *_: [turn("a", "x"), turn("b", "x")])
    with pytest.raises(WaitingForPeople):
        reading.run(config)
    with pytest.raises(ConfigError, match="made with other settings"):
        reading.run(config.model_copy(update={"seed": 1}))
    (config.output / "key.json").unlink()
    (config.output / "judgements.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="belongs to an earlier sheet"):
        reading.run(config)


def test_words_of_other_corpora_are_not_printed():
    key = {"c001": {"context": "x", "source": "x", "policies": ["a"]}}
    said = [Judgement(id="c001", replies=(judged(True, 1),))]
    theirs = turn("a", "x").model_copy(update={"corpus": "esconv"})

    assert "I hate my boss" in reading.printed(key, [turn("a", "x")], said)
    assert "I hate my boss" not in reading.printed(key, [theirs], said)


def test_judgements_of_another_sheet_are_refused():
    key = {"c001": {"context": "x", "source": "x", "policies": ["a"]}}
    with pytest.raises(ConfigError, match="do not belong together: c001"):
        list(reader_metrics(["a"], key, []))
    with pytest.raises(ConfigError, match="c001: 1 replies were to be judged"):
        list(reader_metrics(["a"], key, [Judgement(id="c001", replies=(judged(True, 1),) * 2)]))
