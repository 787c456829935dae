"""The report: every number and transcript of real runs is there, and hostile text stays text."""

import datetime
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from markupsafe import escape

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from tests.training.cer.endpoint import Endpoint
from tests.training.evaluation.finished import HOSTILE, Finished, speak
from training.common import results
from training.evaluation import report
from training.evaluation.report import PUBLISHED, Config, Published, emotion_by_round
from training.evaluation.saved_runs import Transcript, read_run

NAMES = ("esc", "sage", "reading")


@pytest.fixture(scope="module")
def runs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    with Endpoint(answer=speak) as endpoint:
        made = Finished(tmp_path_factory.mktemp("runs"), endpoint.url)
        made.esc_eval("esc", "kind", "curt")
        made.sage("sage", "kind", "curt")
        made.reading("reading", "kind", "curt")
        yield made


@pytest.fixture
def config(runs: Finished, tmp_path: Path) -> Config:
    folders = tuple(runs.folder / name for name in NAMES)
    return Config(runs=folders, output=tmp_path / "report", title="A <b>bold</b> title")


def page_of(config: Config) -> str:
    return (config.output / "report.html").read_bytes().decode()  # with its line ends


def preferences(**changes: str) -> results.Result:
    outcomes = {"wins": 55.0, "ties": 20.0, "neither acceptable": 5.0, "losses": 20.0}
    interval = {"low": 40.0, "high": 70.0, "n": 40, "unit": "%", "of": "a", "about": "a against b"}
    values = {
        "name": "human_test",
        "title": "A study",
        "date": datetime.date(2026, 1, 2),
        "model": "a, b",
        "label_source": "person (2 raters)",
        "command": "python -m training evaluate human x.toml",
        "versions": {"python": "3.11.7"},
        "metrics": [{"name": name, "value": share} | interval for name, share in outcomes.items()],
    }
    return results.Result.model_validate(values | changes)


def test_the_page_has_all_numbers_transcripts_and_how_they_were_made(runs, config):
    report.run(config)
    page = page_of(config)

    saved = [read_run(path) for path in config.runs]
    assert [len(run.transcripts) for run in saved] == [12, 24, 12]
    assert page.count('<details class="transcript">') == 12 + 24 + 12
    for run, name in zip(saved, ("esc", "sage", "reading_reading"), strict=True):
        for each in run.transcripts:
            assert all(escape(line.text) in page for line in each.lines)
        for table in results.tables_of(results.load(runs.folder / "results" / f"{name}.json")):
            for row in table.rows:
                assert all(f">{escape(cell)}</td>" in page for cell in row)
        assert escape(run.record.command) in page
        assert run.record.date in page
    costs = [json.loads(line) for line in (runs.folder / "esc/requests.jsonl").open()]
    seeker = sum(line["requests"] for line in costs if line["model"] == "seeker")
    assert seeker == 2 * 6 * 5
    assert re.search(rf'>seeker</td>\s*<td class="number">{seeker}</td>', page)
    tokens = sum(line["tokens"] for line in costs)
    assert f"<dd>{tokens:,} (tokens read are not recorded)</dd>" in page
    assert page.count("<dt>Requests</dt><dd>not recorded</dd>") == 1  # the reading


def test_hostile_text_stays_text_and_nothing_is_requested(config):
    report.run(config)
    page = page_of(config)

    assert escape(HOSTILE) in page
    assert "<script" not in page
    assert "<b>" not in page
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in page
    addresses = re.findall(
        r'(?:src|href|action|url)\s*[=(]\s*"?([^"\s>]+)', re.sub("<p.*</p>", "", page)
    )
    assert {address[:5] for address in addresses if not address.startswith("#")} == {"data:"}


@pytest.mark.usefixtures("drawn_plots")
def test_plots_are_drawn_where_the_runs_have_their_numbers(config, tmp_path):
    study = results.save(preferences(), tmp_path)
    report.run(config.model_copy(update={"results": (study,)}))

    plots = sorted((config.output / "plots").iterdir())
    names = ["esc_dimensions.svg", "human_test_preferences.svg", "sage_rounds.svg"]
    # the number of the section keeps plots of equal names apart
    assert sorted(path.name.partition("_")[2] for path in plots) == names
    assert len({path.name.partition("_")[0] for path in plots}) == 3
    for path in plots:
        assert path.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    page = page_of(config)
    assert (
        len(re.findall(r'<img src="data:image/svg\+xml;base64,[\w+/=]{9999,}" alt="\w', page)) == 3
    )
    text = (config.output / "report.md").read_text(encoding="utf-8")
    assert text.count("](plots/") == 3


def test_the_markdown_has_the_tables_of_the_results_files(runs, config):
    report.run(config)
    text = (config.output / "report.md").read_text(encoding="utf-8")

    for name in ("esc", "sage", "reading_reading"):
        result = results.load(runs.folder / "results" / f"{name}.json")
        for table in results.tables_of(result):
            assert table.markdown in text
        assert results.origin(result) in text
    assert "| COMPEER-URP | 85.7 % | 76.9 % | 88.2 % | 76.5 % | 88.9 % | 87.5 % |" in text
    assert "| COMPEER-URP | 48.9 | 7.00 % | 13.0 % | not reported |" in text
    assert text.count("Published: ") == 2  # nothing published beside the reading
    assert '"max_turns": 4' in text
    assert '"top_p"' not in text  # a default


def test_no_published_number_stands_beside_a_small_simulation(runs, config, tmp_path):
    with Endpoint(answer=speak) as endpoint:
        seeker = {"source": f"openai:{endpoint.url}#seeker", "tries": 1, "style": "trained"}
        small = runs.esc_eval("esc_small", "kind", seeker=seeker)
    alone = config.model_copy(update={"runs": (small,)})

    report.run(alone)

    text = (alone.output / "report.md").read_text(encoding="utf-8")
    assert "## Small simulation: evaluate esc-eval: esc_small" in text
    assert "### Small simulation: ESC-Eval" in text
    assert "Published: " not in text


def test_published_rows_have_the_average_that_the_paper_prints_except_three():
    esc_eval, sage, esconv = load_toml(PUBLISHED, Published).tables
    printed = {name: row[-1] for name, row in esc_eval.rows.items()}
    means = {name: sum(row[:-1]) / 7 for name, row in esc_eval.rows.items()}

    assert {n: printed[n] for n in printed if abs(printed[n] - means[n]) >= 0.01} == {
        "InternLM3": 76.21,
        "COMPEER-UR": 79.70,
        "COMPEER-URP": 82.39,
    }
    assert {*esc_eval.rows} == {*sage.rows}
    for table in (esc_eval, sage, esconv):
        assert {len(row) for row in table.rows.values()} == {len(table.measures)}
        assert table.footnote.strip()


def test_an_ended_dialogue_keeps_its_last_emotion():
    def dialogue(profile: str, *emotions: float) -> Transcript:
        return Transcript("m", profile, (), emotions=emotions)

    curves = emotion_by_round([dialogue("a", 40, 50, 100), dialogue("b", 40, 30), dialogue("c")])

    # (100 + 30) / 2 at the end
    assert [each.value for each in curves["m"]] == [40, 40, 65]
    assert [(each.low, each.high, each.n) for each in curves["m"]] == [
        (40, 40, 2),
        (30, 50, 2),
        (30, 100, 2),
    ]


def test_failed_dialogues_are_shown_with_their_reason(runs, config, tmp_path):
    run = Path(shutil.copytree(runs.folder / "esc", tmp_path / "failing"))
    row = {"dialogue": "kind/en/9", "problem": "kind replies: <no> reply", "lines": ["Hi", "?"]}
    (run / "failed.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    report.run(config.model_copy(update={"runs": (run,)}))
    page = page_of(config)

    assert "<summary>kind: en/9 (failed: kind replies: &lt;no&gt; reply)</summary>" in page
    assert page.count('<details class="transcript">') == 12 + 1


def test_conversations_of_other_corpora_are_not_shown(runs, config, tmp_path):
    run = Path(shutil.copytree(runs.folder / "reading", tmp_path / "reading"))
    rows = [json.loads(line) for line in (run / "turns.jsonl").open(encoding="utf-8")]
    rows = [json.dumps(row | {"corpus": "esconv"}) + "\n" for row in rows]
    (run / "turns.jsonl").write_text("".join(rows), encoding="utf-8")
    report.run(config.model_copy(update={"runs": (run,)}))
    page = page_of(config)

    assert "a conversation of esconv, whose licence may not allow to show it" in page
    assert escape(HOSTILE) not in page


def test_a_dry_run_checks_the_files_and_writes_nothing(config):
    report.run(config, dry_run=True)

    assert not config.output.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"bad\.json: cannot be read \(No such file"),
        ('{"name": "bad", "tit', r"bad\.json: the file: Invalid JSON"),
        ("{}", r"bad\.json: name: Field required"),
    ],
)
def test_a_results_file_that_cannot_be_read_is_named(config, tmp_path, text, message):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=message) as caught:
        report.run(config.model_copy(update={"results": (path,)}))
    assert "\n" not in str(caught.value)
    assert not config.output.exists()


def test_a_run_without_its_results_file_is_named(runs, config, tmp_path):
    run = Path(shutil.copytree(runs.folder / "sage", tmp_path / "sage"))
    (run / "sage.json").unlink()

    with pytest.raises(ConfigError, match=r"sage/sage\.json: cannot be read"):
        report.run(config.model_copy(update={"runs": (run,)}))


def test_a_damaged_store_of_responses_is_named(runs, config, tmp_path):
    run = Path(shutil.copytree(runs.folder / "sage", tmp_path / "sage"))
    (store, *_) = (run / "answers").rglob("responses.sqlite")
    store.write_bytes(b"no database" * 500)

    with pytest.raises(ConfigError, match=r"responses\.sqlite: cannot be read"):
        report.run(config.model_copy(update={"runs": (run,)}))


def test_a_report_about_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to report: set runs or results"):
        Config()
