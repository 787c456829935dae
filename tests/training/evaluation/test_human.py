"""The preference study: a blind package, measures by hand, and answers that are refused."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from compeer_core.annotation.annotations import (
    Annotation,
    AnnotationItem,
    read_annotations,
    write_annotations,
)
from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import ConfigError
from compeer_core.row_files import read_rows, write_rows
from compeer_core.taxonomy import Preference
from compeer_core.votes.__main__ import main as votes
from tests.cases import case_of
from training.evaluation import human, report
from training.evaluation.contexts import SampledTurn, read_contexts
from training.evaluation.human import Config
from training.evaluation.pair_items import NO_REPLY, PairKey, blind_items, model_pairs
from training.evaluation.preferences import (
    agreement_metrics,
    order_metrics,
    pair_metrics,
    strength_metrics,
)
from training.evaluation.ratings import Rating, standing_ratings
from training.stages import WaitingForPeople

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TURN = (
    "<history>They say it.\nStage: Exploration</history>\n"
    "<emotion>They feel sad.\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
    "<strategy>Ask.\nStrategy: Question</strategy>\n<reply>{}</reply>"
)


def key_of(case: str, models=("a", "b")) -> PairKey:
    return PairKey(
        item_id=f"{case}-{'-'.join(models)}",
        case=case,
        source=case,
        corpus="written",
        seed=1,
        models=models,
        turns=("x", "y"),
    )


def rating(case: str, answer: str, rater: str = "ann", models=("a", "b")) -> Rating:
    """An answer in the order in which the models are named."""
    return Rating(key_of(case, models), rater, Preference(answer), models)


def said(item: str, rater: str, answer: str | None, minutes: int = 0, **fields) -> Annotation:
    date = NOON + timedelta(minutes=minutes)
    return Annotation(item_id=item, annotator=rater, preference=answer, date=date, **fields)


def named(metrics) -> dict[tuple[str, str, str], float]:
    return {(metric.of, metric.baseline, metric.name): metric.value for metric in metrics}


@pytest.fixture
def config(tmp_path) -> Config:
    rows = [
        CerRecord(
            id=f"d{number}#{turn}",
            case=case_of(f"d{number}", f"Message {number} {turn}", split="test"),
            first=Candidate(author="corpus", reply="Oh no."),
        )
        for number in range(8)
        for turn in range(2)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    return Config(
        models=tuple({"name": name, "source": name} for name in "abc"),
        contexts=({"path": tmp_path / "rows.jsonl", "count": 6},),
        output=tmp_path / "run",
        results=tmp_path / "results",
        name="human_test",
    )


@pytest.fixture
def package(config, monkeypatch) -> Config:
    """A written package; the reply of model b is the best, then a, then c."""

    def sampled(policies, contexts, *_):
        for policy in policies:
            for case in contexts:
                yield SampledTurn(policy.name, case, 7, TURN.format(f"I am {policy.name}."))

    monkeypatch.setattr(human, "sampled_turns", sampled)
    with pytest.raises(WaitingForPeople, match=r"12 items .* run this command again"):
        human.run(config)
    return config


def keys_of(config: Config) -> list[PairKey]:
    return [PairKey(**row) for row in json.loads((config.output / "key.json").read_text())["items"]]


def put(config: Config, source: str, annotations, name: str = "answers.jsonl"):
    path = config.output / "ratings" / source / name
    write_annotations(path, annotations)
    return path


def best_of(key: PairKey, order: str = "bac") -> str:
    return "first" if order.index(key.models[0]) < order.index(key.models[1]) else "second"


# --- The package --------------------------------------------------------------------------------


def test_the_package_hides_the_models_and_the_key_names_them(package):
    items = list(read_rows(package.output / "package" / "items.jsonl", AnnotationItem))
    keys = keys_of(package)

    assert [item.id for item in items] == [key.item_id for key in keys]
    for item, key in zip(items, keys, strict=True):
        assert item.steps is None
        assert item.replies == tuple(f"I am {name}." for name in key.models)
        assert key.seed == 7
    # the first model with each other, each first in half of the six cases
    assert Counter(key.models for key in keys) == dict.fromkeys(
        [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")], 3
    )
    assert len({key.source for key in keys}) == 6  # one context of each source dialogue


def test_a_package_is_not_written_again_and_refuses_other_settings(package, monkeypatch):
    before = (package.output / "key.json").read_bytes()
    monkeypatch.setattr(human, "sampled_turns", lambda *_: pytest.fail("sampled again"))
    with pytest.raises(WaitingForPeople):
        human.run(package)

    assert (package.output / "key.json").read_bytes() == before
    with pytest.raises(ConfigError, match="other settings; choose another output"):
        human.run(package.model_copy(update={"seed": 5}))


def test_the_desk_accepts_the_items(package, tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'desk.sqlite3'}"
    items = str(package.output / "package" / "items.jsonl")
    assert votes(["items", items, "--database-url", url]) == 0

    assert "12 items" in capsys.readouterr().out


def test_without_a_reply_the_item_says_so():
    turns = [
        SampledTurn(name, case_of("d"), 1, text)
        for name, text in (("a", ""), ("b", TURN.format("Why?")))
    ]
    ((item, key),) = blind_items(turns, [("a", "b")], seed=0)

    assert item.replies is not None
    assert dict(zip(key.models, item.replies, strict=True)) == {"a": NO_REPLY, "b": "Why?"}


def test_all_models_are_compared_with_each_other_on_demand():
    assert model_pairs("abc", "all") == [("a", "b"), ("a", "c"), ("b", "c")]


def test_contexts_with_a_picture_only(config, tmp_path):
    (tmp_path / "m.txt").write_text("hi\n", encoding="utf-8")
    (sample,) = config.contexts
    for path, problem in ((sample.path, "shows a picture"), (tmp_path / "m.txt", "no picture")):
        pictured = sample.model_copy(update={"path": path, "with_picture": True})
        with pytest.raises(ConfigError, match=problem):
            list(read_contexts([pictured], 0))


# --- Measures -----------------------------------------------------------------------------------


def test_outcomes_and_difference_by_hand():
    # of ten cases, a wins five, ties two, loses two; neither reply of the last is acceptable
    answers = ["first"] * 5 + ["both"] * 2 + ["second"] * 2 + ["neither"]
    metrics = list(pair_metrics([rating(f"c{n}", x) for n, x in enumerate(answers)], [("a", "b")]))

    values = named(metrics)
    assert values["a", "", "wins"] == pytest.approx(50)
    assert values["a", "", "ties"] == pytest.approx(20)
    assert values["a", "", "neither acceptable"] == pytest.approx(10)
    assert values["a", "", "losses"] == pytest.approx(20)
    assert values["a", "b", "wins"] == pytest.approx(30)  # 50 - 20
    assert {metric.n for metric in metrics} == {10}


def test_the_side_does_not_matter():
    sides = [rating("c1", "first"), rating("c2", "second", models=("b", "a"))]

    assert named(pair_metrics(sides, [("a", "b")]))["a", "", "wins"] == 100


def test_more_raters_of_the_same_cases_do_not_narrow_the_interval():
    answers = ["first", "second", "first", "first", "both", "second", "first", "first"] * 3

    def width(raters):
        given = [rating(f"c{n:02}", x, rater) for rater in raters for n, x in enumerate(answers)]
        (difference,) = [each for each in pair_metrics(given, [("a", "b")]) if each.baseline]
        return difference.high - difference.low

    assert width("xyz") == pytest.approx(width("x"))


def test_unanimous_answers_keep_an_interval():
    given = [rating(f"c{n}", "first") for n in range(20)]
    (difference,) = [each for each in pair_metrics(given, [("a", "b")]) if each.baseline]

    assert difference.value == 100
    assert difference.low < 90


def test_strengths_order_the_models_and_match_the_odds_of_the_answers():
    # a beats b in 60 of 80 cases, which is log(3) logits or 191 points; the ridge takes a little
    given = [rating(f"c{n:02}", "first" if n % 4 else "second") for n in range(80)]
    given = [
        each if n % 8 < 4 else Rating(each.key, "ann", each.preference.swapped(), each.shown[::-1])
        for n, each in enumerate(given)
    ]
    strength = {metric.of: metric for metric in strength_metrics(given)}

    assert strength["a"].value - strength["b"].value == pytest.approx(191, abs=6)
    assert strength["a"].value + strength["b"].value == pytest.approx(2000)
    assert strength["a"].low > strength["b"].high


def test_models_that_never_met_have_no_strengths(caplog):
    given = [rating(f"c{n}", "first") for n in range(9)]
    given += [rating(f"c{n}", "first", models=("d", "e")) for n in range(9)]

    assert not list(strength_metrics(given))
    assert "too few answers compare" in caplog.text


def test_agreement_and_order_by_hand():
    pairs = [("first", "first")] * 6 + [("both", "second")] * 4
    answers = [{"ann": Preference(x), "bo": Preference(y)} for x, y in pairs]
    values = {metric.name: metric.value for metric in agreement_metrics(answers, ("a", "b"))}
    assert values["raw"] == pytest.approx(60)
    # shares .6, .2, .2, 0: chance = (.24 + .16 + .16) / 3 = .1867, and (.6 - .1867) / .8133 = .508
    assert values["AC1"] == pytest.approx(0.508, abs=1e-3)
    # 20 ratings: expected disagreement 1 - (12*11 + 4*3 + 4*3) / (20*19) = .5895, observed .4
    assert values["alpha"] == pytest.approx(1 - 0.4 / 0.5895, abs=1e-3)

    given = [
        rating(f"c{n}", x) for n, x in enumerate(["first", "first", "first", "second", "both"])
    ]
    (order,) = order_metrics(given)
    assert (order.value, order.n) == (75, 4)


def test_only_the_first_two_people_count_and_all_language_models():
    key = key_of("c1")
    answers = [
        said(key.item_id, "ann", "first"),
        said(key.item_id, "bo", "first", 1, shown_first="second"),
        said(key.item_id, "cy", "second", 2),
    ]
    known = {key.item_id: key}

    people = standing_ratings(answers, known, "person")
    assert [(each.rater, each.winner) for each in people] == [("ann", "a"), ("bo", "b")]
    readers = standing_ratings(answers, known, "llm")
    assert [each.rater for each in readers] == ["ann", "bo", "cy"]


# --- The analysis -------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn_plots")
def test_people_and_language_models_get_a_result_each(package):
    keys = keys_of(package)
    people = [
        said(key.item_id, rater, best_of(key), number)
        for number, rater in enumerate(["ann", "bo"])
        for key in keys
    ]
    put(package, "person", people, "desk.csv")
    put(package, "llm", [said(key.item_id, "reader", best_of(key, "cab")) for key in keys])
    human.run(package)

    found = {path.stem: json.loads(path.read_text()) for path in package.results.iterdir()}
    assert found.keys() == {"human_test_person", "human_test_llm"}
    by_people, by_model = found["human_test_person"], found["human_test_llm"]
    assert by_people["label_source"] == "person (2 raters)"
    assert by_model["label_source"] == "llm (reader)"
    assert "not by people" in by_model["title"]
    assert "6 cases, 24 answers" in by_people["title"]

    def wins(result):
        return {
            metric["about"]: metric["value"]
            for metric in result["metrics"]
            if metric["name"] == "wins" and not metric["baseline"]
        }

    assert wins(by_people) == {"a against b": 0, "a against c": 100}
    assert wins(by_model) == {"a against b": 100, "a against c": 0}
    assert not any("agreement" in metric["about"] for metric in by_model["metrics"])
    for source in ("person", "llm"):
        assert (package.output / source / "table.md").is_file()
        assert (package.output / source / "preferences.png").stat().st_size > 1000

    report.run(report.Config(runs=(package.output,), output=package.output / "report"))
    page = (package.output / "report" / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 2  # one for each source of answers
    assert page.count("<summary>a and b: ") == page.count("<summary>a and c: ") == 6
    assert "Message " not in page  # the licence of the contexts' corpus is unknown


def test_a_revision_in_the_same_file_replaces_the_answer(package):
    key = next(key for key in keys_of(package) if {*key.models} == {"a", "b"})
    a_is_better = best_of(key, "abc")
    revised = Preference(a_is_better).swapped()
    path = put(
        package,
        "person",
        [said(key.item_id, "ann", revised), said(key.item_id, "ann", a_is_better, 5)],
    )
    human.run(package)

    assert len(list(read_annotations(path))) == 2
    result = json.loads((package.results / "human_test_person.json").read_text())
    assert "1 cases, 1 answers" in result["title"]
    assert result["metrics"][0]["value"] == 100


# --- Answers that are refused -------------------------------------------------------------------


def test_an_unknown_item_is_named_with_file_and_row(package):
    first = keys_of(package)[0].item_id
    path = put(package, "person", [said(first, "ann", "both"), said("other", "ann", "both")])

    with pytest.raises(ConfigError, match=rf"^{path}, row 2: item other is not in the key"):
        human.run(package)


@pytest.mark.parametrize("name", ["answers.jsonl", "more.jsonl"])
def test_a_rater_who_answered_twice_is_named_with_both_places(package, name):
    first = keys_of(package)[0].item_id
    rows = [said(first, "ann", "both")]
    earlier = put(package, "person", rows if name != "answers.jsonl" else rows * 2)
    path = (
        put(package, "person", [said(first, "ann", "first", 5)], name)
        if name[0] == "m"
        else earlier
    )

    row = 1 if name[0] == "m" else 2
    with pytest.raises(
        ConfigError,
        match=rf"^{path}, row {row}: ann has answered about item {first} before \({earlier}, row 1\)",
    ):
        human.run(package)


def test_a_name_among_people_and_language_models_is_refused(package):
    keys = keys_of(package)
    put(package, "llm", [said(keys[0].item_id, "ann", "both")])
    put(package, "person", [said(keys[1].item_id, "ann", "both")])

    with pytest.raises(ConfigError, match=r", row 1: ann answers as .* here and as .*, row 1"):
        human.run(package)


def test_answers_without_a_source_or_without_their_key_are_refused(package):
    first = keys_of(package)[0].item_id
    loose = package.output / "ratings" / "answers.jsonl"
    write_annotations(loose, [said(first, "ann", "both")])
    with pytest.raises(ConfigError, match=rf"^{loose}: who answered\?"):
        human.run(package)

    loose.rename(package.output / "ratings" / "person" / "answers.jsonl")
    (package.output / "key.json").unlink()
    with pytest.raises(ConfigError, match=r"person/answers.jsonl: its key .*key.json is missing"):
        human.run(package)


def test_a_dry_run_shows_the_table_and_writes_nothing(config, caplog):
    with caplog.at_level("INFO"):
        human.run(config, dry_run=True)

    assert "| ties | 5 points | 10 points | 15 points | 6 cases show |" in caplog.text
    assert "6 contexts, 12 items" in caplog.text
    assert not config.output.exists()


def test_two_models_of_one_name_are_refused(config):
    with pytest.raises(ValueError, match="two policies have the same name"):
        Config.model_validate(config.model_dump() | {"models": [{"name": "a", "source": "x"}] * 2})
