"""Shared by the page's tests: scripted models, services on them, and a visitor without a browser."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr

from compeer_core.registry import Registry
from compeer_core.votes.store import VoteStore
from tests.databases import database_in
from ui_components.chat.handlers import Chat
from ui_components.server.visitors import COOKIE
from ui_components.shared.models import Models
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey

REPLY = "That is a heavy thing to carry alone. What makes it hardest?"
SECOND_REPLY = "You noticed what this does to you, and that takes courage."
COMPLETE = (
    "<history>The seeker lost a job and told nobody.\nStage: Exploration</history>\n"
    "<emotion>There is fear of the next days.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4"
    "</emotion>\n"
    "<strategy>The seeker should feel understood first.\nStrategy: Reflection of Feelings</strategy>\n"
    f"<reply>{REPLY}</reply>"
)
SECOND = (
    "<history>The seeker says what is hard.\nStage: Comforting</history>\n"
    "<emotion>A little lighter.\nSentiment: Negative\nEmotion: Shame\nIntensity: 3</emotion>\n"
    "<strategy>Name what went well.\nStrategy: Affirmation and Reassurance</strategy>\n"
    f"<reply>{SECOND_REPLY}</reply>"
)
BROKEN = (
    "<history>About the exam.\nStage: Explore</history>\n"
    "<emotion>Tense.\nSentiment: Negative</emotion>\n"
    "<reply>You have come a long way.</reply>"
)
HOSTILE = (
    "<history>${window.stolen(1)} {{value}} <script>window.stolen(2)</script>\nStage: ${1+1}</history>\n"
    "<emotion>`${window.stolen(3)}`\nSentiment: Negative\nEmotion: Anger\nIntensity: 2</emotion>\n"
    "<strategy>\\${window.stolen(4)}\nStrategy: <b>Hug</b></strategy>\n"
    "<reply><img src=x onerror='window.stolen(5)'> ${window.stolen(6)} ![x](https://example.com/x.png)"
    "</reply>"
)
LOOP = COMPLETE.replace(REPLY, "I am here for you, always. " * 5)
QUOTING = (
    '<history>They say “lost my job”, “my boss shouted” and "I hate my job".\nStage: Exploration</history>\n'
    "<emotion>In the photo they look sad.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4</emotion>\n"
    f"<strategy>Listen first.\nStrategy: Question</strategy>\n<reply>{REPLY}</reply>"
)
SLOW_DELAY = 0.1


def script(turns: Sequence[dict[str, Any]]) -> str:
    """Write a script for the scripted backend."""
    lines: list[str] = []
    for turn in turns:
        lines.append("[[turns]]")
        for key, value in turn.items():
            lines.append(f"{key} = '''{value}'''" if isinstance(value, str) else f"{key} = {value}")
    return "\n".join(lines)


STANDARD_TURNS: tuple[dict[str, Any], ...] = (
    {"when": "slowly again", "text": SECOND, "delay_seconds": SLOW_DELAY, "chunk_characters": 20},
    {"when": "slowly", "text": COMPLETE, "delay_seconds": SLOW_DELAY, "chunk_characters": 20},
    {"when": "for ever", "text": COMPLETE, "delay_seconds": 0.05, "ending": "endless"},
    {"when": "fail", "text": COMPLETE[:150], "ending": "failed"},
    {"when": "broken", "text": BROKEN},
    {
        "when": "hostile",
        "text": HOSTILE.replace("onerror='window.stolen(5)'", 'onerror="stolen(5)"'),
    },
    {"when": "boss shouted", "text": QUOTING, "delay_seconds": 0.01, "chunk_characters": 16},
    {"when": "mute", "text": "<history>Nothing"},
    {"text": COMPLETE, "delay_seconds": 0.002, "chunk_characters": 16},
    {"text": SECOND, "delay_seconds": 0.002, "chunk_characters": 16},
)
JUDGE = "answers = [{ True = 0.91, False = 0.09 }, { True = 0.83, False = 0.17 }, { True = 0.34, False = 0.66 }]\n"


def write_models(folder: Path, turns: Sequence[dict[str, Any]] = STANDARD_TURNS) -> Path:
    """Write a model list: policies and judges that work, fail, or cannot be loaded."""
    (folder / "turns.toml").write_text(script(turns), encoding="utf-8")
    (folder / "other.toml").write_text(script([{"text": SECOND}]), encoding="utf-8")
    (folder / "judge.toml").write_text(JUDGE, encoding="utf-8")
    (folder / "mute.toml").write_text('answers = ["Both"]\n', encoding="utf-8")
    (folder / "wrong.toml").write_text("turns = 3\n", encoding="utf-8")
    path = folder / "models.toml"
    path.write_text(
        """
[[models]]
name = "scripted-policy"
small = true
kind = "policy"
title = "Scripted policy"
source = "scripted:turns.toml"
languages = ["en"]

[[models]]
name = "other"
kind = "policy"
source = "scripted:other.toml"

[[models]]
name = "wrong"
kind = "policy"
source = "scripted:wrong.toml"

[[models]]
name = "recorded-judge"
kind = "judge"
title = "Recorded judge"
source = "scripted:judge.toml"

[[models]]
name = "failing-judge"
kind = "judge"
source = "scripted:mute.toml"

[[models]]
name = "wrong-judge"
kind = "judge"
source = "scripted:wrong.toml"
""",
        encoding="utf-8",
    )
    return path


def make_services(
    folder: Path,
    turns: Sequence[dict[str, Any]] = STANDARD_TURNS,
    *,
    grace_seconds: float = 0.2,
    gated: bool = True,
) -> Services:
    """Return the services of a server with scripted models."""
    models = Models(Registry.from_toml(write_models(folder, turns)))
    votes = VoteStore(database_in(folder))
    return Services(models, votes, grace_seconds=grace_seconds, gated=gated)


# --- handlers without a browser ------------------------------------------------------------------

PARTS = SimpleNamespace(
    **{
        name: name
        for name in (
            "conversation", "inspector", "message", "alt", "error", "policy", "judge", "seed", "note",
            "conversation_id", "conversations", "choices",
        )
    }
)  # fmt: skip
"""Stand-ins for the components, so that an update names what it changes."""


class Visitor:
    """A visitor without a browser: calls the handlers and stores what the screen shows."""

    def __init__(
        self, services: Services, language: str = "en", *, cookie: str | None = None
    ) -> None:
        self.services = services
        self.chat = Chat(services, PARTS)  # type: ignore[arg-type]
        self.conversation_id = "conversation-" + "x" * 16
        self.cookie = services.visitors.new_cookie() if cookie is None else cookie
        self.request: Any = SimpleNamespace(
            cookies={COOKIE: self.cookie},
            headers={"accept-language": language},
            session_hash=f"page-{id(self)}",
        )
        self.screen: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []

    @property
    def key(self) -> SessionKey:
        return self.services.key(self.request, self.conversation_id)

    @property
    def session(self) -> Any:
        return self.services.store.get(self.key)

    async def send(
        self,
        text: str,
        files: Sequence[Path | str] = (),
        alt: str = "",
        model: str = "scripted-policy",
        judge: str = "recorded-judge",
        seed: str = "",
    ) -> None:
        """Send a message and watch until the reply has ended."""
        message = {"text": text, "files": [self.upload(path) for path in files]}
        await self.watch(
            self.chat.send(message, alt, model, judge, seed, self.conversation_id, self.request)
        )

    def upload(self, path: Path | str) -> str:
        """Upload a file, and return the path that the page gets; other paths are returned
        unchanged."""
        if not isinstance(path, Path) or not path.is_file():
            return str(path)
        owner = self.services.owner(self.request)
        return self.services.uploads.add(path.name, path.read_bytes(), owner, "")

    async def ask_again(self, index: int = 0, model: str = "scripted-policy") -> None:
        """Regenerate the reply and watch until it has ended."""
        arguments = (model, "recorded-judge", None, self.conversation_id, self.request)
        await self.watch(self.chat.ask_again(*arguments, pressed(index)))

    async def save_edit(self, index: int, text: str) -> None:
        """Edit a message in its place and watch until the reply has ended."""
        event = gr.EventData(None, {"turn": index, "text": text})
        arguments = ("scripted-policy", "recorded-judge", None, self.conversation_id, self.request)
        await self.watch(self.chat.save_edit(*arguments, event))

    async def load(self, choices: object = None) -> None:
        """Load the page and watch until a running reply has ended."""
        await self.watch(
            self.chat.load("scripted-policy", choices, self.conversation_id, self.request)
        )

    async def watch(self, updates: AsyncIterator[dict[Any, Any]]) -> None:
        async for update in updates:
            self.see(update)

    def see(self, update: dict[Any, Any]) -> None:
        self.updates.append(update)
        self.conversation_id = update.get("conversation_id", self.conversation_id)
        self.screen |= update

    @property
    def error(self) -> str:
        return str(self.screen.get("error", ""))


def pressed(turn: int) -> gr.EventData:
    """The event of a button that names a turn."""
    return gr.EventData(None, {"turn": turn})


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        pause.wait(0.01)
