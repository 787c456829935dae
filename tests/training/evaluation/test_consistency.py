"""The consistency evaluation: selection of turns, stored verdicts, and outputs."""

import csv
import json
from pathlib import Path

import pytest

from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord, DecidedBy
from compeer_core.consistency import CLEAR_SIGNS
from compeer_core.dialogue import Speaker
from compeer_core.errors import BackendError, ConfigError
from compeer_core.registry import ModelEntry, Registry
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference, Strategy
from compeer_core.unifireward import PREFERENCES, VERDICTS, Judge
from tests.training.cer.endpoint import Endpoint, asked
from training.cer import esconv_rules
from training.cer.steps.generation import GeneratedTurn
from training.common import results
from training.data.records import read_records
from training.evaluation import consistency
from training.evaluation.consistency import Config, StoredVerdicts
from training.evaluation.strategy_signs import measure_signs
from training.evaluation.turn_selection import Rejected, Row, Turn, read_rows, select

ASKS, STATES = "Why is that?", "It rains."


def written(reply, strategy="Question", stage="Exploration"):
    return (
        f"<history>Work.\nStage: {stage}</history><emotion>Low.\nSentiment: Negative\n"
        f"Emotion: Sadness\nIntensity: 3</emotion><strategy>Ask.\nStrategy: {strategy}</strategy>"
        f"<reply>{reply}</reply>"
    )


def case_of(number, *, opening="I lost my job", original="I see.", split="test", language="en"):
    return Case(
        id=f"d{number}#0",
        dialogue_id=f"d{number}",
        source_id=f"s{number // 2}",
        corpus="esconv",
        language=language,
        split=split,
        licence="CC BY-NC 4.0",
        round=0,
        rounds=1,
        history=(CaseUtterance(speaker=Speaker.SEEKER, text=f"{opening}, number {number}."),),
        original=original,
    )


def turn_of(number, text=None, **case):
    text = written(ASKS) if text is None else text
    return GeneratedTurn(
        id=f"d{number}#0/policy/0",
        case=case_of(number, **case),
        author="policy",
        sample=0,
        seed=0,
        text=text,
        reply=None,
    )


def row_of(text, **case):
    case = case_of(0, **case)
    return Row("r", case, text, case.original)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (row_of(None), Rejected.BARE),
        (row_of("<reply>Why?</reply>"), Rejected.INCOMPLETE),
        (row_of(written(ASKS), original=None), Rejected.ALONE),
        (row_of(written("I  SEE.")), Rejected.SAME),
        (row_of(written(ASKS, "Hugging")), Rejected.UNTOLD),
        (row_of(written(ASKS), language="zh"), Rejected.UNTOLD),
    ],
)
def test_reasons_to_reject_a_turn(row, reason):
    assert select(row) is reason


def test_selected_turn_knows_whether_its_reply_follows_the_strategy():
    asks, states = select(row_of(written(ASKS))), select(row_of(written(STATES, "Others")))

    assert isinstance(asks, Turn)
    assert isinstance(states, Turn)
    assert (asks.follows, asks.has_clear_signs) == (True, True)
    assert (states.follows, states.has_clear_signs) == (False, False)


def test_cer_rows_give_the_turn_with_reasoning_and_a_reference(tmp_path):
    model = Candidate(author="policy", reply=ASKS, turn=written(ASKS))
    corpus = Candidate(author="corpus", reply="I see.")
    rows = [
        CerRecord(id="a", case=case_of(1), first=corpus, second=model),
        CerRecord(
            id="b",
            case=case_of(2, original="The original."),
            first=model,
            second=corpus,
            preference=Preference.FIRST,
            preference_by=DecidedBy(kind="rule", name="r/1"),
        ),
        CerRecord(id="c", case=case_of(3, original="The original."), first=model),
        CerRecord(id="d", case=case_of(4, split="train"), first=model),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)

    rows = list(read_rows([tmp_path / "rows.jsonl"], ["test"]))

    assert [(row.id, row.text, row.reference) for row in rows] == [
        ("a", written(ASKS), "I see."),
        ("b", written(ASKS), "I see."),
        ("c", written(ASKS), "The original."),
    ]


# --- the stage -----------------------------------------------------------------------------------


class LenientScorer:
    """Judges every step correct, except for some histories, and every reply better."""

    reserved = ()

    def __init__(self, name, calls, *, false_on=()):
        self.name = name
        self._calls = calls
        self._false_on = false_on

    def check_labels(self, labels):
        pass

    def open(self, messages):
        self._history = messages[-1].text
        return self

    def ask(self, text, labels):
        self._calls.append(self.name)
        if "broken" in self._history:
            raise BackendError("broken")
        if labels == VERDICTS:
            wrong = any(f"number {number}." in self._history for number in self._false_on)
            return (0.1, 0.9) if wrong else (0.9, 0.1)
        own = max(text.find(f"First: {reply}") for reply in (ASKS, STATES)) >= 0
        likely = {True: "First", False: "Second"}[own]
        return tuple(0.7 if label == likely else 0.1 for label in PREFERENCES)

    def answer(self, label):
        pass

    def close(self):
        pass


@pytest.fixture
def calls():
    return []


@pytest.fixture
def config(tmp_path: Path, monkeypatch, calls) -> Config:
    turns = [turn_of(n, written(ASKS if n % 4 else STATES)) for n in range(12)]
    turns += [turn_of(20, "<reply>Hm.</reply>"), turn_of(21, opening="All is broken")]
    turns += [turn_of(22, split="train")]
    write_rows(tmp_path / "turns.jsonl", turns)

    class Models(Registry):
        def judge(self, name):
            return Judge(
                name, LenientScorer(name, calls, false_on=range(6) if name == "two" else ())
            )

    entries = [ModelEntry(name=name, kind="judge", source="none") for name in ("one", "two")]
    monkeypatch.setattr(Registry, "from_toml", lambda *_, **__: Models(entries))
    return Config(
        judges=("one",),
        written=(tmp_path / "turns.jsonl",),
        folder=tmp_path / "run",
        output=tmp_path / "results",
        name="consistency_test",
    )


def measured(config):
    result = results.load(config.output / "consistency_test.json")
    return {(metric.about, metric.label, metric.name): metric for metric in result.metrics}


@pytest.mark.usefixtures("drawn_plots")
def test_stage_writes_table_csv_and_plot(config):
    consistency.run(config)

    metrics = measured(config)
    # 3 of 12 replies make a statement although the strategy is Question; the judge accepts all 12.
    primary = metrics[consistency.PRIMARY, "one", "contradictions"]
    assert (primary.value, primary.n, primary.unit) == (pytest.approx(25), 12, "%")
    assert primary.low < 25 < primary.high
    assert metrics[consistency.PRIMARY, "one", "by chance"].value == pytest.approx(25)
    assert metrics[consistency.PRIMARY, "one", "difference"].value == pytest.approx(0)
    assert metrics[consistency.CLEAR, "one", "contradictions"].n == 12
    assert metrics["steps and reply verdict disagree", "one", "contradictions"].value == 0
    assert metrics["verdicts", "one", "all steps True"].value == 100
    assert metrics["verdicts", "one", "reply carries out its strategy"].value == pytest.approx(75)
    drawn = {of: each.value for (about, of, _), each in metrics.items() if about == "turns drawn"}
    assert drawn == {
        "counted": 12,
        "rejected: the turn is not complete": 1,
        "rejected: a judge could not be read": 1,
    }
    with (config.folder / "table.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(metrics)
    assert (config.folder / "table.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (config.folder / "turns.jsonl").open(encoding="utf-8")]
    assert {row["id"] for row in rows if row["contradictions"]["one"]} == {
        f"d{number}#0/policy/0" for number in (0, 4, 8)
    }


def test_second_judge_is_compared_with_the_first(config):
    consistency.run(config.model_copy(update={"judges": ("one", "two")}))

    metrics = measured(config)
    # The second judges all steps of turns 0 to 5 wrong, so only turn 8 contradicts. By chance: 1/3 of
    # the 3 have a correct strategy step, all are accepted.
    assert metrics[consistency.PRIMARY, "two", "contradictions"].value == pytest.approx(100 / 12)
    assert metrics[consistency.PRIMARY, "two", "by chance"].value == pytest.approx(100 / 12)
    difference = metrics[consistency.PRIMARY, "difference (two - one)", "contradictions"]
    assert difference.value == pytest.approx(-200 / 12)
    assert difference.low <= difference.value <= difference.high
    # In six turns a step is wrong and the reply better.
    assert metrics[
        "steps and reply verdict disagree", "two", "contradictions"
    ].value == pytest.approx(50)


def test_stored_verdicts_are_reused(config, calls):
    few = config.model_copy(update={"turns": 5})
    consistency.run(few)
    before = len(calls)
    first = [each.id for each in read_records(config.folder / "one.jsonl", StoredVerdicts)]

    consistency.run(few)
    assert len(calls) == before
    path = config.folder / "one.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # killed while writing
    consistency.run(config)

    again = [each.id for each in read_records(path, StoredVerdicts)]
    assert again[: len(first) - 1] == first[:-1]
    assert len(again) == len(set(again)) == 13
    assert measured(config)[consistency.PRIMARY, "one", "contradictions"].n == 12


def test_assessor_is_asked_about_original_and_permuted_verdicts(config):
    def answer(body):
        # Inconsistent if all steps are correct and the reply is not better, or vice versa.
        text = asked(body)
        right, better = "-> False" not in text, "the supporter's reply is better" in text
        return json.dumps({"consistent": right == better})

    with Endpoint(answer=answer) as endpoint:
        both = {"judges": ("one", "two"), "assessor": endpoint.source}
        consistency.run(config.model_copy(update=both))
        requests = endpoint.requests
        consistency.run(config.model_copy(update=both))
        assert endpoint.requests == requests

    metrics = measured(config)
    # Both judges prefer every reply, so permuting the reply verdicts changes no question.
    assert requests == 12 + 6
    assert metrics["says tiny", "one", "contradictions"].value == 0
    assert metrics["says tiny", "two", "contradictions"].value == pytest.approx(50)
    assert metrics["says tiny", "two", "difference"].value == pytest.approx(0)
    assert metrics["questions to the assessor", "asked", "count"].value == 18
    stored = [path for path in (config.folder / "assessor").iterdir() if path.is_file()]
    for path in (*stored, config.output / "consistency_test.json"):
        assert endpoint.url.encode() not in path.read_bytes()


def test_dry_run_writes_nothing(config, caplog, tmp_path):
    caplog.set_level("INFO")

    consistency.run(config, dry_run=True)

    assert "13 of 14 turns are valid" in caplog.text
    assert "fewer valid turns than the requested 1000" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"turns.jsonl"}


def test_rejects_invalid_settings_before_loading_models(config, tmp_path):
    with pytest.raises(ConfigError, match="oen"):
        consistency.run(config.model_copy(update={"judges": ("oen",)}), dry_run=True)
    with pytest.raises(ConfigError, match="is not an endpoint"):
        consistency.run(config.model_copy(update={"assessor": "hf:gpt"}), dry_run=True)
    with pytest.raises(ConfigError, match="leave out --resume"):
        consistency.run(config, resume=tmp_path)
    with pytest.raises(ConfigError, match="no valid turn"):
        consistency.run(config.model_copy(update={"splits": ("valid",)}))
    with pytest.raises(ValueError, match="named twice"):
        Config(judges=("one", "one"), written=(tmp_path,), folder=tmp_path)


# --- accuracy of the signs -----------------------------------------------------------------------


@pytest.mark.corpora
def test_signs_are_detected_in_replies_with_that_strategy(corpora, tmp_path):
    esconv_rules.run(esconv_rules.Config(esconv=corpora / "esconv", output=tmp_path))

    signs = measure_signs(tmp_path / "rows.jsonl")

    for strategy in Strategy:
        margin = signs[strategy].found.value - signs[strategy].false_alarms.value
        assert signs[strategy].found.n > 500
        assert signs[strategy].found.low > signs[strategy].false_alarms.high
        assert (margin >= 0.4) == (strategy in CLEAR_SIGNS)
    assert signs[None].found.value == pytest.approx(0.699, abs=0.001)
    assert signs[None].false_alarms.value == pytest.approx(0.319, abs=0.001)
