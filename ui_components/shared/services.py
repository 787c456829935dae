"""What all visitors of one server share. Handlers get it handed in; nothing is global."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import gradio as gr
from fastapi import Request
from gradio.utils import get_upload_folder

from compeer_core.votes.battles import Deletion
from compeer_core.votes.store import VoteStore
from ui_components.compare.jobs import Comparing
from ui_components.results.boards import Boards
from ui_components.server.deletions import Deletions, arrived
from ui_components.server.metrics import Metrics
from ui_components.server.uploads import Uploads
from ui_components.server.visitors import LANGUAGE_COOKIE, Caller, Visitors, address_of
from ui_components.shared.generation import GRACE_SECONDS, Writers
from ui_components.shared.models import Models
from ui_components.shared.session import Session
from ui_components.shared.session_store import SessionKey, SessionStore
from ui_components.shared.texts import Texts, choose_language, load_texts, region_of


@dataclass(frozen=True)
class Services:
    """The shared parts of one server."""

    models: Models
    votes: VoteStore
    language: str | None = None
    """The language of the page where the visitor has chosen none; None asks the browser."""
    deletions: Deletions = field(default_factory=Deletions)
    metrics: Metrics = field(default_factory=Metrics)
    uploads: Uploads = field(
        default_factory=lambda: Uploads(Path(get_upload_folder()) / "pictures")
    )
    grace_seconds: float = GRACE_SECONDS
    """How long a reply goes on although its page was closed, so that a reload finds it."""
    visitors: Visitors = field(init=False)
    """Signed with the database's secret, so that a vote is its owner's after a restart."""
    store: SessionStore[Session] = field(init=False)
    writers: Writers = field(init=False)
    comparing: Comparing = field(init=False)
    boards: Boards = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "visitors", Visitors(self.votes.secret("visitors").hex()))
        store = SessionStore(Session(), is_current=self.deletions.is_current)
        object.__setattr__(self, "store", store)
        writers = Writers(self.models, self.store, self.metrics, grace_seconds=self.grace_seconds)
        object.__setattr__(self, "writers", writers)
        comparing = Comparing(
            self.models,
            self.votes,
            self.metrics,
            grace_seconds=self.grace_seconds,
            is_current=self.deletions.is_current,
        )
        object.__setattr__(self, "comparing", comparing)
        object.__setattr__(self, "boards", Boards(self.votes))

    def texts(self, request: gr.Request | Request) -> Texts:
        """The words in the language of whoever asks."""
        chosen = request.cookies.get(LANGUAGE_COOKIE)
        accepted = request.headers.get("accept-language")
        texts = load_texts(choose_language(chosen, accepted, self.language))
        return replace(texts, region=region_of(accepted, texts.language))

    def key(self, request: gr.Request, conversation: str) -> SessionKey:
        """The conversation of whoever asks."""
        caller = self.caller(request)
        generation = self.deletions.generation(caller.visitor, arrived(request))
        return SessionKey(caller.visitor, conversation, generation, network=caller.network)

    def owner(self, request: gr.Request | Request) -> str:
        """Whose an upload is: the visitor's of the cookie, or the address's where there is none."""
        visitor = self.visitors.read(request.cookies)
        return visitor or f"address {address_of(request) or ''}"

    def caller(self, request: gr.Request | Request) -> Caller:
        """Whoever asks; somebody without a cookie is taken for a program."""
        network = self.visitors.network(address_of(request))
        visitor = self.visitors.read(request.cookies)
        return Caller(network, visitor, is_program=not visitor)

    def knows(self, visitor: str) -> bool:
        """Whether a conversation or a comparison of a visitor is kept."""
        return self.store.holds(visitor) or self.comparing.store.holds(visitor)

    def forget(self, visitor: str) -> Deletion:
        """Delete everything that is kept of a visitor: conversations, battles and votes.

        What is still on its way is ended, and nothing of it is kept.

        Raises:
            StoreError: The database failed: battles and votes are there as before, conversations
                are gone.
        """
        self.deletions.add(visitor)
        self.writers.forget(visitor)
        self.store.forget(visitor)
        self.comparing.forget(visitor)
        self.uploads.forget_owner(visitor)
        return self.votes.delete_voter(visitor)
