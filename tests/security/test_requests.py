"""Which requests are let in: routes, sizes, times, other sites, and who asks behind a proxy."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from gradio.routes import App

from tests.page_client import chat_body, handlers, picture_of, upload
from tests.pages import make_services
from tests.security.server_process import ServerProcess, running_server
from ui_components.page import build_page
from ui_components.server.app import build_server, serving
from ui_components.server.http_protocol import BoundedHeaders
from ui_components.server.request_filter import GradioCalls, RequestFilter
from ui_components.server.uploads import Uploads

OPEN = {
    ("GET", "/"),
    ("HEAD", "/"),
    ("GET", "/config"),
    ("GET", "/config/"),
    ("GET", "/theme.css"),
    ("GET", "/favicon.ico"),
    ("GET", "/assets/{path:path}"),
    ("GET", "/static/{path:path}"),
    ("GET", "/svelte/{path:path}"),
    ("GET", "/gradio_api/info"),
    ("GET", "/gradio_api/info/"),
    ("GET", "/gradio_api/queue/data"),
    ("GET", "/gradio_api/call/{api_name}/{event_id}"),
    ("POST", "/gradio_api/queue/join"),
    ("POST", "/gradio_api/run/{api_name}"),
    ("POST", "/gradio_api/call/{api_name}"),
    ("POST", "/gradio_api/call/{api_name}/"),
    ("POST", "/gradio_api/cancel"),
    ("POST", "/gradio_api/upload"),  # ours stands in front
    ("GET", "/gradio_api/file={path_or_url:path}"),
    ("GET", "/robots.txt"),
}
"""What the page, gradio_client and callers of the HTTP API need."""


# --- routes --------------------------------------------------------------------------------------


def gradio_routes(services) -> Iterator[tuple[str, str]]:
    """Every route of the gradio that is installed, whatever its version adds."""

    def walk(routes):
        for route in routes:
            for method in getattr(route, "methods", None) or ():
                yield method, route.path
            included = getattr(route, "original_router", None)
            yield from walk(included.routes if included is not None else ())

    application = App.create_app(build_page(services, "test"))
    yield from walk(application.routes)


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    return make_services(tmp_path_factory.mktemp("models"))


def test_every_other_route_of_gradio_is_closed(services):
    known = set(gradio_routes(services))
    assert ("POST", "/gradio_api/process_recording") in known, "the walk does not see the routes"
    closed = known - OPEN
    assert len(closed) > 40
    with TestClient(build_server(services)) as client:
        for method, path in sorted(closed):
            filled = path.replace("{path_or_url:path}", "x").replace("{", "").replace("}", "")
            answer = client.request(method, filled.replace(":path", ""), json={})
            assert answer.status_code in {404, 405}, (method, path, answer.text[:200])


def test_other_methods_and_spellings_of_open_routes_are_closed(server):
    with server.client() as client:
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert client.request(method, "/gradio_api/queue/join").status_code in {400, 404, 405}
        for path in (
            "//gradio_api/deep_link",
            "/gradio_api/./deep_link",
            "/gradio_api/info/../deep_link",
            "/gradio_api/deep_link/",
            "/GRADIO_API/deep_link",
            "/gradio_api%2Fdeep_link",
            "/gradio_api/run/chat",
            "/gradio_api/api/chat",
        ):
            assert client.get(path).status_code in {404, 405}, path
            assert client.post(path, json={}).status_code in {404, 405}, path


def test_a_deep_link_of_an_address_is_not_followed(server):
    with server.client() as client:
        plain = client.get("/").text
        linked = client.get("/?deep_link=../../etc&view=x").text

    assert '"deep_link_state":"none"' in linked.replace(" ", "")
    assert len(linked) == len(plain)


def test_web_sockets_get_no_answer(server):
    with socket.create_connection(server.address, timeout=5) as wire:
        wire.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b"101 " not in wire.recv(200).split(b"\r\n")[0]


# --- what gradio is told -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("call/chat", b"{", 400, "not JSON"),
        ("call/chat", b"[" * 100_000, 400, "not JSON"),
        ("call/chat", b'{"data": [NaN]}', 400, "not JSON"),
        ("call/chat", b"[]", 400, "not a JSON object"),
        ("call/chat", b"{}", 400, "data must be a list"),
        ("call/chat", b'{"data": ["x"]}', 400, "data must hold 6 values"),
        ("call/nothing", b'{"data": []}', 404, "there are /chat, /score, /models, /leaderboard"),
        ("queue/join", b'{"data": [], "fn_index": 10000, "session_hash": "a"}', 400, "fn_index"),
        ("queue/join", b'{"data": [], "fn_index": true, "session_hash": "a"}', 400, "fn_index"),
        ("queue/join", b'{"data": [], "fn_index": 0}', 400, "session_hash"),
        ("queue/join", b'{"data": [], "fn_index": 0, "session_hash": "a/b"}', 400, "session_hash"),
        ("queue/join", b'{"data": [], "batched": true}', 400, "unknown field"),
        ("run/predict", b'{"data": [], "event_id": "x"}', 400, "unknown field"),
        ("cancel", b'{"event_id": 1}', 400, "those of a call"),
    ],
)
def test_what_gradio_cannot_read_is_one_sentence(server, path, body, status, sentence):
    with server.client() as client:
        answer = client.post(f"/gradio_api/{path}", content=body)

    assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer.text


def test_deep_and_wide_bodies_are_refused(server):
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    with server.client() as client:
        for message in (deep, ["x"] * 30_000):
            answer = client.post("/gradio_api/call/chat", json=chat_body(history=message))
            assert (answer.status_code, answer.json()["detail"]) == (
                400,
                "the request is nested too deeply or has too many values",
            )


def test_handlers_of_the_queue_are_not_called_beside_it(server):
    with server.client() as client:
        send = handlers(client)["message submit"]
        body = {"data": [None] * 6, "fn_index": send, "session_hash": "x"}
        assert client.post("/gradio_api/run/predict", json=body).status_code == 404


def test_handlers_beside_the_queue_are_not_called_through_it(server):
    """Their answers come at once; in the queue they would be kept for who never listens."""
    with server.client() as client:
        starter = handlers(client)["conversation use_starter"]
        box = {"text": "x" * 1000, "files": []}
        body = {"data": [box], "fn_index": starter, "session_hash": "x", "event_data": {"turn": 0}}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 404
        assert client.post("/gradio_api/run/predict", json=body).status_code == 200


def test_wrong_values_end_in_a_sentence_and_leave_no_words_in_the_log(server):
    words = "a secret of mine"
    with server.client() as client:
        send = handlers(client)["message submit"]
        data = [[words], words, words, words, words, words]
        body = {"data": data, "fn_index": send, "session_hash": "mistaken"}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
        with client.stream("GET", "/gradio_api/queue/data?session_hash=mistaken") as answer:
            ended = next(
                message
                for line in answer.iter_lines()
                if line.startswith("data: ")
                and (message := json.loads(line[6:]))["msg"] == "process_completed"
            )
    assert ended["success"] is False
    assert "the request is invalid" in ended["output"]["error"]
    log = "".join(server.errors)
    assert words not in log
    assert "a handler failed:" in log


def test_a_path_too_long_for_a_file_is_not_found(server):
    with server.client() as client:
        assert client.get(f"/static/{'x' * 5000}").status_code == 404


# --- sizes and times -----------------------------------------------------------------------------


def test_bodies_are_bounded(server):
    with server.client() as client:
        large = client.post("/gradio_api/call/chat", json=chat_body("x" * 300_000))
        pieces = client.post("/gradio_api/call/chat", content=(b"x" * 65_536 for _ in range(9)))
        desk = client.post("/desk/view", content=b"x" * 300_000)
        heavy = upload(client, "x.png", b"x" * (10 * 2**20 + 1))
        many = client.post(
            "/gradio_api/upload", files=[("files", (f"{n}.png", b"x")) for n in range(5)]
        )
        none = client.post("/gradio_api/upload", content=b"x")

    assert [answer.status_code for answer in (large, pieces, desk, heavy)] == [413] * 4
    assert large.json()["detail"] == "at most 262,144 bytes may be sent at once"
    assert many.status_code == 400
    assert many.text == "Please send at most 4 photos at a time."
    assert none.status_code == 400


def test_a_body_that_does_not_come_is_given_up():
    async def scenario() -> list[dict]:
        sent: list[dict] = []
        calls = GradioCalls({0: 6}, frozenset(), {0: frozenset()}, {"chat": 0})
        filtered = RequestFilter(
            FastAPI(),
            calls=calls,
            own_routes=(),
            uploads=None,  # type: ignore[arg-type]
            owner_of=lambda _: "",
            body_seconds=0.2,
        )

        async def receive() -> dict:
            await asyncio.sleep(0.05)  # a byte now and then
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/gradio_api/call/chat",
            "query_string": b"",
            "headers": [],
        }
        await filtered(scope, receive, send)
        return sent

    begun = time.monotonic()
    start, body = asyncio.run(scenario())

    assert time.monotonic() - begun < 2
    assert start["status"] == 408
    assert "within 0 seconds" in json.loads(body["body"])["detail"]


@pytest.fixture
def impatient(services, monkeypatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(BoundedHeaders, "header_seconds", 0.5)
    app = FastAPI()

    @app.get("/slow")
    async def slow(request: Request) -> PlainTextResponse:
        await asyncio.sleep(1.2)
        return PlainTextResponse("done")

    with serving(app) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.mark.parametrize("sent", [b"", b"GET /slow HTT", b"GET /slow HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_come_are_given_up(impatient, sent):
    begun = time.monotonic()
    with socket.create_connection(impatient, timeout=10) as wire:
        wire.sendall(sent)
        assert wire.recv(100) == b""
    assert time.monotonic() - begun < 5


def test_headers_byte_by_byte_buy_no_time(impatient):
    begun = time.monotonic()
    with socket.create_connection(impatient, timeout=10) as wire, pytest.raises(OSError):
        for byte in b"GET /slow HTTP/1.1\r\nHost: " + b"x" * 1000:
            wire.sendall(bytes([byte]))
            time.sleep(0.02)
    assert time.monotonic() - begun < 5


def test_a_slow_answer_and_a_second_request_are_not_given_up(impatient):
    request = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(impatient, timeout=10) as wire:
        for _ in range(2):
            wire.sendall(request)
            answer = b""
            while not answer.endswith(b"done"):
                piece = wire.recv(1000)
                assert piece, "closed in the middle"
                answer += piece


def test_the_rest_of_a_body_that_nobody_wants_buys_no_time(server):
    begun = time.monotonic()
    with socket.create_connection(server.address, timeout=30) as wire:
        wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        answer = b""
        with suppress(OSError):
            while piece := wire.recv(1000):
                answer += piece
                wire.sendall(b"x")
    assert b'"status":"ok"' in answer
    assert time.monotonic() - begun < 5


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(BoundedHeaders, "unread_seconds", 0.3)
    app = FastAPI()

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * 50_000_000)

    with serving(app) as url, socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        wire.settimeout(10)
        wire.connect((host, int(port)))
        wire.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(1.5)
        read = 0
        with suppress(ConnectionResetError):
            while piece := wire.recv(1_000_000):
                read += len(piece)
    assert read < 20_000_000


# --- other sites ---------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "demo.example"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
def test_no_other_origin_may_read_an_answer(server, host, origin):
    headers = {"origin": origin, "host": host}
    with server.client() as client:
        for path in ("/config", "/gradio_api/info", "/healthz", "/results/board.json"):
            assert "access-control-allow-origin" not in client.get(path, headers=headers).headers
        asked = {**headers, "access-control-request-method": "POST"}
        answer = client.options("/gradio_api/queue/join", headers=asked)
        assert answer.status_code == 404
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_no_page_of_another_site_sends_anything(server, site):
    with server.visitor() as client:
        headers = {"sec-fetch-site": site}
        for path in ("gradio_api/call/chat", "gradio_api/upload", "forget", "desk/login"):
            assert client.post(f"/{path}", json=chat_body(), headers=headers).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_no_page_of_another_site_sends_anything_over_a_line_without_encryption(server, origin):
    """There browsers say nothing of sites, only where the page is from."""
    with server.visitor() as client:
        for path in ("forget", "desk/login", "gradio_api/upload"):
            assert client.post(f"/{path}", headers={"origin": origin}).status_code == 403
        hidden = {"origin": "null", "x-forwarded-host": "demo.example"}  # a proxy nobody has named
        assert client.post("/forget", headers=hidden).status_code == 403
        assert client.post("/forget", headers={"origin": server.url}).status_code == 200


# --- behind a proxy ------------------------------------------------------------------------------


def owner_is_taken_from_the_header(server: ServerProcess) -> bool:
    with server.client() as client:
        forwarded = {"x-forwarded-for": "203.0.113.7"}
        answer = client.post(
            "/gradio_api/upload", files={"files": ("x.png", b"x")}, headers=forwarded
        )
        path = answer.json()[0]
        shown = client.get(f"/gradio_api/file={path}", headers={"x-forwarded-for": "203.0.113.8"})
        return shown.status_code == 404


def test_nobody_s_word_is_taken_for_an_address_or_a_scheme(server):
    with server.client() as client:
        cookie = client.get("/", headers={"x-forwarded-proto": "https"}).headers["set-cookie"]

    assert "SameSite=Lax" in cookie
    assert not owner_is_taken_from_the_header(server)


def test_nobody_s_word_is_taken_for_the_address_of_the_page(server):
    claims = {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    with server.client() as client:
        assert client.get("/config", headers=claims).json()["root"] == server.url
        assert "evil.example" not in client.get("/", headers=claims).text


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that trusts the proxy 127.0.0.1."""
    folder = tmp_path_factory.mktemp("proxied")
    with running_server(folder, "--forwarded-allow-ips", "127.0.0.1") as started:
        yield started


def test_a_named_proxy_is_believed(proxied):
    with proxied.client() as client:
        cookie = client.get("/", headers={"x-forwarded-proto": "https"}).headers["set-cookie"]
        claims = {"x-forwarded-host": "demo.example", "x-forwarded-proto": "https"}
        root = client.get("/config", headers=claims).json()["root"]

    assert "SameSite=None; Secure" in cookie
    assert root == "https://demo.example"
    assert owner_is_taken_from_the_header(proxied)


def test_uploads_of_one_network_of_ipv6_keep_nobody_else_out(proxied):
    head = b"POST /gradio_api/upload HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
    head += b"Content-Type: multipart/form-data; boundary=B\r\n"
    with ExitStack() as stack:
        for number in range(1, 65):
            wire = stack.enter_context(socket.create_connection(proxied.address))
            wire.sendall(head + b"X-Forwarded-For: 2001:db8::%x\r\n\r\n--B\r\n" % number)
        time.sleep(1)
        with proxied.client(headers={"x-forwarded-for": "198.51.100.7"}) as honest:
            assert upload(honest, "x.png", b"x").status_code == 200


def test_an_upload_of_a_cookie_s_visitor_is_not_another_s_at_the_same_address(server):
    with server.visitor() as anna, server.client() as program:
        path = upload(anna, "x.png", b"x").json()[0]
        body = chat_body(image=picture_of(path))
        assert program.post("/gradio_api/call/chat", json=body).status_code == 400


@pytest.mark.parametrize("charset", ["undefined", "punycode", "idna", "utf-7"])
def test_a_form_in_an_odd_encoding_ends_in_a_sentence(server, charset):
    body = (
        b'--B\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nx\r\n--B--\r\n'
    )
    kind = f"multipart/form-data; boundary=B; charset={charset}"
    with server.client() as client:
        answer = client.post("/gradio_api/upload", content=body, headers={"content-type": kind})
    assert answer.status_code in {200, 400}


# --- uploads, without a server -------------------------------------------------------------------


def test_unsent_uploads_are_swept_before_the_hour_is_over(tmp_path):
    now = [0.0]
    uploads = Uploads(tmp_path / "uploads", clock=lambda: now[0])
    first = uploads.add("a.png", b"a", "anna", "")
    now[0] = 2000.0
    second = uploads.add("b.png", b"b", "anna", "")
    now[0] = 3540.0  # a minute before the hour, which is how often it is swept

    uploads.sweep()

    assert [uploads.holds(path, "anna") for path in (first, second)] == [False, True]
    assert [entry.name for entry in (tmp_path / "uploads").rglob("*.png")] == ["b.png"]


def test_when_the_disk_share_is_full_the_greediest_address_gives_way(tmp_path, monkeypatch):
    monkeypatch.setattr("ui_components.server.uploads.MAX_TOTAL_BYTES", 100)
    uploads = Uploads(tmp_path)
    honest = uploads.add("a.png", b"x" * 20, "anna", "198.51.100.1")
    greedy = [
        uploads.add("b.png", b"x" * 20, f"visitor {number}", "203.0.113.9") for number in range(9)
    ]

    assert uploads.holds(honest, "anna")
    held = [uploads.holds(path, f"visitor {number}") for number, path in enumerate(greedy)]
    assert held == [False] * 5 + [True] * 4  # 20 + 4 * 20 bytes
