"""ESC-Eval (Zhao et al., 2024, arXiv 2406.14952): `python -m training evaluate esc-eval <config.toml>`.

A seeker model plays each role card and talks to the model under test for five rounds. Judges then rate the
whole dialogue from 0 to 4 on seven dimensions; a table shows the mean / 4 * 100, for each judge and for the
mean of the judges, English and Chinese apart, with CIs over dialogues.

The model under test sees neither the card nor the greeting that opens the seeker's prompt. A verdict that
cannot be read is excluded and counted. Cards and rubrics are read from a copy of the official repository
(haidequanbu/ESC-Eval); dialogues and scores are written in its format and can be read from it:

```text
<output>/result/<model>_<language>.json           {"0": ["AI assistant：...", "ESC-Role：...", ...]}
<output>/score/<judge>/<model>_<language>.json    {"0": {"fluency": 3, ...}}, -1 if unreadable
<output>/failed.jsonl                             dialogues without a usable text, and why
```

docs/training.md lists the differences from the official protocol.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

from pydantic import BaseModel, Field, model_validator

from compeer_core.dialogue import Speaker
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.messages import Message
from compeer_core.prompts import fill, neutralise
from compeer_core.row_files import read_json
from training.cer.requests.asking import Asker
from training.cer.requests.generators import GeneratorSettings
from training.common.interrupts import StopRequest
from training.common.run_directory import RunDirectory
from training.data.seeker_prompt import GREETING, seeker_messages, situation_of_card
from training.evaluation.esc_eval_scores import (
    DIMENSIONS,
    ROUNDS,
    SEEKER,
    SUPPORTER,
    UNREADABLE,
    Key,
    Language,
    Parser,
    Rubrics,
    Scores,
    Transcripts,
    metrics,
    name_of,
    read_verdict,
    write_file,
)
from training.evaluation.simulated_dialogues import (
    Conversation,
    SimulationConfig,
    Supporter,
    advance,
    check_text,
    load_prompt,
    log_bounds,
    opened,
    publish,
    reply,
    seeker_chat,
    titled,
    write_failed,
)
from training.stages import WaitingForPeople, refuse_resume

GREETINGS: Mapping[Language, str] = {
    "en": GREETING,
    "zh": "你好，我是您的私人助手，您有任何烦恼都可以向我诉说！",
}
"""The first line of every official dialogue."""
ADAPTER = "{adapter}"
_INTERNLM2 = (
    "ESC-RANK's base is InternLM2, which transformers does not have, and code of a checkpoint is never "
    f"executed. Serve it with vLLM, an adapter per dimension, and set source = 'openai:URL#{ADAPTER}'; or run "
    "the official score.py on the run's folder `result` and name the folder of its files in `scores`"
)


class RoleCard(BaseModel):
    """A role card of the official repository; its other keys are for annotators."""

    base: str
    """The text that the seeker gets."""


class Judge(GeneratorSettings):
    """A judge: a model, or score files that another program wrote."""

    name: str = Field(pattern=r"^[\w.\-]+$")
    source: str = ""
    """As in `GeneratorSettings`. `{adapter}` in it or in `adapter` stands for ESC-RANK's names: `fluency` for
    Chinese, `fluency_en` for English, and so on."""
    scores: Path | None = None
    """Folder of score files in the official format, instead of a model."""
    parser: Parser = "strict"
    """What can be read. strict: an answer that is only a number from 0 to 4. official: as in score.py, the first
    of the labels 0, 1, 2, 3, 4 that occurs anywhere, so "10" is 0, and an answer is never requested again."""
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int = Field(default=16, ge=1)

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.scores is None) == (not self.source):
            raise ValueError(f"judge {self.name}: set either source or scores")
        return self

    def settings(self, dimension: str, language: Language) -> GeneratorSettings:
        """Return the model for a dimension."""
        name = f"{dimension}_en" if language == "en" else dimension
        adapter = None if self.adapter is None else Path(str(self.adapter).replace(ADAPTER, name))
        source = self.source.replace(ADAPTER, name)
        return self.model_copy(update={"source": source, "adapter": adapter})

    def check_adapters(self, language: Language) -> None:
        """Raise `ConfigError` if the folder of an adapter is missing."""
        for dimension in DIMENSIONS:
            adapter = self.settings(dimension, language).adapter
            if adapter is not None and not adapter.is_dir():
                raise ConfigError(
                    f"judge {self.name}: there is no folder {adapter}; download ESC-RANK with "
                    f"`hf download haidequanbu/ESC-RANK --local-dir {adapter.parent}`. {_INTERNLM2}"
                )


class Config(SimulationConfig):
    """`[evaluate esc-eval]`: models under test, role cards, seeker and judges."""

    transcripts: tuple[Path, ...] = ()
    """Official dialogue files to rate as well, named `<model>_<language>.json`."""
    cards: Mapping[Language, Path] = {}
    """Role cards by language, such as `data/card_high_en.json`."""
    seeker: GeneratorSettings | None = None
    """The seeker: ESC-Role (`hf:haidequanbu/ESC-Role`), an endpoint, or another checkpoint. With the style
    "trained" it is an adapter of `sft seeker`, and the result a small simulation."""
    judges: tuple[Judge, ...] = Field(min_length=1)
    rubrics: Path | None = None
    """`rubric_prompts.json`: the seven rubrics of score.py by language, for judges with a model."""
    seed: int = Field(default=0, ge=0)
    command: str = "python -m training evaluate esc-eval training/configs/evaluate_esc-eval.toml"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        models = [(each.name, language) for each in self.policies for language in self.cards]
        models += map(name_of, self.transcripts)
        judges = [judge.name for judge in self.judges]
        if not models:
            raise ValueError("nothing to evaluate: set policies or transcripts")
        if len({*models}) < len(models) or len({*judges}) < len(judges):
            raise ValueError("two models or two judges have the same name")
        if self.policies and not (self.cards and self.seeker):
            raise ValueError("policies need cards and a seeker")
        if self.is_small and self.cards.keys() - {"en"}:
            raise ValueError("a seeker of `sft seeker` speaks English: leave out the other cards")
        if self.rubrics is None and any(judge.source for judge in self.judges):
            raise ValueError("judges with a model need rubrics")
        return self

    @property
    def is_small(self) -> bool:
        """Whether the seeker is an adapter of `sft seeker`."""
        return self.seeker is not None and self.seeker.style == "trained"


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Hold the dialogues, rate them and publish the result; continues an interrupted run.

    Raises:
        ConfigError: A file is missing or invalid.
        StoppedEarly: The user wants to stop; the texts so far are stored.
    """
    if resume != config.output:
        refuse_resume(resume, "evaluate esc-eval resumes by itself")
    cards = {
        language: read_json(path, tuple[RoleCard, ...])[: config.count]
        for language, path in config.cards.items()
    }
    written = {name_of(path): read_json(path, Transcripts) for path in config.transcripts}
    rubrics = None if config.rubrics is None else read_json(config.rubrics, Rubrics)
    numbers: dict[Key, Sequence[str]] = {
        (policy.name, language): [str(number) for number in range(len(roles))]
        for policy in config.policies
        for language, roles in cards.items()
    }
    numbers |= {key: list(transcripts) for key, transcripts in written.items()}
    for judge, (_, language) in itertools.product(config.judges, numbers):
        judge.check_adapters(language)
    if dry_run:
        log_bounds(_bounds(config, sum(map(len, cards.values())), sum(map(len, numbers.values()))))
        return
    RunDirectory.continued(config.output, config)
    with StopRequest() as stopping:
        held = dict(_hold(config, cards, stopping)) if config.policies else {}
        dialogues = _write_dialogues(held, config.output) | written
        ratings = {}
        for judge in config.judges:
            try:
                ratings[judge.name] = _rate(judge, dialogues, config, rubrics, stopping)
            except CheckpointError as error:
                if ADAPTER in str(judge.adapter):
                    raise CheckpointError(f"{error}. {_INTERNLM2}") from error
                raise
    seeker = "" if config.seeker is None else f", seeker {config.seeker.author}"
    publish(
        config,
        metrics(ratings, numbers, [policy.name for policy in config.policies]),
        title=titled(f"ESC-Eval, {ROUNDS} rounds{seeker}", is_small=config.is_small),
        label_source=f"judges {', '.join(ratings)}",
        seed=config.seed,
        interval="95 % CI over dialogues",
    )


def _bounds(config: Config, cards: int, rated: int) -> Iterator[tuple[GeneratorSettings, int]]:
    for policy in config.policies:
        yield policy, ROUNDS * cards
    if config.seeker is not None:
        yield config.seeker, ROUNDS * cards * len(config.policies)
    for judge in config.judges:
        if judge.scores is None:
            yield judge, len(DIMENSIONS) * rated


# --- dialogues ---------------------------------------------------------------------------------


def _hold(
    config: Config, cards: Mapping[Language, Sequence[RoleCard]], stopping: StopRequest
) -> Iterator[tuple[Key, Sequence[Conversation]]]:
    """Let every policy talk to the seeker about every card."""
    assert config.seeker is not None
    with opened(config.seeker, config.output, stopping) as seeker:
        for policy in config.policies:
            with opened(policy, config.output, stopping) as supporter:
                for language, roles in cards.items():
                    conversations = [
                        RolePlay(f"{policy.name}/{language}/{number}", card=card.base)
                        for number, card in enumerate(roles)
                    ]
                    _converse(seeker, supporter, policy, conversations, language, config)
                    yield (policy.name, language), conversations


@dataclass(kw_only=True)
class RolePlay(Conversation):
    """The dialogue about a role card."""

    card: str


def _converse(
    seeker: Asker,
    supporter: Asker,
    policy: Supporter,
    conversations: Sequence[RolePlay],
    language: Language,
    config: Config,
) -> None:
    template = "" if config.is_small else load_prompt(config.prompts, f"esc_seeker.{language}")

    def messages(conversation: RolePlay) -> Sequence[Message]:
        if config.is_small:
            situation = situation_of_card(conversation.card)
            return seeker_messages(situation, conversation.turns, seeker.reserved)
        return (
            Message("system", (fill(template, card=conversation.card),)),
            Message("user", (GREETINGS[language],)),
            *seeker_chat(conversation, seeker.reserved),
        )

    for _ in range(ROUNDS):
        texts = advance(seeker, "seeker", conversations, messages, check_text, config.seed)
        for conversation, text in texts:
            conversation.lines.append(text.strip())
        reply(supporter, policy, conversations, language, config.seed)


def transcript(conversation: Conversation, language: Language) -> list[str]:
    """Return the lines of a dialogue in the official format, greeting first."""
    lines = [SUPPORTER + GREETINGS[language]]
    for speaker, text in conversation.turns:
        lines.append((SEEKER if speaker is Speaker.SEEKER else SUPPORTER) + text)
    return lines


def _write_dialogues(
    held: Mapping[Key, Sequence[Conversation]], output: Path
) -> dict[Key, Transcripts]:
    """Write and return the complete dialogues; write those that failed to a file of their own."""
    dialogues = {}
    for (model, language), conversations in held.items():
        complete = {
            str(number): transcript(each, language)
            for number, each in enumerate(conversations)
            if each.problem is None
        }
        dialogues[model, language] = complete
        write_file(output / "result" / f"{model}_{language}.json", complete)
    write_failed(output, itertools.chain.from_iterable(held.values()))
    return dialogues


# --- verdicts ----------------------------------------------------------------------------------


def _rate(
    judge: Judge,
    dialogues: Mapping[Key, Transcripts],
    config: Config,
    rubrics: Rubrics | None,
    stopping: StopRequest,
) -> dict[Key, Scores]:
    """Return a judge's scores of all dialogues; write those of a model.

    Raises:
        ConfigError: A score file lacks a dialogue, or has another.
        WaitingForPeople: Score files are missing.
    """
    if judge.scores is not None:
        files = {key: judge.scores / f"{key[0]}_{key[1]}.json" for key in dialogues}
        missing = [str(path) for path in files.values() if not path.exists()]
        if missing:
            raise WaitingForPeople(
                f"judge {judge.name}: {', '.join(missing)} missing; rate the files of "
                f"{config.output / 'result'} with the program that writes them and run this again"
            )
        return {key: _read_scores(path, dialogues[key]) for key, path in files.items()}
    assert rubrics is not None  # see `Config`
    with ExitStack() as stack:  # the adapters of a judge share their base while it is open
        askers: dict[GeneratorSettings, Asker] = {}
        ratings: dict[Key, Scores] = {
            key: {number: {} for number in transcripts} for key, transcripts in dialogues.items()
        }
        for language, dimension in itertools.product(get_args(Language), DIMENSIONS):
            entries = {
                f"{model}/{language}/{number}": (lines, ratings[model, language][number])
                for (model, spoken), transcripts in dialogues.items()
                if spoken == language
                for number, lines in transcripts.items()
            }
            if entries:
                settings = judge.settings(dimension, language)
                if settings not in askers:
                    askers[settings] = stack.enter_context(
                        opened(settings, config.output, stopping)
                    )
                _rate_dimension(
                    judge, askers[settings], dimension, language, entries, rubrics, config
                )
    for (model, language), scores in ratings.items():
        write_file(config.output / "score" / judge.name / f"{model}_{language}.json", scores)
    return ratings


def _read_scores(path: Path, dialogues: Transcripts) -> Scores:
    scores = read_json(path, Scores)
    if different := sorted(scores.keys() ^ dialogues.keys()):
        raise ConfigError(
            f"{path}: has scores of {len(scores)} dialogues, of {len(dialogues)} that were held; the first that "
            f"differs is {different[0]}. Rate the dialogues again"
        )
    return scores


def _rate_dimension(
    judge: Judge,
    asker: Asker,
    dimension: str,
    language: Language,
    entries: Mapping[str, tuple[list[str], dict[str, int]]],
    rubrics: Rubrics,
    config: Config,
) -> None:
    frame = load_prompt(config.prompts, "esc_judge")

    def messages(rating: Conversation) -> Sequence[Message]:
        lines = [neutralise(line, asker.reserved) for line in entries[rating.key][0]]
        return (Message("user", (rubrics.question(frame, dimension, language, lines),)),)

    def check(key: str, text: str) -> str | None:
        is_readable = read_verdict(text, judge.parser) is not None
        return None if is_readable or judge.parser == "official" else "unreadable"

    for _, scores in entries.values():
        scores[dimension] = UNREADABLE
    label = f"{judge.name} {dimension}"
    ratings = [Conversation(key) for key in entries]
    for rating, text in advance(asker, label, ratings, messages, check, config.seed):
        score = read_verdict(text, judge.parser)
        entries[rating.key][1][dimension] = UNREADABLE if score is None else score
