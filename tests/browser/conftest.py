"""A server with scripted models and its page in a real Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.pages import make_services
from ui_components.server.app import build_server, serving
from ui_components.shared.services import Services


@pytest.fixture(autouse=True)
def _patient() -> None:
    expect.set_options(timeout=60_000)


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


def opened(page: Page, address: str, ready: str = "#conversation .log") -> Page:
    """Go to the page and wait until it has drawn the conversation, or something else."""
    page.goto(address)
    page.locator(ready).wait_for()
    return page


@pytest.fixture(params=[(1280, 800), (390, 844)], ids=["desktop", "phone"])
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The width and height of a laptop's window and of a phone, in CSS pixels."""
    width, height = request.param
    return width, height


@contextmanager
def visit(
    browser: Browser,
    address: str,
    size: tuple[int, int],
    *,
    ready: str = "#conversation .log",
    **context: Any,
) -> Iterator[Page]:
    """Open the page as a new visitor with a window of that size."""
    width, height = size
    is_phone = width < 760
    visitor = browser.new_context(
        viewport={"width": width, "height": height},
        is_mobile=is_phone,
        has_touch=is_phone,
        **context,
    )
    visitor.set_default_timeout(30_000)
    yield opened(visitor.new_page(), address, ready)
    visitor.close()


def message(page: Page) -> Locator:
    """The message box of Chat."""
    return page.locator("#message textarea")


def send(page: Page, text: str) -> None:
    """Type a message, press Enter, and wait until it is in the conversation."""
    turns = page.locator("#conversation .turn")
    number = turns.count()
    message(page).fill(text)
    message(page).press("Enter")
    expect(turns).to_have_count(number + 1)


def settled(page: Page) -> None:
    """Wait until no reply is being generated."""
    expect(page.locator("#conversation .log")).to_have_attribute("data-running", "no")


@pytest.fixture
def another(browser: Browser, address: str) -> Iterator[Page]:
    """A second visitor of the same server."""
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    yield opened(context.new_page(), address)
    context.close()
