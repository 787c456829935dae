"""People's votes on replies: the store, the leaderboard, exports, and how far annotators agree."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compeer_core.annotation.annotations import agreement
    from compeer_core.votes.export import export_cer
    from compeer_core.votes.leaderboard.board import bradley_terry
    from compeer_core.votes.store import VoteStore

__all__ = ["VoteStore", "agreement", "bradley_terry", "export_cer"]

_MODULES = {
    "VoteStore": "compeer_core.votes.store",
    "agreement": "compeer_core.annotation.annotations",
    "bradley_terry": "compeer_core.votes.leaderboard.board",
    "export_cer": "compeer_core.votes.export",
}


def __getattr__(name: str) -> object:
    """Import on first use: the database and the statistics take a second each to load."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
