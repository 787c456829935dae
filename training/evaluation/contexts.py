"""The contexts of blind evaluations, and the turns that policies sample for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.backends.protocol import Sampling
from compeer_core.cer import Case, CaseUtterance, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from training.common import results
from training.data.histories import has_pictures, read_histories
from training.data.pictures import Pictures
from training.data.records import drawn
from training.evaluation.answer_store import store_path
from training.evaluation.policy_answers import (
    AnswerRequest,
    PolicySource,
    loaded_policy,
    seed_of,
)


class Contexts(FrozenModel):
    """A sample of the contexts in a file."""

    path: Path
    """CER rows; or a text file (`.txt`) with a first message per line."""
    count: int = Field(gt=0)
    """Number of contexts; all if there are fewer."""
    with_picture: bool = Field(default=False, exclude_if=lambda is_on: not is_on)
    """Whether only contexts that show a picture are drawn."""


class BlindConfig(FrozenModel):
    """What blind evaluations share: the contexts, and how policies answer them."""

    contexts: tuple[Contexts, ...] = Field(min_length=1)
    output: Path
    """Folder of the run."""
    results: Path = results.FOLDER
    faces: Path | None = None
    """Folder of the packed faces, for contexts that show one."""
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=0.9, gt=0, le=1)
    max_new_tokens: int = Field(default=300, gt=0)
    seed: int = 0
    """Of contexts, sampling, sides and order."""

    @property
    def sampling(self) -> Sampling:
        """The settings of every turn."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens
        )


@dataclass(frozen=True)
class SampledTurn:
    """A policy's turn for a context."""

    policy: str
    case: Case
    seed: int
    """Of the sampling."""
    text: str
    strategy: str | None = None
    """The forced one."""


def read_contexts(
    samples: Sequence[Contexts], seed: int, *, one_per_source: bool = False
) -> Iterator[Case]:
    """Yield the drawn contexts of the test split.

    Args:
        samples: The files and numbers.
        seed: Of the draws.
        one_per_source: Whether only one context of each source dialogue may be drawn, so that contexts are
            independent of each other.

    Raises:
        ConfigError: A file is missing or has no fitting context.
    """
    sources: set[str] = set()
    for contexts in samples:
        if contexts.path.suffix == ".txt":
            if contexts.with_picture:
                raise ConfigError(f"{contexts.path}: first messages of a text file have no picture")
            yield from _first_messages(contexts.path)[: contexts.count]
            continue
        rows, _ = read_histories([contexts.path], "test")
        if contexts.with_picture:
            rows = list(filter(has_pictures, rows))
        if one_per_source:
            rows = _one_per_source(rows, sources, seed)
        if not rows:
            raise ConfigError(
                f"{contexts.path}: no context is left"
                f"{' that shows a picture' if contexts.with_picture else ''}"
            )
        chosen = drawn(rows, contexts.count, seed)
        sources |= {row.case.source_id for row in chosen}
        yield from (row.case for row in chosen)


def _one_per_source(rows: Sequence[CerRecord], taken: set[str], seed: int) -> list[CerRecord]:
    """Draw a context of each source dialogue that is not taken, in the order of the rows."""
    of_source: dict[str, CerRecord] = {}
    for place in np.random.default_rng([seed, 2]).permutation(len(rows)).tolist():
        of_source.setdefault(rows[place].case.source_id, rows[place])
    kept = {row.id for source, row in of_source.items() if source not in taken}
    return [row for row in rows if row.id in kept]


def _first_messages(path: Path) -> list[Case]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return [
        Case(
            id=f"{path.stem}-{number}",
            dialogue_id=f"{path.stem}-{number}",
            source_id=f"{path.stem}-{number}",
            corpus="",
            language="en",
            split="test",
            licence="",
            round=0,
            rounds=1,
            history=(CaseUtterance(speaker=Speaker.SEEKER, text=line),),
            original=None,
        )
        for number, line in enumerate(filter(None, map(str.strip, lines)), start=1)
    ]


def sampled_turns(
    policies: Sequence[PolicySource],
    contexts: Sequence[Case],
    pictures: Pictures,
    sampling: Sampling,
    output: Path,
    seed: int,
    forced: Sequence[str | None] | None = None,
    draws: int = 1,
) -> Iterator[SampledTurn]:
    """Yield a turn of each policy for each context, policy by policy.

    Turns are stored below `output` (`training.evaluation.answer_store`), so an interrupted call is resumed.

    Args:
        policies: Loaded one after another.
        contexts: What they answer.
        pictures: Opens the pictures of the contexts.
        sampling: Its seed is ignored.
        output: Folder of the run.
        seed: With the place of a context, the seed of its turns, which is the same for all policies.
        forced: The strategy to force in each context; None forces none.
        draws: See `AnswerRequest`.
    """
    strategies = [None] * len(contexts) if forced is None else forced
    seeds = [seed_of(number, seed) for number in range(len(contexts))]
    for policy in policies:
        requests = (
            AnswerRequest(pictures.dialogue(case), (of_case,), case.language, strategy, draws)
            for case, of_case, strategy in zip(contexts, seeds, strategies, strict=True)
        )
        with loaded_policy(policy) as answerer:
            stored = store_path(output, policy.name)
            answers = answerer.answers(requests, sampling, len(contexts), stored)
            for case, of_case, strategy, (answer,) in zip(
                contexts, seeds, strategies, answers, strict=True
            ):
                yield SampledTurn(policy.name, case, of_case, answer.text, strategy)
