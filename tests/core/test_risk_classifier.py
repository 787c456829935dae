"""The learned check for signs of danger: how it reads a base, and what the shipped weights find."""

import copy
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.dialogue import language_of
from compeer_core.errors import CheckpointError
from compeer_core.risk_classifier import (
    KINDS,
    LONGEST,
    RiskClassifier,
    RiskNet,
    RiskShape,
    padded,
    pieces,
)
from compeer_core.safety import RiskKind, RiskSign

pytestmark = pytest.mark.usefixtures("one_core")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = RiskShape(first=1, last=2, rank=2)


@pytest.fixture(scope="module")
def base(qwen_folder):
    return load_model(qwen_folder, "float32").eval()


@pytest.fixture(scope="module")
def tokenizer(qwen_folder):
    return AutoTokenizer.from_pretrained(qwen_folder)


@pytest.fixture(scope="module")
def net(base):
    torch.manual_seed(0)
    net = RiskNet(base.model.language_model, SHAPE).eval()
    with torch.no_grad():
        for weight in net.up.values():
            weight.normal_(std=0.3)
    return net


@pytest.fixture
def weights_file(net, tmp_path):
    def write(threshold=0.0, shape=SHAPE, sure=1e9):
        settings = {"threshold": threshold, "sure": sure, "shape": shape.model_dump()}
        file = tmp_path / "risk.safetensors"
        weights = {name: tensor.half() for name, tensor in net.state_dict().items()}
        save_file(weights, file, {"risk": json.dumps(settings)})
        return file

    return write


def test_unchanged_layers_compute_what_transformers_computes(base, net, tokenizer):
    ids = torch.tensor(pieces(tokenizer, "I feel sad and I cannot sleep.")[0])
    expected = base.model.language_model(
        input_ids=ids, output_hidden_states=True, use_cache=False
    ).hidden_states[SHAPE.first]

    assert torch.allclose(net.lower(ids), expected, atol=1e-4)


def test_padding_does_not_change_logits(net, tokenizer):
    rows = [pieces(tokenizer, text)[0][0] for text in ("Hi.", "I will lose my job next month.")]
    prefix = pieces(tokenizer, "Hi.")[1]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    together = net(net.lower(ids), *padded([len(row) for row in rows], prefix))

    for row, logits in zip(rows, together, strict=True):
        alone = net(net.lower(torch.tensor([row])), *padded([len(row)], prefix))
        assert torch.allclose(alone[0], logits, atol=1e-4)


def test_updated_layers_attend_in_both_directions(net):
    ids = torch.arange(10, 20)[None]
    changed = ids.clone()
    changed[0, -1] = 30
    averaged = torch.zeros(1, 10, dtype=torch.bool)
    averaged[0, 0] = True
    read = torch.ones(1, 10, dtype=torch.bool)

    before, after = (net(net.lower(tokens), averaged, read) for tokens in (ids, changed))

    assert not torch.allclose(before, after)


def test_only_updates_and_classifier_are_trained(base, net):
    names = {name.split(".")[0] for name, _ in net.named_parameters()}

    assert names == {"down", "up", "norm", "head"}


def test_a_message_is_a_sign_from_the_threshold_on(base, tokenizer, weights_file):
    odds, kind = RiskClassifier(base, tokenizer, weights_file()).log_odds("They left me alone.")
    below = RiskClassifier(base, tokenizer, weights_file(odds - 0.01))("They left me alone.", "en")
    above = RiskClassifier(base, tokenizer, weights_file(odds + 0.01))("They left me alone.", "en")

    sure = weights_file(odds - 0.02, sure=odds - 0.01)
    assert RiskClassifier(base, tokenizer, sure)("They left me alone.", "en") == RiskSign(kind)
    assert kind in RiskKind
    assert below == RiskSign(kind, is_hint=True)
    assert above is None


@pytest.mark.parametrize("text", ["", " \n", "我很难过 ok", "😀", "12"])
def test_messages_without_english_words_are_not_classified(base, tokenizer, weights_file, text):
    assert RiskClassifier(base, tokenizer, weights_file(-1e9))(text, "en") is None


def test_the_gravest_piece_of_a_long_message_counts(base, tokenizer, weights_file):
    classifier = RiskClassifier(base, tokenizer, weights_file())
    text = "We talk at home. " * LONGEST
    rows, prefix = pieces(tokenizer, text)
    odds = [classifier.log_odds(tokenizer.decode(row[prefix:]))[0] for row in rows]

    assert len(rows) > 1 and max(map(len, rows)) == prefix + LONGEST
    assert classifier.log_odds(text)[0] == pytest.approx(max(odds), abs=1e-3)


def test_of_a_very_long_message_the_beginning_and_the_end_are_read(
    base, tokenizer, weights_file, monkeypatch
):
    monkeypatch.setattr("compeer_core.risk_classifier.MOST_PIECES", 2)
    classifier = RiskClassifier(base, tokenizer, weights_file())
    read = []
    lower = classifier._net.lower

    def counted(ids):
        read.append(ids.tolist())
        return lower(ids)

    monkeypatch.setattr(classifier._net, "lower", counted)
    text = "I am here. " + "It rained again. " * 150 + "I am there."
    rows, _ = pieces(tokenizer, text)
    classifier.log_odds(text)

    assert len(rows) > 4
    assert [row[: len(rows[-1])] for row in read[0]] == [rows[0][: len(rows[-1])], rows[-1]]


def test_a_message_waits_for_others_only_for_a_while(base, tokenizer, weights_file, monkeypatch):
    monkeypatch.setattr("compeer_core.risk_classifier.PATIENCE_SECONDS", 0.01)
    classifier = RiskClassifier(base, tokenizer, weights_file(-1e9))

    assert classifier("They left me alone.", "en") is not None
    with classifier._lock:
        assert classifier("They left me alone.", "en") is None
    assert classifier("They left me alone.", "en") is not None


def test_lone_surrogates_are_ignored(base, tokenizer, weights_file):
    classifier = RiskClassifier(base, tokenizer, weights_file(-1e9))

    assert classifier("They left \ud800me alone.", "en") == classifier("They left me alone.", "en")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft 0.21 still reads it
def test_adapters_and_other_threads_change_nothing(
    qwen_folder, adapter_folders, tokenizer, weights_file
):
    import peft

    model = load_model(qwen_folder, "float32").eval()
    classifier = RiskClassifier(model, tokenizer, weights_file())
    texts = [f"I am alone for {number} days" for number in range(8)]
    expected = [classifier.log_odds(text) for text in texts]
    peft.PeftModel.from_pretrained(model, str(adapter_folders[0])).eval()
    results = {}
    threads = [
        threading.Thread(target=lambda text=text: results.update({text: classifier.log_odds(text)}))
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for text, (odds, kind) in zip(texts, expected, strict=True):
        assert results[text] == (pytest.approx(odds, abs=1e-4), kind)


def test_unusable_files_are_refused_with_a_remedy(base, tokenizer, weights_file, tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"nothing")
    deeper = weights_file(shape=RiskShape(first=1, last=9, rank=2))

    for file in (tmp_path / "missing.safetensors", damaged, deeper):
        with pytest.raises(CheckpointError, match="python -m training risk"):
            RiskClassifier(base, tokenizer, file)


def test_a_quantized_base_is_refused(base, tokenizer, weights_file):
    quantized = copy.deepcopy(base)
    projection = quantized.model.language_model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)

    with pytest.raises(CheckpointError, match="without --quantize 4bit or 8bit"):
        RiskClassifier(quantized, tokenizer, weights_file())


def test_classes_are_no_danger_and_all_kinds():
    assert KINDS[0] is None and {*KINDS[1:]} == {*RiskKind} - {RiskKind.PAST_SELF_HARM}


@pytest.fixture(scope="module")
def shipped():
    folder = ROOT / "assets" / "checkpoints" / "compeer-small-base"
    model = load_model(folder, "float32").eval()
    return RiskClassifier(model, AutoTokenizer.from_pretrained(folder))


@pytest.mark.timeout(600)  # reads messages one by one
@pytest.mark.parametrize("every", [11, pytest.param(2, marks=pytest.mark.slow)])
def test_shipped_weights_reach_the_published_figures(shipped, every):
    """Some English messages of `fresh`, of which the card states 60 % and 5 %."""
    lines = (Path(__file__).parent / "risk_messages.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines if (row := json.loads(line))["split"] == "fresh"]
    english = [row for row in rows if language_of(row["text"]) == "en"]
    alarms = {True: [], False: []}
    for row in english[::every]:
        alarms[row["kind"] != "none"].append(shipped(row["text"], "en") is not None)

    assert len(english) >= 440
    assert sum(alarms[True]) / len(alarms[True]) >= 0.5
    assert sum(alarms[False]) / len(alarms[False]) <= 0.09


def test_few_words_give_no_hint(base, tokenizer, weights_file):
    odds, _ = RiskClassifier(base, tokenizer, weights_file()).log_odds("Bye for ever.")
    eager = RiskClassifier(base, tokenizer, weights_file(odds - 0.01))

    assert eager("Bye for ever.", "en") is None
