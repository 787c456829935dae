"""A real HTTP server for the tests of endpoint backends, and no key from the environment."""

from collections.abc import Iterator

import pytest

from tests.core.backends.openai.endpoint_server import Endpoint, serving


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("COMPEER_API_KEY", raising=False)
