"""What people say about replies: annotations, how well people agree, and files of both.

`agreement` here is the function. What else the module of the same name holds is had by
``from compeer_core.votes.agreement import ...``.
"""

from compeer_core.votes.annotations import agreement

__all__ = ["agreement"]
