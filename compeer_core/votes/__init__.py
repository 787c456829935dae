"""What people say about replies: annotations, how well people agree, and files of both."""

from compeer_core.votes.annotations import agreement

__all__ = ["agreement"]
