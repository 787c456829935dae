"""What people say about replies: votes and boards, annotations, how well people agree, and files of all.

`agreement` here is the function. What else the module of the same name holds is had by
``from compeer_core.votes.agreement import ...``.
"""

from compeer_core.votes.annotations import agreement
from compeer_core.votes.board import bradley_terry

__all__ = ["agreement", "bradley_terry"]
