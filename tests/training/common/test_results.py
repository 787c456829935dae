"""Tables come from the files, and a document that differs from them is found."""

import datetime
import json
from pathlib import Path

import pytest

from compeer_core.errors import ConfigError
from training.__main__ import main
from training.common.results import (
    FOLDER,
    Metric,
    Result,
    fill,
    format_value,
    load,
    measured,
    render,
    render_headline,
    save,
    write_csv,
)


def a_result(**changes: object) -> Result:
    values: dict[str, object] = {
        "name": "speed",
        "title": "Speed",
        "date": datetime.date(2026, 1, 2),
        "model": "m",
        "label_source": "timed",
        "command": "python -m training benchmark x.toml",
        "versions": {"python": "3.11.7"},
        "metrics": (
            Metric(name="First token", value=0.25, low=0.2, high=0.4, n=10, unit="s"),
            Metric(name="Turns", value=1200, n=1200, note="a|b"),
        ),
    }
    return Result.model_validate(values | changes)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    save(a_result(), tmp_path / FOLDER)
    (tmp_path / "README.md").write_text(
        "# A\n\n<!-- results:speed -->\n<!-- /results:speed -->\n\nend\n", encoding="utf-8"
    )
    return tmp_path


def test_a_file_reads_back_as_it_was_written(tmp_path):
    assert load(save(a_result(), tmp_path)) == a_result()


def test_a_table_shows_value_interval_and_count():
    lines = render(a_result()).splitlines()

    assert "| Measure | Value | 95 % CI | n | Note |" in lines
    assert "| First token | 0.250 s | 0.200 to 0.400 | 10 |  |" in lines
    assert "| Turns | 1,200 |  | 1,200 | a\\|b |" in lines
    assert lines[-1] == "Reproduce: `python -m training benchmark x.toml`"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.05, "0.0500"), (-1.5, "-1.50"), (99.94, "99.9"), (31415.9, "31,416")],
)
def test_numbers_keep_three_significant_digits(value, shown):
    assert format_value(value) == shown


def test_the_command_fills_a_document_and_then_finds_nothing_to_do(checkout, capsys):
    root = ["--root", str(checkout)]
    assert main(["results", "--check", *root]) == 1
    assert main(["results", *root]) == 0
    assert main(["results", "--check", *root]) == 0

    text = (checkout / "README.md").read_text(encoding="utf-8")
    assert "| First token | 0.250 s" in text
    assert text.endswith("<!-- /results:speed -->\n\nend\n")


def test_checking_changes_nothing(checkout):
    before = (checkout / "README.md").read_text(encoding="utf-8")
    main(["results", "--check", "--root", str(checkout)])

    assert (checkout / "README.md").read_text(encoding="utf-8") == before


def test_a_number_changed_by_hand_is_found(checkout):
    root = ["--root", str(checkout)]
    main(["results", *root])
    readme = checkout / "README.md"
    readme.write_text(readme.read_text("utf-8").replace("0.250", "0.150"), "utf-8")

    assert main(["results", "--check", *root]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results:speed -->\n",
        "<!-- /results:speed -->\n",
        "<!-- results:speed -->\n<!-- /results:other -->\n",
        "<!-- results:speed -->\n<!-- results:speed -->\n",
        "<!-- results:unknown -->\n<!-- /results:unknown -->\n",
    ],
)
def test_a_marker_that_leads_nowhere_is_named(checkout, text):
    with pytest.raises(ConfigError, match=r"results:(speed|unknown)|unknown\.json"):
        fill(text, checkout / FOLDER, Path("README.md"))


@pytest.mark.parametrize(
    "changes",
    [
        {"extra": 1},
        {"metrics": []},
        {"metrics": [{"name": "x", "value": 1, "low": 0, "n": 1}]},
        {"metrics": [{"name": "x", "value": 1, "low": 3, "high": 2, "n": 1}]},
        {"name": "another"},
    ],
)
def test_a_broken_file_is_rejected(tmp_path, changes):
    path = tmp_path / "speed.json"
    values = json.loads(a_result().model_dump_json()) | changes
    path.write_text(json.dumps(values), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"speed\.json"):
        load(path)


def test_a_comparison_has_a_line_per_judge_and_a_column_per_measure():
    def metric(about, of, name, value, **more):
        return Metric(about=about, of=of, name=name, value=value, n=more.pop("n", 5), **more)

    result = Result(
        name="c",
        title="Judges",
        date=datetime.date(2026, 1, 2),
        model="a, b",
        label_source="by hand",
        command="run",
        versions={},
        metrics=(
            metric("step 1", "a", "F1", 50.0, low=40.0, high=60.0, unit="%"),
            metric("step 1", "a", "MCC", 0.25),
            metric("step 1", "b", "F1", 51.0, unit="%", n=4),
            metric("reply", "a", "kappa", 0.5, n=7),
        ),
    )

    lines = render(result).splitlines()

    assert lines[4:8] == [
        "| Question | Judge | F1 | MCC | n |",
        "| --- | --- | ---: | ---: | ---: |",
        "| step 1 | a | 50.0 % (40.0 to 60.0) | 0.250 | 5 |",
        "| step 1 | b | 51.0 % |  | 4 |",
    ]
    assert lines[9] == "| Question | Judge | kappa | n |"
    assert lines[11] == "| reply | a | 0.500 | 7 |"
    policies = render(result.model_copy(update={"compared": "Policy"}))
    assert "| Question | Policy | F1 | MCC | n |" in policies


def judges() -> Result:
    """Two judges on two questions, and their difference."""

    def metric(about: str, of: str, name: str, value: float, **more: object) -> Metric:
        return Metric.model_validate(
            {"about": about, "of": of, "name": name, "value": value, "n": 5} | more
        )

    return a_result(
        name="judges",
        metrics=(
            metric("step 1, history", "a", "AUROC", 60.0, low=50.0, high=70.0, unit="%"),
            metric("step 1, history", "b", "AUROC", 55.0, unit="%"),
            metric("step 1, history", "a", "AUROC", 5.0, unit="%", baseline="b"),
            metric("reply", "a", "kappa", 0.5),
        ),
    )


def test_a_difference_names_both_systems_in_the_table_and_its_baseline_in_the_csv(tmp_path):
    assert "| step 1, history | difference (a - b) | 5.00 % | 5 |" in render(judges())

    write_csv(tmp_path / "table.csv", judges().metrics)
    rows = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "question,judge,baseline,measure,value,low,high,n,unit"
    assert rows[3] == '"step 1, history",a,b,AUROC,5.0,,,5,%'


HEADLINE = """
[[row]]
title = "AUROC"
file = "judges"
unit_of_n = "turns"
value = { metric = "AUROC", of = "a", about = "step 1, history" }
against = "b"
reference = { metric = "AUROC", of = "b", about = "step 1, history" }
[[row]]
title = "Gain"
file = "judges"
unit_of_n = "turns"
value = { metric = "AUROC", of = "a", baseline = "b", about = "step 1, history" }
against = "b"
"""


def test_the_headline_table_shows_value_interval_reference_and_count(tmp_path):
    save(judges(), tmp_path)
    rows = tmp_path / "headline.toml"
    rows.write_text(HEADLINE, encoding="utf-8")

    lines = render_headline(tmp_path, rows).splitlines()

    assert lines[2] == "| AUROC (n = 5 turns) | 60.0 % (50.0 to 70.0) | b: 55.0 % |"
    assert lines[3] == "| Gain (n = 5 turns) | 5.00 % | b |"


def test_a_headline_row_without_its_metric_is_an_error_that_names_the_file(tmp_path):
    save(judges(), tmp_path)
    rows = tmp_path / "headline.toml"
    rows.write_text(HEADLINE.replace('"AUROC", of = "a", base', '"F1", of = "a", base'), "utf-8")

    with pytest.raises(ConfigError, match=r"judges\.json: 0 metrics match"):
        render_headline(tmp_path, rows)


def test_an_estimate_in_per_cent_is_scaled():
    class Share:
        value, low, high, n = 0.5, 0.25, 0.75, 8

    metric = measured("share", Share(), unit="%", of="a", baseline="b")

    assert (metric.value, metric.low, metric.high, metric.n) == (50.0, 25.0, 75.0, 8)
    assert metric.label == "difference (a - b)"
