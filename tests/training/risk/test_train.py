"""The stage `risk`: from labelled messages to a file that `RiskClassifier` loads, and its figures."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.errors import ConfigError
from compeer_core.risk_classifier import RiskClassifier
from compeer_core.safety import RiskKind
from training.common import results
from training.risk import train
from training.risk.train import Config, Message, Part

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path, small_corpora, tiny_base):
    file = tmp_path / "messages.jsonl"
    rows = [
        {"text": f"{text} {split} {number}", "kind": kind, "split": split}
        for split in ("train", "threshold", "test")
        for number in range(12)
        for text, kind in (
            ("I want to die", "suicide"),
            ("nobody will miss me", "suicide"),
            ("we had soup", "none"),
            ("the train was late", "none"),
            ("我想死", "suicide"),
        )
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    part = {"file": file}
    seekers = {"path": "esconv/train.txt.gz", "kind": "esconv", "lines": 6}
    return Config(
        base=tiny_base,
        output=tmp_path / "run",
        data_dir=small_corpora,
        train=({**part, "split": "train"},),
        threshold=({**part, "split": "threshold"},),
        test={"new": {**part, "split": "test", "rows": ((0, 20),)}},
        everyday=(seekers,),
        everyday_test={"seekers": {**seekers, "path": "esconv/valid.txt.gz"}},
        shape={"first": 1, "last": 2, "rank": 2},
        batch=8,
        steps=60,
        warmup_steps=2,
        decay_steps=20,
        adamw_lr=0.01,
        results=tmp_path / "results",
    )


def metrics_of(config):
    result = results.load(config.results / "risk.json")
    return {(m.about, m.of, m.name): m for m in result.metrics}


def test_stage_learns_signs_that_no_phrase_covers(config, tiny_base):
    train.run(config)

    metrics = metrics_of(config)
    assert metrics["new", "phrases", "Recall"].value == 50
    assert metrics["new", "classifier", "Recall"].value == 100
    assert metrics["new", "classifier", "Recall"].n == 10
    assert metrics["new", "classifier", "False alarms"].value == 0
    assert metrics["new, by kind", "either", "Recall: suicide"].value == 100
    assert metrics["seekers", "either", "Alarms per 1,000 lines"].n == 6
    classifier = RiskClassifier(
        load_model(tiny_base, "float32"),
        AutoTokenizer.from_pretrained(tiny_base),
        config.output / "risk.safetensors",
    )
    assert classifier("nobody will miss me 40", "en") is not None
    assert classifier("we had soup 40", "en") is None


def test_a_finished_run_is_tested_again_without_training(config):
    train.run(config)
    before = (config.output / "risk.safetensors").read_bytes()
    other = config.model_copy(update={"test": {"other": config.test["new"]}})

    train.run(other, resume=config.output)

    assert (config.output / "risk.safetensors").read_bytes() == before
    assert ("other", "classifier", "Recall") in metrics_of(config)


def test_dry_run_writes_nothing(config):
    train.run(config, dry_run=True)

    assert not config.output.exists()


def test_a_part_with_one_class_is_refused(config):
    part = config.threshold[0].model_copy(update={"rows": ((0, 0),)})

    with pytest.raises(ConfigError, match="needs signs of danger and look-alikes"):
        train.run(config.model_copy(update={"threshold": (part,)}), dry_run=True)


def test_a_part_can_name_writers(tmp_path):
    file = tmp_path / "messages.jsonl"
    rows = [
        {
            "text": f"{writer} {kind}",
            "kind": kind,
            "split": "wide",
            **({"writer": writer} if writer else {}),
        }
        for writer in ("", "anna", "ben", "carl")
        for kind in ("suicide", "none")
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")

    chosen = train._labelled(Part(split="wide", rows=((0, 2),), writers=("ben",), file=file))

    assert [message.text for message in chosen] == [" suicide", " none", "ben suicide", "ben none"]


def test_phrases_use_up_part_of_the_false_alarms():
    """Of 20 look-alikes phrases flag one, so 10 % leaves one to the classifier: the one at 19."""
    messages = [Message(str(n), None, RiskKind.SUICIDE if n == 3 else None) for n in range(20)]
    signs = [Message("sign", RiskKind.SUICIDE, None)] * 2
    odds = torch.tensor([*map(float, range(20)), 50.0, -50.0])

    threshold = train._threshold(odds, [*messages, *signs], 0.1)

    assert threshold == 18.0
    alarms = [
        m.phrase is not None or o > threshold for o, m in zip(odds[:20], messages, strict=True)
    ]
    assert sum(alarms) == 2
