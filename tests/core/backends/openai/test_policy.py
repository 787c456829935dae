"""The endpoint backend against a real HTTP server, with the faults that real servers have."""

import json
import logging
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.backends.feed import TextFeed
from compeer_core.backends.openai.policy import OpenAIBackend, OpenAICompletion, Patience
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import BackendError, ConfigError, EndpointError, Fault
from compeer_core.images import Image
from tests.core.backends.openai.endpoint_server import HASTY, Endpoint, Reply, Script

HELLO = (Message("user", ("Hello?",)),)
PIXEL = Image(b"\x89PNG...", 1, 1)


def opened(
    backend: OpenAIBackend,
    messages: tuple[Message, ...] = HELLO,
    sampling: Sampling | None = None,
    stop: threading.Event | None = None,
) -> OpenAICompletion:
    return backend.open(messages, sampling or Sampling(), stop or threading.Event())


def says(*texts: str, reason: str = "stop", tokens: int | None = None) -> Script:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.say(*texts)
        reply.end(reason, tokens)

    return script


def refuses(status: int, text: str = "", **headers: str) -> Script:
    return lambda reply: reply.refuse(status, text, **headers)


def text_of(backend: OpenAIBackend) -> str:
    return "".join(opened(backend).generate())


def error_of(backend: OpenAIBackend) -> str:
    with pytest.raises(BackendError) as caught:
        list(opened(backend).generate())
    return str(caught.value)


# --- what goes right -----------------------------------------------------------------------------


def test_a_turn_is_read_part_by_part_from_one_request(endpoint: Endpoint) -> None:
    backend = endpoint(says("<a>on", "e</a", "><b>two", "</b>", tokens=9)).backend()
    completion = opened(backend)

    first = "".join(completion.generate("</a>"))
    second = "".join(completion.generate("</b>"))
    rest = "".join(completion.generate())

    assert (first, second, rest) == ("<a>one</a>", "<b>two</b>", "")
    assert completion.ended
    assert completion.tokens == 9
    assert len(endpoint.bodies) == 1


def test_the_request_says_what_was_asked_for(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret ")
    backend = endpoint(says("ok")).backend()
    messages = (
        Message("system", ("Be kind.",)),
        Message("user", (PIXEL, "What do you see?")),
    )

    list(opened(backend, messages, Sampling(0.0, 0.5, 1.1, 77, 5)).generate())

    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-secret"
    assert endpoint.bodies == [
        {
            "model": "tiny",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_p": 0.5,
            "repetition_penalty": 1.1,
            "max_tokens": 77,
            "seed": 5,
            "messages": [
                {"role": "system", "content": "Be kind."},
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": PIXEL.data_url()}},
                        {"type": "text", "text": "What do you see?"},
                    ],
                },
            ],
        }
    ]


def test_our_own_key_wins_and_none_is_sent_where_none_is_set(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = endpoint(says("ok")).backend()
    text_of(backend)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    monkeypatch.setenv("COMPEER_API_KEY", "ours")
    backend = endpoint.backend()
    text_of(backend)

    assert "Authorization" not in endpoint.headers[0]
    assert endpoint.headers[1]["Authorization"] == "Bearer ours"


def test_a_character_split_across_packets_arrives_whole(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        line = 'data: {"choices":[{"delta":{"content":"我很\u2028难过 😢"}}]}\r\n\r\n'.encode()
        for byte in line:
            reply.block(bytes([byte]))
        reply.end()

    backend = endpoint(script).backend()

    assert text_of(backend) == "我很\u2028难过 😢"


def test_an_answer_that_is_not_streamed_is_accepted(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        content = {"choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}]}
        body = json.dumps(content).encode()
        reply.head(Content_Type="application/json", Content_Length=str(len(body)))
        reply.raw(body)

    backend = endpoint(script).backend()

    assert text_of(backend) == "whole"


def test_comments_empty_chunks_and_thinking_are_no_text(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.block(b": keep-alive\n\n")
        reply.event({"choices": [{"delta": {"role": "assistant", "content": None}}]})
        reply.event({"choices": [{"delta": {"reasoning_content": "hmm"}}]})
        reply.block(b"event: message\nid: 3\nretry: 10\n")
        reply.say("yes")
        reply.event({"choices": [{"delta": {"content": [{"type": "text", "text": "!"}]}}]})
        reply.end()

    backend = endpoint(script).backend()
    completion = opened(backend)

    assert "".join(completion.generate()) == "yes!"
    assert completion.tokens == 2


def test_the_budget_is_enforced_if_the_server_ignores_it(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        while True:
            reply.say("more ")

    backend = endpoint(script).backend()
    completion = opened(backend, sampling=Sampling(max_new_tokens=7))

    assert "".join(completion.generate()) == "more " * 7
    assert completion.ended
    assert endpoint.gone.wait(20)


def test_a_stream_that_ends_after_the_finish_reason_needs_no_done(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.say("bye")
        reply.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        reply.cut()

    backend = endpoint(script).backend()

    assert text_of(backend) == "bye"


# --- dialects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("complaint", "gone"),
    [
        ("", {"stream_options"}),
        ("stream_options: Extra inputs are not permitted", {"stream_options"}),
        ("Unsupported parameter: seed", {"seed"}),
        ("Unrecognized request argument supplied: repetition_penalty", {"repetition_penalty"}),
    ],
)
def test_a_rejected_field_is_dropped_from_then_on(
    endpoint: Endpoint, complaint: str, gone: set[str]
) -> None:
    def script(reply: Reply) -> None:
        if gone & endpoint.bodies[-1].keys():
            reply.refuse(400, complaint)
        else:
            says("fine")(reply)

    backend = endpoint(script).backend()
    sampling = Sampling(seed=3, repetition_penalty=1.2)

    for _ in range(2):
        assert "".join(opened(backend, sampling=sampling).generate()) == "fine"
    assert len(endpoint.bodies) == 1 + 2  # it is learnt once
    assert endpoint.bodies[0].keys() - endpoint.bodies[-1].keys() == gone


def test_the_newer_budget_field_is_learned(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        if "max_tokens" in endpoint.bodies[-1]:
            reply.refuse(400, "'max_tokens' is not supported, use 'max_completion_tokens' instead.")
        else:
            says("fine")(reply)

    backend = endpoint(script).backend()

    assert [text_of(backend), text_of(backend)] == ["fine", "fine"]
    assert [body.get("max_completion_tokens") for body in endpoint.bodies] == [None, 512, 512]


def test_an_invalid_value_is_an_error_and_changes_no_dialect(endpoint: Endpoint) -> None:
    backend = endpoint(refuses(400, "temperature must be at most 2")).backend()
    before = backend.dialect

    assert error_of(backend) == "the model 'tiny' rejects the request (400)"
    assert backend.dialect == before
    assert all("temperature" in body for body in endpoint.bodies)


def test_a_conversation_that_is_too_long_is_told_apart(endpoint: Endpoint) -> None:
    complaint = "This model's maximum context length is 4096 tokens, say max_completion_tokens"
    backend = endpoint(refuses(400, complaint)).backend()

    assert "cannot take a conversation of this length" in error_of(backend)
    assert len(endpoint.bodies) == 1


# --- trying again --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_temporary_fault_before_the_first_text_is_retried(
    endpoint: Endpoint, status: int
) -> None:
    backend = endpoint(refuses(status), refuses(status), says("at last")).backend()

    assert text_of(backend) == "at last"
    assert len(endpoint.bodies) == 3


def test_a_permanent_fault_ends_after_some_tries(endpoint: Endpoint) -> None:
    backend = endpoint(refuses(500)).backend()

    assert (
        error_of(backend)
        == "the model 'tiny' has a fault (500), tried 3 times; try again in a minute"
    )
    assert len(endpoint.bodies) == 3


def test_retry_after_is_obeyed(endpoint: Endpoint) -> None:
    backend = endpoint(refuses(429, Retry_After="0.3"), says("now")).backend()
    started = time.monotonic()

    assert text_of(backend) == "now"
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    ("status", "sentence"), [(429, "is overloaded (429)"), (503, "has a fault (503)")]
)
@pytest.mark.parametrize("later", ["Wed, 21 Oct 2099 07:28:00 GMT", "90"])
def test_a_retry_after_beyond_our_patience_is_an_error_at_once(
    endpoint: Endpoint, status: int, sentence: str, later: str
) -> None:
    backend = endpoint(refuses(status, Retry_After=later), says("late")).backend()
    started = time.monotonic()

    assert f"{sentence}, tried once" in error_of(backend)
    assert time.monotonic() - started < 20


def test_a_stream_that_says_done_without_a_reason_is_complete(endpoint: Endpoint) -> None:
    def done(reply: Reply) -> None:
        reply.stream()
        reply.say("all ", "of it")
        reply.block(b"data: [DONE]\n\n")
        reply.raw(b"0\r\n\r\n")

    assert text_of(endpoint(done).backend()) == "all of it"
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    ("before", "part"), [((), "reported an error"), (("half",), "in mid-reply")]
)
def test_a_bare_error_in_a_stream_is_reported_and_not_tried_again(
    endpoint: Endpoint, before: tuple[str, ...], part: str
) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.say(*before)
        reply.block(b'{"object": "error", "message": "CUDA"}\n')
        reply.raw(b"0\r\n\r\n")

    error = error_of(endpoint(script).backend())

    assert part in error
    assert "CUDA" not in error
    assert len(endpoint.bodies) == 1


def test_ids_of_an_organisation_in_the_environment_are_not_sent(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-somebody")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-of-somebody")

    assert text_of(endpoint(says("hello")).backend()) == "hello"
    assert not [value for value in endpoint.headers[0].values() if "of-somebody" in value]


def test_a_connection_lost_before_the_first_text_is_tried_again(endpoint: Endpoint) -> None:
    def lose(reply: Reply) -> None:
        reply.stream()
        reply.cut()

    backend = endpoint(lambda reply: reply.cut(), lose, says("third")).backend()

    assert text_of(backend) == "third"


def test_an_unreachable_endpoint_is_an_error(endpoint: Endpoint) -> None:
    backend = OpenAIBackend("http://127.0.0.1:1/v1", "tiny", HASTY)

    assert (
        error_of(backend)
        == "the model 'tiny' cannot be reached, tried 3 times; try again in a minute"
    )
    backend.close()


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "complaint", "fault"),
    [
        (401, "", Fault.SETTINGS),
        (402, "", Fault.SETTINGS),
        (403, "", Fault.SETTINGS),
        (404, "", Fault.SETTINGS),
        (400, "The model `tiny` does not exist", Fault.SETTINGS),
        (429, "insufficient_quota", Fault.SETTINGS),
        (413, "", Fault.REQUEST),
        (400, "maximum context length is 4096 tokens", Fault.REQUEST),
        (422, "", Fault.REQUEST),
        (408, "", Fault.PASSING),
        (429, "slow down", Fault.PASSING),
        (500, "", Fault.PASSING),
    ],
)
def test_an_error_tells_what_it_implies_for_other_requests(
    endpoint: Endpoint, status: int, complaint: str, fault: Fault
) -> None:
    backend = endpoint(refuses(status, complaint)).backend(Patience(tries=1))

    with pytest.raises(EndpointError) as caught:
        list(opened(backend).generate())

    assert caught.value.fault is fault
    assert str(status) in caught.value.reason


def test_an_error_has_the_wait_of_retry_after(endpoint: Endpoint) -> None:
    backend = endpoint(refuses(429, Retry_After="7")).backend(Patience(tries=1))

    with pytest.raises(EndpointError) as caught:
        list(opened(backend).generate())

    assert caught.value.wait_seconds == 7
    assert caught.value.reason == "is overloaded (429)"


@pytest.mark.parametrize(
    ("status", "part"),
    [
        (401, "does not accept the key (401); set COMPEER_API_KEY or OPENAI_API_KEY"),
        (404, "is not known at this address (404)"),
        (413, "cannot take a conversation of this length"),
        (418, "rejects the request (418)"),
        (301, "rejects the request (301)"),
    ],
)
def test_a_refusal_is_not_tried_again(endpoint: Endpoint, status: int, part: str) -> None:
    backend = endpoint(refuses(status, "You said: I want to cry", Location="/x")).backend()
    error = error_of(backend)

    assert part in error
    assert "cry" not in error
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"data: {broken\n\n", "not JSON"),
        (b"data: [1]\n\n", "reported an error in mid-reply"),
        (b'data: {"error": {"message": "CUDA"}}\n\n', "reported an error in mid-reply"),
        (b'data: {"object": "error", "message": "CUDA"}\n\n', "reported an error in mid-reply"),
        (b'data: {"choices": 5}\n\n', "unknown form"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "unknown form"),
        (b'data: {"choices": [{"delta": "\xff"}]}\n\n', "not UTF-8"),
        (b"x" * (1 << 20), "sent more than 1 MiB"),
    ],
)
def test_a_broken_stream_keeps_what_came_before(
    endpoint: Endpoint, data: bytes, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compeer_core.backends.openai.client.MAX_ANSWER_BYTES", 1 << 20)

    def script(reply: Reply) -> None:
        reply.stream()
        reply.say("half")
        reply.block(data)
        reply.end()

    backend = endpoint(script).backend()
    chunks = opened(backend).generate()

    assert next(chunks) == "half"
    with pytest.raises(BackendError, match=part) as caught:
        list(chunks)
    assert "CUDA" not in str(caught.value)
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("politely", [True, False])
def test_a_reply_that_is_cut_off_is_not_taken_for_complete(
    endpoint: Endpoint, politely: bool
) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.say("half")
        if politely:
            reply.raw(b"0\r\n\r\n")
        else:
            reply.cut()

    backend = endpoint(script).backend()
    chunks = opened(backend).generate()

    assert next(chunks) == "half"
    with pytest.raises(BackendError, match="lost the connection in mid-reply"):
        list(chunks)
    assert len(endpoint.bodies) == 1


def test_lines_that_are_not_events_are_ignored(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.block(b"garbage\n\n")
        reply.say("fine")
        reply.end()

    backend = endpoint(script).backend()

    assert text_of(backend) == "fine"


def test_a_web_page_is_not_a_reply(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.head(Content_Type="text/html; charset=utf-8", Content_Length="6")
        reply.raw(b"<html>")

    backend = endpoint(script).backend()

    assert "answered with a web page" in error_of(backend)


def test_a_reply_that_was_withheld_is_an_error(endpoint: Endpoint) -> None:
    backend = endpoint(says(reason="content_filter")).backend()

    assert "withheld" in error_of(backend)


def test_a_server_without_text_times_out(endpoint: Endpoint) -> None:
    release = threading.Event()

    def script(reply: Reply) -> None:
        reply.stream()
        while not release.wait(0.05):
            reply.block(b": keep-alive\n\n")  # alive, yet not answering

    backend = endpoint(script).backend(Patience(first_text_seconds=0.2))
    started = time.monotonic()

    assert "did not answer in time" in error_of(backend)
    assert 0.2 <= time.monotonic() - started < 20
    release.set()


def test_a_server_that_falls_silent_times_out(endpoint: Endpoint) -> None:
    release = threading.Event()

    def script(reply: Reply) -> None:
        reply.stream()
        reply.say("well")
        release.wait(60)

    backend = endpoint(script).backend(Patience(between_seconds=0.2))

    assert "fell silent in mid-reply" in error_of(backend)
    release.set()


def test_a_turn_has_a_time_limit(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        while True:
            reply.say("and ")
            time.sleep(0.01)

    backend = endpoint(script).backend(Patience(turn_seconds=0.3))

    assert "took too long" in error_of(backend)


def test_a_missing_token_count_does_not_block(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compeer_core.backends.openai.policy.USAGE_SECONDS", 0.1)
    release = threading.Event()

    def script(reply: Reply) -> None:
        reply.stream()
        reply.say("done")
        reply.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        release.wait(60)

    backend = endpoint(script).backend()
    completion = opened(backend)

    assert "".join(completion.generate()) == "done"
    assert completion.tokens == 1
    release.set()


# --- stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [True, False])
def test_a_stop_ends_the_text_and_the_connection_at_once(endpoint: Endpoint, begun: bool) -> None:
    waiting = threading.Event()

    def script(reply: Reply) -> None:
        reply.stream()
        if begun:
            reply.say("so")
        waiting.set()
        while True:  # until the client hangs up
            time.sleep(0.01)
            reply.block(b": x\n\n")

    backend = endpoint(script).backend(Patience())
    stop = threading.Event()
    completion = opened(backend, stop=stop)
    chunks = completion.generate()
    if begun:
        assert next(chunks) == "so"
    assert waiting.wait(20)
    stop.set()
    started = time.monotonic()

    assert list(chunks) == []
    assert endpoint.gone.wait(20)
    assert time.monotonic() - started < 20
    assert not completion.ended
    assert list(completion.generate()) == []


def test_close_hangs_up(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        while True:
            reply.say("and ")
            time.sleep(0.01)

    backend = endpoint(script).backend()
    completion = opened(backend)
    next(completion.generate())
    completion.close()

    assert endpoint.gone.wait(20)
    backend.close()
    backend.close()  # twice is fine


def test_a_closed_backend_ends_what_runs_and_opens_again(endpoint: Endpoint) -> None:
    def script(reply: Reply) -> None:
        reply.stream()
        reply.say("one")
        while len(endpoint.bodies) < 2:
            time.sleep(0.01)
            reply.say("one")

    backend = endpoint(script, says("two")).backend()
    chunks = opened(backend).generate()
    next(chunks)
    backend.close()

    assert set(chunks) <= {"one"}
    assert text_of(backend) == "two"
    backend.close()


def test_two_turns_run_at_once_and_apart(endpoint: Endpoint) -> None:
    meeting = threading.Barrier(2, timeout=60)

    def script(reply: Reply) -> None:
        meeting.wait()  # both requests are in before either is answered
        reply.stream()
        reply.say("hi")
        reply.end()

    backend = endpoint(script).backend()
    first, second = opened(backend), opened(backend)

    assert "".join(first.generate()) == "".join(second.generate()) == "hi"


def test_text_cannot_be_put_into_a_turn(endpoint: Endpoint) -> None:
    backend = endpoint(says("x")).backend()

    assert not backend.can_write
    with pytest.raises(BackendError):
        opened(backend).write("y")


# --- secrets and addresses -----------------------------------------------------------------------


def test_neither_key_nor_conversation_is_logged(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COMPEER_API_KEY", "sk-secret")
    caplog.set_level(logging.DEBUG)
    echo = "Incorrect key sk-secret, you said Hello? stream_options"
    backend = endpoint(refuses(400, echo), refuses(401, echo)).backend()
    error = error_of(backend)

    assert "sk-secret" not in caplog.text + error + repr(backend)
    assert "Hello?" not in caplog.text + error
    assert endpoint.url not in error


@pytest.mark.parametrize(
    ("url", "model", "part"),
    [
        ("localhost:8000/v1", "m", "is not a URL"),
        ("ftp://host/v1", "m", "is not a URL"),
        ("http://", "m", "is not a URL"),
        ("http://host:port/v1", "m", "is not a URL"),
        ("http://user:hidden@host/v1", "m", "contains a password"),
        ("http://host/v1", "", "names no model"),
    ],
)
def test_a_bad_address_is_a_configuration_error(url: str, model: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        OpenAIBackend(url, model)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000/v1", "http://host:8000/v1/chat/completions"),
        ("http://host/v1/", "http://host/v1/chat/completions"),
        ("http://host/v1/chat/completions", "http://host/v1/chat/completions"),
        ("https://host/v1?api-version=3", "https://host/v1/chat/completions?api-version=3"),
    ],
)
def test_the_address_of_the_requests(url: str, expected: str) -> None:
    assert str(OpenAIBackend(url, "m").address) == expected


# --- the feed ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.text("<a/>b", max_size=40), st.lists(st.integers(1, 5)), st.sampled_from(["</a>", "b", "aa"])
)
def test_stretches_do_not_depend_on_the_chunks(text: str, sizes: list[int], until: str) -> None:
    def chunks() -> Iterator[str]:
        rest = text
        for size in sizes:
            yield rest[:size]
            rest = rest[size:]
        yield rest

    feed = TextFeed(chunks())
    stretches = []
    while not feed.exhausted:
        stretches.append("".join(feed.take(until)))

    *before, last = text.split(until)
    assert stretches == [*(part + until for part in before), last]
