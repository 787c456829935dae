"""The judge of a stage: a name in a list of models, or the location of its weights."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from compeer_core.backends.openai.settings import Verdicts
from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.registry import ModelEntry, Quantize, Registry
from compeer_core.unifireward import Judge
from training.common.threads import use_all_threads


class JudgeSource(FrozenModel):
    """`[judge]`: which reward model, named in a list of models or by its location."""

    models: Path | None = None
    """A list of models (`models.toml`) that holds the judge."""
    name: str = ""
    """A judge of that list; empty uses its default."""
    source: str = ""
    """Without a list: a checkpoint folder, `hf:NAME` or `openai:URL#MODEL`."""
    adapter: Path | None = None
    """A LoRA adapter on that checkpoint."""
    reply_source: str = ""
    """A second model that judges the replies: a PRM and an ORM instead of UnifiReward (paper:
    COMPEER-POR "uses separate PRM + ORM reward models")."""
    reply_adapter: Path | None = None
    """A LoRA adapter that judges the replies."""
    languages: tuple[str, ...] = ("en",)
    """Of the judge's card; it is prompted in the first one that has prompts."""
    verdicts: Verdicts | None = None
    """For an endpoint: how to read its verdicts; see `compeer_core.registry`."""
    quantize: Quantize | None = None
    device: str | None = None
    """Device of a checkpoint; None picks the best available."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.models is None) == (not self.source):
            raise ValueError(
                "name a list of models (`models`) or the judge's location (`source`), not both"
            )
        other_keys = self.adapter or self.reply_source or self.reply_adapter or self.verdicts
        if self.models is not None and other_keys:
            raise ValueError(
                "with `models`, the list describes the judge; remove adapter, reply_source, "
                "reply_adapter and verdicts"
            )
        return self

    def load(self) -> Judge:
        """Load the judge.

        Raises:
            ConfigError: There is no such judge, or a verdict is not one token for it.
            BackendError: It cannot be loaded.
        """
        if self.models is not None:
            registry = Registry.from_toml(self.models, quantize=self.quantize, device=self.device)
            judge = registry.judge(self.name)
            if judge is None:
                raise ConfigError(f"{self.models}: no judge in this list")
            return _with_all_threads(judge)
        given = {} if self.verdicts is None else {"verdicts": self.verdicts}
        entry = ModelEntry(
            name="judge",
            kind="judge",
            source=self.source,
            adapter=self.adapter,
            reply_source=self.reply_source,
            reply_adapter=self.reply_adapter,
            languages=self.languages,
            **given,
        )
        judge = Registry([entry], quantize=self.quantize, device=self.device).judge("judge")
        assert judge is not None
        return _with_all_threads(judge)


def _with_all_threads(judge: Judge) -> Judge:
    for scorer in (judge.scorer, judge.reply_scorer):
        if isinstance(scorer, TransformersScorer):
            use_all_threads(scorer.chat)
    return judge
