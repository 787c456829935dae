"""Services with scripted models for the tests of Compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compeer_core.registry import Registry
from compeer_core.votes.battles import Limits
from compeer_core.votes.store import VoteStore
from tests.databases import database_in
from tests.pages import COMPLETE, REPLY, SECOND, SECOND_REPLY, script
from ui_components.shared.models import Models
from ui_components.shared.services import Services

MODELS = {"maple-1": "Maple the First", "cedar-2": "Cedar the Second", "willow-3": ""}
LEAK = COMPLETE.replace(REPLY, "I am maple-1, and I am glad that you are here.")
LONG = (
    f"{REPLY} You have held so much together these past weeks, and nobody around you seems to have seen it. "
    "When the phone stays silent in the evening, where do your thoughts go first? I would like to hear."
)
SECOND_LONG = (
    f"{SECOND_REPLY} Telling it to somebody for the first time often makes a thing weigh a little less. "
    "Who, apart from me, might be glad that you told them, even if your voice shakes while you speak?"
)
SLOWLY = {"when": "slowly", "delay_seconds": 0.015, "chunk_characters": 12}
ENDLESS = {"when": "for ever", "delay_seconds": 0.05, "chunk_characters": 12}
FOR_EVER = {
    # Long words, so that a reply that is stopped is neither too long nor repeats itself.
    "text": COMPLETE.replace(REPLY, " ".join([REPLY, *(f"word{n:040}" for n in range(800))]))
}
# Replies that do not repeat the long ones, which the gate would withhold.
NEXT = {"when": "what now", "text": COMPLETE.replace(REPLY, "Who could you call first, today?")}
SECOND_NEXT = {
    "when": "what now",
    "text": SECOND.replace(SECOND_REPLY, "Rest first. The rest can wait."),
}
TURNS: dict[str, list[dict[str, Any]]] = {
    "maple-1": [
        {**SLOWLY, "text": COMPLETE.replace(REPLY, LONG)},
        {**ENDLESS, **FOR_EVER},
        NEXT,
        {"when": "who are you", "text": LEAK},
        {"when": "break", "text": COMPLETE[:150], "ending": "failed"},
        {"text": COMPLETE},
    ],
    "cedar-2": [
        {**SLOWLY, "text": SECOND.replace(SECOND_REPLY, SECOND_LONG)},
        {**ENDLESS, **FOR_EVER},
        SECOND_NEXT,
        {"text": SECOND},
    ],
    "willow-3": [{"text": SECOND.replace("courage", "patience")}],
}
JUDGE = 'answers = ["True", "True", "False", "Both"]\n'


def write_list(folder: Path, names: Sequence[str] = ("maple-1", "cedar-2")) -> Path:
    """Write a list of scripted models with a judge."""
    entries = ['[[models]]\nname = "oracle"\nkind = "judge"\nsource = "scripted:oracle.toml"\n']
    (folder / "oracle.toml").write_text(JUDGE, encoding="utf-8")
    for name in names:
        (folder / f"{name}.toml").write_text(
            script(TURNS[name]) if name in TURNS else "turns = 3\n", encoding="utf-8"
        )
        entries.append(
            f'[[models]]\nname = "{name}"\nkind = "policy"\ntitle = "{MODELS.get(name, "")}"\n'
            f'source = "scripted:{name}.toml"\nlanguages = ["en"]\n'
        )
    path = folder / "models.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    return path


def make(
    folder: Path,
    names: Sequence[str] = ("maple-1", "cedar-2"),
    *,
    grace_seconds: float = 0.2,
    limits: Limits | None = None,
) -> Services:
    """Return services with scripted models to compare."""
    registry = Registry.from_toml(write_list(folder, names))
    votes = VoteStore(database_in(folder), limits)
    return Services(Models(registry), votes, grace_seconds=grace_seconds)
