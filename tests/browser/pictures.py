"""Takes the README's screenshots with the shipped models in a real Chromium.

    python -m tests.browser.pictures            # all, into assets/screenshots
    python -m tests.browser.pictures compare    # one

Model output is the first sample, with a fixed seed where the page has a field for one. Two screens
need people's input: the votes of `results` are random and the item of `annotate` is a recording of
the tour; README says so under each.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import PIL.Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

import app
from compeer_core.annotation.desk import Desk
from compeer_core.annotation.items import add_items
from compeer_core.cer import Candidate, CerRecord
from compeer_core.registry import Registry
from compeer_core.row_files import write_rows
from compeer_core.tour.contents import load_tour
from compeer_core.votes.database import default_url
from compeer_core.votes.store import VoteStore
from tests.cases import case_of
from tests.conftest import CHROMIUM, CHROMIUM_FLAGS, REPOSITORY
from tests.voting import hold_votes
from ui_components.server.app import build_server, serving
from ui_components.shared.models import Models
from ui_components.shared.services import Services

OUTPUT = REPOSITORY / "assets" / "screenshots"
SIZE = {"width": 1280, "height": 860}
MESSAGE = "I lost my job last month and I cannot tell my family."
PATIENCE_MS = 480_000
FRAME_MS = 200
LAST_SECONDS = 3.0
ANIMATION_WIDTH = 800
ANNOTATOR = "ann"
COLOURS = 128

Frame = tuple[float, PIL.Image.Image]
"""When it was taken, in seconds, and the picture."""


class Camera:
    """A browser at a server with the shipped models."""

    def __init__(self, browser: Browser, address: str, token: str) -> None:
        self._browser = browser
        self._address = address
        self.token = token

    def page(self, screen: str, query: str = "") -> Page:
        context = self._browser.new_context(locale="en-US", timezone_id="UTC", viewport=SIZE)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(f"{self._address}/?screen={screen}{query}")
        page.locator(f"#screen-{screen}-button[aria-selected=true]").wait_for()
        page.wait_for_timeout(1500)
        return page


def _keep(name: str, page: Page) -> None:
    page.mouse.move(5, 400)
    page.wait_for_timeout(400)
    shot = PIL.Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = OUTPUT / f"{name}.png"
    shot.quantize(COLOURS, dither=PIL.Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path.name}: {path.stat().st_size / 1000:.0f} kB\n")


# --- the screens ---------------------------------------------------------------------------------


def chat(camera: Camera) -> None:
    page = camera.page("chat")
    _say(page)
    _keep("page", page)


def steer(camera: Camera) -> None:
    page = camera.page("chat")
    _say(page)
    page.get_by_role("button", name="Generate and rank").click()
    expect(page.locator("#inspector .ranking > li")).to_have_count(4, timeout=PATIENCE_MS)
    _wait_for_reply(page)
    page.locator("#inspector .ranking").scroll_into_view_if_needed()
    page.evaluate("document.querySelector('#inspector .ranking').scrollIntoView({block: 'center'})")
    _keep("steer", page)


def compare(camera: Camera) -> None:
    """An animation from the message to the names."""
    page = camera.page("compare")
    frames: list[Frame] = []

    def film(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            shot = PIL.Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            frames.append((time.monotonic(), shot))
            page.wait_for_timeout(FRAME_MS)

    box = page.locator("#compare-message textarea")
    box.fill(MESSAGE)
    film(1)
    box.press("Enter")
    ballot = page.locator("#compare-ballot .ballot")
    over = page.locator("#compare-ballot .ballot.is-open[data-over=yes]")
    while not over.count():
        film(0.1)
    page.evaluate("document.activeElement.blur()")
    film(2)
    page.keyboard.press("2")
    expect(ballot).to_contain_text("Your vote is stored")
    film(1)
    ballot.get_by_role("button", name="Reveal the models").click()
    expect(ballot.locator(".names dd")).to_have_count(2)
    ballot.scroll_into_view_if_needed()
    page.wait_for_timeout(600)
    film(3)
    _animate("compare", frames)


def results(camera: Camera) -> None:
    page = camera.page("results")
    page.locator("#results-board .board").wait_for()
    _keep("results", page)


def annotate(camera: Camera) -> None:
    page = camera.page("annotate")
    page.locator("#desk-token").fill(camera.token)
    page.locator("#desk-token").press("Enter")
    page.locator("#desk-item-title").wait_for()
    page.keyboard.press("q")
    page.wait_for_timeout(1200)
    _keep("annotate", page)


def tour(camera: Camera) -> None:
    page = camera.page("tour", "&step=2")
    page.keyboard.press("f")
    page.wait_for_timeout(1000)
    _keep("tour", page)


SCREENS: dict[str, Callable[[Camera], None]] = {
    each.__name__: each for each in (chat, steer, compare, results, annotate, tour)
}


def _say(page: Page) -> None:
    page.locator("#settings button").first.click()
    page.locator("#seed textarea, #seed input").first.fill("0")
    page.locator("#settings button").first.click()
    box = page.locator("#message textarea")
    box.fill(MESSAGE)
    box.press("Enter")
    page.locator("#conversation .turn").wait_for()
    _wait_for_reply(page)


def _wait_for_reply(page: Page) -> None:
    log = page.locator("#conversation .log")
    expect(log).to_have_attribute("data-running", "no", timeout=PATIENCE_MS)


def _animate(name: str, frames: Sequence[Frame]) -> None:
    """Write an animated WebP with the frames' original timing."""
    begun = [
        0,
        *(n for n in range(1, len(frames)) if frames[n][1].tobytes() != frames[n - 1][1].tobytes()),
    ]
    ends = [*(frames[n][0] for n in begun[1:]), frames[-1][0] + LAST_SECONDS]
    spans = [round(1000 * (end - frames[n][0])) for n, end in zip(begun, ends, strict=True)]
    height = round(ANIMATION_WIDTH * SIZE["height"] / SIZE["width"])
    small = [frames[n][1].resize((ANIMATION_WIDTH, height)) for n in begun]
    path = OUTPUT / f"{name}.webp"
    small[0].save(
        path, save_all=True, append_images=small[1:], duration=spans, loop=0, quality=55, method=6
    )
    sys.stdout.write(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {len(small)} frames\n")


# --- people's input -------------------------------------------------------------------------------


def _recorded_item() -> CerRecord:
    tour = load_tour()
    second, first = (tour.turns(stage.name)[0] for stage in tour.stages()[-2:])
    case = case_of("tour/job", first.said, corpus="tour", split="test", original=None)
    return CerRecord(
        id="tour/job",
        case=case,
        first=Candidate(author=first.model.name, reply=first.reading.turn.reply, turn=first.raw),
        second=Candidate(author=second.model.name, reply=second.reading.turn.reply),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Take pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.pictures", description=__doc__)
    parser.add_argument("screens", nargs="*", choices=[[], *SCREENS], help="which; all by default")
    chosen = parser.parse_args(argv).screens or list(SCREENS)
    OUTPUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, VoteStore(default_url(Path(folder))) as votes:
        services = Services(Models(Registry.from_toml(app.MODELS)), votes, grace_seconds=60)
        if "results" in chosen:
            hold_votes(votes, 60, models=[one.name for one in services.models.entries("policy")])
        desk = Desk(votes)
        token = desk.add_annotator(ANNOTATOR)
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, [_recorded_item()])
        add_items(desk, rows)
        services.models.warm_up(lambda error: sys.exit(str(error))).join()
        with serving(build_server(services)) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
            for name in chosen:
                SCREENS[name](Camera(browser, address, token))
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
