"""Models that write for the pipeline: behind an endpoint, in this process, or recorded."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.registry import Source, SourceKind, parse_source


class GeneratorSettings(FrozenModel):
    """A model that writes, and how it is asked."""

    source: str
    """`openai:URL#MODEL`, a checkpoint folder, `hf:ID` or `scripted:FILE`, see
    `compeer_core.registry`. The key of an endpoint comes from the environment
    (`compeer_core.backends.openai_.KEY_VARIABLES`) and is never written anywhere."""
    name: str = ""
    """The author that records name; empty: the model's name in `source`."""
    adapter: Path | None = None
    """A LoRA adapter for a checkpoint."""
    device: str | None = None
    """Where a checkpoint runs; None takes what there is."""
    style: Literal["prompted", "trained"] = "prompted"
    """Was it trained to write the output grammar, or must a prompt ask for it?"""
    sees_images: bool = False
    """False: pictures are left out of what it is asked."""
    in_flight: int = Field(default=8, ge=1)
    """Endpoint: requests at a time. In process: rows of a batch."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests begin evenly spaced, not more often than this. None: as fast as it goes."""
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=0.9, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=512, ge=1)
    tries: int = Field(default=4, ge=1)
    """Texts that a question may cost: an unusable one is asked for again with another seed. In
    process and at temperature 0 there is one try, since another seed changes nothing."""
    retries: int = Field(default=6, ge=0)
    """How often a request that got no text (429, 5xx, time-out, lost connection) is sent again."""
    backoff_seconds: float = Field(default=0.5, ge=0)
    """Before the first of those; doubled for each further one, and as long as `Retry-After` asks."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """For one request, from its beginning to the last word of its answer."""
    price_per_million_input: float | None = Field(default=None, ge=0)
    """For the estimate, in whatever currency; None: unknown."""
    price_per_million_output: float | None = Field(default=None, ge=0)

    @property
    def where(self) -> Source:
        """The source, read. Raises `ConfigError` where it cannot be."""
        return parse_source(self.source)

    @property
    def author(self) -> str:
        """What records call whoever wrote."""
        where = self.where
        return self.name or where.model or Path(where.location).name

    @property
    def in_process(self) -> bool:
        """Whether it is a checkpoint that runs here, in batches."""
        return self.where.kind in {SourceKind.CHECKPOINT, SourceKind.HUB}
