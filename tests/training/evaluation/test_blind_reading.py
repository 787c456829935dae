"""Blind rating of replies: the sheet hides the policies, metrics by hand."""

import json

import pytest

from compeer_core.errors import ConfigError
from compeer_core.grounding import invented_quotations
from training.evaluation import blind_reading
from training.evaluation.blind_reading import (
    Config,
    Judgement,
    ReplyJudgement,
    reader_metrics,
    rule_metrics,
)
from training.evaluation.blind_sheet import WrittenTurn
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


def rating(answers: bool, rank: int) -> ReplyJudgement:
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


def test_reader_metrics_by_hand():
    key = {
        "c001": {"context": "x", "source": "x", "policies": ["a", "b"]},
        "c002": {"context": "y", "source": "y", "policies": ["b", "a"]},
    }
    judgements = {
        "c001": Judgement(id="c001", replies=(rating(True, 1), rating(False, 2))),
        "c002": Judgement(id="c002", replies=(rating(True, 1), rating(True, 1))),
    }
    metrics = list(reader_metrics(["a", "b"], key, judgements, "LLM rater"))

    assert values(metrics, "answers the message") == {"a": 100.0, "b": 50.0}
    assert values(metrics, "preferred over b (ties count half)") == {"a": 75.0}  # a win and a tie
    assert values(metrics, "answers the message: difference to b") == {"a": 50.0}


def test_rule_metrics_by_hand():
    turns = [
        turn("a", "x"),
        turn("a", "y", quoted='"my job"'),
        turn("b", "x", reply="go on and on now " * 4),
        turn("b", "y").model_copy(update={"text": "Hello"}),
    ]
    metrics = list(rule_metrics(turns))

    assert values(metrics, "complete turns without an invented quotation") == {
        "a": 50.0,
        "b": 100.0,
    }
    assert values(metrics, "complete") == {"a": 100.0, "b": 50.0}
    assert values(metrics, "repetition rate (4-gram >= 3x)") == {"a": 0.0, "b": 50.0}


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ('"I hate" it', []),
        ('"i hate" it', []),
        ('"hate my Boss"', ["hate my Boss"]),
        ('"hate my boss."', ["hate my boss."]),
    ],
)
def test_quotations_must_match_exactly(text, odd):
    assert list(invented_quotations(text, ["I hate my boss"], exact=True)) == odd


def test_first_run_writes_a_blind_sheet_and_second_run_publishes(config, monkeypatch):
    replies = {"a": "Why do you?", "b": "Oh."}
    written = [
        turn(name, f"first-{number}", reply=replies[name]) for name in "ab" for number in (1, 2)
    ]
    monkeypatch.setattr(blind_reading, "_generate_turns", lambda *_: written)
    with pytest.raises(WaitingForPeople, match=r"according to .* and run this command again"):
        blind_reading.run(config)

    sheet = (config.output / "sheet.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in sheet.splitlines()]
    assert [line.keys() for line in lines] == [{"id", "conversation", "replies"}] * 2
    key = json.loads((config.output / "key.json").read_text(encoding="utf-8"))["lines"]
    for line in lines:
        policies = key[line["id"]]["policies"]
        assert line["replies"] == [replies[policy] for policy in policies]
    judgements = "".join(
        Judgement(id=line["id"], replies=(rating(True, 1), rating(True, 2))).model_dump_json()
        + "\n"
        for line in lines
    )
    (config.output / "judgements.jsonl").write_text(judgements, encoding="utf-8")
    blind_reading.run(config)

    (file,) = config.results.iterdir()
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["name"] == "reading_test"
    assert result["label_source"].startswith("llm")
    text = (config.output / "replies.md").read_text(encoding="utf-8")
    assert text.count("> seeker: I hate my boss") == 2
    assert text.count("- a (rank ") == text.count("- b (rank ") == 2
    assert "rank 2; no fault): Oh." in text or "rank 1; no fault): Oh." in text


def test_rejects_a_sheet_of_other_settings(config, monkeypatch):
    turns = [turn("a", "x"), turn("b", "x")]
    monkeypatch.setattr(blind_reading, "_generate_turns", lambda *_: turns)
    with pytest.raises(WaitingForPeople):
        blind_reading.run(config)
    with pytest.raises(ConfigError, match="written with other settings"):
        blind_reading.run(config.model_copy(update={"seed": 1}))
    (config.output / "key.json").unlink()
    (config.output / "judgements.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="belongs to an earlier sheet"):
        blind_reading.run(config)


def test_text_of_other_corpora_is_not_published():
    key = {"c001": {"context": "x", "source": "x", "policies": ["a"]}}
    judgements = {"c001": Judgement(id="c001", replies=(rating(True, 1),))}
    esconv = turn("a", "x").model_copy(update={"corpus": "esconv"})

    assert "I hate my boss" in blind_reading.rated_replies(key, [turn("a", "x")], judgements)
    assert "I hate my boss" not in blind_reading.rated_replies(key, [esconv], judgements)


def test_rejects_another_number_of_replies():
    key = {"c001": {"context": "x", "source": "x", "policies": ["a"]}}
    judgements = {"c001": Judgement(id="c001", replies=(rating(True, 1),) * 2)}
    with pytest.raises(ConfigError, match="c001: 2 replies are judged, 1 are expected"):
        list(reader_metrics(["a"], key, judgements, "LLM rater"))
