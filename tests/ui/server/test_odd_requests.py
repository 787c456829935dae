"""Odd URLs, headers and cookies give one sentence, never a 500."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.pages import make_services
from tests.voting import hold_votes
from ui_components.annotate.annotators import ANNOTATOR_COOKIE
from ui_components.server.app import build_server, serving
from ui_components.server.visitors import COOKIE, LANGUAGE_COOKIE

MOMENTS = st.one_of(
    st.text(max_size=40),
    st.builds(
        "{}{}".format,
        st.datetimes().map(lambda moment: moment.isoformat()),
        st.from_regex(r"|Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?", fullmatch=True),
    ),
    st.from_regex(r"[0-9W:.TZ+-]{1,30}", fullmatch=True),
)
FILTERS = st.lists(
    st.tuples(
        st.sampled_from(
            ("kind", "language", "topic", "group", "image", "reasoning", "admit", "as_of", "x")
        ),
        st.one_of(
            st.text(max_size=12), st.sampled_from(("blind", "with", "leaked", "all", "-", "en"))
        ),
    ),
    max_size=6,
)
FILES = st.sampled_from(("board.json", "board.svg", "models.csv", "votes.jsonl", "pairs.csv"))
ODD_BYTES = st.binary(max_size=40).map(
    lambda odd: odd.translate(None, b"\x00\r\n").strip(b" \t")  # with which it is no header
)
slowly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    services = make_services(tmp_path_factory.mktemp("models"))
    hold_votes(services.votes, 12)
    with serving(build_server(services)) as where:
        yield where
    services.votes.close()


def ask(address: str, path: str, headers: bytes = b"") -> tuple[int, str, str]:
    """Send a raw request; returns status, kind and body."""
    where = urlsplit(address)
    with socket.create_connection((where.hostname, where.port), timeout=60) as line:
        line.sendall(
            f"GET {path} HTTP/1.1\r\nConnection: close\r\n".encode()
            + (headers if headers.lower().startswith(b"host:") else b"Host: desk\r\n" + headers)
            + b"\r\n"
        )
        answer = b"".join(iter(lambda: line.recv(2**16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    kinds = [
        each for each in head.decode("latin-1").lower().split("\r\n") if "content-type" in each
    ]
    return int(head.split()[1]), "".join(kinds), body.decode("utf-8", "replace")


def is_answered(status: int, kind: str, body: str) -> bool:
    """Whether it is a readable file, or one sentence about the error."""
    if status == 200:
        if "json;" in f"{kind};" and "jsonl" not in kind:
            json.loads(body)
        elif "svg" in kind:
            ElementTree.fromstring(body)
        return True
    return status in {400, 404} and body.count("\n") <= 1 and "Traceback" not in body


@slowly
@given(FILES, MOMENTS)
@example("board.json", "9999-12-31T23:59:59-23:59")
@example("votes.jsonl", "0001-01-01T00:00:00+23:59")
@example("board.svg", "2999-01-01T00:00:00Z")
def test_any_moment_is_a_file_or_one_sentence(address, name, moment):
    assert is_answered(*ask(address, f"/results/{name}?as_of={quote(moment, safe='')}"))


@slowly
@given(FILES, FILTERS)
@example("board.svg", [("language", "\x00\x01")])
@example("board.json", [("topic", "x" * 3000)])
def test_any_filters_are_a_file_or_one_sentence(address, name, filters):
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in filters)
    assert is_answered(*ask(address, f"/results/{name}?{query}"))


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("as_of=9999-12-31T23:59:59-23:59", "as_of must be a date with time and zone"),
        ("as_of=0001-01-01T00:00:00%2B00:01", "as_of must be a date with time and zone"),
        ("as_of=", "as_of must be a date with time and zone"),
        ("as_of=2999-01-01T00:00:00Z", "as_of is in the future"),
        ("kind=best", "kind must be one of blind, named, any"),
        ("image=perhaps", "image must be 'with' or 'without'"),
        ("admit=anything", "there is no flag 'anything'"),
        ("language=%00", "a filter has a character that cannot be shown"),
        (f"topic={'x' * 3000}", "the filters have more than 2000 characters"),
    ],
)
def test_an_invalid_query_gives_one_sentence(address, query, sentence):
    status, kind, body = ask(address, f"/results/board.json?{query}")

    assert status == 400
    assert "text/plain" in kind
    assert sentence in body
    assert body.count("\n") == 1


def test_our_logs_hold_nothing_of_what_was_sent(address, caplog):
    caplog.set_level("DEBUG")
    secret = "a-word-of-a-visitor"
    with httpx.Client(base_url=address, timeout=60) as visitor:
        visitor.get("/")
        visitor.cookies.set(ANNOTATOR_COOKIE, secret)
        for path in ("login", "view", "answer", "draft", "undo", "logout"):
            visitor.post(f"/desk/{path}", json={"tab": secret, "token": secret, "item": secret})
            visitor.post(f"/desk/{path}", content=secret)
        for path in (
            f"/results/board.json?admit={secret}",
            f"/results/board.json?as_of={secret}",
            f"/results/{secret}.csv",
            f"/pictures/{secret}/0",
            f"/desk/export/{secret}",
        ):
            visitor.get(path)
        for body in (
            {"data": [secret, [{"role": secret, "content": secret}]]},
            {"data": [[{"role": "user", "content": "hello"}], "turn", None, secret]},
        ):
            for name in ("chat", "score"):
                call = visitor.post(f"/gradio_api/call/{name}", json=body)
                if call.status_code == 200:
                    visitor.get(f"/gradio_api/call/{name}/{call.json()['event_id']}")

    ours = ("compeer_core", "ui_components")
    messages = [each.getMessage() for each in caplog.records if each.name.startswith(ours)]
    assert not [each for each in messages if secret in each]


@slowly
@given(st.text(max_size=20), st.one_of(st.text(max_size=20), st.integers().map(str)))
@example("a", "9" * 5000)
@example("a", "-1")
@example("a", "\u0661")
def test_a_picture_of_any_number_is_not_there(address, turn, number):
    named, counted = quote(turn, safe=""), quote(number, safe="")
    for path in (
        f"/pictures/{named}/{counted}",
        f"/desk/picture?item={named}&number={counted}",
        f"/desk/picture?item={named}",
        f"/desk/picture?number={counted}",
    ):
        status, _, body = ask(address, path)
        assert status == 404, path
        assert "Traceback" not in body


@slowly
@given(
    st.sampled_from(
        ("/", "/healthz", "/pictures/a/0", "/desk/picture?item=a&number=0", "/results/board.json")
    ),
    st.sampled_from(
        (
            *(f"Cookie: {name}=" for name in (COOKIE, ANNOTATOR_COOKIE, LANGUAGE_COOKIE)),
            "Cookie: ",
            "Accept-Language: ",
            "Host: ",
            "Sec-Fetch-Site: ",
            "X-Forwarded-Proto: ",
            "X-Forwarded-For: ",
        )
    ),
    ODD_BYTES,
)
@example("/results/board.json", "Host: ", b"[")
@example("/", f"Cookie: {COOKIE}=", b'"\\777\\000"')
@example("/", "Accept-Language: ", b"en;q=1..2, \xff;q=9e999")
def test_any_bytes_in_a_header_are_answered(address, path, name, odd):
    status, _, body = ask(address, path, name.encode() + odd + b"\r\n")

    assert status < 500
    assert "Traceback" not in body
