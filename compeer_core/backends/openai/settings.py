"""Settings of requests to endpoints, without the SDK: importing them costs no start-up time."""

from dataclasses import dataclass
from typing import Literal

KEY_VARIABLES = ("COMPEER_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key; the first that is set wins."""

Verdicts = Literal["logprobs", "parsed"]
"""How a judge's verdict is read, see `compeer_core.backends.openai.scoring`."""

MAX_WRITTEN_TOKENS = 512
"""Default budget of a written judgement."""


@dataclass(frozen=True)
class Patience:
    """Time limits of a request, and how often it is tried."""

    connect_seconds: float = 10.0
    first_text_seconds: float = 60.0
    """From the request to its first text, retries included."""
    between_seconds: float = 30.0
    """From one chunk to the next."""
    turn_seconds: float = 300.0
    """For the whole answer."""
    tries: int = 4
    retry_seconds: float = 30.0
    """Longest `Retry-After` that is waited for; beyond it the request fails at once."""
