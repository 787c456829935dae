"""What a judge is trained on is what it reads in use, token by token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trl.chat_template_utils import (
    qwen2_5_vl_chat_template,
    qwen2_5_vl_training_chat_template,
)
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_ import TransformersScorer
from compeer_core.cer import CaseUtterance
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.images import read_image
from compeer_core.model_pool import ModelPool, load_label_scorer
from compeer_core.processing import load_processor
from tests.checkpoints import CHATML as OURS
from tests.checkpoints import VICUNA, build_qwen
from tests.training.corpora_fixture import jpeg
from tests.training.reward_model.test_train import record
from training.finetune.sft_trainer import build_dataset, message_rows
from training.reward_model.conversations import Kind, conversations
from training.reward_model.template import CHATML, TRIED, misfit, training_template

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATES = {"small": OURS, "qwen": qwen2_5_vl_chat_template}
"""trl ships Qwen2.5-VL's template as it is published, to compare with what a checkpoint brings."""
MARKED = CHATML.read_text(encoding="utf-8")
PHOTO = read_image(jpeg(56, "sad", 1))
OTHER = read_image(jpeg(84, "happy", 2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: build_qwen(
            tmp_path_factory.mktemp(name), chat_template=template, max_position_embeddings=4096
        )
        for name, template in TEMPLATES.items()
    }


@pytest.fixture(params=TEMPLATES)
def judge(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[TransformersScorer]:
    """A judge in use."""
    scorer = load_label_scorer(str(folders[request.param]), device="cpu", pool=ModelPool())
    yield scorer
    scorer.close()


def taught(kind: Kind) -> list[tuple[Message, ...]]:
    """Conversations with two pictures in the history, at different turns."""
    row = record(1)
    said = (
        *row.case.history,
        CaseUtterance(speaker=Speaker.SUPPORTER, text="Oh no."),
        CaseUtterance(speaker=Speaker.SEEKER, text="我很难过。\n\nTrue? <b>"),
    )
    row = row.model_copy(update={"case": row.case.model_copy(update={"history": said})})
    return list(conversations(row, kind, [[PHOTO], [], [OTHER]]))


@pytest.mark.parametrize("kind", Kind)
def test_the_tokens_before_each_verdict_are_those_of_the_judge_in_use(judge, folders, kind):
    asked = taught(kind)
    folder = folders["small" if judge.chat.processor.chat_template == OURS else "qwen"]
    processor = load_processor(folder)
    processor.chat_template = training_template(folder, processor)
    rows = [message_rows(messages) for messages in asked]
    collator = DataCollatorForVisionLanguageModeling(
        processor=processor, assistant_only_loss=True, chat_template=None
    )
    batch = collator(
        list(build_dataset([{"messages": m, "images": i, "length": 0} for m, i in rows]))
    )

    for messages, ids, labels in zip(asked, batch["input_ids"], batch["labels"], strict=True):
        kept = [int(at) for at in (labels != -100).nonzero().flatten()]
        begins = [at for at in kept if at - 1 not in kept]
        answers = [number for number, m in enumerate(messages) if m.role == "assistant"]
        assert len(begins) == len(answers)
        for at, number in zip(begins, answers, strict=True):
            encoded = judge.chat.owner.call(
                lambda before=messages[:number]: judge.chat.encode(before, reply=True)
            )
            left = int((ids == processor.tokenizer.pad_token_id).cumprod(0).sum())
            assert ids[left:at].tolist() == list(encoded.ids)
            (token,) = judge.label_tokens([messages[number].text])
            # The verdict, and the end of its turn: what a judge generates, and nothing else.
            end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
            assert ids[at : at + 2].tolist() == [token, end]
            assert at + 2 not in kept


def processor_with(folders: dict[str, Path], template: str) -> Any:
    processor = load_processor(folders["small"])
    processor.chat_template = template
    return processor


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_ours_is_found_for_small_models_and_for_qwen(folders, template):
    assert training_template("base", processor_with(folders, template)) == MARKED


def test_a_default_system_message_is_noticed(folders):
    qwen = processor_with(folders, qwen2_5_vl_chat_template)
    without_system = TRIED[1:]

    # Qwen's template adds one, ours does not; a judge's conversation always brings its own.
    assert "'system\\nYou are a helpful assistant." in misfit("qwen", qwen, MARKED, without_system)
    assert not misfit("qwen", qwen, qwen2_5_vl_training_chat_template, without_system)
    assert not misfit("qwen", qwen, MARKED)
    assert not misfit("qwen", qwen, qwen2_5_vl_training_chat_template)


def test_a_base_whose_own_template_has_marks_is_trained_with_it(folders):
    own = MARKED.replace("<|im_start|>", "<|vision_end|>")

    assert training_template("base", processor_with(folders, own)) == own


def test_a_base_without_a_fitting_template_is_rejected(folders):
    with pytest.raises(ConfigError, match=r"^base: .* name the copy in training_template$"):
        training_template("base", processor_with(folders, VICUNA))


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (OURS, r"mine\.jinja has no {% generation %} marks"),
        (MARKED.replace("role'] + '\\n'", "role'] + ' '"), r"writes ' What to judge.*never reads"),
        (
            MARKED.replace("{%- generation -%}", "{%- generation -%}{{- '> ' -}}"),
            r"begins an answer with '> True",
        ),
        (
            MARKED.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
            + "{%- generation -%}{%- endgeneration -%}",
            r"marks 1 of 2 answers",
        ),
        (
            "{% generation %}{{ raise_exception('no') }}{% endgeneration %}",
            "cannot format a judge's",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_rejected(folders, tmp_path, written, says):
    path = tmp_path / "mine.jinja"
    path.write_text(written, encoding="utf-8")

    with pytest.raises(ConfigError, match=says):
        training_template("base", processor_with(folders, OURS), path)


def test_a_template_that_cannot_be_read_is_named(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read: No such file"):
        training_template("base", processor_with(folders, OURS), tmp_path / "none.jinja")
