"""Questions, a check and settings that several tests of askers share."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compeer_core.backends.protocol import Message
from tests.training.cer.endpoint import Body, asked, echo
from training.cer.requests.asking import Answer, Asker, Question
from training.cer.requests.generators import GeneratorSettings

KEY = "sk-this-must-not-be-written"


def usable(key: str, text: str) -> str | None:
    return "wrong language" if "bad" in text else None


def question(number: int, text: str = "") -> Question:
    return Question(f"q{number}", (Message("user", (text or f"q{number}",)),), seed=number)


def questions(count: int) -> Iterator[Question]:
    return (question(number) for number in range(count))


def flaky(body: Body) -> str:
    """Every third question needs another seed, every tenth never gets a usable text."""
    number = int(asked(body)[1:])
    is_bad = number % 10 == 0 or (number % 3 == 0 and body["seed"] == number)
    return f"bad {number}" if is_bad else echo(body)


def settings(source: str, **changes: Any) -> GeneratorSettings:
    return GeneratorSettings.model_validate(
        {"source": source, "backoff_seconds": 0.01, "in_flight": 4} | changes
    )


def answers_of(asker: Asker, count: int) -> list[Answer]:
    try:
        return list(asker.ask(questions(count), usable, label="test", total=count))
    finally:
        asker.close()


def stored_attempts(folder: Path) -> list[tuple[Any, ...]]:
    """Return all rows of the response store in a folder, by their primary key."""
    connection = sqlite3.connect(folder / "responses.sqlite")
    try:
        return connection.execute("SELECT * FROM responses").fetchall()
    finally:
        connection.close()


def files_with(folder: Path, secret: str) -> list[Path]:
    """Return the files below a folder that contain a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if secret.encode() in path.read_bytes()]
