"""SFT of the small seeker: whole dialogues of CER rows, with the roles swapped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compeer_core.cer import Case, CaseUtterance, CerRecord, HumanLabels, Variant
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.model_pool import ModelPool
from compeer_core.row_files import write_rows
from tests.training.reward_model.test_train import record
from tests.training.runs import SHORT_SCHEDULE, metrics_of, weights
from training.data.seeker_prompt import GREETING, rating_messages, seeker_messages
from training.finetune.base_model import LoraShape
from training.finetune.small_adapter import load_small_base
from training.finetune.tokenise import SampleReader
from training.sft import seeker
from training.sft.seeker import Config, RowBuilder, SeekerDialogue, read_dialogues

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

SITUATION = "I lost my job."
SAID = ("My work is gone.", "Why?", "They closed.", "That is hard.")


def round_of(number: int, place: int, *, split: str = "train", **changes: Any) -> CerRecord:
    """A round of dialogue `number`: two seeker turns, rated 4 before and 2 after."""
    row = record(number, split=split)
    said = [
        CaseUtterance(speaker=(Speaker.SEEKER, Speaker.SUPPORTER)[at % 2], text=text)
        for at, text in enumerate(SAID)
    ]
    values = row.case.model_dump() | {
        "id": f"d{number}#{place}",
        "dialogue_id": f"d{number}",
        "round": place,
        "rounds": 2,
        "history": said[: 2 * place + 1],
        "original": SAID[2 * place + 1],
        "situation": SITUATION,
        "labels": HumanLabels(intensity_before=4, intensity_after=2),
    }
    case = Case.model_validate(values | changes)
    return row.model_copy(update={"id": f"r{number}-{place}", "case": case})


@pytest.fixture
def config(tiny_base: Path, tmp_path: Path) -> Config:
    train = [round_of(number, place) for number in range(6) for place in (1, 0)]
    valid = [round_of(number, 1, split="valid") for number in range(6, 8)]
    write_rows(tmp_path / "rows.jsonl", [*train, *valid])
    return Config(
        records=(tmp_path / "rows.jsonl",),
        base=tiny_base,
        output=tmp_path / "run",
        lora=LoraShape(rank=4, alpha=8),
        compute="fp32",
        dialogues_per_step=3,
        steps=4,
        **SHORT_SCHEDULE,
        validation_dialogues=2,
    )


@pytest.fixture
def reader(tiny_base: Path) -> SampleReader:
    return SampleReader(tiny_base, load_small_base(tiny_base, "fp32"))


def turns(count: int) -> tuple[tuple[Speaker, str], ...]:
    speakers = (Speaker.SEEKER, Speaker.SUPPORTER)
    return tuple((speakers[place % 2], text) for place, text in enumerate(SAID[:count]))


def test_the_stage_learns_and_saves_an_adapter(config):
    seeker.run(config, dry_run=True)
    assert not config.output.exists()

    seeker.run(config.model_copy(update={"batch_tokens": 1000}))

    measured = metrics_of(config.output)
    assert measured[-1]["loss"] < measured[0]["loss"]
    assert all("lora_" in name for name in weights(config.output / "adapter"))


def test_a_dialogue_is_rebuilt_from_its_last_round(config):
    dialogues = read_dialogues(config.records, "train")

    assert len(dialogues) == 6
    assert dialogues[0] == SeekerDialogue(SITUATION, turns(4), 4, 2)


def test_rows_of_other_languages_or_without_a_situation_are_refused(config):
    rows = [
        round_of(1, 0, situation=None),
        round_of(2, 0, language="zh"),
        round_of(3, 0).model_copy(update={"variant": Variant.REWRITE}),
        round_of(4, 0, original=None),
    ]
    write_rows(config.records[0], rows)

    with pytest.raises(ConfigError, match="no English dialogue of the train split"):
        seeker.run(config)


def test_what_is_learnt_is_what_the_seeker_says_and_how_strong_its_distress_is(reader):
    [row] = RowBuilder(reader, 2048).rows(SeekerDialogue(SITUATION, turns(4), 4, 2))

    decode = reader.processor.tokenizer.decode
    # The row begins with the dialogue and ends with the rating before it.
    assert decode(row.targets).split("<|im_end|>") == [SAID[0], SAID[2], "2", "4", ""]
    text = decode(row.tokens[0])
    assert text.count(SITUATION) == text.count(GREETING) == 1
    assert text.count("How strong is your distress") == 2
    assert torch.equal(row.tokens[0][row.predicting + 1], row.targets)


def test_an_unrated_dialogue_ends_with_the_seeker(reader):
    [row] = RowBuilder(reader, 2048).rows(SeekerDialogue(SITUATION, turns(4), None, None))

    decode = reader.processor.tokenizer.decode
    assert decode(row.targets).split("<|im_end|>") == [SAID[0], SAID[2], ""]
    assert decode(row.tokens[0]).endswith(f"{SAID[2]}<|im_end|>")


def test_a_long_dialogue_loses_its_end(reader):
    dialogue = SeekerDialogue(SITUATION, turns(4), None, 2)
    [whole] = RowBuilder(reader, 2048).rows(dialogue)
    build = RowBuilder(reader, whole.length - 1)

    [cut] = build.rows(dialogue)

    decode = reader.processor.tokenizer.decode
    assert decode(cut.targets).split("<|im_end|>") == [SAID[0], SAID[2], ""]
    assert build.cut == 1
    assert RowBuilder(reader, 10).rows(dialogue) == []


def test_training_and_simulation_read_the_same_tokens(tiny_base, reader):
    [row] = RowBuilder(reader, 2048).rows(SeekerDialogue(SITUATION, turns(4), None, 2))
    learnt = row.tokens[0].tolist()
    asked = [seeker_messages(SITUATION, turns(count)) for count in (0, 2)]
    asked.append(rating_messages(seeker_messages(SITUATION, turns(4))))
    lease = ModelPool().lease(str(tiny_base), None, None, "cpu")
    try:
        prompts = [list(lease.chat.encode(messages).ids) for messages in asked]
    finally:
        lease.release()

    decode = reader.processor.tokenizer.decode
    for prompt, answer in zip(prompts, (SAID[0], SAID[2], "2"), strict=True):
        assert learnt[: len(prompt)] == prompt
        assert decode(learnt[len(prompt) :]).startswith(f"{answer}<|im_end|>")
