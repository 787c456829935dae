"""Steps that look at each row by itself write the same files on Ray as in this process."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from compeer_core.cer import SPLITS, Case
from compeer_core.errors import ConfigError
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    render,
)
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Emotion, Sentiment, Stage
from tests.training.cer.personality.personality_rows import row, rows, written
from training.cer.personality import clusters, rewriting, traits
from training.cer.records import SourceDialogue, StepReport
from training.cer.requests.engines import LOCAL, Engine, RayEngine
from training.cer.silver import dataset as silver
from training.cer.steps import cases, filtering
from training.cer.steps.generation import GeneratedTurn
from training.cer.steps.ingest import CorpusFile, collect
from training.data.pictures import Pictures
from training.data.records import read_records

# Ray warns of its own settings. Workers import all that they need, on cores that others use too.
pytestmark = [
    pytest.mark.slow,  # test_pipeline.py has the same of an engine that cuts the stream
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(600),
]

Step = Callable[[Path, Engine], StepReport]
"""Writes into a folder."""


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[RayEngine]:
    """A local Ray, and blocks so small that each step has several."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
        pytest.importorskip("ray.data", reason="the extra `ray` is not installed")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_worker_niceness", "0")  # or they wait for whatever else is running
            ray.init(
                num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
            )
            yield RayEngine(workers=2, block=8)
        ray.shutdown()


@pytest.fixture(scope="module")
def dialogues(small_corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ESConv of the fixture; of some dialogues a second row, a short one, one of one speaker."""
    path = tmp_path_factory.mktemp("steps") / "dialogues.jsonl"
    files = [
        CorpusFile(loader="esconv", path=f"esconv/{split}.txt.gz", split=split) for split in SPLITS
    ]
    collect(files, small_corpora, path, seed=0)
    result = list(read_records(path, SourceDialogue))
    for number, talk in enumerate(result[:9]):
        kept = talk.utterances[:: 1 if number % 3 else 2] if number % 2 else talk.utterances[:3]
        name = talk.id.replace("/lines/", "/windows/")
        result.insert(3 * number, talk.model_copy(update={"id": name, "utterances": kept}))
    write_rows(path, [*result, result[5]])
    return path


def both(step: Step, folder: Path, ray_engine: RayEngine) -> StepReport:
    """Do a step on either engine, and find no difference. Returns the report."""
    reports = []
    engines: dict[str, Engine] = {"local": LOCAL, "ray": ray_engine}
    for name, engine in engines.items():
        (folder / name).mkdir()
        reports.append(step(folder / name, engine))
    files = {
        name: {
            path.relative_to(folder / name): path.read_bytes()
            for path in (folder / name).rglob("*")
            if path.is_file()
        }
        for name in engines
    }
    assert files["local"]
    assert files["ray"] == files["local"]
    # As text: the order of its keys is that of a file, too.
    assert reports[1].model_dump_json() == reports[0].model_dump_json()
    return reports[0]


def test_the_rules_of_the_filter(dialogues: Path, ray_engine: RayEngine, tmp_path: Path) -> None:
    settings = filtering.Settings(min_rounds=2, max_same=2)

    def step(folder: Path, engine: Engine) -> StepReport:
        return filtering.filter_dialogues(
            dialogues, folder / "kept.jsonl", folder / "dropped.jsonl", settings, engine=engine
        )

    report = both(step, tmp_path, ray_engine)

    assert report.written
    assert report.dropped_count


def test_drawing_cases_with_photos(
    dialogues: Path, small_corpora: Path, ray_engine: RayEngine, tmp_path: Path
) -> None:
    settings = cases.Settings(rounds_per_dialogue=2, face_share=0.5)
    pictures = Pictures(small_corpora, small_corpora / "faces")

    def step(folder: Path, engine: Engine) -> StepReport:
        return cases.draw_cases(
            dialogues, folder / "cases.jsonl", settings, pictures, 3, engine=engine
        )

    report = both(step, tmp_path, ray_engine)

    assert report.written
    assert report.figures["with picture"]
    assert set(report.dropped["esconv"]) >= {cases.Reason.ANOTHER_LAYOUT, cases.Reason.REPEATED}


def test_errors_of_a_row_have_the_same_message(
    dialogues: Path, ray_engine: RayEngine, tmp_path: Path
) -> None:
    read = read_records(dialogues, SourceDialogue)
    source = tmp_path / "source.jsonl"
    write_rows(source, (row.model_copy(update={"split": "dev2"}) for row in read))
    said = []
    for engine in (LOCAL, ray_engine):
        with pytest.raises(ConfigError) as caught:
            cases.draw_cases(source, tmp_path / "cases.jsonl", cases.Settings(), engine=engine)
        said.append(str(caught.value))

    assert said[1] == said[0]
    assert "split is 'dev2'" in said[0]
    assert not (tmp_path / "cases.jsonl").exists()


def test_the_silver_rule(dialogues: Path, ray_engine: RayEngine, tmp_path: Path) -> None:
    source = tmp_path / "cases.jsonl"
    cases.draw_cases(dialogues, source, cases.Settings())
    turns = tmp_path / "turns.jsonl"
    write_rows(turns, generated(read_records(source, Case)))

    def step(folder: Path, engine: Engine) -> StepReport:
        output, judged = folder / "labelled.jsonl", folder / "judged.jsonl"
        return silver.label(source, turns, output, judged, silver.Settings(), 3, engine=engine)

    report = both(step, tmp_path, ray_engine)

    assert report.figures["judged"]
    assert set(report.dropped["esconv"]) >= {silver.Reason.INCOMPLETE, silver.Reason.REPEATED}


def generated(result: Iterator[Case]) -> Iterator[GeneratedTurn]:
    """Two turns for each case, of which now and then one is half, or the same again."""
    kinds = list(product(("work", "a breakup"), (Emotion.ANXIETY, Emotion.SHAME), Stage))
    for number, case in enumerate(result):
        for sample in range(2):
            problem, emotion, stage = kinds[(number + (number % 3) * sample) % len(kinds)]
            reasoning = Reasoning(
                HistoryStep(f"It is about {problem}.", stage),
                EmotionStep("It shows.", Sentiment.NEGATIVE, emotion, 3),
                StrategyStep("It fits.", "Question"),
            )
            text = render(SupportTurn(reasoning, "What did you say to them?"))
            yield GeneratedTurn(
                id=f"{case.id}/policy/{sample}",
                case=case,
                author="policy",
                sample=sample,
                seed=0,
                text=text[: -20 if number % 5 == 4 else None],
                reply="x",
                problems=(),
            )


@pytest.mark.parametrize("checks", [True, False])
def test_traits_and_rewriting_by_rules(ray_engine: RayEngine, tmp_path: Path, checks: bool) -> None:
    # Short texts are not compared, and stay whatever the floor.
    short = [row(f"s{number}", [f"It is {number}."], "I see.", "Oh no!") for number in range(8)]
    source = written(tmp_path, [*rows(24), *short])
    wide = replace(ray_engine, block=16)
    bounds = rewriting.Settings().bounds.model_copy(update={"similarity_floor": 0.7})
    settings = rewriting.Settings(checks_words=checks, bounds=bounds)

    def tell(folder: Path, engine: Engine) -> StepReport:
        return traits.describe(source, folder / "personas.jsonl", traits.Settings(), engine=engine)

    def reword(folder: Path, engine: Engine) -> StepReport:
        cast = tmp_path / "cast"
        return rewriting.rewrite(
            source, cast / "personas.jsonl", folder / "variants", settings, seed=3, engine=engine
        )

    (tmp_path / "told").mkdir()
    told = both(tell, tmp_path / "told", wide)
    clusters.cluster(
        tmp_path / "told" / "ray" / "personas.jsonl",
        tmp_path / "cast",
        clusters.Settings(k_max=4),
        seed=0,
    )
    report = both(reword, tmp_path, wide)

    assert told.written == 56
    assert report.written
    assert bool(report.dropped_count) == checks
