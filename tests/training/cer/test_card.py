"""The data card: every number of a small set recomputed by hand, and what may not be shown."""

import json

import pytest

from compeer_core.cer import Candidate, CerRecord, DecidedBy, Variant
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from tests.cases import case_of, turn_text
from training.cer import card
from training.cer.records import StepReport

RULE = DecidedBy(kind="rule", name="silver/1 steps, chained")
PERSON = DecidedBy(kind="person", name="Wren")


def row(
    name,
    steps=None,
    preference=None,
    by=RULE,
    split="train",
    corpus="esconv",
    licence="CC BY-NC 4.0",
    language="en",
    variant=Variant.ORIGINAL,
    said="My boss shouts at me.",
    reason="",
):
    case = case_of(
        name,
        said,
        id=name,
        corpus=corpus,
        language=language,
        split=split,
        licence=licence,
        rounds=3,
        original="I see.",
    )
    judged = Candidate(
        author="policy",
        reply="How so?",
        turn=turn_text("How so?") if steps else None,
        steps=steps,
        steps_by=by if steps else None,
        reason=reason,
    )
    return CerRecord(
        id=name,
        case=case,
        first=judged,
        second=None if preference is None else Candidate(author="corpus", reply="I see."),
        preference=preference,
        preference_by=None if preference is None else by,
        variant=variant,
    )


ROWS = [
    row("a", (True, True, True), Preference.SECOND),
    row("b", (True, True, True), Preference.BOTH),
    row("c", (False, True, False), Preference.SECOND, reason="names a breakup"),
    row("d", (False, False, None), split="test"),
    row("e", None, Preference.FIRST, by=PERSON, corpus="counselchat", licence="MIT"),
    row(
        "f",
        (True, False, False),
        variant=Variant.PERSONA,
        corpus="smile",
        licence="CC0",
        language="zh",
    ),
]


@pytest.fixture
def described(tmp_path):
    def describe(rows=ROWS, reports=(), **settings):
        write_rows(tmp_path / "rows.jsonl", rows)
        files = {"rows.jsonl": tmp_path / "rows.jsonl"}
        return card.describe(files, reports, card.Settings(**settings), seed=0)

    return describe


def test_rows_are_counted_by_each_facet(described):
    result = described()

    assert result.files == {"rows.jsonl": 6}
    assert result.counts == {
        "corpus": {"esconv": 4, "counselchat": 1, "smile": 1},
        "language": {"en": 5, "zh": 1},
        "split": {"train": 5, "test": 1},
        "author of a reply": {"policy": 6, "corpus": 4},
        "variant": {"original": 5, "persona": 1},
        "decided by": {
            "steps: rule (silver/1 steps, chained)": 5,
            "preference: rule (silver/1 steps, chained)": 3,
            "preference: person": 1,
        },
    }


def test_shares_and_wilson_intervals_by_hand(described):
    result = described()

    # history wrong: c and d of a, b, c, d, f. Wilson with z = 1.96, z^2 = 3.8416:
    # centre (2 + 1.9208) / 8.8416 = 0.44345,
    # half-width 1.96 / 8.8416 * sqrt(2 * 3 / 5 + 0.9604) = 0.32581
    history = result.wrong["all"]["history"]
    assert (history.count, history.of) == (2, 5)
    assert history.low == pytest.approx(0.44345 - 0.32581, abs=2e-4)
    assert history.high == pytest.approx(0.44345 + 0.32581, abs=2e-4)
    # nobody judged the strategy of d: c and f of a, b, c, f
    strategy = result.wrong["all"]["strategy"]
    assert (strategy.count, strategy.of) == (2, 4)
    assert (result.wrong["train"]["emotion"].count, result.wrong["train"]["emotion"].of) == (1, 4)
    assert set(result.wrong["test"]) == {"history", "emotion"}
    answers = {name: each.count for name, each in result.preferences["all"].items()}
    assert answers == {"first": 1, "second": 2, "both": 1, "neither": 0}
    assert "test" not in result.preferences


def test_the_strictest_licence_is_named_first(described):
    assert list(described().licences) == ["CC BY-NC 4.0", "MIT", "CC0"]
    page = card.render(described())
    assert "The strictest licence is **CC BY-NC 4.0**" in page
    assert page.startswith("---\nlicense: cc-by-nc-4.0\nlanguage: [en, zh]\n---\n")


@pytest.mark.parametrize(
    ("stricter", "looser"),
    [
        ("none stated; text of a TV series", "CC BY-NC-SA 4.0"),
        ("CC BY-NC-SA 4.0", "CC BY-NC 4.0"),
        ("CC BY-NC 4.0", "CC BY-SA 4.0"),
        ("CC BY-SA 4.0", "CC BY 4.0"),
        ("CC BY 4.0", "CC0"),
        ("something new", "CC BY-NC-SA 4.0"),
    ],
)
def test_the_order_of_licences(stricter, looser):
    assert card.strictness(stricter) < card.strictness(looser)


def test_an_unknown_licence_is_other(described):
    page = card.render(described([row("a", (True, True, True), licence="none stated")]))

    assert page.startswith("---\nlicense: other\n")


def test_examples_are_of_each_kind_and_only_of_corpora_that_may_be_quoted(described):
    result = described()
    names = {kind: {e.id for e in result.examples if e.kind is kind} for kind in card.Kind}

    assert names == {
        card.Kind.RIGHT: {"a", "b"},
        card.Kind.WRONG: {"c", "d"},
        card.Kind.HUMAN: {"e"},
        card.Kind.REWRITTEN: set(),  # f is of a corpus that is not on the list
    }
    page = card.render(result)
    assert "names a breakup" in page
    assert "From counsel-chat (Bertagnolli), MIT; row `e`." in page
    assert "### Rewritten\n\nThere is no such row that may be quoted." in page
    quoted = described(quotable={"smile": "SMILE, CC0"})
    assert [example.id for example in quoted.examples] == ["f"]


def test_a_row_with_signs_of_danger_is_no_example(described):
    result = described([row("a", (True, True, True), said="I want to kill myself.")])

    assert result.examples == ()
    assert result.counts["corpus"] == {"esconv": 1}


def test_few_examples_are_drawn_independently_of_row_order(described):
    many = [row(f"r{n}", (True, True, True)) for n in range(50)]
    result = described(many)

    assert len(result.examples) == 2
    assert result.examples == described(many[::-1]).examples


def test_names_of_annotators_are_not_shown(described):
    assert "Wren" not in card.render(described())


def test_figures_before_and_after_selection_share_a_table(described):
    figures = {
        "train.raw.rows": 700,
        "train.raw.wrong.history": 0.78125,
        "train.raw.wrong.emotion": 0.7,
        "train.raw.wrong.strategy": 0.6,
        "train.raw.strategy.wrong_after_wrong": 0.8,
        "train.raw.strategy.wrong_after_right": 0.25,
        "train.raw.strategy.phi": 0.3125,
        "train.raw.strategy.bits": None,
        "train.selected.rows": 90,
        "train.selected.wrong.history": 0.4,
        "train.selected.note": "all rows are taken: too few",
        "test.raw.rows": 0,
    }
    dropped = {"esconv": {"the turn is not complete": 12, "none": 0}}
    report = StepReport(step="silver", read=712, written=90, dropped=dropped, figures=figures)
    page = card.render(described(reports=[report]))

    assert "| train | judged | 700 | 78.1 % | 70.0 % | 60.0 % |" in page
    assert "| train | selected | 90 | 40.0 % | – | – |" in page
    assert "| train | judged | strategy | 80.0 % | 25.0 % | 0.312 | – |" in page
    assert "In train, all rows are taken: too few." in page
    assert "| silver | 712 | 90 | 12 |" in page
    assert "| silver | esconv | the turn is not complete | 12 |" in page
    assert "| silver | esconv | none | 0 |" not in page
    assert "| test |" not in page.split("## Selection of judged rows")[1].split("##")[0]


def test_agreement_and_decontamination_are_shown_as_reported(described):
    reports = [
        StepReport(step="leaks", read=10, written=9, figures={"near-duplicates": 1}),
        StepReport(
            step="settle", read=5, written=4, figures={"history: raw": 0.8, "history: alpha": None}
        ),
    ]
    page = card.render(described(reports=reports))

    assert "| near-duplicates | 1 |" in page
    assert "| history: raw | 0.800 |" in page
    assert "| history: alpha | – |" in page


def test_limits_follow_from_who_decided(described):
    by_rule = "\n".join(described(limits=("One more.",)).limits)
    control = DecidedBy(kind="rule", name="silver/1 steps, not chained")
    by_control = "\n".join(described([row("a", (True, True, True), by=control)]).limits)
    by_person = "\n".join(described([row("a", (True, True, True), by=PERSON)]).limits)

    assert "No person judged" in by_rule
    assert "depend on earlier ones by construction" in by_rule
    assert "One more." in by_rule
    assert "unchained control" in by_control
    assert "by construction" not in by_control
    assert "No person judged" not in by_person
    assert "The only language is en." in by_person


def test_the_same_rows_give_the_same_files(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    settings = card.Settings(title="Six rows", command="python -m training cer x.toml")
    for name in ("one", "two"):
        report = card.write({"rows.jsonl": tmp_path / "rows.jsonl"}, tmp_path / name, [], settings)

    assert (report.step, report.read) == ("card", 6)
    for file in (card.README, card.JSON):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    saved = json.loads((tmp_path / "one" / card.JSON).read_text(encoding="utf-8"))
    assert card.Card.model_validate(saved).title == "Six rows"
    assert str(tmp_path) not in (tmp_path / "one" / card.README).read_text(encoding="utf-8")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["README.md", "card.json"]


def test_no_rows_give_a_card_too_and_a_missing_file_is_named(described, tmp_path):
    page = card.render(described([]))
    assert "0 rows of CER" in page

    with pytest.raises(ConfigError, match="no such file"):
        card.describe({"x": tmp_path / "x.jsonl"}, [], card.Settings(), 0)


def test_a_text_with_a_fence_cannot_end_its_code_block(described):
    result = described([row("a", (True, True, True), said="```\n# Hello")])

    assert "````text" in card.render(result)
