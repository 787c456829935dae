"""Obedience to forced strategies: a blind sheet with controls, metrics by hand, and wrong judgements."""

import json
from collections import Counter

import pytest

from compeer_core.consistency import Followed
from compeer_core.errors import ConfigError
from compeer_core.reasoning import read
from compeer_core.taxonomy import ESCONV_STRATEGIES
from tests.checkpoints import build_qwen
from training.evaluation import steering
from training.evaluation.policy_answers import Answerer
from training.evaluation.saved_runs import read_run
from training.evaluation.steering import (
    ALL,
    CONTROL,
    RULE,
    Config,
    Hidden,
    Judgement,
    SteeredTurn,
    blind_sheet,
    steering_metrics,
)
from training.stages import WaitingForPeople

STRATEGIES = ESCONV_STRATEGIES.names
TURN = (
    "<history>They say it.\nStage: Exploration</history>\n"
    "<emotion>They feel sad.\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
    "<strategy>Ask.\nStrategy: {}</strategy>\n<reply>{}</reply>"
)


def turn(context: str, strategy: str = "Question", reply: str = "Why?") -> SteeredTurn:
    return SteeredTurn(
        policy="a",
        context=context,
        source=context,
        corpus="",
        conversation=("seeker: I hate my boss",),
        messages=("I hate my boss",),
        text=TURN.format(strategy, reply),
        strategy=strategy,
        by_rule=Followed.YES,
    )


@pytest.fixture
def config(tmp_path) -> Config:
    (tmp_path / "first.txt").write_text("I hate my boss\n" * 8, encoding="utf-8")
    return Config(
        policies=({"name": "a", "source": "x"},),
        contexts=({"path": tmp_path / "first.txt", "count": 8},),
        output=tmp_path / "run",
        results=tmp_path / "results",
        name="steering_test",
        reader="a test",
        label_source="llm",
    )


@pytest.fixture
def sheet(config, monkeypatch) -> list[dict[str, object]]:
    """The lines of a written sheet: each strategy once, and a control."""
    turns = [turn(f"first-{n}", name, f"Reply {n}?") for n, name in enumerate(STRATEGIES)]
    monkeypatch.setattr(steering, "_generate_turns", lambda *_: turns)
    with pytest.raises(WaitingForPeople, match=r"according to .* and run this command again"):
        steering.run(config)
    text = (config.output / "sheet.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write(config: Config, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (config.output / "judgements.jsonl").write_text(text, encoding="utf-8")


def answers(sheet) -> list[dict[str, object]]:
    return [{"id": line["id"], "carries_out": True, "fits": True} for line in sheet]


# --- the sheet -----------------------------------------------------------------------------------


def test_the_sheet_shows_conversation_strategy_and_reply_alone(config, sheet):
    key = json.loads((config.output / "key.json").read_text(encoding="utf-8"))["lines"]
    hidden = {line: Hidden(**row) for line, row in key.items()}

    assert {tuple(line) for line in sheet} == {
        ("id", "conversation", "strategy", "definition", "reply")
    }
    assert len(sheet) == 8 + 1
    for line in sheet:
        row = hidden[line["id"]]
        assert line["strategy"] == row.shown
        assert line["definition"] == ESCONV_STRATEGIES.entry(row.shown).definition_en
        assert line["reply"] == f"Reply {STRATEGIES.index(row.forced)}?"
    assert [row.is_control for row in hidden.values()].count(True) == 1
    assert "carries_out" in (config.output / "rubric.md").read_text(encoding="utf-8")


def test_a_tenth_of_the_turns_with_a_reply_returns_with_another_strategy():
    turns = [turn(f"x{n}") for n in range(11)] + [turn(f"y{n}", reply="") for n in range(29)]
    key = {line: Hidden(**row) for line, row in blind_sheet(turns, 0).key.items()}
    controls = [row for row in key.values() if row.is_control]

    assert len(key) == 40 + 4
    assert len({row.context for row in controls}) == 4
    assert all(row.context.startswith("x") for row in controls)
    assert len({row.shown for row in controls}) > 1
    in_order = [row.context for row in key.values() if not row.is_control]
    assert in_order != [turn.context for turn in turns]


@pytest.mark.usefixtures("one_thread")
def test_every_strategy_is_forced_equally_often_and_an_interrupted_run_resumes(
    config, tmp_path, monkeypatch
):
    policy = {"name": "a", "source": str(build_qwen(tmp_path / "policy"))}
    config = Config(
        **(config.model_dump() | {"policies": [policy], "strategies_per_context": 2}),
    ).model_copy(update={"max_new_tokens": 12})
    with monkeypatch.context() as patch:
        patch.setattr(steering, "blind_sheet", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steering.run(config)
    monkeypatch.setattr(Answerer, "_generate_batch", lambda *_: pytest.fail("generated again"))
    with pytest.raises(WaitingForPeople):
        steering.run(config)

    rows = (config.output / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [SteeredTurn.model_validate_json(row) for row in rows]
    assert Counter(turn.strategy for turn in turns) == dict.fromkeys(STRATEGIES, 2)
    assert Counter(turn.context for turn in turns) == {f"first-{n}": 2 for n in range(1, 9)}
    assert not (config.output / "answers").exists()


def test_the_rule_reads_the_reply_of_a_turn(config, monkeypatch):
    def sampled(_, contexts, *arguments):
        *_, forced, draws = arguments
        assert draws == 3
        for case, strategy in zip(contexts, forced, strict=True):
            yield steering.SampledTurn("a", case, 7, TURN.format(strategy, "Why?"), strategy)

    monkeypatch.setattr(steering, "sampled_turns", sampled)
    with pytest.raises(WaitingForPeople):
        steering.run(config.model_copy(update={"draws": 3}))
    rows = (config.output / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [SteeredTurn.model_validate_json(row) for row in rows]

    assert {turn.strategy for turn in turns if turn.by_rule is Followed.YES} == {"Question"}
    assert read(turns[1].text).strategy.strategy == turns[1].strategy == STRATEGIES[1]


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_by_hand():
    def hidden(source: str, forced: str, shown: str, by_rule: Followed) -> Hidden:
        return Hidden(
            policy="a", context=source, source=source, forced=forced, shown=shown, by_rule=by_rule
        )

    yes, no, unknown = Followed.YES, Followed.NO, Followed.UNKNOWN
    key = {
        "s1": hidden("w", "Question", "Question", yes),
        "s2": hidden("x", "Question", "Question", yes),
        "s3": hidden("y", "Others", "Others", no),
        "s4": hidden("z", "Others", "Others", yes),
        "s5": hidden("z", "Others", "Others", unknown),
        "s6": hidden("w", "Question", "Others", no),
        "s7": hidden("x", "Question", "Information", no),
    }
    said = {"s1": 1, "s2": 1, "s3": 1, "s4": 0, "s5": 0, "s6": 1, "s7": 0}
    judgements = {
        line: Judgement(id=line, carries_out=bool(answer), fits=line != "s1")
        for line, answer in said.items()
    }

    found = {
        (metric.about, metric.name): (metric.value, metric.n)
        for metric in steering_metrics(key, judgements, "LLM rater")
    }

    assert found == {
        (ALL, "carried out (LLM rater)"): (60.0, 5),
        (ALL, "fits (LLM rater)"): (80.0, 5),
        ("Question", "carried out (LLM rater)"): (100.0, 2),
        ("Question", "fits (LLM rater)"): (50.0, 2),
        ("Others", "carried out (LLM rater)"): (pytest.approx(100 / 3), 3),
        ("Others", "fits (LLM rater)"): (100.0, 3),
        (CONTROL, "carried out (LLM rater)"): (50.0, 2),
        (CONTROL, "fits (LLM rater)"): (100.0, 2),
        # of the reader's yes 2 of 3 by the rule, of the no 0 of 1: (2/3 + 0) / 2
        (RULE, "balanced accuracy"): (pytest.approx(100 / 3), 4),
    }


def test_without_a_no_of_the_reader_the_rule_is_not_measured():
    row = Hidden(
        policy="a",
        context="x",
        source="x",
        forced="Others",
        shown="Others",
        by_rule=Followed.YES,
    )
    judgements = {"s1": Judgement(id="s1", carries_out=True, fits=True)}

    metrics = steering_metrics({"s1": row}, judgements, "LLM rater")
    assert {metric.about for metric in metrics} == {ALL, "Others"}


def test_the_second_run_publishes(config, sheet):
    write(config, answers(sheet)[::-1])
    steering.run(config)

    (file,) = config.results.iterdir()
    result = json.loads(file.read_text(encoding="utf-8"))
    assert (result["name"], result["gate"]) == ("steering_test", "off")
    assert result["label_source"].startswith("llm")
    assert "| Question | a | 100 % (100 to 100)" in (config.output / "table.md").read_text()
    saved = read_run(config.output)
    assert saved.stage == "evaluate steering"
    assert "forced strategy: Question" in {each.note for each in saved.transcripts}


# --- judgements that cannot be used --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1].pop("fits"), r"judgements\.jsonl, line 2: fits: Field required"),
        (lambda rows: rows[2].update(id="s099"), r"line 3: the sheet has no line 's099'"),
        (lambda rows: rows.append(rows[0]), r"line 10: s001 was judged before; keep one"),
        (lambda rows: rows.pop(4), r"judgements\.jsonl: 1 lines are not judged, first s005"),
        (lambda rows: rows[3].update(carries_out="maybe"), r"line 4: carries_out: Input should be"),
    ],
)
def test_wrong_judgements_are_named_with_their_line(config, sheet, change, message):
    rows = answers(sheet)
    change(rows)
    write(config, rows)
    with pytest.raises(ConfigError, match=message):
        steering.run(config)


def test_rejects_a_sheet_of_other_settings_and_another_folder_to_resume(config, sheet, tmp_path):
    with pytest.raises(ConfigError, match="written with other settings"):
        steering.run(config.model_copy(update={"draws": 2}))
    with pytest.raises(ConfigError, match="leave out --resume"):
        steering.run(config, resume=tmp_path)
