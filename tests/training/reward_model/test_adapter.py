"""Judges as adapters: what the page computes with them, stored states, weights, and interrupted runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import load_label_scorer
from compeer_core.prompts import judge_messages
from compeer_core.reasoning import Part
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import PREFERENCES, VERDICTS
from tests.training.reward_model.test_train import RULE, record, without_words
from tests.training.runs import metrics_of, weights
from training.data.faces import read_faces
from training.data.pictures import Pictures
from training.finetune.base_model import LoraShape
from training.finetune.shared_prefix import ATTENTION, predicted_logits
from training.finetune.small_adapter import load_small_base
from training.finetune.tokenise import SampleReader
from training.reward_model import adapter
from training.reward_model.adapter import Config, LowerStates, RowBuilder, class_weights, measures
from training.reward_model.conversations import Kind, questions
from training.reward_model.train import WORDS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


def judged(number: int, sample: int = 0, **changes: Any) -> CerRecord:
    """One of several judged turns for history `number`; odd ones are right and preferred."""
    right = (number + sample) % 2 == 1
    row = record(number, **changes)
    turn = str(row.first.turn).replace("Low.", f"{'Sad about the work' if right else 'Glad'}.")
    first = Candidate(
        author="small", reply="Why?", turn=turn, steps=(True, right, right), steps_by=RULE
    )
    preference = Preference.FIRST if right else Preference.SECOND
    return row.model_copy(
        update={"id": f"r{number}-{sample}", "first": first, "preference": preference}
    )


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    """Six histories of two turns, one with a photo; the upper of two layers is trained."""
    face = f"faces/{read_faces(small_corpora / 'faces')[0].file}"
    train = [
        judged(n, sample, images=(face,) if n == 0 else ()) for n in range(6) for sample in (0, 1)
    ]
    valid = [judged(n, sample, split="valid") for n in range(6, 9) for sample in (0, 1)]
    write_rows(tmp_path / "rows.jsonl", [*train, *valid, judged(9, split="test")])
    return Config(
        records=(tmp_path / "rows.jsonl",),
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        lora=LoraShape(rank=4, alpha=8),
        first_layer=1,
        cases_per_step=2,
        steps=4,
        warmup_steps=1,
        decay_steps=2,
        adamw_lr=0.02,
        save_every=2,
        evaluate_every=2,
        compute="fp32",
    )


def changed(config: Config, **changes: Any) -> Config:
    return config.model_copy(update=changes)


def answers_of_the_page(
    scorer: TransformersScorer, row: CerRecord, kind: Kind, pictures: Pictures, *, findings: bool
) -> list[Sequence[float]]:
    """Ask a loaded judge the questions of a row, and answer each as the label says."""
    dialogue = row.case.dialogue(pictures.shown(row.case.history))
    answers: list[Sequence[float]] = []
    for asked in questions(row, kind, findings=findings):
        session = scorer.open(judge_messages(dialogue, "en", scorer.reserved))
        for part, question, verdict in asked:
            labels = PREFERENCES if part is Part.REPLY else VERDICTS
            answers.append(session.ask(question, labels))
            session.answer(verdict)
        session.close()
    return answers


@pytest.mark.parametrize(
    ("kind", "findings"), [*((kind, False) for kind in Kind), (Kind.UNIFIED, True)]
)
def test_the_page_computes_the_probabilities_that_were_trained(config, kind, findings, monkeypatch):
    judges: list[Any] = []
    of_class = adapter._Judge

    def noted(*arguments: Any) -> Any:
        judges.append(of_class(*arguments))
        return judges[-1]

    monkeypatch.setattr(adapter, "_Judge", noted)
    config = changed(config, kind=kind, findings=findings, steps=2, decay_steps=0)
    adapter.run(config)

    [judge] = judges
    scorer = load_label_scorer(str(config.base), adapter=config.output / "adapter", device="cpu")
    pictures = Pictures(None, config.faces)
    model = load_small_base(config.base, "fp32")
    reader = SampleReader(config.base, model)
    token_of = reader.verdict_tokens(WORDS[kind])
    build = RowBuilder(reader, pictures, kind, token_of, 2048, findings=findings)
    for case in adapter.read_cases(config.records, "train", kind)[:2]:  # with a photo and without
        [row] = build.rows(case)
        with torch.no_grad():
            trained = judge.probabilities(row)
        served = [
            probabilities
            for record in case
            for probabilities in answers_of_the_page(
                scorer, record, kind, pictures, findings=findings
            )
        ]
        assert len(trained) == len(served)
        for ours, theirs in zip(trained, served, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
    scorer.close()


def changed_layers(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Numbers of the layers whose weights differ."""
    return {
        name.partition("language_model.layers.")[2].partition(".")[0]
        for name in after
        if not torch.equal(before[name], after[name])
    }


def test_the_stage_trains_the_upper_layers_and_leaves_a_calibration(config, caplog):
    caplog.set_level("INFO")
    adapter.run(config)

    learnt = weights(config.output / "adapter")
    moved = {name: torch.zeros_like(w) for name, w in learnt.items() if "lora_B" in name}
    assert changed_layers(moved, {name: learnt[name] for name in moved}) == {"1"}
    measured = [row for row in metrics_of(config.output) if "auroc" in row]
    assert [row["step"] for row in measured] == [2, 4]
    # Words of the second step tell; all verdicts on the first are True.
    assert {f"auroc_{part}" for part in ("emotion", "strategy", "reply")} <= measured[0].keys()
    assert "auroc_history" not in measured[0]
    best = max(measured, key=lambda row: row["auroc"])
    calibration = json.loads((config.output / "calibration.json").read_text(encoding="utf-8"))
    assert calibration == {name: best[name] for name in calibration}
    assert {"temperature_steps", "temperature_replies"} <= calibration.keys()
    assert "auroc_emotion" in caplog.text


def test_a_run_may_begin_with_an_adapter(config, tmp_path):
    longer = changed(config, steps=8, first_layer=0)
    adapter.run(longer)
    further = changed(config, output=tmp_path / "further", start=longer.output / "adapter")

    adapter.run(further)

    before, after = (weights(run.output / "adapter") for run in (longer, further))
    assert changed_layers(before, after) == {"1"}
    assert metrics_of(further.output)[0]["loss"] < metrics_of(longer.output)[0]["loss"] - 0.05
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        adapter.run(changed(config, start=tmp_path), dry_run=True)


def test_rows_that_are_padded_together_teach_the_same(config, tmp_path):
    alone = changed(config, first_layer=0)
    padded = changed(alone, batch_tokens=2000, output=tmp_path / "padded")
    adapter.run(alone)
    adapter.run(padded)

    for one, other in zip(metrics_of(alone.output), metrics_of(padded.output), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one.get("auroc", 0) == pytest.approx(other.get("auroc", 0), abs=1e-3)
    assert not any((alone.output / "states").iterdir())  # there is no layer below
    with pytest.raises(ValidationError, match="set first_layer = 0"):
        Config.model_validate(vars(config) | {"batch_tokens": 2000})


def test_the_loss_decreases(config):
    adapter.run(changed(config, steps=12, first_layer=0, evaluate_every=12))

    losses = [row["loss"] for row in metrics_of(config.output)]
    assert losses[-1] < losses[0] - 0.1


def test_stored_states_give_what_the_whole_model_computes_and_are_shared(config, tmp_path):
    model = load_small_base(config.base, "fp32")
    model.model.language_model.set_attn_implementation(ATTENTION)
    reader = SampleReader(config.base, model)
    token_of = reader.verdict_tokens(WORDS[Kind.UNIFIED])
    build = RowBuilder(reader, Pictures(None, config.faces), Kind.UNIFIED, token_of, 2048)
    [row] = build.rows(adapter.read_cases(config.records, "train", Kind.UNIFIED)[0])
    folder = tmp_path / "states"
    for _ in range(2):  # computed, then read
        lower = LowerStates(folder, model, 1, "base")
        judge = adapter._Judge(model, lower, 1, token_of)
        with torch.no_grad():
            logits, _ = judge._logits(row)
            expected = predicted_logits(model, row.row)
        assert torch.allclose(logits, expected, atol=1e-3)
        [file] = folder.iterdir()
        assert file.stat().st_size == pytest.approx(row.length * 32 * 2, rel=0.1)
    LowerStates(folder, model, 1, "another base").of(row.row)
    assert len(list(folder.iterdir())) == 2


def test_another_seed_reads_the_states_of_the_first_run(config, tmp_path, monkeypatch):
    states = tmp_path / "states"
    adapter.run(changed(config, states=states, steps=3))

    monkeypatch.setattr(adapter, "row_embeddings", None)  # cannot be called
    adapter.run(changed(config, states=states, steps=3, seed=1, output=tmp_path / "second"))


def test_long_rows_are_split_by_conversations_and_longer_conversations_are_counted(config):
    model = load_small_base(config.base, "fp32")
    reader = SampleReader(config.base, model)
    token_of = reader.verdict_tokens(WORDS[Kind.UNIFIED])

    def builder(longest: int) -> RowBuilder:
        return RowBuilder(reader, Pictures(None, config.faces), Kind.UNIFIED, token_of, longest)

    case = adapter.read_cases(config.records, "train", Kind.UNIFIED)[1]
    [whole] = builder(2048).rows(case)
    halves = builder(whole.length - 1).rows(case)
    assert len(halves) == 2 and [*halves[0].verdicts, *halves[1].verdicts] == [*whole.verdicts]
    none = builder(10)
    assert none.rows(case) == [] and none.too_long == 2


def test_rare_verdicts_weigh_more_by_hand():
    step = [(Part.EMOTION, "True")] * 6 + [(Part.EMOTION, "False")] * 2
    weight_of = class_weights(iter([*step, *[(Part.REPLY, "First")] * 20, (Part.REPLY, "Second")]))

    assert weight_of[Part.EMOTION, "True"] == pytest.approx(8 / 12)
    assert weight_of[Part.EMOTION, "False"] == 2
    assert weight_of[Part.REPLY, "Second"] == adapter.LARGEST_WEIGHT


def test_measures_by_hand():
    parts = [(Part.HISTORY, "True"), (Part.HISTORY, "False"), (Part.HISTORY, "True")]
    replies = [(Part.REPLY, "First"), (Part.REPLY, "Second"), (Part.REPLY, "Both")]
    measured = measures(
        [
            (parts, [(0.9, 0.1), (0.6, 0.4), (0.4, 0.6)]),
            (replies, [(0.6, 0.2, 0.1, 0.1), (0.1, 0.3, 0.3, 0.3), (0.1, 0.1, 0.7, 0.1)]),
        ]
    )

    assert measured["auroc_history"] == 0.5  # of two pairs one is in order
    assert measured["balanced_accuracy_history"] == 0.25
    assert measured["auroc_reply"] == 1 and measured["auroc"] == 0.75
    assert measured["ece_reply"] == pytest.approx(
        0.25
    )  # .75 for one that is, .25 for one that is not


def test_errors_are_reported_before_anything_is_written(config, tmp_path):
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            adapter.run(changed(config, **changes))
        assert not config.output.exists()

    refused(CheckpointError, "no such folder", base=Path("no/where/at-all"))
    refused(ConfigError, "no such file", records=(tmp_path / "none.jsonl",))
    write_rows(tmp_path / "train.jsonl", [judged(1)])
    refused(
        ConfigError,
        "no row of the valid split teaches a reward model of kind 'unified'",
        records=(tmp_path / "train.jsonl",),
    )
    refused(
        ConfigError, r"train\.jsonl: no row of the valid", validation=(tmp_path / "train.jsonl",)
    )
    refused(ConfigError, "first_layer: 2, but the base has 2 layers", first_layer=2)
    base = without_words(config.base, tmp_path / "base", "Second")
    refused(ConfigError, "'Second' must be one token each", base=base)


def test_a_dry_run_counts_and_writes_nothing(config, caplog):
    caplog.set_level("INFO")

    adapter.run(config, dry_run=True)

    assert not config.output.exists()
    assert "train: 6 histories; verdicts: emotion False 6, emotion True 6" in caplog.text
    assert "valid: 3 histories" in caplog.text
