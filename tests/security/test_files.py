"""No request makes the server read, copy, delete or fetch what is not the visitor's own upload."""

import io
import os
import socket
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import PIL.Image
import pytest

from tests.page_client import FILE_DATA, call_chat, chat_body, handlers, heard, picture_of, upload
from tests.security.server_process import SECRET, ServerProcess, running_server


def png(width: int = 40, height: int = 30) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "olive").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def targets(server: ServerProcess, tmp_path_factory) -> dict[str, str]:
    """What a burglar would like to have, and by which address it could be named."""
    folder = tmp_path_factory.mktemp("private")
    text = folder / "notes.txt"
    text.write_text(f"private {SECRET}", encoding="utf-8")
    uploads = next(server.data_folder.glob("uploads-*"))
    link = uploads / "link.png"
    link.symlink_to(text)
    database = next(server.data_folder.glob("*.sqlite*"))
    return {
        "text": str(text),
        "environment": "/proc/self/environ",
        "database": str(database),
        "link": str(link),
        "device": "/dev/zero",
        "dots": f"{uploads}/../../private/notes.txt",
        "address": "http://127.0.0.1:9/notes.txt",
    }


def bodies(path: str, send: int) -> dict[str, tuple[str, dict]]:
    """Every place of a request in which gradio would take a file."""
    named = picture_of(path)
    box = {"text": "x", "files": [named]}
    session = {"session_hash": "burglar", "trigger_id": None}
    call = "/gradio_api/call/chat"
    join = "/gradio_api/queue/join"
    return {
        "role of a message": (call, chat_body(history=[{"role": named, "content": "x"}])),
        "content of a message": (call, chat_body(history=[{"role": "user", "content": named}])),
        "message": (call, {"data": [named, None, None, "", None, -1]}),
        "picture": (call, chat_body(image=named)),
        "picture without a mark": (call, chat_body(image={"path": path})),
        "picture that is a stream": (call, chat_body(image=named | {"is_stream": True})),
        "picture with an address": (call, chat_body(image=named | {"url": path})),
        "message box": (join, {"data": [box, "", "", "", "", None], "fn_index": send, **session}),
        "event": (
            join,
            {"data": [None, "", "", "", "", None], "event_data": box, "fn_index": send, **session},
        ),
    }


def test_no_request_names_a_file_that_is_not_an_upload_of_its_own(server, targets):
    with server.visitor() as client, server.client() as program:
        send = handlers(client)["message submit"]
        for wanted, path in targets.items():
            for place, (address, body) in bodies(path, send).items():
                for sender in (client, program):
                    answer = sender.post(address, json=body)
                    assert answer.status_code == 400, (wanted, place, answer.text)
                    assert SECRET not in answer.text
                    assert path not in answer.text, "an error tells a path"
    assert server.is_healthy()


def test_no_file_of_the_machine_is_shown(server, targets):
    with server.visitor() as client:
        for path in targets.values():
            for route in ("file=", "file/", "proxy=", "stream/"):
                answer = client.get(f"/gradio_api/{route}{path}")
                assert answer.status_code in {400, 404}, (route, path)
                assert SECRET not in answer.text


def test_a_path_that_is_no_string_is_refused_too(server):
    odd = [
        {"path": 7},
        {"path": ["a"]},
        {"path": None},
        {"meta": FILE_DATA},
        {"path": {"path": "x"}},
    ]
    with server.client() as client:
        for value in odd:
            assert (
                client.post("/gradio_api/call/chat", json=chat_body(image=value)).status_code == 400
            )


def test_a_picture_outside_the_uploads_is_not_deleted(server, tmp_path):
    outside = tmp_path / "family.png"
    outside.write_bytes(png())
    with server.client() as client:
        for more in ({}, {"is_stream": True}, {"is_stream": 1}):
            body = chat_body(image=picture_of(str(outside), **more))
            assert client.post("/gradio_api/call/chat", json=body).status_code == 400
    assert outside.is_file()


def test_no_address_is_fetched_for_anybody(server):
    asked: list[str] = []

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png())

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Recorder) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{other.server_port}/x.png"
        with server.client() as client:
            for route in ("file=", "proxy="):
                assert client.get(f"/gradio_api/{route}{address}").status_code == 404
                assert client.head(f"/gradio_api/{route}{address}").status_code in {404, 405}
            for named in (picture_of(address), picture_of("x", url=address), {"path": address}):
                assert (
                    client.post("/gradio_api/call/chat", json=chat_body(image=named)).status_code
                    == 400
                )
        other.shutdown()
    assert asked == []


# --- uploads are their owner's ---------------------------------------------------------------------


def test_an_upload_is_shown_and_sent_by_its_owner_alone_and_gone_when_it_was_sent(server):
    with server.visitor() as anna, server.visitor() as ben, server.client() as nobody:
        path = upload(anna, "desk.png", png()).json()[0]
        shown = anna.get(f"/gradio_api/file={path}")

        assert (shown.status_code, shown.headers["content-type"]) == (200, "image/png")
        for other in (ben, nobody):
            assert other.get(f"/gradio_api/file={path}").status_code == 404
            body = chat_body(image=picture_of(path))
            assert other.post("/gradio_api/call/chat", json=body).status_code == 400

        assert call_chat(anna, image=picture_of(path))[0] == "complete"
        assert not Path(path).exists()
        assert anna.get(f"/gradio_api/file={path}").status_code == 404


def test_a_file_that_is_no_picture_is_handed_back_as_a_download_only(server):
    with server.visitor() as anna:
        path = upload(anna, "page.html", b"<script>alert(1)</script>").json()[0]
        shown = anna.get(f"/gradio_api/file={path}")

    assert shown.headers["content-disposition"] == "attachment"
    assert shown.headers["content-type"] == "application/octet-stream"


def test_who_asks_for_an_upload_and_does_not_read_it_takes_no_memory(server):
    with server.visitor() as anna:
        content = os.urandom(9 * 2**20)
        path = upload(anna, "large.png", content).json()[0]
        assert anna.get(f"/gradio_api/file={path}").content == content
        cookie = "; ".join(f"{name}={value}" for name, value in anna.cookies.items())
        request = f"GET /gradio_api/file={path} HTTP/1.1\r\nHost: x\r\nCookie: {cookie}\r\n\r\n"
        before = server.resident_bytes()
        with ExitStack() as stack:
            for _ in range(30):
                wire = stack.enter_context(socket.socket())
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                wire.connect(server.address)
                wire.sendall(request.encode())
            time.sleep(3)
            grown = server.resident_bytes() - before
            assert server.is_healthy()
    assert grown < 60 * 2**20  # whole files would be 270 MiB


@pytest.mark.parametrize("swapped", ["link", "pipe", "device"])
def test_an_upload_that_became_something_else_is_not_opened(server, tmp_path, swapped):
    """Nobody can do this from outside; the door stays shut all the same."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    with server.visitor() as anna:
        path = Path(upload(anna, "desk.png", png()).json()[0])
        path.unlink()
        if swapped == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(secret if swapped == "link" else "/dev/zero")

        assert anna.get(f"/gradio_api/file={path}").status_code == 404
        assert call_chat(anna, image=picture_of(str(path)))[0] == "error"
    assert server.is_healthy()


def test_names_of_uploads_cannot_lead_elsewhere(server):
    hostile = [
        "../../evil.png",
        "/etc/cron.d/x.png",
        "..",
        ".",
        "a\\..\\b.png",
        "x" * 500,
        "\u202egnp.exe",
        "\U00020000" * 300,  # four bytes each
    ]
    uploads = next(server.data_folder.glob("uploads-*"))
    with server.visitor() as anna:
        for name in hostile:
            answer = upload(anna, name, png())
            assert answer.status_code == 200, name
            assert Path(answer.json()[0]).resolve().is_relative_to(uploads.resolve()), name


def test_a_visitor_keeps_a_dozen_unsent_pictures_and_the_oldest_goes_first(server):
    with server.visitor() as anna, server.visitor() as ben:
        bens = upload(ben, "ben.png", png()).json()[0]
        paths = [upload(anna, f"{number}.png", png()).json()[0] for number in range(14)]

        assert [Path(path).exists() for path in paths] == [False] * 2 + [True] * 12
        assert Path(bens).exists()


def test_deletion_takes_the_unsent_pictures_along(server):
    with server.visitor() as anna:
        path = Path(upload(anna, "desk.png", png()).json()[0])
        assert path.is_file()
        assert anna.post("/forget").status_code == 200
    assert not path.exists()


def test_a_picture_of_a_refused_call_is_deleted(server):
    with server.client() as program:
        path = upload(program, "notes.png", b"no picture").json()[0]
        kind, answer = call_chat(program, image=picture_of(path))

    assert kind == "error"
    assert "not an image" in str(answer)
    assert not Path(path).exists()


def test_an_honest_program_sends_a_picture(server):
    with server.client() as program:
        path = upload(program, "desk.png", png()).json()[0]
        answer = program.post("/gradio_api/call/chat", json=chat_body(image=picture_of(path)))
        kind, turns = heard(program, answer.json()["event_id"])

    assert kind == "complete"
    assert turns[0]["complete"] is True


def test_what_a_killed_server_left_is_gone_at_the_next_start(server, tmp_path):
    with server.visitor() as anna:
        living = Path(upload(anna, "desk.png", png()).json()[0])
    with running_server(tmp_path, data=server.data_folder) as second, second.visitor() as ben:
        killed = Path(upload(ben, "desk.png", png()).json()[0])
        second.process.kill()
        second.process.wait(10)
    assert killed.is_file()
    with running_server(tmp_path, data=server.data_folder):
        assert not killed.exists()
        assert living.is_file(), "a server beside a living one takes its uploads"


def test_httpx_is_what_these_tests_think_it_is():
    """The paths above must reach the server as they are written."""
    request = httpx.Client(base_url="http://x").build_request(
        "GET", "/gradio_api/file=/proc/self/environ"
    )
    assert request.url.raw_path == b"/gradio_api/file=/proc/self/environ"
