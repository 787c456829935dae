"""Time to first paint with 500 conversations and 500 votes in memory."""

import sys
from dataclasses import replace

import pytest
from playwright.sync_api import Page

from compeer_core.dialogue import Speaker, Utterance
from tests.browser.conftest import opened
from tests.pages import make_services
from tests.voting import hold_votes
from ui_components.server.app import build_server, serving
from ui_components.shared.session import Session, Turn
from ui_components.shared.session_store import SessionKey

pytestmark = [
    pytest.mark.slow,  # a statement about time, which holds on a machine that does nothing else
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]

CONVERSATIONS = 500
SECOND_MS = 1000
CONTENT = {
    "compare": "#compare-talk .talk",
    "results": "#results-board section, #results-board .board",
    "annotate": "#screen-annotate h2",
    "tour": "#tour h2",
    "chat": "#conversation .log",
}
PAINTED = """([tab, content]) => new Promise((done) => {
    const begun = performance.now();
    document.getElementById(tab).click();
    const look = () => {
        const shown = [...document.querySelectorAll(content)].some((one) => one.offsetHeight > 0);
        if (shown) requestAnimationFrame(() => done(performance.now() - begun));
        else requestAnimationFrame(look);
    };
    look();
})"""


def test_each_tab_is_painted_within_a_second(chromium: Page, tmp_path, capsys):
    services = make_services(tmp_path)
    said = Turn(Utterance(Speaker.SEEKER, "I lost my job and cannot sleep. " * 10))
    for number in range(CONVERSATIONS):
        key = SessionKey(f"visitor-{number}", "conversation-" + "x" * 16)
        turns = tuple(replace(said, key=f"{number}-{turn}") for turn in range(6))
        services.store.update(key, lambda _, turns=turns: Session(turns=turns))
    hold_votes(services.votes, CONVERSATIONS)
    with serving(build_server(services)) as address:
        page = opened(chromium, address)
        page.wait_for_timeout(3000)
        took = {
            name: page.evaluate(PAINTED, [f"screen-{name}-button", content])
            for name, content in CONTENT.items()
        }
        page.reload()
        page.locator("#conversation .log").wait_for()
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")

    assert len(services.store) >= CONVERSATIONS
    capsys.readouterr()
    with capsys.disabled():
        sys.stdout.write(f"milliseconds: {took}; the page itself: {first:.0f}\n")
    assert {name: ms for name, ms in took.items() if ms > SECOND_MS} == {}
