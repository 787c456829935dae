"""Generators in this process: each row of a batch is written as if it were alone."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_ import ChatModel
from compeer_core.errors import CompeerError, ConfigError
from compeer_core.images import Image, read_image
from compeer_core.model_pool import load_transformers, shared_pool
from tests.checkpoints import build_adapter, build_llava, build_qwen
from tests.training.cer.requests.asking_helpers import stored_attempts
from training.cer.requests.asking import Answer, Asker, Budget, BudgetSpentError, Question
from training.cer.requests.generators import (
    BatchGenerator,
    GeneratorSettings,
    Prompt,
    Written,
    open_generator,
    reserved_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Image:
    path = tmp_path_factory.mktemp("pictures") / "face.png"
    Pillow.linear_gradient("L").convert("RGB").resize((90, 70)).save(path)
    return read_image(path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_llava(tmp_path_factory.mktemp("llava"))


def settings(folder: Path, **changes: Any) -> GeneratorSettings:
    return GeneratorSettings.model_validate(
        {
            "source": str(folder),
            "device": "cpu",
            "max_new_tokens": 24,
            "sees_images": True,
            "temperature": 1.0,
            "top_p": 0.9,
        }
        | changes
    )


def prompts(picture: Image) -> list[Prompt]:
    """Long and short prompts, with no picture, one and two."""
    contents: list[tuple[str | Image, ...]] = [
        ("I feel sad",),
        (picture, "What do you see in my face? I could not sleep at all because of the exam."),
        ("Hi",),
        (picture, "one", picture, "two"),
        ("我最近很难过，睡不着觉。" * 4,),
    ]
    return [Prompt((Message("user", content),), seed) for seed, content in enumerate(contents)]


def written(
    generator: BatchGenerator, rows: list[Prompt], size: int
) -> list[Written | CompeerError]:
    """Write the rows in batches of a size."""
    return [
        result
        for begin in range(0, len(rows), size)
        for result in generator.write(rows[begin : begin + size])
    ]


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens generators, and closes them after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(chosen: GeneratorSettings) -> BatchGenerator:
            generator = open_generator(chosen)
            stack.callback(generator.close)
            return generator

        yield open_one


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen", "llava"])
def test_a_batch_equals_what_the_demo_writes_one_by_one(
    model: str, request: pytest.FixtureRequest, picture: Image, opened: Any
) -> None:
    folder: Path = request.getfixturevalue(model)
    greedy = settings(folder, temperature=0)
    together = written(opened(greedy), prompts(picture), 5)

    backend = load_transformers(str(folder), device="cpu")
    alone = []
    for prompt in prompts(picture):
        completion = backend.open(
            prompt.messages, Sampling(temperature=0, max_new_tokens=24), threading.Event()
        )
        alone.append(Written("".join(completion.generate()), completion.tokens))
    backend.close()
    assert together == alone
    assert len({row.text for row in alone}) == len(alone)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_row_is_sampled_independently_of_its_batch(
    qwen: Path, picture: Image, opened: Any, penalty: float
) -> None:
    generator = opened(settings(qwen, repetition_penalty=penalty))
    rows = prompts(picture)
    alone = written(generator, rows, 1)

    assert written(generator, rows, 5) == alone
    assert written(generator, rows[::-1], 3) == alone[::-1]
    assert written(generator, [rows[0], rows[0]], 2) == [alone[0]] * 2


def test_prompts_that_differ_only_in_their_seed_are_prefilled_once(
    qwen: Path, picture: Image, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = opened(settings(qwen, max_new_tokens=150))
    rows = [Prompt(prompt.messages, seed) for seed in range(7) for prompt in prompts(picture)[:3]]
    alone = written(generator, rows, 1)
    read: list[int] = []
    run = ChatModel.run

    def counted(chat: ChatModel, track: Any, *rest: Any, **named: Any) -> Any:
        read.append(len(track.ids))
        return run(chat, track, *rest, **named)

    monkeypatch.setattr(ChatModel, "run", counted)
    assert written(generator, rows, 21) == alone
    assert len(read) == 3
    # Rows end at different times, so the batch shrinks on the way.
    assert len({row.tokens for row in alone if isinstance(row, Written)}) > 3


def test_caches_that_cannot_be_joined_are_decoded_prompt_by_prompt(
    tmp_path: Path, picture: Image, opened: Any
) -> None:
    sliding = build_qwen(tmp_path / "sliding")
    config = json.loads((sliding / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    (sliding / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = opened(settings(sliding))
    rows = [Prompt(prompt.messages, seed) for seed in range(3) for prompt in prompts(picture)[:3]]
    assert written(generator, rows, 9) == written(generator, rows, 1)


def test_another_seed_gives_another_text(qwen: Path, picture: Image, opened: Any) -> None:
    generator = opened(settings(qwen))
    message = prompts(picture)[0].messages
    texts = [row.text for row in written(generator, [Prompt(message, n) for n in range(4)], 4)]

    assert len(set(texts)) == 4


def test_an_adapter_is_applied_only_for_its_own_generator(
    qwen: Path, picture: Image, opened: Any, tmp_path: Path
) -> None:
    adapter = build_adapter(qwen, tmp_path / "adapter")
    plain, adapted = opened(settings(qwen)), opened(settings(qwen, adapter=adapter))
    before = written(plain, prompts(picture), 5)
    changed = written(adapted, prompts(picture), 5)

    assert changed != before
    assert written(plain, prompts(picture), 5) == before


def test_a_row_ends_at_the_context_length_of_the_model(
    tmp_path: Path, picture: Image, opened: Any
) -> None:
    small = build_qwen(tmp_path / "small", max_position_embeddings=96)
    generator = opened(settings(small, max_new_tokens=400))
    rows = [Prompt((Message("user", ("word " * count,)),), 1) for count in (1, 10)]
    together = generator.write(rows)

    assert together == written(generator, rows, 1)
    assert all(isinstance(row, Written) and row.tokens < 96 for row in together)


def test_a_row_that_is_too_long_does_not_affect_its_batch(
    qwen: Path, picture: Image, opened: Any
) -> None:
    generator = opened(settings(qwen))
    rows = prompts(picture)
    too_long = Prompt((Message("user", ("far too long " * 600,)),), 0)
    made = generator.write([rows[0], too_long, rows[2]])

    assert [made[0], made[2]] == written(generator, [rows[0], rows[2]], 1)
    assert isinstance(made[1], CompeerError)


# --- with an asker -------------------------------------------------------------------------------


def picky(key: str, text: str) -> str | None:
    return "begins with a small letter" if text[:1].islower() else None


def questions(count: int) -> Iterator[Question]:
    for number in range(count):
        words = "I feel sad " * (number % 7 + 1)
        yield Question(f"q{number}", (Message("user", (f"{words}{number}",)),), number)


def answers(
    qwen: Path, folder: Path, count: int, budget: int | None = None, **changes: Any
) -> list[Answer]:
    asker = Asker(settings(qwen, in_flight=3, **changes), folder, Budget(budget))
    try:
        return list(asker.ask(questions(count), picky, label="test"))
    finally:
        asker.close()


def test_a_resumed_run_writes_the_same_batches(qwen: Path, tmp_path: Path) -> None:
    whole = answers(qwen, tmp_path / "whole", 30)
    assert {answer.tries for answer in whole} >= {1, 2}
    for budget in (3, 10, 22, 100):  # each start is ended by its budget
        try:
            answers(qwen, tmp_path / "parts", 30, budget)
        except BudgetSpentError:
            continue

    assert stored_attempts(tmp_path / "parts") == stored_attempts(tmp_path / "whole")
    assert answers(qwen, tmp_path / "parts", 30) == whole


def test_greedy_decoding_is_not_repeated(qwen: Path, tmp_path: Path) -> None:
    greedy = answers(qwen, tmp_path, 20, temperature=0)

    assert {answer.tries for answer in greedy} == {1}
    assert {answer.problem for answer in greedy} == {None, "begins with a small letter"}


# --- sources -------------------------------------------------------------------------------------


def test_recorded_turns_are_a_generator(tmp_path: Path, opened: Any) -> None:
    script = tmp_path / "script.toml"
    script.write_text('[[turns]]\ntext = "recorded"\n', encoding="utf-8")
    generator = opened(GeneratorSettings(source=f"scripted:{script}"))

    prompts = [Prompt((Message("user", (text,)),), 0) for text in ("Hi", "Hello")]
    assert [result.text for result in generator.write(prompts)] == ["recorded"] * 2


def test_an_author_is_named_after_the_model_unless_the_settings_name_it() -> None:
    assert GeneratorSettings(source="openai:http://localhost/v1#org/big").author == "org/big"
    assert GeneratorSettings(source="runs/policy/final").author == "final"
    assert GeneratorSettings(source="runs/policy/final", name="policy").author == "policy"


def test_stored_responses_do_not_depend_on_the_address_of_an_endpoint() -> None:
    here = GeneratorSettings(source="openai:http://localhost:1/v1#m")
    there = GeneratorSettings(source="openai:http://localhost:2/v1#m", in_flight=99)

    assert here.made_under == there.made_under
    assert here.made_under != here.model_copy(update={"top_p": 0.5}).made_under


def test_an_unknown_kind_of_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown source"):
        open_generator(GeneratorSettings(source="opnai:http://localhost#m"))


def test_reserved_tokens_are_known_without_the_weights(qwen: Path) -> None:
    assert "<|im_start|>" in reserved_tokens(settings(qwen))
    assert reserved_tokens(GeneratorSettings(source="openai:http://localhost/v1#m")) == ()


# --- choices -------------------------------------------------------------------------------------


def test_of_choices_the_likeliest_is_written(qwen: Path, opened: Any) -> None:
    rows = [Prompt((Message("user", (f"Rate {n}.",)),), n) for n in range(4)]
    choices = ("0", "1", "2")

    texts = [each.text for each in opened(settings(qwen, choices=choices)).write(rows)]

    lease = shared_pool().lease(str(qwen), None, None, None)
    try:
        tokens = lease.chat.label_tokens(choices)
        for row, text in zip(rows, texts, strict=True):
            ids = torch.tensor([lease.chat.encode(row.messages).ids])
            with torch.no_grad():
                logits = lease.chat.model(input_ids=ids.to(lease.chat.model.device)).logits
            assert text == choices[int(logits[0, -1, list(tokens)].argmax())]
    finally:
        lease.release()


def test_choices_need_a_checkpoint_in_this_process() -> None:
    with pytest.raises(ValueError, match="only a checkpoint in this process"):
        GeneratorSettings(source="openai:http://localhost/v1#m", choices=("0", "1"))
