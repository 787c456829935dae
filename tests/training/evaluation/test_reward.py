"""Evaluation of reward models on CER rows: ratings, unscorable questions, and the table."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord, DecidedBy
from compeer_core.dialogue import Speaker
from compeer_core.errors import BackendError, ConfigError
from compeer_core.registry import Registry
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import PREFERENCES, VERDICTS, Judge
from training.common import results
from training.data.pictures import Pictures
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
    model = Candidate(
        author="policy", reply="Why?", turn=written("Why?"), steps=steps, steps_by=RULE
    )
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


class KeywordScorer:
    """A scorer that decides by keywords in the text, and fails on the word `broken`."""

    name = "keywords"
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
    return Judge("keywords", KeywordScorer())


def test_ratings_do_not_depend_on_the_order_of_replies(judge):
    original, swapped_order = rate(
        judge,
        [record(1), record(2, swapped=True, preference=Preference.SECOND)],
        Pictures(),
    )

    assert original.steps == swapped_order.steps == (True, True, False)
    assert original.step_probabilities == swapped_order.step_probabilities == (0.8, 0.8, 0.2)
    assert original.preference is swapped_order.preference is Preference.FIRST
    assert original.verdict is swapped_order.verdict is Preference.FIRST
    # the mean over both orders
    assert original.preference_probabilities == pytest.approx((0.7, 0.1, 0.1, 0.1))
    assert (original.group, original.decided_by) == ("s0", "rule: r/1")


def test_bare_replies_and_unlabelled_steps(judge):
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


def test_unscorable_questions_are_counted_and_have_no_verdict(judge):
    broken = record(5)
    history = (CaseUtterance(speaker=Speaker.SEEKER, text="All is broken."),)
    broken = broken.model_copy(update={"case": broken.case.model_copy(update={"history": history})})

    failed, fine = rate(judge, [broken, record(6)], Pictures())

    assert failed.unscorable == 4
    assert failed.verdict is None
    assert failed.step_probabilities == (None, None, None)
    assert fine.unscorable == 0


def test_stored_ratings_are_reused(judge, tmp_path):
    path = tmp_path / "rated.jsonl"
    first = rate_file(judge, [record(1)], 1, Pictures(), path)

    again = rate_file(Judge("other", KeywordScorer()), [record(2)], 1, Pictures(), path)

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


def test_table_by_hand():
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

    metrics = comparison({"policy": rows})
    table = {(metric.about, metric.of, metric.name): metric for metric in metrics}

    step = "step 1, history"
    assert table[step, "policy", "weighted F1"].value == pytest.approx(76.6667, abs=1e-3)
    assert table[step, "policy", "recall of False"].value == pytest.approx(100)
    assert table[step, "policy", "balanced accuracy"].value == pytest.approx(83.3333, abs=1e-3)
    assert table[step, MAJORITY, "weighted F1"].value == pytest.approx(64.2857, abs=1e-3)
    assert table[step, MAJORITY, "recall of False"].value == 0
    assert table["step 3, strategy", "policy", "weighted F1"].n == 3
    # Reply: labels first first first both; verdicts first first first second: 3 of 4.
    assert table["reply", "policy", "accuracy"].value == pytest.approx(75)
    assert table["reply", MAJORITY, "accuracy"].value == pytest.approx(75)
    assert table["reply", MAJORITY, "kappa"].value == 0


def test_differences_use_rows_that_both_judges_rated():
    labels = [(True, True, True), (True, True, False), (False, False, True), (False, True, None)]
    first = [0.9, 0.8, 0.2, 0.3]
    second = [0.9, None, 0.8, 0.3]

    def ratings(probabilities):
        return [
            rated(
                number, labels=label, probabilities=(value, 0.9, None if label[2] is None else 0.9)
            )
            for number, (label, value) in enumerate(zip(labels, probabilities, strict=True))
        ]

    table = {
        (each.about, each.label, each.name): each
        for each in comparison({"one": ratings(first), "two": ratings(second)})
    }

    # rows 0, 2 and 3 of step 1, labels T F F: all correct against T T F, balanced 1 and (1 + 1/2) / 2
    difference = table["step 1, history", "difference (one - two)", "balanced accuracy"]
    assert difference.value == pytest.approx(25)
    assert difference.n == 3
    assert not [key for key in table if key[1] == "difference (two - one)"]


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
        row.model_copy(update={"case": row.case.model_copy(update={"split": "valid"})})
        for row in test
    ]
    human = [
        row.model_copy(
            update={
                "first": Candidate(author="a", reply="Why?"),
                "second": Candidate(author="b", reply="Hm."),
                "preference_by": PERSON,
                "case": row.case.model_copy(update={"corpus": "pair"}),
            }
        )
        for row in test
    ]
    for name, rows in {"test": test, "valid": valid, "human": human}.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)

    class Models:
        def judge(self, name):
            return Judge(name, KeywordScorer())

    monkeypatch.setattr(Registry, "from_toml", lambda *_, **__: Models())
    return Config(
        judges=("one", "two"),
        test=(tmp_path / "test.jsonl", tmp_path / "valid.jsonl"),
        validation=(tmp_path / "valid.jsonl",),
        human=(tmp_path / "human.jsonl",),
        folder=tmp_path / "run",
        output=tmp_path / "results",
        name="reward_test",
        label_source="by hand",
        command="run",
    )


@pytest.mark.usefixtures("drawn_plots")
def test_stage_writes_table_csv_and_plots(config):
    reward.run(config)

    result = results.load(config.output / "reward_test.json")
    lines = results.render(result).splitlines()
    [head] = [line for line in lines if "recall of False" in line]
    assert head.startswith("| Question | Judge | weighted F1 | recall of False |")
    table = [line for line in lines if line.startswith("| step")]
    assert len(table) == 3 * 4  # three steps: two judges, the majority class, a difference
    assert all(line.endswith("| 20 |") for line in table)  # without validation rows
    about_by_name = {(metric.name, metric.about) for metric in result.metrics}
    assert {("temperature", "calibration of the steps"), ("kappa", "corpus: pair")} <= about_by_name
    with (config.folder / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.metrics)
    for name in ("table.png", "one.reliability.png"):
        assert (config.folder / name).read_bytes().startswith(b"\x89PNG")
    assert "recall of False" in (config.folder / "table.md").read_text(encoding="utf-8")
    assert json.loads((config.output / "reward_test.json").read_text(encoding="utf-8"))["seed"] == 0


def test_words_alone_are_a_baseline_and_sanity_pairs_a_line_each(config, tmp_path):
    train = [record(n, steps=(True, n % 2 == 0, True), split="train") for n in range(60, 80)]
    pairs = []
    for number, name in enumerate(["insult", "insult", "doubled"]):
        pair = record(80 + number, preference=Preference.FIRST)
        first, second = Candidate(author="llm", reply="Why?"), Candidate(author="rule", reply="No.")
        by = DecidedBy(kind="rule", name=f"sanity/{name}")
        if name == "doubled":  # the keyword judge prefers "Why?", which is the corruption here
            first, second = second, first
        pairs.append(
            pair.model_copy(update={"first": first, "second": second, "preference_by": by})
        )
    write_rows(tmp_path / "train.jsonl", train)
    write_rows(tmp_path / "sanity.jsonl", pairs)

    reward.run(
        config.model_copy(
            update={
                "baseline": (tmp_path / "train.jsonl",),
                "sanity": (tmp_path / "sanity.jsonl",),
            }
        )
    )

    metrics = results.load(config.output / "reward_test.json").metrics
    table = {(m.about, m.of, m.name): m for m in metrics}
    insult = table["sanity: insult", "one", "own reply preferred"]
    assert (insult.value, insult.n) == (pytest.approx(100), 2)
    assert table["sanity: doubled", "two", "own reply preferred"].value == 0
    assert ("step 2, emotion", "TF-IDF", "AUROC") in table
    assert ("step 1, history", "TF-IDF", "AUROC") not in table  # always True in training


def test_dry_run_writes_nothing_and_other_splits_are_ignored(config, caplog):
    caplog.set_level("INFO")

    reward.run(config, dry_run=True)

    assert "20 test rows, 20 validation rows, 20 human judgements, 0 sanity pairs" in caplog.text
    assert not config.folder.exists()
    with pytest.raises(ConfigError, match="no row of the test split"):
        reward.run(config.model_copy(update={"test": config.validation}))


def test_human_judgements_are_limited_per_corpus(config, tmp_path, caplog):
    caplog.set_level("INFO")
    small = [record(number, corpus="epitome", split="train") for number in range(40, 44)]
    write_rows(tmp_path / "small.jsonl", small)
    human = (*config.human, tmp_path / "small.jsonl")
    capped = config.model_copy(update={"human": human, "human_rows": 5})

    reward.run(capped, dry_run=True)
    reward.run(capped.model_copy(update={"human_splits": ("train", "test")}), dry_run=True)

    assert "validation rows, 5 human judgements" in caplog.text
    assert "validation rows, 9 human judgements" in caplog.text  # five of pair, four of epitome


def test_unreadable_image_is_omitted_and_reported(config, tmp_path, caplog):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    broken = record(30)
    message = broken.case.history[0].model_copy(update={"images": ("broken.jpg",)})
    case = broken.case.model_copy(update={"history": (message,)})
    broken = broken.model_copy(update={"case": case})
    rows = [record(31, steps=(True, False, True)), record(32, steps=(False, True, False)), broken]
    write_rows(tmp_path / "pictures.jsonl", rows)

    reward.run(
        config.model_copy(update={"test": (tmp_path / "pictures.jsonl",), "data_dir": tmp_path})
    )

    assert "judged without the unreadable image broken.jpg" in caplog.text
    assert results.load(config.output / "reward_test.json").metrics
