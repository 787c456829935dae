"""A model behind an endpoint for the tests of the whole route."""

from collections.abc import Iterator

import pytest

from tests.training.cer.endpoint import Endpoint
from tests.training.cer.whole_route import answer


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(answer) as running:
        yield running
