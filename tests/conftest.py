"""What every test stands on: no network, no downloads, a real browser, the public corpora.

Environment variables it reads:

``COMPEER_REQUIRE_BROWSER=1``
    A missing browser is a failure instead of a skip, and so is a run that collected browser tests
    but ran none.
``COMPEER_CHROMIUM``
    The Chromium to drive, by default /usr/bin/chromium-headless-shell (the same engine without
    windows, and faster) or else /usr/bin/chromium.
``COMPEER_CORPORA``
    The folder of public corpora, by default shared/corpora beside the checkout.
"""

import gc
import ipaddress
import math
import os
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    GRADIO_ANALYTICS_ENABLED="False",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)
# No test may reach the votes of whoever runs it, or serve where a Space would.
os.environ.pop("COMPEER_DATA_DIR", None)
os.environ.pop("COMPEER_DATABASE_URL", None)
os.environ.pop("GRADIO_SERVER_NAME", None)
os.environ.pop("GRADIO_SERVER_PORT", None)
os.environ.pop("SPACE_ID", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: threads of one would only take them from another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The settings above must stand before any library reads them.
import pytest
from hypothesis import settings
from playwright.sync_api import Browser, Page, sync_playwright

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("compeer", deadline=None)
settings.load_profile("compeer")

REPOSITORY = Path(__file__).resolve().parent.parent
HEADLESS_SHELL = Path("/usr/bin/chromium-headless-shell")
CHROMIUM = Path(
    os.environ.get("COMPEER_CHROMIUM")
    or (HEADLESS_SHELL if HEADLESS_SHELL.exists() else "/usr/bin/chromium")
)
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _truthy(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "yes"}


BROWSER_REQUIRED = _truthy("COMPEER_REQUIRE_BROWSER")


# --- the network -------------------------------------------------------------------------------


class NetworkForbiddenError(RuntimeError):
    """A test reached for an address outside this machine.

    Not an OSError, so that code which forgives a lost connection does not forgive this.
    """


def _is_local(host: object) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    if name is None or name in {"", "localhost"}:
        return True
    if not isinstance(name, str):
        return False
    try:
        address = ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return name.endswith(".localhost") or name == socket.gethostname()
    return address.is_loopback or address.is_unspecified


_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_getaddrinfo = socket.getaddrinfo
_load_verify_locations = ssl.SSLContext.load_verify_locations
_load_default_certs = ssl.SSLContext.load_default_certs


def _refuse_outside(address: object) -> None:
    if isinstance(address, tuple) and not _is_local(address[0]):
        raise NetworkForbiddenError(
            f"a test tried to reach {address[0]}; mark it 'network' if it must"
        )


def _guarded_connect(self: socket.socket, address: Any) -> None:
    _refuse_outside(address)
    _connect(self, address)


def _guarded_connect_ex(self: socket.socket, address: Any) -> int:
    _refuse_outside(address)
    return _connect_ex(self, address)


def _guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_outside((host,))
    return _getaddrinfo(host, *args, **kwargs)


def _guard_network(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(socket.socket, "connect", _guarded_connect)
    patch.setattr(socket.socket, "connect_ex", _guarded_connect_ex)
    patch.setattr(socket, "getaddrinfo", _guarded_getaddrinfo)
    # Whom the world trusts does not matter here, and each client of HTTP would read it for 50 ms.
    patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
    patch.setattr(ssl.SSLContext, "load_default_certs", lambda *_, **__: None)


@pytest.fixture(scope="session", autouse=True)
def _only_this_machine() -> Iterator[None]:
    """Session wide, because servers and fixtures outlive the test that started them."""
    with pytest.MonkeyPatch.context() as patch:
        _guard_network(patch)
        yield


@pytest.fixture(autouse=True)
def _the_world_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("network") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _connect)
        patch.setattr(socket.socket, "connect_ex", _connect_ex)
        patch.setattr(socket, "getaddrinfo", _getaddrinfo)
        patch.setattr(ssl.SSLContext, "load_verify_locations", _load_verify_locations)
        patch.setattr(ssl.SSLContext, "load_default_certs", _load_default_certs)
        yield


# --- the order of tests, and browser tests that must not be lost --------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run browser tests last: Playwright's event loop stays in the main thread once started.

    Workers of xdist receive whole files in this order, so the browser comes last in each of them too;
    therefore a file holds either browser tests or others. Of the browser files, those with most tests
    come first, so that the workers end at about the same time.
    """
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "browser" in names:
            item.add_marker(pytest.mark.browser)
        if "corpora" in names:
            item.add_marker(pytest.mark.corpora)
    of_browser = {item.path for item in items if _needs_browser(item)}
    mixed = of_browser & {item.path for item in items if not _needs_browser(item)}
    if mixed:
        names = ", ".join(sorted(path.name for path in mixed))
        raise pytest.UsageError(f"browser tests belong into files of their own: {names}")
    tests_of = Counter(item.path for item in items)
    items.sort(
        key=lambda item: tests_of[item.path] if _needs_browser(item) else math.inf, reverse=True
    )


def pytest_collection_finish() -> None:
    """Take the imported libraries out of garbage collection.

    With all of them loaded, a full collection takes most of a second, and transformers' trainer asks for
    one at each start.
    """
    gc.collect()
    gc.freeze()


def _needs_browser(item: pytest.Item) -> bool:
    return item.get_closest_marker("browser") is not None


def _browser_tests(terminal: pytest.TerminalReporter, outcome: str) -> int:
    return sum("browser" in report.keywords for report in terminal.getreports(outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many browser tests ran, in words that a script can find."""
    passed = _browser_tests(terminalreporter, "passed")
    skipped = _browser_tests(terminalreporter, "skipped")
    terminalreporter.write_line(f"browser tests: {passed} passed, {skipped} skipped")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where the browser is required, a skipped browser test fails the run, and so does none."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if not BROWSER_REQUIRED or terminal is None or session.exitstatus != pytest.ExitCode.OK:
        return
    if _browser_tests(terminal, "skipped") or not _browser_tests(terminal, "passed"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# --- a real Chromium ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, started once."""
    if not CHROMIUM.exists():
        reason = f"there is no {CHROMIUM}; on Debian: apt-get install chromium"
        if BROWSER_REQUIRED:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield running
        running.close()


@pytest.fixture
def chromium(browser: Browser) -> Iterator[Page]:
    """A page of a browser context of its own: no cookies, no storage, English."""
    context = browser.new_context(
        locale="en-US", timezone_id="UTC", viewport={"width": 1280, "height": 900}
    )
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


# --- the public corpora -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of public corpora; a test that asks for it is skipped where there is none."""
    named = os.environ.get("COMPEER_CORPORA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "corpora"
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}; COMPEER_CORPORA names the folder")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY
