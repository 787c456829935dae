"""Stage `cer` on the silver route: what is done, what is left alone, and what its config says."""

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compeer_core.cer import SPLITS, CerRecord, Variant
from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from tests.training.cer.endpoint import Endpoint
from training.__main__ import main
from training.cer import pipeline
from training.cer.pipeline import Config
from training.cer.requests.engines import LocalEngine
from training.data.records import read_records
from training.stages import StoppedEarly

CONFIGS = Path(pipeline.__file__).parents[1] / "configs"
ESCONV = ", ".join(
    f'{{loader="esconv", path="esconv/{split}.txt.gz", split="{split}"}}' for split in SPLITS
)
JUDGED = '{name="counselchat", use="train", paths=["counselchat/20200325_counsel_chat.csv.gz"]}'


Starter = Callable[..., Config]


@pytest.fixture
def silver(small_corpora: Path, endpoint: Endpoint, tmp_path: Path) -> Starter:
    """Makes a config of the silver route, with an endpoint in the place of COMPEER-small."""

    def config(*changes: str) -> Config:
        loaded = load_toml(
            CONFIGS / "silver.toml",
            Config,
            [
                f"data_dir={small_corpora}",
                f"output={tmp_path / 'run'}",
                f"corpora=[{ESCONV}]",
                f"judged=[{JUDGED}]",
                "role_cards=[]",
                "cases.rounds_per_dialogue=2",
                "leaks.shared_words=1000",  # dialogues of the fixture say much the same
                f'generators={{writer={{source="{endpoint.source}"}}}}',
                *changes,
            ],
        )
        if any(change.startswith("personality") for change in changes):
            return loaded
        return loaded.model_copy(update={"personality": None})  # it has a test of its own

    return config


def done_again(output: Path, before: dict[str, int]) -> list[str]:
    """Return the steps whose note is newer than before, in the order in which they were done."""
    now = notes(output)
    return sorted((name for name in now if now[name] != before.get(name)), key=now.__getitem__)


def notes(output: Path) -> dict[str, int]:
    return {
        note.stem: note.stat().st_mtime_ns for note in (output / "reports" / "done").glob("*.json")
    }


def test_the_silver_route_writes_rows_with_the_reasons_of_the_rule(silver):
    config = silver()

    pipeline.run(config)

    rows = {name: list(read_records(config.output / f"{name}.jsonl", CerRecord)) for name in SPLITS}
    everything = [row for result in rows.values() for row in result]
    assert everything
    assert all(row.case.split == name for name, result in rows.items() for row in result)
    judged = [
        candidate
        for row in everything
        for candidate in row.candidates
        if candidate.steps is not None
    ]
    assert judged
    assert all(candidate.steps_by.kind == "rule" and candidate.reason for candidate in judged)
    assert {candidate.author for candidate in judged} == {"tiny"}
    people = list(read_records(config.output / "human.train.jsonl", CerRecord))
    assert all(row.preference_by.name.startswith("counselchat") for row in people)
    text = (config.output / "README.md").read_text(encoding="utf-8")
    assert text.count("Silver CER from ESConv")
    assert not list(config.output.rglob("*.new"))


def test_a_changed_setting_repeats_the_steps_that_depend_on_it(silver):
    pipeline.run(silver())
    changes: list[str] = []
    for change, again in (
        ("card.title=Another title", ["card"]),
        ("silver.false_shares=[0.6, 0.5, 0.5]", ["silver", "split", "card"]),
        ("generation.samples_per_case=3", ["generate", "silver", "split", "card"]),
        (
            'judged=[{name="counselchat", paths=["counselchat/20200325_counsel_chat.csv.gz"]}]',
            ["human", "human_split", "card"],
        ),
        ("engine=local", []),
        ("max_requests=100000", []),
        ("generators.writer.in_flight=3", []),
    ):
        changes.append(change)
        config = silver(*changes)
        before = notes(config.output)

        pipeline.run(config)

        result = done_again(config.output, before)
        assert result[:1] == again[:1], change
        # what comes out the same as before leaves later steps alone
        assert result == [step for step in again if step in result], change


def test_only_changed_questions_are_sent_again(silver, endpoint):
    pipeline.run(silver())
    asked = endpoint.requests

    # with one round more of each dialogue, the two of before are asked about no more
    pipeline.run(silver("cases.rounds_per_dialogue=3"))
    more = endpoint.requests - asked
    cases = len((silver().output / "steps" / "cases.jsonl").read_text("utf-8").splitlines())
    assert 0 < more < cases

    # other words under the same keys are other questions
    asked = endpoint.requests
    pipeline.run(silver("cases.rounds_per_dialogue=3", "cases.history_characters=1"))
    assert endpoint.requests > asked


def test_resume_insists_on_the_settings_of_the_run(silver):
    config = silver()
    with pytest.raises(ConfigError, match="no run to resume"):
        pipeline.run(config, resume=config.output)
    pipeline.run(config)

    pipeline.run(silver("max_requests=5", "engine=local"), resume=config.output)
    with pytest.raises(ConfigError, match=r"cases\.history_characters \(was 1200, now 2\)"):
        pipeline.run(silver("cases.history_characters=2"), resume=config.output)

    record = json.loads((config.output / "config.json").read_text(encoding="utf-8"))
    assert len(record["resumed"]) == 1


def test_two_starts_do_not_work_on_one_run(silver):
    config = silver("max_requests=0")
    with pytest.raises(StoppedEarly):
        pipeline.run(config)

    with pipeline._locked(config.output), pytest.raises(ConfigError, match="another process"):
        pipeline.run(config)
    with pytest.raises(StoppedEarly):
        pipeline.run(config)


def test_variants_come_out_in_equal_numbers_without_any_model(silver):
    config = silver("personality.clusters.encoder=tfidf", "personality.clusters.k_max=3")

    pipeline.run(config)

    rows = {
        variant: list(read_records(config.output / "variants" / f"{variant}.jsonl", CerRecord))
        for variant in (Variant.DUPLICATE, Variant.REWRITE, Variant.PERSONA)
    }
    assert len({len(result) for result in rows.values()}) == 1
    assert all(row.variant is variant for variant, result in rows.items() for row in result)


def test_a_subset_of_the_sources_can_be_drawn(silver):
    config = silver("sources_per_split=2")

    pipeline.run(config)

    lines = (config.output / "steps" / "trial.jsonl").read_text(encoding="utf-8").splitlines()
    sources = {(row["split"], row["source_id"]) for row in map(json.loads, lines)}
    assert sorted(split for split, _ in sources) == sorted([*SPLITS, *SPLITS])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("annotaion.mode=people", "annotaion: unknown key, got {'mode': 'people'} (did you mean "),
        ("silver.fals_shares=[1]", "(did you mean 'false_shares'?)"),
        ("roles.turns=['writr']", "no generator 'writr' (did you mean 'writer'?)"),
        ("generators={}", "at least one is needed"),
        ("generators={a={source='openai:http://me:sk-1@localhost/v1#m'}}", "COMPEER_API_KEY"),
        ("corpora=[{loader='esconf', path='x'}]", "no loader 'esconf'"),
        ("corpora=[]", "at least 1 item"),
        ("max_requests=-1", "greater than or equal to 0"),
    ],
)
def test_a_wrong_key_is_named_with_its_place(silver, change, says):
    with pytest.raises(ConfigError) as caught:
        silver(change)

    assert says in str(caught.value)
    assert "sk-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("corpora=[{loader='esconv', path='esconv/missing.txt.gz'}]", "missing.txt.gz"),
        ("faces=nowhere", "nowhere"),
        ("judged=[{name='pair', paths=['pair/none.csv']}]", "none.csv"),
        ("annotation.files=['nobody.csv']", "nobody.csv"),
        ("generators={a={source='no/such/checkpoint'}}", "no/such/checkpoint"),
    ],
)
def test_missing_inputs_are_reported_before_anything_is_written(silver, change, says):
    config = silver(change)

    for dry_run in (True, False):
        with pytest.raises(ConfigError) as caught:
            pipeline.run(config, dry_run=dry_run)
        assert says in str(caught.value)
    assert not config.output.exists()


class Pieces(LocalEngine):
    """Ray's way without its processes: a few items at a time, each of them a copy."""

    def __init__(self, workers: int) -> None:
        self.pieces: list[int] = []

    def map(self, function, items):
        stream = iter(items)
        while copies := pickle.loads(pickle.dumps(list(itertools.islice(stream, 4)))):
            self.pieces.append(len(copies))
            yield from function(iter(copies))


def test_an_engine_that_works_in_batches_gives_the_same_rows(silver, tmp_path, monkeypatch):
    used: list[Pieces] = []
    monkeypatch.setattr(pipeline, "RayEngine", lambda n: used.append(Pieces(n)) or used[-1])
    local, other = silver(), silver("engine=ray", f"output={tmp_path / 'pieces'}")
    pipeline.run(local)

    pipeline.run(other)

    assert sum(map(len, (engine.pieces for engine in used))) > 10
    same_rows(local, other)


@pytest.mark.slow  # the whole route in processes
@pytest.mark.filterwarnings("ignore")  # Ray warns of what it does itself
def test_the_same_rows_come_from_ray(silver, tmp_path):
    ray = pytest.importorskip("ray")
    local = silver()
    pipeline.run(local)
    other = silver("engine=ray", f"output={tmp_path / 'ray'}")

    try:
        pipeline.run(other)
    finally:
        ray.shutdown()  # other modules start one of their own

    same_rows(local, other)


def same_rows(local: Config, other: Config) -> None:
    names = ["train.jsonl", "valid.jsonl", "test.jsonl", "steps/turns.jsonl", "README.md"]
    for name in names:
        assert (other.output / name).read_bytes() == (local.output / name).read_bytes(), name


@pytest.mark.usefixtures("one_thread")
def test_compeer_small_writes_turns_in_this_process(silver, repository):
    checkpoints = repository / "assets" / "checkpoints"
    source, adapter = checkpoints / "compeer-small-base", checkpoints / "compeer-small"
    config = silver(
        f'generators={{small={{source="{source}", adapter="{adapter}", style="trained"}}}}',
        "cases.rounds_per_dialogue=1",
        "sources_per_split=2",
        "silver.false_shares=[0.5, 0.5, 0.5]",
    )

    pipeline.run(config)

    report = json.loads((config.output / "reports" / "generate.json").read_text(encoding="utf-8"))
    assert report["written"] == 12  # two turns for each case
    assert report["figures"]["complete"] >= 4


@pytest.mark.parametrize("name", ["silver", "cer_full"])
def test_the_shipped_configs_load(name):
    config = load_toml(CONFIGS / f"{name}.toml", Config)

    assert config.corpora
    assert config.card.command.endswith(f"{name}.toml")


def test_the_flag_of_the_command_line_reaches_the_config(silver, capsys):
    config = silver()
    path = config.output.parent / "silver.toml"
    path.write_text((CONFIGS / "silver.toml").read_text(encoding="utf-8"), encoding="utf-8")

    assert main(["cer", str(path), "--max-requests", "none"]) == 2
    assert "max_requests: Input should be a valid integer" in capsys.readouterr().err
    assert main(["cer", "--help"]) == 0
    assert "--max-requests" in capsys.readouterr().out


def test_starting_the_stage_loads_no_heavy_library(repository):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, training.cer.pipeline; "
            "sys.exit(bool({'torch', 'ray', 'transformers', 'datasets'} & set(sys.modules)))",
        ],
        cwd=repository,
        env=dict(os.environ),
        check=False,
        timeout=60,
    )

    assert done.returncode == 0
