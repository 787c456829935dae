"""One turn: live verdicts beside the parts, and a record whatever happens."""

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.scripted import (
    ScriptedBackend,
    ScriptedCompletion,
    ScriptedScorer,
    ScriptedScoring,
    ScriptedTurn,
)
from compeer_core.errors import BackendError, InputError
from compeer_core.gate import Fault
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import Part, PartFinished, PartStarted, TurnFinished, read
from compeer_core.turn import (
    FRESH_DRAWS,
    DrawRejected,
    Halt,
    ReplyJudged,
    StepJudged,
    TurnDone,
    TurnEvent,
    TurnRecord,
    draw_seed,
    take_turn,
)
from compeer_core.unifireward import (
    NO_REFERENCE,
    Judge,
    Judgement,
    ResponseVerdict,
    StepVerdict,
    Unscorable,
)
from tests.core.example import DIALOGUE, TEXT
from tests.draws import Draws

KIND_JUDGE = Judge("kind", ScriptedScorer(["True", "First"]))


def turn(
    text: ScriptedTurn | str = TEXT,
    judge: Judge | None = KIND_JUDGE,
    controls: Controls | None = None,
    stop: threading.Event | None = None,
    **settings: object,
) -> list[TurnEvent]:
    policy = Policy("p", ScriptedBackend([text]))
    stop = stop or threading.Event()
    return list(take_turn(policy, judge, DIALOGUE, controls or Controls(), stop, **settings))  # type: ignore[arg-type]


def record_of(events: Sequence[TurnEvent]) -> TurnRecord:
    last = events[-1]
    assert isinstance(last, TurnDone)
    assert sum(isinstance(event, TurnDone) for event in events) == 1
    return last.record


def stopped_when(
    policy: Policy, judge: Judge | None, when: object, **settings: object
) -> TurnRecord:
    """Take a turn in which the visitor presses Stop at the first event of a kind."""
    stop = threading.Event()
    events = []
    for event in take_turn(policy, judge, DIALOGUE, Controls(), stop, **settings):  # type: ignore[arg-type]
        events.append(event)
        if isinstance(event, when):  # type: ignore[arg-type]
            stop.set()
    return record_of(events)


class Sessions(ScriptedScorer):
    """A scorer that keeps its sessions."""

    def __init__(self, *answers: object) -> None:
        super().__init__(answers)  # type: ignore[arg-type]
        object.__setattr__(self, "sessions", [])

    sessions: list[ScriptedScoring]

    def open(self, messages: Sequence[Message]) -> ScriptedScoring:
        self.sessions.append(super().open(messages))
        return self.sessions[-1]


# --- a turn that goes well -----------------------------------------------------------------------


def test_each_step_is_judged_once_it_is_finished_and_before_the_turn_is() -> None:
    events = turn(reference="Calm down.")
    seen = [
        (type(event).__name__, getattr(event, "part", None))
        for event in events
        if isinstance(event, PartFinished | StepJudged | ReplyJudged | TurnFinished | TurnDone)
    ]

    steps = (Part.HISTORY, Part.EMOTION, Part.STRATEGY)
    judged = [seen.index(("StepJudged", part)) for part in steps]
    assert judged == sorted(judged)
    for part, place in zip(steps, judged, strict=True):
        assert seen.index(("PartFinished", part)) < place < seen.index(("TurnFinished", None))
    assert seen[-3:] == [("TurnFinished", None), ("ReplyJudged", None), ("TurnDone", None)]
    assert len(seen) == 4 + 3 + 3


def test_the_policy_does_not_wait_for_a_verdict() -> None:
    replying = threading.Event()

    class Patient(ScriptedScoring):
        def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
            assert replying.wait(60)
            return super().ask(text, labels)

    class Scorer(ScriptedScorer):
        def open(self, messages: Sequence[Message]) -> ScriptedScoring:
            session = super().open(messages)
            session.__class__ = Patient
            return session

    judge = Judge("patient", Scorer(["True", "First"]))
    names = []
    for event in take_turn(
        Policy("p", ScriptedBackend([TEXT])), judge, DIALOGUE, Controls(), threading.Event()
    ):
        if isinstance(event, PartStarted) and event.part is Part.REPLY:
            replying.set()
        names.append(type(event).__name__)

    assert names.count("StepJudged") == 3
    assert "StepJudged" not in names[: names.index("PartStarted") + 1]


def test_the_record_holds_the_whole_turn() -> None:
    controls = Controls(sampling=Sampling(seed=11))
    record = record_of(turn(controls=controls, reference="Calm down."))

    assert (record.model, record.judge, record.seed) == ("p", "kind", 11)
    assert (record.raw, record.reading) == (TEXT, read(TEXT))
    assert (record.status, record.error) == ("finished", None)
    assert record.tokens == -(-len(TEXT) // 4)
    assert record.first_token_seconds is not None
    assert 0 <= record.first_token_seconds <= record.seconds
    assert record.scoring_seconds >= 0
    assert record.judgement is not None
    assert record.judgement.steps == (StepVerdict(True, 0.9),) * 3
    assert isinstance(record.judgement.response, ResponseVerdict)


def test_live_judging_and_judging_afterwards_agree() -> None:
    judge = Judge("j", ScriptedScorer(["True", "False", "True", {"First": 0.7, "Both": 0.3}]))
    record = record_of(turn(judge=judge, reference="Calm down."))

    assert [record.judgement] == judge.judge(DIALOGUE, [TEXT], ["Calm down."])


def test_without_a_reference_the_reply_is_not_judged() -> None:
    events = turn()
    record = record_of(events)

    assert ReplyJudged(NO_REFERENCE) in events
    assert record.judgement is not None
    assert record.judgement.response is NO_REFERENCE
    assert record.judgement.reward().total == 4.0


def test_without_a_judge_there_is_no_judgement() -> None:
    events = turn(judge=None)
    record = record_of(events)

    assert not any(isinstance(event, StepJudged | ReplyJudged) for event in events)
    assert (record.judge, record.judgement) == (None, None)
    assert record.status == "finished"


def test_a_seed_is_drawn_recorded_and_used() -> None:
    used = []

    class Seeds(ScriptedBackend):
        def open(
            self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
        ) -> ScriptedCompletion:
            used.append(sampling)
            return super().open(messages, sampling, stop)

    own = Sampling(temperature=0.3)
    policy = Policy("p", Seeds([TEXT]), sampling=own)
    records = [
        record_of(list(take_turn(policy, None, DIALOGUE, Controls(), threading.Event())))
        for _ in range(3)
    ]

    assert [sampling.seed for sampling in used] == [record.seed for record in records]
    assert len({record.seed for record in records}) > 1
    assert {sampling.temperature for sampling in used} == {0.3}


def test_the_first_text_is_timed_apart_from_the_whole() -> None:
    record = record_of(turn(ScriptedTurn(text=TEXT, first_delay_seconds=0.1, chunk_characters=500)))

    assert record.first_token_seconds is not None
    assert record.first_token_seconds >= 0.1


def test_scoring_time_begins_with_the_end_of_the_reply() -> None:
    judge = Judge("slow", ScriptedScorer(["True", "First"], delay_seconds=0.03))
    record = record_of(turn(judge=judge, reference="Calm down."))

    assert record.seconds >= 3 * 0.03
    assert record.scoring_seconds >= 2 * 0.03


def test_controls_that_cannot_be_met_are_an_error_of_the_visitor() -> None:
    with pytest.raises(InputError):
        turn(controls=Controls(strategy="Magic"))


# --- replies that break the form -----------------------------------------------------------------


@pytest.mark.parametrize(("reference", "total"), [("Calm down.", -5.0), (None, -4.0)])
def test_a_turn_that_lacks_a_part_loses_every_point(reference: str | None, total: float) -> None:
    judge = Sessions("True", "First")
    text = TEXT.replace("<strategy>Ask first.\nStrategy: Question</strategy>\n", "")
    events = turn(text, Judge("j", judge), reference=reference)
    record = record_of(events)

    assert record.status == "finished"
    assert record.judgement == Judgement.of_incomplete(has_reference=reference is not None)
    assert record.judgement.reward().total == total
    assert record.reading.reply == "What happened today?"
    assert sum(isinstance(event, StepJudged) for event in events) == 2
    assert not any(isinstance(event, ReplyJudged) for event in events)
    assert len(judge.sessions[0].asked) == 2
    assert judge.sessions[0].closed


def test_a_budget_that_runs_out_is_the_models_own_fault() -> None:
    endless = ScriptedTurn(text="<history>and on", ending="endless")
    record = record_of(turn(endless, controls=Controls(sampling=Sampling(max_new_tokens=20))))

    assert record.status == "finished"
    assert record.judgement == Judgement.of_incomplete(has_reference=False)


def test_an_unreadable_label_is_judged_like_any_other() -> None:
    record = record_of(turn(TEXT.replace("Anxiety", "Saudade")))

    assert record.reading.is_complete
    assert record.judgement is not None
    assert record.judgement.reward().total == 4.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*(p.opening for p in Part), *(p.closing for p in Part), "a\n"])))
def test_whatever_a_model_writes_a_turn_ends_with_its_record(pieces: list[str]) -> None:
    record = record_of(turn("".join(pieces) or " "))

    assert record.status == "finished"
    assert record.judgement is not None
    if not record.reading.is_complete:
        assert record.judgement.is_complete is False


# --- stops, deadlines and failures ---------------------------------------------------------------


@pytest.mark.parametrize("when", [PartStarted, PartFinished, StepJudged])
def test_a_stopped_turn_keeps_its_text_and_is_not_scored(when: type) -> None:
    record = stopped_when(Policy("p", ScriptedBackend([TEXT])), KIND_JUDGE, when)

    assert record.status == "stopped"
    assert (record.error, record.judgement) == (None, None)
    assert record.raw
    assert TEXT.startswith(record.raw)


def test_a_stop_before_the_first_text_leaves_an_empty_record() -> None:
    stop = threading.Event()
    stop.set()
    record = record_of(turn(stop=stop))

    assert (record.status, record.raw, record.tokens) == ("stopped", "", 0)
    assert record.first_token_seconds is None


def test_a_stop_while_waiting_for_the_model_is_quick() -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    started = time.monotonic()
    record = record_of(turn(ScriptedTurn(text=TEXT, first_delay_seconds=60), stop=stop))

    assert record.status == "stopped"
    assert time.monotonic() - started < 20


def test_a_stop_after_the_last_text_leaves_the_reply_unjudged_but_finished() -> None:
    policy = Policy("p", ScriptedBackend([TEXT]))
    record = stopped_when(policy, KIND_JUDGE, TurnFinished, reference="Calm down.")

    assert record.status == "finished"
    assert record.judgement is not None
    assert record.judgement.steps == (StepVerdict(True, 0.9),) * 3
    assert isinstance(record.judgement.response, Unscorable)
    assert "stopped" in record.judgement.response.reason


def test_a_turn_that_takes_too_long_is_ended_and_says_so() -> None:
    slow = ScriptedTurn(text=TEXT, delay_seconds=0.02)
    started = time.monotonic()
    record = record_of(turn(slow, deadline_seconds=0.2))

    assert record.status == "failed"
    assert record.error == "the reply took longer than 0.2 seconds and was stopped"
    assert TEXT.startswith(record.raw)
    assert record.judgement is None
    assert time.monotonic() - started < 20


def test_a_judge_that_takes_too_long_leaves_the_reply_unharmed() -> None:
    judge = Judge("slow", ScriptedScorer(["True", "First"], delay_seconds=0.15))
    record = record_of(turn(judge=judge, reference="x", deadline_seconds=0.4))

    assert record.raw == TEXT or record.status == "failed"
    if record.judgement is not None:
        assert record.judgement.reward().unscorable >= 1


def test_a_policy_that_fails_keeps_what_it_wrote() -> None:
    half = TEXT[: TEXT.index("<strategy>")]
    events = turn(ScriptedTurn(text=half, ending="failed"))
    record = record_of(events)

    assert record.status == "failed"
    assert record.error
    assert record.raw == half
    assert record.judgement is None
    assert any(isinstance(event, TurnFinished) for event in events)
    assert sum(isinstance(event, StepJudged) for event in events) == 2


@pytest.mark.parametrize(
    "failure", [BackendError("lost"), RuntimeError("CUDA out of memory"), {"True": float("nan")}]
)
def test_a_judge_that_fails_leaves_the_reply_alone(failure: object) -> None:
    record = record_of(turn(judge=Judge("j", Sessions("True", failure)), reference="x"))

    assert (record.status, record.error, record.raw) == ("finished", None, TEXT)
    assert record.judgement is not None
    assert record.judgement.is_complete
    assert record.judgement.reward().steps == (1.0, None, None)
    assert record.judgement.reward().total is None


def test_a_turn_that_is_closed_early_lets_go_of_both_models() -> None:
    closed = []

    class Closes(ScriptedBackend):
        def open(
            self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
        ) -> ScriptedCompletion:
            completion = super().open(messages, sampling, stop)
            real_close = completion.close
            completion.close = lambda: (closed.append(True), real_close())[1]  # type: ignore[method-assign, func-returns-value]
            return completion

    scorer = Sessions("True")
    policy = Policy("p", Closes([TEXT]))
    events = take_turn(policy, Judge("j", scorer), DIALOGUE, Controls(), threading.Event())
    while not isinstance(next(events), StepJudged):
        pass
    events.close()

    assert closed
    assert scorer.sessions[0].closed
    assert list(events) == []


def test_the_judges_model_is_not_touched_before_the_first_step_is_there() -> None:
    scorer = Sessions("True")
    policy = Policy("p", ScriptedBackend([TEXT]))
    events = take_turn(policy, Judge("j", scorer), DIALOGUE, Controls(), threading.Event())
    while not isinstance(next(events), PartFinished):
        assert scorer.sessions == []
    assert scorer.sessions == []
    events.close()


# --- the flag ------------------------------------------------------------------------------------


def test_a_halt_is_set_by_the_stop_or_by_time() -> None:
    stop = threading.Event()
    by_stop, by_time = Halt(stop, 60), Halt(threading.Event(), 0.05)
    assert not by_stop.is_set()
    assert not by_stop.wait(0.01)
    assert by_time.wait(10)
    assert by_time.is_late
    assert not by_time.is_stopped
    stop.set()

    assert by_stop.wait()
    assert by_stop.is_stopped
    assert not by_stop.is_late


# --- the gate ------------------------------------------------------------------------------------

LOOP = TEXT.replace("What happened today?", "I am here. " * 9)


def gated(
    backend: Draws, *, temperature: float = 0.7, stop_at: type | None = None, **settings: object
) -> list[TurnEvent]:
    """Take a turn with the gate; Stop is pressed at the first event of a kind."""
    stop = threading.Event()
    controls = Controls(sampling=Sampling(temperature=temperature, seed=5))
    events = []
    for event in take_turn(
        Policy("p", backend),
        KIND_JUDGE,
        DIALOGUE,
        controls,
        stop,
        gated=True,
        **settings,  # type: ignore[arg-type]
    ):
        events.append(event)
        if stop_at is not None and isinstance(event, stop_at):
            stop.set()
    return events


def test_a_turn_that_passes_the_gate_is_drawn_once() -> None:
    backend = Draws(TEXT)
    record = record_of(gated(backend))

    assert backend.seeds == [5]
    assert (record.gated, record.draws, record.rejected, record.withheld) == (True, 1, (), False)
    assert record.reading == read(TEXT)


def test_a_rejected_turn_is_drawn_again_with_a_derived_seed() -> None:
    backend = Draws(LOOP, "no format", TEXT)
    events = gated(backend, reference="Calm down.")
    record = record_of(events)
    rejected = [event.draw for event in events if isinstance(event, DrawRejected)]

    assert backend.seeds == [5, draw_seed(5, 1), draw_seed(5, 2)]
    assert [(draw.seed, draw.raw) for draw in rejected] == [
        (5, LOOP),
        (draw_seed(5, 1), "no format"),
    ]
    assert [draw.faults[0] for draw in rejected] == [Fault.REPEATS_ITSELF, Fault.FORMAT]
    assert record.rejected == tuple(rejected)
    assert (record.draws, record.withheld, record.seed) == (3, False, draw_seed(5, 2))
    assert record.reading.reply == "What happened today?"
    alone = [record_of(turn(text)).tokens for text in (LOOP, "no format", TEXT)]
    assert record.tokens == sum(alone)
    assert sum(isinstance(event, ReplyJudged) for event in events) == 1


def test_the_seed_of_the_record_gives_the_same_turn_at_once() -> None:
    first = record_of(gated(Draws(LOOP, TEXT)))
    again = Controls(sampling=Sampling(seed=first.seed))
    record = record_of(turn(controls=again))

    assert (record.seed, record.raw) == (first.seed, first.raw)


def test_the_reply_is_withheld_if_every_draw_is_rejected() -> None:
    backend = Draws(LOOP)
    events = gated(backend, reference="Calm down.")
    record = record_of(events)

    assert len(backend.seeds) == len({*backend.seeds}) == 1 + FRESH_DRAWS
    assert (record.draws, len(record.rejected)) == (1 + FRESH_DRAWS, 1 + FRESH_DRAWS)
    assert (record.withheld, record.status) == (True, "finished")
    assert record.reading.reply is None
    assert record.raw == LOOP
    assert record.judgement is not None
    assert record.judgement.steps == (StepVerdict(True, 0.9),) * 3
    assert record.judgement.reward().response is None
    assert not any(isinstance(event, ReplyJudged) for event in events)


def test_greedy_decoding_is_not_repeated() -> None:
    backend = Draws(LOOP)

    assert record_of(gated(backend, temperature=0.0)).withheld
    assert backend.seeds == [5]


def test_a_stop_or_the_deadline_ends_the_draws() -> None:
    backend = Draws(LOOP)
    stopped = record_of(gated(backend, stop_at=DrawRejected))
    assert (len(backend.seeds), stopped.status, stopped.withheld) == (2, "stopped", False)
    assert (stopped.draws, len(stopped.rejected)) == (2, 1)

    slow = Draws(ScriptedTurn(text=LOOP, delay_seconds=0.002))
    late = record_of(gated(slow, deadline_seconds=0.3))
    assert len(slow.seeds) <= 2
    assert late.seconds < 3


def test_a_reply_that_loops_until_it_is_stopped_is_withheld() -> None:
    text = LOOP.removesuffix("</reply>")
    endless = Draws(ScriptedTurn(text=text, ending="failed"))
    record = record_of(gated(endless))

    assert (record.status, record.withheld, record.reading.reply) == ("failed", True, None)
    assert record.rejected[0].faults == (Fault.REPEATS_ITSELF,)


def test_without_the_gate_nothing_is_rejected() -> None:
    record = record_of(turn(LOOP))

    assert (record.gated, record.draws, record.withheld) == (False, 1, False)
    assert record.reading.reply == "I am here. " * 8 + "I am here."
