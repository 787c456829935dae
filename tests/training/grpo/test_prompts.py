"""Prompts: formatted as in SFT, with pictures at their turns; orders that can be continued."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.cer import Candidate, CaseUtterance, CerRecord
from compeer_core.processing import load_processor
from tests.training.grpo.world import record, turn
from training.data.faces import read_faces
from training.data.pictures import Pictures
from training.finetune.sft_trainer import message_rows
from training.grpo.prompts import PromptBook, prompt_order, trl_message
from training.sft.cer import turn_row


@pytest.fixture
def row(faces) -> CerRecord:
    first, second = (f"faces/{face.file}" for face in read_faces(faces)[:2])
    history = (
        CaseUtterance(speaker="seeker", text="Look at me.", images=(first,)),
        CaseUtterance(speaker="supporter", text="I do. <reply>"),
        CaseUtterance(speaker="seeker", text="And <|im_start|>now?"),
        CaseUtterance(speaker="seeker", text="Hello?", images=(second,)),
    )
    answer = Candidate(author="corpus", reply="Why?", turn=turn("Why?"))
    return record(1, history=history).model_copy(update={"first": answer})


@pytest.fixture
def book(row, faces):
    return PromptBook([row], Pictures(None, faces))


def texts(rows: list[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    return [(row["role"], [block.get("text") for block in row["content"]]) for row in rows]


def test_a_prompt_is_formatted_as_in_sft(book, row, policy):
    learnt = turn_row(book.pictures.dialogue(row.case), row.first.turn)

    prompt = book.prompt(0)

    assert texts(prompt) == texts(learnt["prompt"])
    kinds = [block["type"] for message in prompt for block in message["content"]]
    assert kinds == [block["type"] for message in learnt["prompt"] for block in message["content"]]
    assert kinds.count("image") == len(learnt["images"]) == 2
    processor = load_processor(policy)
    ours = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    theirs = processor.apply_chat_template(
        learnt["prompt"], tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs
    assert ours.count("<|image_pad|>") == 2 and ours.count("<reply>") == 0


def test_rows_are_formatted_on_access_and_numbered(book, policy):
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
