"""What all visitors of one server share. Handlers receive it; nothing is global."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import gradio as gr
from fastapi import Request
from gradio.utils import get_upload_folder

from compeer_core.safety import RiskCheck, find_risk
from compeer_core.votes.battles import Deletion
from compeer_core.votes.store import VoteStore
from ui_components.chat.jobs import ReplyJobs
from ui_components.compare.comparison import Comparison
from ui_components.compare.jobs import RoundJobs
from ui_components.results.boards import DEMO, Boards
from ui_components.server.deletions import Deletions, arrived
from ui_components.server.metrics import Metrics
from ui_components.server.uploads import Uploads
from ui_components.server.visitors import LANGUAGE_COOKIE, Caller, Visitors, address_of
from ui_components.shared.jobs import GRACE_SECONDS
from ui_components.shared.models import Models
from ui_components.shared.risk import RiskStates
from ui_components.shared.session import Session
from ui_components.shared.session_store import SessionKey, SessionStore
from ui_components.shared.texts import Texts, choose_language, load_texts, region_of


@dataclass(frozen=True)
class Services:
    """The shared parts of one server."""

    models: Models
    votes: VoteStore
    language: str | None = None
    """The language for visitors who have chosen none; None follows the browser."""
    deletions: Deletions = field(default_factory=Deletions)
    metrics: Metrics = field(default_factory=Metrics)
    uploads: Uploads = field(
        default_factory=lambda: Uploads(Path(get_upload_folder()) / "pictures")
    )
    grace_seconds: float = GRACE_SECONDS
    """How long generation continues after its page was closed, so that a reload finds it."""
    gated: bool = True
    """Whether a reply that has ended must pass the gate of `compeer_core.gate` to stay on the page."""
    demo_board: bool = False
    """Whether the leaderboard ranks models from the first vote on."""
    risk_check: RiskCheck = find_risk
    """Looks for signs of danger in every message of Chat, Compare and the API."""
    risks: RiskStates = field(init=False)
    visitors: Visitors = field(init=False)
    """Signed with the database's secret, so that votes keep their owner across restarts."""
    store: SessionStore[Session] = field(init=False)
    chat_jobs: ReplyJobs = field(init=False)
    compare_jobs: RoundJobs = field(init=False)
    boards: Boards = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "visitors", Visitors(self.votes.secret("visitors").hex()))
        risks = RiskStates(self.risk_check, self.deletions.is_current)
        object.__setattr__(self, "risks", risks)
        store = SessionStore(Session(), is_current=self.deletions.is_current)
        object.__setattr__(self, "store", store)
        chat_jobs = ReplyJobs(
            self.models, store, self.metrics, grace_seconds=self.grace_seconds, gated=self.gated
        )
        object.__setattr__(self, "chat_jobs", chat_jobs)
        compare_jobs = RoundJobs(
            self.models,
            SessionStore(Comparison(), is_current=self.deletions.is_current),
            self.votes,
            self.metrics,
            grace_seconds=self.grace_seconds,
            gated=self.gated,
        )
        object.__setattr__(self, "compare_jobs", compare_jobs)
        object.__setattr__(self, "boards", Boards(self.votes, DEMO if self.demo_board else None))

    def texts(self, request: gr.Request | Request) -> Texts:
        """The texts in the visitor's language."""
        chosen = request.cookies.get(LANGUAGE_COOKIE)
        accepted = request.headers.get("accept-language")
        texts = load_texts(choose_language(chosen, accepted, self.language))
        return replace(texts, region=region_of(accepted, texts.language))

    def key(self, request: gr.Request, conversation: str) -> SessionKey:
        """The key of the visitor's conversation."""
        caller = self.caller(request)
        generation = self.deletions.generation(caller.visitor, arrived(request))
        return SessionKey(caller.visitor, conversation, generation, network=caller.network)

    def owner(self, request: gr.Request | Request) -> str:
        """The owner of an upload: the cookie's visitor, or the address if there is no cookie."""
        visitor = self.visitors.read(request.cookies)
        return visitor or f"address {address_of(request) or ''}"

    def caller(self, request: gr.Request | Request) -> Caller:
        """The sender of a request; without a cookie it counts as a program."""
        network = self.visitors.network(address_of(request))
        visitor = self.visitors.read(request.cookies)
        return Caller(network, visitor, is_program=not visitor)

    def knows(self, visitor: str) -> bool:
        """Whether a conversation or a comparison of a visitor is stored."""
        return self.store.holds(visitor) or self.compare_jobs.store.holds(visitor)

    def forget(self, visitor: str) -> Deletion:
        """Delete everything stored about a visitor: conversations, risk state, battles and votes.

        Running jobs are stopped and leave nothing behind.

        Raises:
            StoreError: The database failed: battles and votes remain, conversations are deleted.
        """
        self.deletions.add(visitor)
        self.chat_jobs.forget(visitor)
        self.compare_jobs.forget(visitor)
        self.risks.forget(visitor)
        self.uploads.forget_owner(visitor)
        return self.votes.delete_voter(visitor)
