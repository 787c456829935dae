"""Services with scripted models, and a visitor of theirs."""

from pathlib import Path

import pytest

from tests.pages import Visitor, make_services
from ui_components.shared.services import Services


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make_services(tmp_path)


@pytest.fixture
def anna(services: Services) -> Visitor:
    return Visitor(services)
