"""The report of evaluations in a real browser: on a phone, on a laptop, in print, and with hostile transcripts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.training.cer.endpoint import Endpoint
from tests.training.evaluation.finished import HOSTILE, Finished, speak
from training.evaluation import report


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    with Endpoint(answer=speak) as endpoint:
        runs = Finished(folder, endpoint.url)
        folders = (runs.esc_eval("esc", "kind", "curt"), runs.sage("sage", "kind", "curt"))
    report.run(report.Config(title="Two runs", runs=folders, output=folder / "report"))
    return (Path(folder) / "report" / "report.html").as_uri()


@pytest.fixture
def requests() -> list[str]:
    """The addresses that the page asked for."""
    return []


@pytest.fixture
def page(
    browser: Browser, size: tuple[int, int], address: str, requests: list[str]
) -> Iterator[Page]:
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, is_mobile=width < 760
    )
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    yield page
    context.close()


def test_hostile_transcripts_open_as_text(page, requests, address):
    transcript = page.locator("details.transcript").first
    expect(transcript.locator(".text").first).to_be_hidden()
    transcript.locator("summary").press("Enter")

    expect(transcript.locator(".text").nth(1)).to_be_visible()
    assert HOSTILE in transcript.locator(".text").nth(1).evaluate("each => each.textContent")
    assert page.title() == "Two runs"
    assert [url for url in requests if not url.startswith("data:")] == [address]


def test_the_page_fits_the_window_and_its_tables_scroll(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for plot in page.locator("img").all():
        assert plot.evaluate("each => each.naturalWidth") > 0
    for region in page.locator(".scroll").all():
        assert region.evaluate("each => each.tabIndex") == 0
    assert not Axe().run(page).response["violations"]


def test_the_contents_lead_to_the_transcripts_of_each_run(page):
    page.get_by_role("link", name="transcripts").nth(1).click()

    expect(page.locator("details.transcript", has_text="seed 0").first).to_be_in_viewport()


def test_print_leaves_out_closed_transcripts(page):
    page.locator("details.transcript").nth(1).locator("summary").click()
    page.emulate_media(media="print")

    expect(page.locator("nav")).to_be_hidden()
    expect(page.locator("details.transcript").nth(0)).to_be_hidden()
    expect(page.locator("details.transcript").nth(1)).to_be_visible()
    assert page.locator(".scroll").first.evaluate("each => getComputedStyle(each).overflow") == (
        "visible"
    )
