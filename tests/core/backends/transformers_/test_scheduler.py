"""Turns that are written at the same time are those of each alone, and nobody waits for another.

Where turns have to overlap for a test to mean something, the owner thread is held until all of them
have asked for text.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_ import scheduler as scheduler
from compeer_core.backends.transformers_ import sequence_state
from compeer_core.backends.transformers_.generation import _Part
from compeer_core.errors import BackendError
from compeer_core.model_pool import ModelPool, load_label_scorer, load_transformers

pytestmark = pytest.mark.usefixtures("one_core")

GREEDY = Sampling(temperature=0, max_new_tokens=16)
WARM = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=3, max_new_tokens=16)


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """The number of rows of each joint pass."""
    sizes: list[int] = []
    step = scheduler._Batch.step

    def counted(batch):
        sizes.append(len(batch.rows))
        return step(batch)

    monkeypatch.setattr(scheduler._Batch, "step", counted)
    return sizes


@pytest.fixture
def joins(monkeypatch) -> list[int]:
    """The number of caches of each join."""
    sizes: list[int] = []
    joined = scheduler.joined

    def counted(caches, *args):
        sizes.append(len(caches))
        return joined(caches, *args)

    monkeypatch.setattr(scheduler, "joined", counted)
    return sizes


def forget(backend) -> None:
    """Drop what was read of earlier turns."""
    backend._chat.owner.call(backend._chat.stored.clear)


def said(*content) -> list[Message]:
    return [Message("user", content)]


def opened(backend, messages, sampling=GREEDY, stop=None):
    return backend.open(messages, sampling, stop or threading.Event())


def text_of(completion, until=None) -> str:
    return "".join(completion.generate(until))


def written_alone(backend, messages, sampling=GREEDY) -> str:
    completion = opened(backend, messages, sampling)
    text = text_of(completion)
    completion.close()
    return text


@contextmanager
def held(backend, waiting: int):
    """Hold the owner thread until so many turns have asked for text."""
    go = threading.Event()
    backend._chat.owner.submit(go.wait)
    try:
        yield
        deadline = time.monotonic() + 60
        while len(backend._scheduler._arrived) < waiting and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        go.set()


def at_once(backend, visits: Sequence[Callable[[], object]]) -> list[object]:
    """Let each visit ask for text in a thread of its own; return what they return or raise."""
    found: list[object] = [None] * len(visits)

    def visit(number: int) -> None:
        try:
            found[number] = visits[number]()
        except BackendError as error:
            found[number] = error

    threads = [threading.Thread(target=visit, args=(n,)) for n in range(len(visits))]
    with held(backend, len(visits)):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    return found


def written_at_once(backend, turns) -> list[object]:
    return at_once(backend, [lambda turn=turn: text_of(turn) for turn in turns])


def conversations(picture) -> list[list[Message]]:
    """Of different lengths, with pictures of different sizes and without."""
    return [
        said("I feel sad."),
        said("Look: ", picture(1), " this was yesterday, and I could not sleep because of it."),
        said("What happened at work today? " * 4),
        [*said(picture(2, 112, 56)), Message("assistant", ("I see.",)), *said("And now?")],
    ]


# --- the same text ------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [3, 64])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_turns_at_once_are_written_in_one_batch_and_are_those_of_each_alone(
    kind, sampling, room, request, picture, steps, monkeypatch
):
    monkeypatch.setattr(scheduler, "ROOM", room)
    backend = request.getfixturevalue(kind)
    talks = conversations(picture)[: 4 if kind == "qwen" else 3]
    samplings = [replace(sampling, seed=n, max_new_tokens=16 - n) for n in range(len(talks))]
    alone = [written_alone(backend, m, s) for m, s in zip(talks, samplings, strict=True)]
    assert len(set(alone)) == len(talks)
    assert not steps  # who is alone is in no batch

    turns = [opened(backend, m, s) for m, s in zip(talks, samplings, strict=True)]

    assert written_at_once(backend, turns) == alone
    assert max(steps) == len(talks)


@dataclass(frozen=True)
class Visit:
    """What one visitor does: part after part, pauses, text written for the model, an early end."""

    text: str
    seed: int
    parts: tuple[str, ...]
    forced: str
    pause: float
    texts: int | None
    """Stops listening after so many; None hears all."""

    def pay(self, backend, hurry: bool = True) -> list[str]:
        sampling = replace(WARM, seed=self.seed)
        completion = opened(backend, said(self.text), sampling)
        heard = []
        try:
            for until in self.parts:
                heard.append(text_of(completion, until))
                time.sleep(0 if hurry else self.pause)
            if self.forced:
                completion.write(self.forced)
            last = completion.generate()
            if self.texts is None:
                heard.append("".join(last))
            else:
                heard.append(
                    "".join(text for text, _ in zip(last, range(self.texts), strict=False))
                )
                last.close()
        finally:
            completion.close()
        return heard


visits = st.builds(
    Visit,
    text=st.sampled_from(["I feel sad", "My boss told me", "考试 😀", "What happened? " * 5]),
    seed=st.integers(0, 3),
    parts=st.lists(st.sampled_from(["e", "a", " ", "<reply>"]), max_size=3).map(tuple),
    forced=st.sampled_from(["", "\nStrategy: Question</strategy>"]),
    pause=st.sampled_from([0.0, 0.001, 0.02]),
    texts=st.sampled_from([None, None, 1, 3]),
)


@given(crowd=st.lists(visits, min_size=2, max_size=4), slice_seconds=st.sampled_from([0.0, 0.1]))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_however_turns_join_and_leave_each_is_what_it_is_alone(qwen, crowd, slice_seconds):
    alone = [visit.pay(qwen) for visit in crowd]
    found: list[object] = [None] * len(crowd)

    def pay(number: int) -> None:
        found[number] = crowd[number].pay(qwen, hurry=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "SLICE_SECONDS", slice_seconds)
        threads = [threading.Thread(target=pay, args=(n,)) for n in range(len(crowd))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert found == alone
    assert qwen._chat.owner.call(lambda: qwen._scheduler._rows) == []


def test_rows_with_other_adapters_take_turns_and_those_with_the_same_are_joined(
    qwen, qwen_folder, adapter_folders, pool, joins, monkeypatch
):
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    warm, cool = (
        load_transformers(str(qwen_folder), adapter=folder, pool=pool) for folder in adapter_folders
    )
    backends = [warm, cool, warm, qwen, qwen]
    talks = [said(f"Message {n}: " + "sad " * n) for n in range(5)]
    alone = [written_alone(b, m) for b, m in zip(backends, talks, strict=True)]
    adapters = []
    step = scheduler._Batch.step

    def seen(batch):
        adapters.append({row.state.adapter for row in batch.rows})
        return step(batch)

    monkeypatch.setattr(scheduler._Batch, "step", seen)
    turns = [opened(b, m) for b, m in zip(backends, talks, strict=True)]

    assert written_at_once(qwen, turns) == alone
    assert len(joins) == 2  # each batch stays joined while the other has its turn
    assert all(len(one) == 1 for one in adapters)
    assert set.union(*adapters) == {warm._adapter, None}
    assert adapters[0] in adapters[2:]  # they came again while others were not done
    warm.close()
    cool.close()


@pytest.mark.parametrize("reason", ["cache", "8bit"])
def test_what_cannot_be_joined_is_written_by_turns(qwen, picture, steps, monkeypatch, reason):
    if reason == "cache":
        for module in (scheduler, sequence_state):
            monkeypatch.setattr(module, "is_plain", lambda _: False)
        forget(qwen)
    else:
        monkeypatch.setattr(qwen._chat.model, "is_loaded_in_8bit", True, raising=False)
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    talks = conversations(picture)
    alone = [written_alone(qwen, messages) for messages in talks]
    turns = [opened(qwen, messages) for messages in talks]
    order = []
    for number, turn in enumerate(turns):
        take = turn.take
        turn.take = lambda part, token, take=take, number=number: (
            order.append(number),
            take(part, token),
        )

    assert written_at_once(qwen, turns) == alone
    assert not steps
    until_one_ended = order[: min(len(order) - order[::-1].index(n) for n in range(4))]
    assert min(until_one_ended.count(n) for n in range(4)) > 10  # of 16


def test_the_shipped_model_writes_the_same_in_company(repository, steps):
    checkpoints = repository / "assets" / "checkpoints"
    backend = load_transformers(
        str(checkpoints / "compeer-small-base"),
        adapter=checkpoints / "compeer-small",
        pool=ModelPool(),
    )
    talks = [said("I failed my exam."), said("My boss shouted at me today, and I cried. " * 3)]
    samplings = [replace(sampling, max_new_tokens=32) for sampling in (GREEDY, WARM)]
    alone = [written_alone(backend, m, s) for m, s in zip(talks, samplings, strict=True)]

    turns = [opened(backend, m, s) for m, s in zip(talks, samplings, strict=True)]

    assert written_at_once(backend, turns) == alone
    assert steps.count(2) > 20
    backend.close()


# --- one prompt, several turns ------------------------------------------------------------------


def counted_reads(backend, monkeypatch) -> list[bool]:
    """For each pass over more than one token: whether it saw pictures."""
    reads: list[bool] = []
    run = backend._chat.run

    def counted(state, *args, **kwargs):
        if state.unread > 1:
            reads.append(not state.read and "pixel_values" in state.encoded.inputs)
        return run(state, *args, **kwargs)

    monkeypatch.setattr(backend._chat, "run", counted)
    return reads


def test_several_turns_after_one_prompt_read_it_once(qwen, picture, monkeypatch, steps):
    messages = said("Look ", picture(1), " and tell me.")
    samplings = [replace(WARM, seed=n) for n in range(4)]
    alone = [written_alone(qwen, messages, sampling) for sampling in samplings]
    forget(qwen)
    reads = counted_reads(qwen, monkeypatch)

    turns = [opened(qwen, messages, sampling) for sampling in samplings]

    assert written_at_once(qwen, turns) == alone
    assert len(set(alone)) == 4
    assert reads == [True]
    assert max(steps) == 4


def test_a_turn_that_begins_later_reads_nothing_of_a_prompt_that_was_read(
    qwen, picture, monkeypatch
):
    messages = said("Look ", picture(1), " and tell me.")
    alone = written_alone(qwen, messages)
    forget(qwen)
    first = opened(qwen, messages)
    text_of(first, alone[5])
    reads = counted_reads(qwen, monkeypatch)

    assert written_alone(qwen, messages) == alone
    assert reads == []
    other = said("Look ", picture(2), " and tell me.")  # as many tokens, and another picture
    written_alone(qwen, other)
    assert reads == [True]
    first.close()
    assert written_alone(qwen, messages) == alone
    assert reads == [True]
    forget(qwen)
    assert written_alone(qwen, messages) == alone
    assert reads == [True, True]


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(qwen, monkeypatch):
    before = [*said("I lost my job and my friends " * 20)]
    after = [*before, Message("assistant", ("Why?",)), *said("they stayed")]
    chat = qwen._chat
    whole = len(chat.owner.call(lambda: chat.encode(after)).ids)
    known = len(chat.owner.call(lambda: chat.encode(before)).ids)
    alone = written_alone(qwen, after)
    forget(qwen)
    written_alone(qwen, before)
    unread: list[int] = []
    run = chat.run

    def counted(state, *args, **kwargs):
        unread.append(state.unread)
        return run(state, *args, **kwargs)

    monkeypatch.setattr(chat, "run", counted)

    assert written_alone(qwen, after) == alone
    assert unread[0] == whole - known


def test_text_written_before_the_first_token_is_read_behind_a_shared_prompt(qwen, monkeypatch):
    messages = said("I feel sad")

    def forced() -> str:
        completion = opened(qwen, messages)
        completion.write("<history>She is sad.")
        text = text_of(completion)
        completion.close()
        return text

    alone = forced()
    forget(qwen)
    first = opened(qwen, messages)
    text_of(first)
    reads = counted_reads(qwen, monkeypatch)

    assert forced() == alone
    assert len(reads) == 1
    first.close()


# --- nobody disturbs another --------------------------------------------------------------------


def test_a_row_that_fails_leaves_the_others_alone(qwen, picture):
    talks = conversations(picture)
    alone = [written_alone(qwen, messages) for messages in talks]
    turns = [opened(qwen, messages) for messages in talks]
    sampler, calls = turns[1].sampler, []

    def failing(ids, scores):
        calls.append(len(ids))
        return sampler(ids, scores) if len(calls) < 5 else 1 / 0

    turns[1].sampler = failing

    found = written_at_once(qwen, turns)

    assert isinstance(found[1], BackendError)
    assert "ZeroDivision" in str(found[1])
    assert turns[1].ended
    assert [found[n] for n in (0, 2, 3)] == [alone[n] for n in (0, 2, 3)]


def test_a_batch_that_fails_is_written_row_by_row(qwen, picture, monkeypatch, steps):
    talks = conversations(picture)
    alone = [written_alone(qwen, messages) for messages in talks]
    counted, failures = scheduler._Batch.step, []

    def failing(batch):
        if len(steps) < 5:
            return counted(batch)
        failures.append(len(batch._states))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(scheduler._Batch, "step", failing)
    turns = [opened(qwen, messages) for messages in talks]

    assert written_at_once(qwen, turns) == alone
    assert failures == [4]


def test_a_row_that_is_stopped_ends_and_the_others_go_on(qwen):
    long = replace(GREEDY, max_new_tokens=100)
    alone = [written_alone(qwen, said(word), long) for word in "AB"]
    stop = threading.Event()
    going, stopping = opened(qwen, said("A"), long), opened(qwen, said("B"), long, stop)

    def stopped() -> str:
        texts = []
        for text in stopping.generate():
            texts.append(text)
            if len(texts) == 4:
                stop.set()
        return "".join(texts)

    whole, part = at_once(qwen, [lambda: text_of(going), stopped])

    assert whole == alone[0]
    assert alone[1].startswith(part)
    assert stopping.tokens < 100
    assert not stopping.ended


def test_who_does_not_read_holds_up_nobody(qwen):
    alone = [written_alone(qwen, said(word)) for word in "AB"]
    slow, quick = opened(qwen, said("A")), opened(qwen, said("B"))
    texts = slow.generate()
    heard = next(texts)

    assert text_of(quick) == alone[1]
    assert heard + "".join(texts) == alone[0]


def test_a_judge_gets_its_turn_between_the_tokens_of_a_batch(qwen, qwen_folder, pool, monkeypatch):
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    judge = load_label_scorer(str(qwen_folder), pool=pool)
    session = judge.open(said("Judge this: "))
    expected = session.ask("sad?", ("True", "False"))
    long = replace(GREEDY, max_new_tokens=150)
    alone = [written_alone(qwen, said(word), long) for word in "AB"]
    turns = [opened(qwen, said(word), long) for word in "AB"]
    meanwhile = []

    def judged() -> str:
        texts = turns[0].generate()
        heard = next(texts)
        found = session.ask("sad?", ("True", "False"))
        meanwhile.extend(turn.tokens for turn in turns)
        assert found == pytest.approx(expected, abs=1e-6)
        return heard + "".join(texts)

    assert at_once(qwen, [judged, lambda: text_of(turns[1])]) == alone
    assert max(meanwhile) < 150
    session.close()
    judge.close()


def test_caches_stay_joined_while_a_judge_has_its_turns(
    qwen, qwen_folder, pool, joins, monkeypatch
):
    monkeypatch.setattr(scheduler, "SLICE_SECONDS", 0.0)
    long = replace(GREEDY, max_new_tokens=40)
    alone = [written_alone(qwen, said(word), long) for word in "AB"]
    turns = [opened(qwen, said(word), long) for word in "AB"]
    slices = []
    run_slice = qwen._scheduler._run_slice
    monkeypatch.setattr(qwen._scheduler, "_run_slice", lambda: (slices.append(1), run_slice()))
    taken = turns[0].take

    def take(part, token):  # another job waits at every token, which ends the slice
        qwen._chat.owner.submit(lambda: None)
        taken(part, token)

    monkeypatch.setattr(turns[0], "take", take)

    assert written_at_once(qwen, turns) == alone
    assert len(slices) > 30
    assert joins == [2]


def test_a_cache_without_the_newest_tokens_is_valid_for_another_text(qwen, joins):
    talks = [said("A"), said("B")]
    turns = [opened(qwen, messages) for messages in talks]
    rows = [_Part(turn, None) for turn in turns]

    def changed() -> list[int]:
        for row in rows:
            qwen._chat.run(row.state, 1)
        batch = scheduler._Batch(qwen._chat, rows)
        for _ in range(3):
            for row, logits in zip(rows, torch.inference_mode()(batch.step)(), strict=True):
                row.state.ids.append(int(logits.argmax(-1)))
        assert batch.goes_on_with(rows[::-1]) and not batch.goes_on_with(rows[:1])
        rows[0].state.truncate(len(rows[0].state.ids) - 2)  # as a text that was written over
        assert not batch.goes_on_with(rows)
        batch.split()
        return [len(row.state.ids) - row.state.read for row in rows]

    assert qwen._chat.owner.call(changed) == [2, 1]  # the first has to read one token again
    for turn in turns:
        turn.close()


def test_turns_go_on_after_their_batch_could_not_be_split(qwen, monkeypatch):
    samplings = [replace(GREEDY, max_new_tokens=count) for count in (8, 24)]
    talks = [said(word) for word in "AB"]
    alone = [written_alone(qwen, m, s) for m, s in zip(talks, samplings, strict=True)]
    failures = []

    def no_memory(*args):
        failures.append(args)
        raise RuntimeError("no memory")

    monkeypatch.setattr(scheduler, "restore_cache", no_memory)
    turns = [opened(qwen, m, s) for m, s in zip(talks, samplings, strict=True)]

    assert written_at_once(qwen, turns) == alone
    assert failures  # when the first was over


def test_closing_a_turn_ends_it_and_no_other(qwen):
    long = replace(GREEDY, max_new_tokens=100)
    alone = written_alone(qwen, said("A"), long)
    going, closing = opened(qwen, said("A"), long), opened(qwen, said("B"), long)

    def closed() -> int:
        for _ in zip(closing.generate(), range(3), strict=False):
            pass
        closing.close()
        return closing.tokens

    whole, tokens = at_once(qwen, [lambda: text_of(going), closed])

    assert whole == alone
    assert tokens < 100
    qwen._chat.owner.call(lambda: None)
    assert closing.state.cache is None


def test_closing_a_model_ends_all_turns_that_it_writes(qwen_folder):
    backend = load_transformers(str(qwen_folder), pool=ModelPool())
    turns = [opened(backend, said(word), replace(GREEDY, max_new_tokens=450)) for word in "ABC"]

    def closing() -> str:
        texts = turns[0].generate()
        heard = next(texts)
        backend.close()
        return heard + "".join(texts)

    found = at_once(backend, [closing, lambda: text_of(turns[1]), lambda: text_of(turns[2])])

    assert all(isinstance(text, str) for text in found)
    assert all(turn.tokens < 450 for turn in turns)
    with pytest.raises(BackendError, match="closed"):
        text_of(turns[1])
