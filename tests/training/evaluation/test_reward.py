"""Judges on rows of CER: what is asked, what is counted, and the table that comes of it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord, DecidedBy
from compeer_core.dialogue import Speaker
from compeer_core.errors import BackendError, ConfigError
from compeer_core.registry import Registry
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import PREFERENCES, VERDICTS, Judge
from training.common import results
from training.data.pictures import Pictures
from training.data.samples import write_records
from training.evaluation import reward
from training.evaluation.judge_ratings import Rated, rate, rate_file
from training.evaluation.reward import MAJORITY, Config, comparison

RULE = DecidedBy(kind="rule", name="r/1")
PERSON = DecidedBy(kind="person", name="raters of x")


def written(reply: str) -> str:
    return (
        f"<history>Work.\nStage: Exploration</history><emotion>Low.\nSentiment: Negative\n"
        f"Emotion: Sadness\nIntensity: 3</emotion><strategy>Ask.\nStrategy: Question</strategy>"
        f"<reply>{reply}</reply>"
    )


def record(
    number, *, steps=(True, True, False), swapped=False, preference=Preference.FIRST, **more
):
    case = Case(
        id=f"d{number}#0",
        dialogue_id=f"d{number}",
        source_id=f"s{number // 2}",
        corpus=more.pop("corpus", "esconv"),
        language="en",
        split=more.pop("split", "test"),
        licence="CC BY-NC 4.0",
        round=0,
        rounds=1,
        history=(CaseUtterance(speaker=Speaker.SEEKER, text=f"I lost my job {number}."),),
        original="I see.",
    )
    model = Candidate(author="nano", reply="Why?", turn=written("Why?"), steps=steps, steps_by=RULE)
    corpus = Candidate(author="corpus", reply="I see.")
    first, second = (corpus, model) if swapped else (model, corpus)
    return CerRecord(
        id=f"r{number}",
        case=case,
        first=first,
        second=second,
        preference=preference,
        preference_by=RULE,
        **more,
    )


class Knowing:
    """A scorer that says 0.8 for what the text calls good, and fails on the word `broken`."""

    name = "knowing"
    reserved = ()

    def check_labels(self, labels):
        pass

    def open(self, messages):
        self._history = messages[-1].text
        return self

    def ask(self, text, labels):
        if "broken" in self._history:
            raise BackendError("broken")
        if labels == VERDICTS:
            return (0.2, 0.8) if "Question" in text else (0.8, 0.2)
        first = text.index("First: Why?") if "First: Why?" in text else -1
        likely = "First" if first >= 0 else "Second"
        return tuple(0.7 if label == likely else 0.1 for label in PREFERENCES)

    def answer(self, label):
        pass

    def close(self):
        pass


@pytest.fixture
def judge():
    return Judge("knowing", Knowing())


def test_a_row_is_rated_the_same_way_round_whichever_reply_came_first(judge):
    straight, turned = rate(
        judge,
        [record(1), record(2, swapped=True, preference=Preference.SECOND)],
        Pictures(),
    )

    assert straight.steps == turned.steps == (True, True, False)
    assert straight.step_probabilities == turned.step_probabilities == (0.8, 0.8, 0.2)
    assert straight.preference is turned.preference is Preference.FIRST
    assert straight.verdict is turned.verdict is Preference.FIRST
    # both orders are averaged: First 0.7 as first, 0.7 as second
    assert straight.preference_probabilities == pytest.approx((0.7, 0.1, 0.1, 0.1))
    assert (straight.group, straight.decided_by) == ("s0", "rule: r/1")


def test_bare_replies_are_compared_and_steps_that_nobody_labelled_are_not_counted(judge):
    bare = record(3).model_copy(
        update={
            "first": Candidate(author="a", reply="Why?"),
            "second": Candidate(author="b", reply="Hm."),
            "preference_by": PERSON,
        }
    )
    partly = record(4, steps=(True, None, False))

    first, second = rate(judge, [bare, partly], Pictures())

    assert first.step_probabilities == first.steps == (None, None, None)
    assert (first.verdict, first.decided_by) == (Preference.FIRST, "person: raters of x")
    assert second.step_probabilities == (0.8, None, 0.2)
    assert first.unscorable == second.unscorable == 0


def test_what_a_judge_cannot_be_read_on_is_counted_and_is_no_verdict(judge):
    broken = record(5)
    history = (CaseUtterance(speaker=Speaker.SEEKER, text="All is broken."),)
    broken = broken.model_copy(update={"case": broken.case.model_copy(update={"history": history})})

    failed, fine = rate(judge, [broken, record(6)], Pictures())

    assert failed.unscorable == 4
    assert failed.verdict is None
    assert failed.step_probabilities == (None, None, None)
    assert fine.unscorable == 0


def test_what_was_rated_is_not_asked_again(judge, tmp_path):
    path = tmp_path / "rated.jsonl"
    first = rate_file(judge, [record(1)], 1, Pictures(), path)

    again = rate_file(Judge("other", Knowing()), [record(2)], 1, Pictures(), path)

    assert again == first


def rated(number, *, labels, probabilities, preference=Preference.FIRST, verdict=Preference.FIRST):
    return Rated(
        id=f"r{number}",
        group=f"s{number // 2}",
        corpus="esconv",
        decided_by="rule: r/1",
        steps=labels,
        step_probabilities=probabilities,
        preference=preference,
        verdict=verdict,
        preference_probabilities=(0.7, 0.1, 0.1, 0.1),
        unscorable=0,
    )


def test_the_table_by_hand():
    # Step 1: labels T T T F; judge says T T F F.  F1(T) = 2*2/(2+3) = 0.8, F1(F) = 2*1/(2+1) = 2/3.
    # Weighted (3 * 0.8 + 2/3) / 4 = 0.766667; recall of False 1; balanced (2/3 + 1) / 2 = 5/6.
    # Always True: F1(T) = 6/7, weighted 4.5/7 = 0.642857.
    rows = [
        rated(0, labels=(True, True, True), probabilities=(0.9, 0.9, 0.9)),
        rated(1, labels=(True, True, False), probabilities=(0.8, 0.9, 0.1)),
        rated(2, labels=(True, False, True), probabilities=(0.3, 0.9, 0.9)),
        rated(
            3,
            labels=(False, True, None),
            probabilities=(0.2, 0.9, None),
            preference=Preference.BOTH,
            verdict=Preference.SECOND,
        ),
    ]

    found = {(one.about, one.of, one.name): one for one in comparison({"nano": rows})}

    step = "step 1, history"
    assert found[step, "nano", "weighted F1"].value == pytest.approx(76.6667, abs=1e-3)
    assert found[step, "nano", "recall of False"].value == pytest.approx(100)
    assert found[step, "nano", "balanced accuracy"].value == pytest.approx(83.3333, abs=1e-3)
    assert found[step, MAJORITY, "weighted F1"].value == pytest.approx(64.2857, abs=1e-3)
    assert found[step, MAJORITY, "recall of False"].value == 0
    assert found["step 3, strategy", "nano", "weighted F1"].n == 3
    # Reply: first first first both; verdicts first first first second: 3 of 4, as the commonest.
    assert found["reply", "nano", "accuracy"].value == pytest.approx(75)
    assert found["reply", MAJORITY, "accuracy"].value == pytest.approx(75)
    assert found["reply", MAJORITY, "kappa"].value == 0


def test_judges_are_compared_with_the_first_on_the_rows_that_both_could_read():
    labels = [(True, True, True), (True, True, False), (False, False, True), (False, True, None)]
    one = [0.9, 0.8, 0.2, 0.3]
    other = [0.9, None, 0.8, 0.3]

    def judged(given):
        return [
            rated(
                number, labels=label, probabilities=(value, 0.9, None if label[2] is None else 0.9)
            )
            for number, (label, value) in enumerate(zip(labels, given, strict=True))
        ]

    found = {
        (each.about, each.of, each.name): each
        for each in comparison({"one": judged(one), "two": judged(other)})
    }

    # rows 0, 2 and 3 of step 1: all right against T T F for T F F: balanced 1 against (1 + 1/2) / 2
    difference = found["step 1, history", "one less two", "balanced accuracy"]
    assert difference.value == pytest.approx(25)
    assert difference.n == 3
    assert not [key for key in found if key[1] == "two less one"]


# --- the stage -----------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Config:
    rng = np.random.default_rng(0)
    test = [
        record(
            number,
            steps=tuple((rng.random(3) < 0.7).tolist()),
            preference=list(Preference)[int(rng.integers(4))],
        )
        for number in range(20)
    ]
    valid = [
        one.model_copy(update={"case": one.case.model_copy(update={"split": "valid"})})
        for one in test
    ]
    human = [
        one.model_copy(
            update={
                "first": Candidate(author="a", reply="Why?"),
                "second": Candidate(author="b", reply="Hm."),
                "preference_by": PERSON,
                "case": one.case.model_copy(update={"corpus": "pair"}),
            }
        )
        for one in test
    ]
    for name, rows in {"test": test, "valid": valid, "human": human}.items():
        write_records(tmp_path / f"{name}.jsonl", rows)

    class Models:
        def judge(self, name):
            return Judge(name, Knowing())

    monkeypatch.setattr(Registry, "from_toml", lambda *_, **__: Models())
    return Config(
        judges=("one", "two"),
        test=(tmp_path / "test.jsonl", tmp_path / "valid.jsonl"),
        validation=(tmp_path / "valid.jsonl",),
        human=(tmp_path / "human.jsonl",),
        folder=tmp_path / "run",
        output=tmp_path / "results",
        name="reward_test",
    )


def test_the_stage_writes_table_csv_and_plots(config):
    reward.run(config)

    result = results.load(config.output / "reward_test.json")
    lines = results.render(result).splitlines()
    [head] = [line for line in lines if "recall of False" in line]
    assert head.startswith("| Question | Judge | weighted F1 | recall of False |")
    table = [line for line in lines if line.startswith("| step")]
    assert len(table) == 3 * 4  # three steps: two judges, the commonest answer, a difference
    assert all(line.endswith("| 20 |") for line in table)  # validation rows are not in it
    assert {one.about for one in result.metrics if one.name == "temperature"} == {
        "calibration of the steps"
    }
    assert any(one.about == "human: pair" and one.name == "kappa" for one in result.metrics)
    with (config.folder / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.metrics)
    for name in ("table.png", "one.reliability.png"):
        assert (config.folder / name).read_bytes().startswith(b"\x89PNG")
    assert "recall of False" in (config.folder / "table.md").read_text(encoding="utf-8")
    assert json.loads((config.output / "reward_test.json").read_text(encoding="utf-8"))["seed"] == 0


def test_a_dry_run_writes_nothing_and_rows_of_other_splits_do_not_count(config, caplog):
    caplog.set_level("INFO")

    reward.run(config, dry_run=True)

    assert "20 test rows, 20 validation rows, 20 human judgements" in caplog.text
    assert not config.folder.exists()
    with pytest.raises(ConfigError, match="no row of the test split"):
        reward.run(config.model_copy(update={"test": config.validation}))


def test_a_large_corpus_of_human_judgements_does_not_crowd_out_a_small_one(
    config, tmp_path, caplog
):
    caplog.set_level("INFO")
    small = [record(number, corpus="epitome", split="train") for number in range(40, 44)]
    write_records(tmp_path / "small.jsonl", small)
    human = (*config.human, tmp_path / "small.jsonl")
    capped = config.model_copy(update={"human": human, "human_rows": 5})

    reward.run(capped, dry_run=True)
    reward.run(capped.model_copy(update={"human_splits": ("train", "test")}), dry_run=True)

    assert "validation rows, 5 human judgements" in caplog.text
    assert "validation rows, 9 human judgements" in caplog.text  # five of pair, four of epitome


def test_a_picture_that_cannot_be_read_is_left_out_and_named(config, tmp_path, caplog):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    broken = record(30)
    said = broken.case.history[0].model_copy(update={"images": ("broken.jpg",)})
    broken = broken.model_copy(update={"case": broken.case.model_copy(update={"history": (said,)})})
    rows = [record(31, steps=(True, False, True)), record(32, steps=(False, True, False)), broken]
    write_records(tmp_path / "pictures.jsonl", rows)

    reward.run(
        config.model_copy(update={"test": (tmp_path / "pictures.jsonl",), "data_dir": tmp_path})
    )

    assert "judged without picture broken.jpg" in caplog.text
    assert results.load(config.output / "reward_test.json").metrics
