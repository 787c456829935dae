"""A server with scripted models and its page in a real Chromium."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.pages import make_services
from ui_components.server.app import build_server, serving
from ui_components.shared.services import Services


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return make_services(tmp_path_factory.mktemp("models"), grace_seconds=4.0)


@pytest.fixture(scope="session")
def address(services: Services) -> Iterator[str]:
    with serving(build_server(services)) as where:
        yield where


@pytest.fixture
def page(chromium: Page, address: str) -> Page:
    return opened(chromium, address)


def opened(page: Page, address: str) -> Page:
    """Go to the page and wait until it has drawn the conversation."""
    page.goto(address)
    page.locator("#conversation .log").wait_for()
    return page


@pytest.fixture
def another(browser: Browser, address: str) -> Iterator[Page]:
    """A second visitor of the same server."""
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    yield opened(context.new_page(), address)
    context.close()
