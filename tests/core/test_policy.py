"""The policy: part by part, stopped cleanly, steered, and never past the end of its reply."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.scripted import ScriptedBackend, ScriptedCompletion, ScriptedTurn
from compeer_core.dialogue import Dialogue
from compeer_core.errors import BackendError, InputError, PromptError
from compeer_core.policy import Controls, Policy, speaks
from compeer_core.reasoning import (
    Event,
    Part,
    PartFinished,
    Reading,
    TextWritten,
    TurnFinished,
    read,
)
from compeer_core.steering import GivenStep
from tests.core.example import DIALOGUE, TEXT

FORCED = "Reflection of Feelings"


class Watched(ScriptedBackend):
    """A scripted backend that keeps what was asked of it."""

    def __init__(self, *turns: ScriptedTurn | str, can_write: bool = True) -> None:
        super().__init__(turns, can_write=can_write)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "completions", [])

    asked: list[tuple[tuple[Message, ...], Sampling]]
    completions: list["WatchedCompletion"]

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> ScriptedCompletion:
        self.asked.append((tuple(messages), sampling))
        turn = self._turn(messages)
        completion = WatchedCompletion(turn, sampling.max_new_tokens, stop, self.can_write)
        self.completions.append(completion)
        return completion


class WatchedCompletion(ScriptedCompletion):
    closed = False
    untils: tuple[str | None, ...] = ()
    written: tuple[str, ...] = ()

    def generate(self, until: str | None = None) -> Iterator[str]:
        self.untils = (*self.untils, until)
        return super().generate(until)

    def write(self, text: str) -> None:
        self.written = (*self.written, text)
        super().write(text)

    def close(self) -> None:
        self.closed = True
        super().close()


def events_of(
    backend: ScriptedBackend,
    controls: Controls | None = None,
    stop: threading.Event | None = None,
    **settings: object,
) -> list[Event]:
    policy = Policy("p", backend, **settings)  # type: ignore[arg-type]
    return list(policy.respond(DIALOGUE, controls or Controls(), stop or threading.Event()))


def reading_of(events: list[Event]) -> Reading:
    last = events[-1]
    assert isinstance(last, TurnFinished)
    return last.reading


# --- writing -------------------------------------------------------------------------------------


def test_a_turn_is_generated_part_by_part() -> None:
    backend = Watched(TEXT)
    events = events_of(backend)

    assert reading_of(events) == read(TEXT)
    assert backend.completions[0].untils == tuple(part.closing for part in Part)
    assert backend.completions[0].closed


def test_between_two_parts_nothing_is_generated() -> None:
    backend = Watched(TEXT)
    for event in Policy("p", backend).respond(DIALOGUE, Controls(), threading.Event()):
        if isinstance(event, PartFinished):
            assert len(backend.completions[0].untils) == list(Part).index(event.part) + 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30))
def test_nothing_is_written_after_the_reply(size: int) -> None:
    turn = ScriptedTurn(
        text=TEXT + "\n<reply>And another</reply> <|user|> hi", chunk_characters=size
    )

    assert reading_of(events_of(ScriptedBackend([turn]))).raw == TEXT


def test_a_model_that_skips_parts_is_ended_by_its_reply_all_the_same() -> None:
    text = "<history>Work.\nStage: Action</history><reply>Hi.</reply>"
    turn = ScriptedTurn(text=text, ending="endless")
    reading = reading_of(events_of(ScriptedBackend([turn])))

    assert reading.raw == text
    assert not reading.is_complete
    assert reading.reply == "Hi."


@pytest.mark.parametrize("part", list(Part))
def test_a_part_that_is_never_closed_ends_with_the_budget(part: Part) -> None:
    text = TEXT.partition(part.closing)[0]
    sampling = Sampling(max_new_tokens=200)
    backend = Watched(ScriptedTurn(text=text + " and so on" * 30, ending="endless"))
    stream = Policy("p", backend).respond(DIALOGUE, Controls(sampling=sampling), threading.Event())
    reading = reading_of(list(stream))

    assert stream.tokens <= 200
    assert not reading.is_complete
    assert f"{part.opening} is not closed" in map(str, reading.problems)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*(p.opening for p in Part), *(p.closing for p in Part), "a\n"])))
def test_any_text_gives_its_reading_up_to_the_first_closed_reply(pieces: list[str]) -> None:
    text = "".join(pieces)
    before, end, _ = text.partition(Part.REPLY.closing)

    assert reading_of(events_of(ScriptedBackend([text or " "]))) == read(before + end or " ")


# --- stopping and failing ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 5, 20, 40])
def test_a_stop_ends_the_turn_with_what_was_written(after: int) -> None:
    stop = threading.Event()
    backend = Watched(TEXT)
    events: list[Event] = []
    for event in Policy("p", backend).respond(DIALOGUE, Controls(), stop):
        events.append(event)
        if len(events) == after:
            stop.set()
    reading = reading_of(events)

    assert TEXT.startswith(reading.raw)
    assert len(reading.raw) < len(TEXT) or reading.is_complete
    assert backend.completions[0].closed


def test_a_stop_between_two_parts_asks_for_nothing_more() -> None:
    stop = threading.Event()
    backend = Watched(TEXT)
    events: list[Event] = []
    for event in Policy("p", backend).respond(DIALOGUE, Controls(), stop):
        events.append(event)
        if isinstance(event, PartFinished):
            stop.set()

    assert len(backend.completions[0].untils) == 1
    assert reading_of(events).history is not None


def test_a_failure_keeps_what_was_written_and_follows_it() -> None:
    backend = Watched(ScriptedTurn(text=TEXT[:90], ending="failed"))
    stream = Policy("p", backend).respond(DIALOGUE, Controls(), threading.Event())
    events: list[Event] = []
    with pytest.raises(BackendError):
        for event in stream:
            events.append(event)

    assert reading_of(events).raw == TEXT[:90]
    assert backend.completions[0].closed


def test_a_backend_that_does_not_even_open_gives_an_empty_reading() -> None:
    class Down(ScriptedBackend):
        def open(self, *_: object) -> ScriptedCompletion:
            raise BackendError("down")

    stream = Policy("p", Down(["x"])).respond(DIALOGUE, Controls(), threading.Event())

    assert reading_of([next(stream)]).raw == ""
    with pytest.raises(BackendError, match="down"):
        next(stream)


def test_a_stream_that_is_closed_early_lets_go_of_the_model() -> None:
    backend = Watched(TEXT)
    stream = Policy("p", backend).respond(DIALOGUE, Controls(), threading.Event())
    next(stream)
    stream.close()

    assert backend.completions[0].closed
    assert list(stream) == []


def test_nothing_is_asked_of_the_model_before_the_first_event() -> None:
    backend = Watched(TEXT)
    stream = Policy("p", backend).respond(DIALOGUE, Controls(), threading.Event())

    assert backend.asked == []
    assert stream.tokens == 0
    stream.close()


# --- prompts and sampling ------------------------------------------------------------------------


def test_the_policy_has_a_sampling_of_its_own_and_controls_win() -> None:
    own, other = Sampling(temperature=0.1), Sampling(temperature=0.2)
    backend = Watched(TEXT)
    events_of(backend, sampling=own)
    events_of(backend, Controls(sampling=other), sampling=own)

    assert [sampling for _, sampling in backend.asked] == [own, other]


def test_a_prompted_model_is_told_the_form_in_the_language_of_the_seeker() -> None:
    backend = Watched(TEXT)
    chinese = Dialogue.from_messages([{"role": "user", "content": "我最近压力很大。"}])
    french = Dialogue.from_messages([{"role": "user", "content": "Je suis très triste."}])
    policy = Policy("p", backend, style="prompted")
    for dialogue in (DIALOGUE, chinese, french):
        list(policy.respond(dialogue, Controls(), threading.Event()))
    systems = [messages[0] for messages, _ in backend.asked]

    assert {message.role for message in systems} == {"system"}
    assert systems[0] == systems[2] != systems[1]
    assert backend.asked[0][0][1:] == (Message("user", ("I cannot go on like this.",)),)


def test_a_trained_model_gets_the_bare_dialogue() -> None:
    backend = Watched(TEXT)
    events_of(backend)

    assert backend.asked[0][0] == (Message("user", ("I cannot go on like this.",)),)


def test_a_dialogue_that_ends_with_the_supporter_is_refused() -> None:
    dialogue = Dialogue.from_messages([{"role": "assistant", "content": "Hello."}])

    with pytest.raises(PromptError):
        Policy("p", ScriptedBackend(["x"])).respond(dialogue, Controls(), threading.Event())


def test_languages() -> None:
    policy = Policy("p", ScriptedBackend(["x"]), languages=("en", "zh"))

    assert policy.speaks("zh")
    assert policy.speaks("und")
    assert not policy.speaks("fr")
    assert speaks(("*",), "fr")


# --- forcing a strategy --------------------------------------------------------------------------


def answer_to(forced: str) -> Callable[[str], str]:
    return lambda text: text.replace("Strategy: Question", f"Strategy: {forced}")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30))
def test_a_forced_strategy_is_written_in_place_of_the_models_own(size: int) -> None:
    backend = Watched(ScriptedTurn(text=TEXT, chunk_characters=size))
    events = events_of(backend, Controls(strategy=FORCED))
    reading = reading_of(events)

    assert reading.raw == answer_to(FORCED)(TEXT)
    assert reading.is_complete
    assert len(backend.completions) == 1
    assert backend.completions[0].written == (f" {FORCED}</strategy>\n<reply>",)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_forced_step_begins_with_its_opening_words(size: int) -> None:
    head, _, rest = TEXT.partition(
        "\n<strategy>Ask"
    )  # the model goes on after the words written for it
    backend = Watched(ScriptedTurn(text=head + rest, chunk_characters=size))
    openings = {FORCED: "Naming the", "Question": "A question"}
    events = events_of(backend, Controls(strategy=FORCED), strategy_openings=openings)

    assert reading_of(events).raw == answer_to(FORCED)(f"{head}\n<strategy>Naming the{rest}")
    assert reading_of(events).is_complete
    assert backend.completions[0].written == (
        "\n<strategy>Naming the",
        f" {FORCED}</strategy>\n<reply>",
    )


def test_a_strategy_without_opening_words_and_a_free_turn_begin_as_the_model_likes() -> None:
    openings = {"Question": "A question"}
    forced = events_of(Watched(TEXT), Controls(strategy=FORCED), strategy_openings=openings)
    free = events_of(Watched(TEXT), strategy_openings={FORCED: "Naming the"})

    assert reading_of(forced).raw == answer_to(FORCED)(TEXT)
    assert reading_of(free).raw == TEXT


def test_opening_words_follow_given_steps() -> None:
    given_steps = read(TEXT).turn.reasoning
    given = tuple(GivenStep(step) for step in (given_steps.history, given_steps.emotion))
    _, _, rest = TEXT.partition("<strategy>Ask")
    backend = Watched(rest)
    controls = Controls(strategy=FORCED, given=given)
    events = events_of(backend, controls, strategy_openings={FORCED: "Naming the"})

    assert "<strategy>Naming the" in reading_of(events).raw
    assert reading_of(events).raw.count("<strategy>") == 1
    assert reading_of(events).is_complete


@pytest.mark.parametrize(
    "strategy",
    [
        "<strategy>Ask first.</strategy>\n",  # no label at all
        "<strategy>Ask first. Strategy: Question</strategy>\n",  # not on a line of its own
        "<strategy>Ask first.\n**Strategy:** Question</strategy>\n",
        "<strategy>Ask first.\n",  # never closed
        "<strategy>Ask first.</strategy",  # and broken off
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_model_that_has_gone_past_the_label_goes_on_from_it(strategy: str, size: int) -> None:
    head, _, _ = TEXT.partition("<strategy>")
    text = f"{head}{strategy}<reply>What happened today?</reply>"
    backend = Watched(ScriptedTurn(text=text, chunk_characters=size))
    stream = Policy("p", backend).respond(DIALOGUE, Controls(strategy=FORCED), threading.Event())
    reading = reading_of(list(stream))
    first, second = backend.completions

    assert reading.is_complete, reading
    assert reading.strategy is not None
    assert reading.strategy.strategy == FORCED
    assert reading.strategy.text.startswith("Ask first.")
    assert reading.reply == "What happened today?"
    assert second.written == (reading.raw.removesuffix("What happened today?</reply>"),)
    assert first.closed
    assert second.closed
    assert stream.tokens == first.tokens + second.tokens
    left = replace(backend.asked[0][1], max_new_tokens=512 - first.tokens)
    assert backend.asked[1] == (backend.asked[0][0], left)


def test_a_model_that_forgets_the_strategy_gets_the_part_written_too() -> None:
    head, _, _ = TEXT.partition("<strategy>")
    reading = reading_of(
        events_of(Watched(f"{head}<reply>Hello there.</reply>"), Controls(strategy=FORCED))
    )

    assert f"<strategy>\nStrategy: {FORCED}</strategy>\n<reply>Hello there.</reply>" in reading.raw
    assert [str(problem) for problem in reading.problems] == ["<strategy> is empty"]


def test_no_tag_is_shown_that_is_taken_back() -> None:
    head, _, _ = TEXT.partition("<strategy>")
    turn = ScriptedTurn(text=f"{head}<strategy>Ask < 3 times.</strategy>", chunk_characters=2)
    events = events_of(Watched(turn), Controls(strategy=FORCED))
    shown = "".join(
        event.text
        for event in events
        if isinstance(event, TextWritten) and event.part is Part.STRATEGY
    )

    assert shown == "Ask < 3 times."


def test_a_forced_turn_can_be_stopped_and_can_run_out() -> None:
    head, _, _ = TEXT.partition(" first.")
    endless = ScriptedTurn(text=head, ending="endless")
    spent = events_of(
        Watched(endless), Controls(strategy=FORCED, sampling=Sampling(max_new_tokens=60))
    )
    stop = threading.Event()
    policy = Policy("p", Watched(TEXT))
    stopped: list[Event] = []
    for event in policy.respond(DIALOGUE, Controls(strategy=FORCED), stop):
        stopped.append(event)
        if isinstance(event, TextWritten) and event.part is Part.STRATEGY:
            stop.set()

    assert FORCED not in reading_of(spent).raw
    assert FORCED not in reading_of(stopped).raw


@pytest.mark.parametrize("style", ["trained", "prompted"])
def test_where_nothing_can_be_written_the_strategy_is_asked_for(style: str) -> None:
    backend = Watched(TEXT, can_write=False)
    events = events_of(backend, Controls(strategy=FORCED), style=style)
    system, user = backend.asked[0][0]

    assert reading_of(events) == read(TEXT)
    assert system.role == "system"
    assert FORCED in system.text.splitlines()[-1]
    assert user.role == "user"


def test_an_unknown_strategy_is_refused_before_anything_is_asked() -> None:
    backend = Watched(TEXT)
    with pytest.raises(InputError) as caught:
        events_of(backend, Controls(strategy="Magic"))

    assert caught.value.code == "strategy_unknown"
    assert caught.value.values == {"strategy": "Magic"}
    assert backend.asked == []
