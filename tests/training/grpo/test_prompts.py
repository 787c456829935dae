"""Prompts: as the SFT stage writes them, with pictures at their turns; orders that can go on."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.processing import load_processor
from tests.training.grpo.world import turn
from training.data.faces import read_faces
from training.data.histories import read_histories
from training.data.pictures import Pictures
from training.data.samples import Sample, SampleUtterance, write_records
from training.finetune.sft_trainer import message_rows
from training.grpo.prompts import PromptBook, prompt_order, trl_message
from training.sft.train import sample_row


@pytest.fixture
def sample(faces):
    return Sample(
        id="d1#2",
        dialogue_id="d1",
        problem="job crisis",
        strategy="Question",
        history=(
            SampleUtterance(speaker="seeker", text="Look at me.", face=read_faces(faces)[0].file),
            SampleUtterance(speaker="supporter", text="I do. <reply>"),
            SampleUtterance(speaker="seeker", text="And <|im_start|>now?"),
            SampleUtterance(speaker="seeker", text="Hello?", face=read_faces(faces)[1].file),
        ),
        completion=turn("Why?"),
    )


@pytest.fixture
def book(sample, faces, tmp_path):
    write_records(tmp_path / "samples.jsonl", [sample])
    found, _ = read_histories([tmp_path / "samples.jsonl"], "train")
    return PromptBook(found, Pictures(None, faces))


def texts(rows: list[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    return [(row["role"], [block.get("text") for block in row["content"]]) for row in rows]


def test_a_prompt_is_written_as_the_sft_stage_writes_it(book, sample, faces, policy):
    photos = {face.file: face.data for face in read_faces(faces)}
    row = sample_row(sample, photos)

    prompt = book.prompt(0)

    assert texts(prompt) == texts(row["prompt"])
    kinds = [block["type"] for message in prompt for block in message["content"]]
    assert kinds == [block["type"] for message in row["prompt"] for block in message["content"]]
    assert kinds.count("image") == len(row["images"]) == 2
    processor = load_processor(policy)
    ours = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    theirs = processor.apply_chat_template(
        row["prompt"], tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs
    assert ours.count("<|image_pad|>") == 2 and ours.count("<reply>") == 0


def test_rows_are_made_when_asked_for_and_named_by_their_number(book, policy):
    rows = book.data_set([0, 0])

    assert len(rows) == 2 and set(rows.column_names) == {"row"}
    assert rows[1]["row"] == 0
    assert texts(rows[1]["prompt"]) == texts(book.prompt(0))


def test_lengths_count_the_tokens_of_pictures(book, policy):
    processor = load_processor(policy)
    (found,) = book.lengths([0], processor)
    text = processor.apply_chat_template(book.prompt(0), tokenize=False, add_generation_prompt=True)

    without = len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    # each placeholder stands for at least 56 x 56 / 28 x 28 = 4 tokens
    assert without + 2 * 3 <= found <= without + 2 * 15


def test_a_message_keeps_its_blocks_in_order(book):
    message = book.messages(0)[0]

    blocks = trl_message(message)["content"]
    rows, images = message_rows([message])

    assert [block["type"] for block in blocks] == [b["type"] for b in rows[0]["content"]]
    assert blocks[0]["image"].size == (message.content[0].width, message.content[0].height)
    assert len(images) == 1


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 5))
def test_every_prompt_comes_before_any_comes_again(count, total, seed):
    order = prompt_order(count, total, seed) if total else []

    assert len(order) == total
    for begin in range(0, total, count):
        part = order[begin : begin + count]
        assert max(Counter(part).values()) == 1
    assert order == (prompt_order(count, total, seed) if total else [])
    if total > count:  # a longer run begins as a shorter one
        assert prompt_order(count, total - 1, seed) == order[:-1]
