"""The owner's part of the annotation desk on a real server process: only the owner gets there."""

import contextlib
import re

import httpx
import pytest

from compeer_core.annotation.desk import Desk
from compeer_core.annotation.owner import DeskOwner
from compeer_core.row_files import write_rows
from compeer_core.votes.database import default_url
from compeer_core.votes.store import VoteStore
from tests.security.server_process import ServerProcess
from tests.ui.annotate.test_annotate import record
from ui_components.annotate.annotators import ANNOTATOR_COOKIE
from ui_components.annotate.owner_routes import IMPORT_PATH
from ui_components.server.request_filter import MAX_BODY_BYTES
from ui_components.server.visitors import COOKIE

ACTIONS = ("person", "link", "revoke", "samples", "assign", "remove", "import")


@pytest.fixture(scope="module")
def printed(server: ServerProcess) -> list[str]:
    """What the server prints after its address."""
    assert server.process.stdout is not None
    return [server.process.stdout.readline() for _ in range(2)]


@pytest.fixture
def store(server: ServerProcess):
    with VoteStore(default_url(server.data_folder)) as opened:
        yield opened


def signed_in(server: ServerProcess, token: str) -> httpx.Client:
    client = server.visitor()
    client.post("/desk/login", json={"token": token}).raise_for_status()
    return client


def do(client: httpx.Client, action: str, **options):
    fields = {"name": "eve", "batch": "", "overlap": "0", "share": "100"}
    files = {"items": ("rows.jsonl", b"{}")}
    return client.post(f"/desk/owner/{action}", data=fields, files=files, **options)


def test_the_printed_token_is_the_owners_and_the_printed_command_names_the_database(
    server, printed, store
):
    owner = DeskOwner(store)
    token = re.search(r"with the token (\S+)$", printed[0])[1]

    assert token == owner.token()
    assert f"--database-url sqlite:///{server.data_folder}/compeer.sqlite3" in printed[1]
    client = signed_in(server, token)
    assert 'data-place="people"' in client.post("/desk/view", json={"tab": "t"}).json()["html"]
    assert re.search("HttpOnly; SameSite=Lax", do_log_in(server, token).headers["set-cookie"])


def do_log_in(server, token):
    return server.visitor().post("/desk/login", json={"token": token})


@pytest.mark.parametrize("action", ACTIONS)
def test_strangers_annotators_and_forgers_are_refused(server, store, action):
    desk = Desk(store)
    token = desk.add_annotator(f"cy {action}", may_adjudicate=True)
    owner = signed_in(server, DeskOwner(store).token())
    cy = signed_in(server, token)
    owners = owner.cookies[ANNOTATOR_COOKIE]
    people = [each.name for each in DeskOwner(store).people()]

    stranger = server.visitor()
    assert do(stranger, action).status_code == 401
    for forged in (owners[:-1] + ("a" if owners[-1] != "a" else "b"), "x" * 4000, "", "0.0"):
        stranger.cookies.set(ANNOTATOR_COOKIE, forged)
        assert do(stranger, action).status_code == 401
    # The signed cookie of a visitor is no session of the desk.
    stranger.cookies.set(ANNOTATOR_COOKIE, owner.cookies[COOKIE])
    assert do(stranger, action).status_code == 401
    assert do(cy, action).status_code == 403
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://example.org"},
    ):
        assert do(owner, action, headers=headers).status_code == 403
    assert [each.name for each in DeskOwner(store).people()] == people
    assert DeskOwner(store).batches() == []


def test_wrong_tokens_get_nothing(server, store):
    token = DeskOwner(store).token()
    for wrong in (token[:-1], token.swapcase(), token + token, ""):
        answer = do_log_in(server, wrong)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_only_the_owner_may_send_more_than_others(server, store, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [record(number) for number in range(300)])
    rows = (tmp_path / "rows.jsonl").read_bytes()
    assert len(rows) > MAX_BODY_BYTES
    owner = signed_in(server, DeskOwner(store).token())

    def sent(client):
        files = {"items": ("rows.jsonl", rows)}
        return client.post(IMPORT_PATH, data={"share": "100"}, files=files)

    # Refused before the body is read, so that the connection may break meanwhile.
    with contextlib.suppress(httpx.HTTPError):
        assert sent(server.visitor()).status_code == 401
    assert DeskOwner(store).batches() == []
    assert sent(owner).status_code == 200
    assert [each.items for each in DeskOwner(store).batches()] == [300]
    assert owner.post("/desk/owner/assign", content=rows).status_code == 413
    DeskOwner(store).remove("rows")
