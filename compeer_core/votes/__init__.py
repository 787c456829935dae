"""What people say about replies: votes and boards, annotations, how well people agree, and files of all.

`agreement` here is the function. What else the module of the same name holds is had by
``from compeer_core.annotation.agreement import ...``.
"""

from typing import TYPE_CHECKING

from compeer_core.annotation.annotations import agreement
from compeer_core.votes.board import bradley_terry

if TYPE_CHECKING:
    from compeer_core.votes.export import export_cer
    from compeer_core.votes.store import VoteStore

__all__ = ["VoteStore", "agreement", "bradley_terry", "export_cer"]


def __getattr__(name: str) -> object:
    """Load what needs a database when it is asked for: most who come here do without."""
    if name == "VoteStore":
        from compeer_core.votes.store import VoteStore

        return VoteStore
    if name == "export_cer":
        from compeer_core.votes.export import export_cer

        return export_cer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
