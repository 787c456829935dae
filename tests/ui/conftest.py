"""Handlers that show an end as soon as it is there."""

import pytest

from ui_components.shared import jobs


@pytest.fixture(autouse=True)
def _quick_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at jobs more often than a page needs: most tests wait for little else."""
    monkeypatch.setattr(jobs, "UPDATES_PER_SECOND", 100)
