"""Comparing two runs: numbers worked out by hand, real runs, and runs that are refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compeer_core.errors import ConfigError
from tests.training.cer.endpoint import Endpoint
from tests.training.evaluation.finished import Finished, speak
from training.__main__ import main
from training.common import results
from training.evaluation import compare
from training.evaluation.compare import Config, comparison, differences
from training.evaluation.saved_runs import Measure

KIND, GRAMMATICAL = Measure("kindness", ""), Measure("grammatical")


@pytest.fixture(scope="module")
def runs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    with Endpoint(answer=speak) as endpoint:
        made = Finished(tmp_path_factory.mktemp("runs"), endpoint.url)
        made.esc_eval("esc_a", "kind")
        made.esc_eval("esc_b", "curt", count=5)
        made.sage("sage", "kind", "curt")
        made.reading("reading", "kind", "curt")
        yield made


def compared(runs: Finished, tmp_path: Path, first: str, second: str, **changes):
    folder = runs.folder
    config = Config(first=folder / first, second=folder / second, output=tmp_path, **changes)
    compare.run(config)
    metrics = results.load(tmp_path / "compare.json").metrics
    return {(metric.about, metric.label, metric.name): metric for metric in metrics}


def test_means_difference_and_corrected_p_values_by_hand():
    first = {
        KIND: {"a": 3.0, "b": 5.0, "c": 4.0, "d": 6.0, "e": 2.0, "only A": 90.0},
        GRAMMATICAL: dict.fromkeys("abcde", 1.0),
    }
    second = {
        KIND: {"a": 1.0, "b": 3.0, "c": 2.0, "d": 4.0, "e": 0.0, "only B": 90.0},
        GRAMMATICAL: dict.fromkeys("abcde", 1.0),
    }
    found = comparison(first, second, {name: name for name in "abcde"}, ("A", "B"))
    table = {(metric.about, metric.label, metric.name): metric for metric in found}

    assert table["kindness", "A", "mean"].value == 4.0
    assert table["kindness", "B", "mean"].value == 2.0
    difference = table["kindness", "difference (A - B)", "mean"]
    # 2 in every dialogue: the paired interval has no width, and no resample is at most 0
    assert (difference.value, difference.low, difference.high, difference.n) == (2, 2, 2, 5)
    p = table["kindness", "difference (A - B)", "p"].value
    # 0.5 of 10,001 is 3.89 standard errors; sqrt(4 / 5) of them, 3.48; twice the tail of t with 4 degrees
    assert p == pytest.approx(0.0254, abs=2e-4)
    assert table["kindness", "difference (A - B)", "p, Holm (2 tests)"].value == 2 * p
    assert table["grammatical", "A", "mean"].value == 100.0
    assert table["grammatical", "difference (A - B)", "p, Holm (2 tests)"].value == 1.0


def test_dialogues_of_one_source_count_as_one(caplog):
    all_of = {name: float(number) for number, name in enumerate("abcdefgh")}
    values = {KIND: {name: all_of[name] for name in "abcdef"}, GRAMMATICAL: all_of}
    sources = dict(zip("abcdefgh", "11112345", strict=True))

    tested = {metric.about for metric in comparison(values, values, sources, ("A", "B"))}
    assert tested == {"grammatical"}  # the kindness is known of the sources 1, 2 and 3
    assert "too few shared dialogues, not tested: kindness" in caplog.text


def test_esc_eval_runs_are_compared_on_their_shared_cards(runs, tmp_path):
    table = compared(runs, tmp_path, "esc_a", "esc_b")

    scores = json.loads((runs.folder / "esc_a/score/judge/kind_en.json").read_text())
    fluency = [scores[str(card)]["fluency"] for card in range(5)]  # B has no sixth card
    mean = table["en, judge: Fluency", "A: kind", "mean"]
    assert mean.value == pytest.approx(100 * sum(fluency) / 5 / 4)
    difference = table["en, judge: Average", "difference (A: kind - B: curt)", "mean"]
    assert difference.n == 5
    assert difference.low <= difference.value <= difference.high
    assert {name for _, _, name in table} == {"mean", "p", "p, Holm (8 tests)"}
    assert (tmp_path / "table.md").read_text().startswith("**evaluate esc-eval: A (")


def test_two_models_of_a_sage_run_are_compared_by_profile(runs, tmp_path):
    table = compared(runs, tmp_path, "sage", "sage", models=("curt", "kind"))

    rows = [
        json.loads(line)
        for seed in (0, 1)
        for line in (runs.folder / f"sage/dialogues/curt_seed{seed}.jsonl").read_text().splitlines()
    ]
    mean = table["final emotion", "A: curt", "mean"]
    assert (mean.n, mean.unit) == (6, "")  # profiles, not dialogues
    assert mean.value == pytest.approx(sum(row["emo_point"] for row in rows) / 12)
    assert table["success", "B: kind", "mean"].unit == "%"


def test_readings_are_compared_by_context(runs, tmp_path):
    table = compared(runs, tmp_path, "reading", "reading", models=("kind", "curt"))

    own = {m.name: m for m in results.load(runs.folder / "results/reading_reading.json").metrics}
    assert table["grammatical", "B: curt", "mean"].value == own["grammatical"].value
    assert ("complete (by rule)", "A: kind", "mean") in table


def test_settings_differ_by_what_decides_a_text():
    one = {"seeker": {"source": "openai:http://a/v1#m", "retries": 1, "top_p": 0.9}, "seeds": [0]}
    same = {"seeker": {"source": "openai:http://b/v1#m", "retries": 9, "top_p": 0.9}, "seeds": [0]}
    other = {"seeker": {"source": "openai:http://a/v1#n", "top_p": 0.9}, "seeds": [0, 1]}

    assert list(differences(one, same)) == []
    assert list(differences(one, other)) == [
        "seeds.1 (null and 1)",
        'seeker.source ("openai:http://a/v1#m" and "openai:http://a/v1#n")',
    ]


def copied(runs: Finished, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(runs.folder / name, tmp_path / "copy"))


def no_config(run: Path) -> None:
    (run / "config.json").unlink()


def half_a_config(run: Path) -> None:
    (run / "config.json").write_text((run / "config.json").read_text()[:80])


def no_scores(run: Path) -> None:
    shutil.rmtree(run / "score")


def half_the_scores(run: Path) -> None:
    path = run / "score/judge/kind_en.json"
    path.write_text(path.read_text()[:40])


def no_dialogue(run: Path) -> None:
    (run / "result/kind_en.json").write_text("{}")


def changed(**fields: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        record = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(record | fields))

    return change


def other_seed(run: Path) -> None:
    record = json.loads((run / "config.json").read_text())
    changed(config=record["config"] | {"seed": 1})(run)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_config, r"config\.json: cannot be read \(No such file or directory\); name the folder"),
        (half_a_config, r"config\.json: the file: Invalid JSON.*run its stage again"),
        (no_scores, r"score/judge/kind_en\.json: cannot be read \(No such file"),
        (half_the_scores, r"kind_en\.json: the file: Invalid JSON"),
        (no_dialogue, r"copy: has no finished dialogue; run evaluate esc-eval again"),
        (
            changed(stage="training.grpo.train"),
            r"copy: is a run of 'grpo'; expected one of evaluate esc-eval, ",
        ),
        (changed(config={"judges": []}), r"config\.json: config\.output: Field required"),
        (other_seed, r"other settings, first seed \(1 and 0\); run one of them again with"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_in_one_sentence(runs, tmp_path, damage, message):
    run = copied(runs, tmp_path, "esc_a")
    damage(run)

    with pytest.raises(ConfigError, match=message) as caught:
        compare.run(Config(first=run, second=runs.folder / "esc_b", output=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "models", "message"),
    [
        ("esc_a", "sage", None, "'evaluate esc-eval' and .* of 'evaluate sage'; only runs of one"),
        ("sage", "sage", None, "kind would be compared with itself; set `models`"),
        ("sage", "sage", ("kind", "cruel"), "cruel has no dialogue .* its models are curt, kind"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs, first, second, models, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        compared(runs, tmp_path, first, second, models=models)


def test_too_few_shared_dialogues_are_refused(runs, tmp_path):
    run = copied(runs, tmp_path, "esc_a")
    path = run / "result/kind_en.json"
    kept = dict(list(json.loads(path.read_text()).items())[:4])
    path.write_text(json.dumps(kept))

    with pytest.raises(ConfigError, match="kind and curt share too few dialogues; a test needs 5"):
        compare.run(Config(first=run, second=runs.folder / "esc_b", output=tmp_path))


def test_the_command_takes_two_folders(runs, tmp_path, capsys):
    folders = [str(runs.folder / name) for name in ("esc_a", "esc_b")]
    output = f"output={tmp_path}"

    assert main(["evaluate", "compare", *folders, "--set", output, "--dry-run"]) == 0
    assert not list(tmp_path.iterdir())
    assert main(["evaluate", "compare", *folders, "--set", output]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"compare.json", "table.csv", "table.md"}
    assert main(["evaluate", "compare", folders[0], str(tmp_path)]) == 2
    assert "config.json: cannot be read" in capsys.readouterr().err
