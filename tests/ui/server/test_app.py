"""The server around the page: headers, cookie, language, images, and gradio's settings."""

import asyncio
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.votes.battles import BattlePlan, SidePlan
from tests.pages import Visitor, make_services
from ui_components.server.app import _add_routes as add_routes
from ui_components.server.app import build_server, serving
from ui_components.server.visitors import COOKIE
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return make_services(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(services: Services):
    here = ("127.0.0.1", 50_000)
    with warnings.catch_warnings(), TestClient(build_server(services), client=here) as client:
        yield client


def config(client: TestClient) -> dict:
    return json.loads(client.get("/config").text)


def test_every_answer_carries_the_security_headers(client):
    for path in ("/", "/healthz", "/metrics", "/config", "/theme.css", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "connect-src 'self'" in policy, path
        assert "img-src 'self' data: blob:" in policy, path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["referrer-policy"] == "no-referrer", path


def test_the_page_gives_a_signed_cookie_that_scripts_cannot_read(client, services):
    client.cookies.clear()
    first = client.get("/").headers["set-cookie"]
    assert "HttpOnly" in first
    assert "SameSite=Lax" in first
    assert services.visitors.read({COOKIE: client.cookies[COOKIE]})
    assert "set-cookie" not in client.get("/").headers  # it is kept


def test_a_forged_cookie_is_replaced(client, services):
    client.cookies.clear()
    client.cookies.set(COOKIE, "anna.forged")

    assert "set-cookie" in client.get("/").headers
    assert services.visitors.read({COOKIE: "anna.forged"}) == ""


def test_in_a_frame_of_another_site_the_cookie_still_travels(client):
    client.cookies.clear()
    cookie = client.get("https://testserver/").headers["set-cookie"]

    assert "SameSite=None; Secure; Partitioned" in cookie


def test_health_names_the_model_and_whether_it_is_loaded(client, services):
    assert client.get("/healthz").json()["model_state"] == "loading"
    services.models.policy("scripted-policy")
    answer = client.get("/healthz").json()

    assert answer["status"] == "ok"
    assert answer["model"] == "scripted-policy"
    assert answer["model_state"] == "ready"
    assert answer["gate"] is True


def test_metrics_count_turns_and_hold_no_words(client, services):
    anna = Visitor(services)
    asyncio.run(anna.send("something private"))
    text = client.get("/metrics").text

    assert 'compeer_turns_total{model="scripted-policy",status="finished"}' in text
    assert "compeer_waiting 0.0" in text
    assert "private" not in text


@pytest.mark.parametrize(
    ("host", "headers", "is_shown"),
    [
        ("127.0.0.1", {}, True),
        ("127.8.8.8", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("192.0.2.7", {}, False),
        ("::ffff:192.0.2.7", {}, False),
        ("10.0.0.1", {}, False),
        ("no address", {}, False),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, False),
        ("127.0.0.1", {"x-forwarded-proto": "https"}, False),
        ("127.0.0.1", {"forwarded": "for=127.0.0.1"}, False),
        ("127.0.0.1", {"x-real-ip": "127.0.0.1"}, False),
        ("127.0.0.1", {"via": "1.1 proxy"}, False),
    ],
)
def test_metrics_are_local_by_default(services, host, headers, is_shown):
    app = FastAPI()
    add_routes(app, services, api_only=True, public_metrics=False)
    answer = TestClient(app, client=(host, 50_000)).get("/metrics", headers=headers)

    assert answer.status_code == (200 if is_shown else 403)
    assert ("compeer_turns" in answer.text) is is_shown
    assert is_shown or "--metrics public" in answer.text


def test_a_flag_makes_the_metrics_public(services):
    app = FastAPI()
    add_routes(app, services, api_only=True, public_metrics=True)

    assert TestClient(app, client=("192.0.2.7", 50_000)).get("/metrics").status_code == 200


def test_a_local_proxy_gets_no_metrics(services):
    app = FastAPI()
    add_routes(app, services, api_only=True, public_metrics=False)
    with serving(app) as address:
        assert httpx.get(f"{address}/metrics").status_code == 200
        for name in ("X-Forwarded-For", "X-Forwarded-Host"):
            headers = {name: "127.0.0.1"}
            assert httpx.get(f"{address}/metrics", headers=headers).status_code == 403


def test_an_image_is_served_to_its_owner_only(client, services):
    from compeer_core.dialogue import Speaker, Utterance
    from ui_components.shared.session import Session, Turn

    anna = Visitor(services)
    turn = Turn(Utterance(Speaker.SEEKER, "", (Image(b"\x89PNG...", 1, 1),)))
    services.store.update(anna.key, lambda _: Session(turns=(turn,)))
    path = f"/pictures/{turn.key}/0"
    client.cookies.clear()
    assert client.get(path).status_code == 404
    client.cookies.set(COOKIE, anna.cookie)
    answer = client.get(path)

    assert answer.content == b"\x89PNG..."
    assert answer.headers["content-type"] == "image/png"
    assert "no-store" in answer.headers["cache-control"]
    assert client.get(f"/pictures/{turn.key}/1").status_code == 404


def test_the_page_is_in_the_language_that_the_browser_asks_for(client):
    client.cookies.clear()
    chinese = client.get("/", headers={"accept-language": "zh-CN,en;q=0.5"}).text
    english = client.get("/", headers={"accept-language": "fr,en;q=0.5"}).text

    assert '"zh-CN"' in re.search(r"<head><script>.*?</script>", chinese)[0]
    assert '"en"' in re.search(r"<head><script>.*?</script>", english)[0]


def test_the_language_can_be_switched_and_the_choice_is_remembered(client):
    client.cookies.clear()
    answer = client.get("/?lang=zh", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "./"
    assert (
        '"zh-CN"' in client.get("/", headers={"accept-language": "en"}).text.split("</script>")[0]
    )
    assert client.get("/?lang=xx", follow_redirects=False).status_code == 200


def test_gradio_keeps_and_publishes_nothing(client):
    settings = config(client)

    assert settings["analytics_enabled"] is False
    assert settings.get("run_history") in {False, None}
    assert client.get("/monitoring").status_code != 200
    assert client.get("/gradio_api/monitoring/summary").status_code != 200
    assert settings["show_error"] is False
    assert settings["max_file_size"] == 10 * 1024 * 1024


def test_programs_see_four_endpoints_and_none_of_the_page(client):
    named = client.get("/gradio_api/info").json()

    assert set(named["named_endpoints"]) == {"/chat", "/score", "/models", "/leaderboard"}
    assert named["unnamed_endpoints"] == {}


def test_uploads_over_the_limit_are_refused(client):
    answer = client.post(
        "/gradio_api/upload",
        files={"files": ("big.png", b"0" * (10 * 1024 * 1024 + 1), "image/png")},
    )

    assert answer.status_code == 413


def test_search_engines_are_asked_to_stay_away(client):
    assert "Disallow: /" in client.get("/robots.txt").text


def test_files_of_the_machine_are_not_served(client, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("private", encoding="utf-8")

    for path in (secret, Path("/etc/passwd"), Path("app.py").resolve()):
        assert client.get(f"/gradio_api/file={path}").status_code == 404


def test_without_a_page_there_are_the_endpoints_and_a_line_that_says_so(services):
    with TestClient(build_server(services, api_only=True)) as client:
        assert "without a page" in client.get("/").text
        assert set(client.get("/gradio_api/info").json()["named_endpoints"]) == {
            "/chat",
            "/score",
            "/models",
            "/leaderboard",
        }
        assert client.get("/healthz").json()["status"] == "ok"


def test_forget_deletes_the_visitors_data_and_rejects_other_sites(services, client):
    client.cookies.clear()
    client.get("/")
    visitor = services.visitors.read({COOKIE: client.cookies[COOKIE]})
    key = SessionKey(visitor, "conversation-" + "x" * 16)
    services.store.update(key, lambda session: replace(session, draft="my words"))
    battle = services.votes.open_battle(
        BattlePlan(
            voter=visitor,
            dialogue=Dialogue((Utterance(Speaker.SEEKER, "I am sad."),)),
            sides=(SidePlan("a", 1), SidePlan("b", 2)),
            seed=0,
        )
    )

    assert client.post("/forget", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert services.votes.battle(battle.id, visitor).id == battle.id
    answer = client.post("/forget", headers={"sec-fetch-site": "same-origin"})

    assert answer.json() == {"battles": 1, "votes": 0, "erased": True}
    assert services.store.get(key).draft == ""
    with pytest.raises(InputError):
        services.votes.battle(battle.id, visitor)
    client.cookies.clear()
    assert client.post("/forget").status_code == 403
