"""SAGE (Zhang et al., 2025, arXiv 2505.02847): `python -m training evaluate sage <config.toml>`.

A sentient agent plays a person with a hidden intention and talks to the model under test. On each reply it makes
two calls: the first decides how the reply changes its emotion (by at most 10, from a start of 40), the second
writes its next message. A dialogue ends in success at 100, in failure below 10, at a goodbye, or after
`max_turns` messages of the agent: 20 in COMPEER, 10 in the public code. The reply to the last message is
generated and not scored, as there.

The score is the mean final emotion over profiles and seeds. It depends on the simulator as much as on the
model, so every number names it; models are compared under the same simulator, paired by profile. Profiles are
read from a copy of the official repository (Tencent/digitalhuman), of RLVER, or of Cactus (English clients).
Dialogues are written in the official format:

```text
<output>/dialogues/<model>_seed<seed>.jsonl    a dialogue a line, in the official format
<output>/failed.jsonl                          dialogues without a usable text, and why
```

docs/training.md lists the differences from the official protocol.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.messages import Message
from compeer_core.prompts import fill, neutralise
from compeer_core.row_files import opened as opened_text
from compeer_core.row_files import parse_json, read_rows
from compeer_core.stats import Estimate, bootstrap_weights, estimate, weighted_mean
from training.cer.requests.asking import Asker
from training.cer.requests.generators import GeneratorSettings
from training.common import results
from training.common.interrupts import StopRequest
from training.common.jsonl import replace_rows
from training.common.run_directory import RunDirectory
from training.data.seeker_prompt import RATINGS, rating_messages, seeker_messages
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
    titled,
    write_failed,
)
from training.stages import refuse_resume

START, LARGEST_CHANGE, SUCCESS, FAILURE = 40, 10, 100, 10
_BANDS = {100: "S", 70: "A", 40: "B", 10: "C"}
_SECTIONS = re.compile(r"^\W*(Content|TargetCompletion|Activity|Analyse|Change)\W*?[:：]", re.M)
_PLANNING = {
    "Activity": "activity",
    "TargetCompletion": "TargetCompletion",
    "Content": "content",
    "Analyse": "analyse",
}
"""Sections and their official keys."""
_CHANGE = re.compile(r"\bChange\W*?[:：]\W*?([+＋\-−－]?\d+)")
_RESPONSE = re.compile(r"^\W*Response\W*?[:：]", re.M)
_GOODBYE = re.compile(r"(?:(?:再见|拜拜)\w?|\b(?:good)?bye(?: for now| then)?)\W*$", re.IGNORECASE)
"""A goodbye that ends a message; the public code takes one anywhere, even in "I said goodbye to him"."""


class Profile(FrozenModel):
    """The person whom the sentient agent plays."""

    id: str
    player: str
    """Name, age, manner of speaking and so on."""
    scene: str
    character: str
    task: str
    """The hidden intention."""
    first_talk: str = ""
    """The first message; empty: the agent writes it."""
    language: Literal["en", "zh"]


class Config(SimulationConfig):
    """`[evaluate sage]`: models under test, profiles and simulator."""

    profiles: Path
    """SAGE's or RLVER's profiles (`.jsonl`, Chinese), or Cactus's clients (`.json`, English); also `.gz`."""
    simulator: GeneratorSettings
    """The model behind the sentient agent. With the style "trained" it is an adapter of `sft seeker`, which says how
    strong its distress is instead of planning, and the result is a small simulation."""
    max_turns: int = Field(default=20, ge=1)
    """The agent's messages in a dialogue: 20 in COMPEER, 10 in the public code and leaderboard."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Each profile is played once per seed."""
    policies: tuple[Supporter, ...] = Field(min_length=1)
    command: str = "python -m training evaluate sage training/configs/evaluate_sage.toml"

    @property
    def is_small(self) -> bool:
        """Whether the simulator is an adapter of `sft seeker`."""
        return self.simulator.style == "trained"

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError("a seed occurs twice")
        return self


@dataclass(kw_only=True)
class SentientDialogue(Conversation):
    """A dialogue with the state of the sentient agent."""

    profile: Profile
    point: int = START
    """The emotion."""
    planning: dict[str, Any] = field(default_factory=dict)
    """The sections of the last emotion call."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The messages in the official format."""
    is_over: bool = False

    @property
    def final(self) -> float:
        """The final emotion; NaN if the dialogue failed."""
        return float(self.point) if self.problem is None else math.nan

    def feel(self, text: str) -> None:
        """Take over the answer to the emotion call."""
        self.planning = read_planning(text)
        self.point = updated(self.point, self.planning["change"])

    def rate(self, rating: int) -> None:
        """Take over a rating of the distress, from 1 to 5."""
        change = change_of(rating, self.point)
        self.planning = dict.fromkeys(_PLANNING.values(), "") | {"change": change}
        self.point = updated(self.point, change)

    def say(self, text: str, thinking: str = "") -> None:
        """Add a message of the agent, and end the dialogue if it has to."""
        message: dict[str, Any] = {"role": "user", "content": text, "emotion-point": self.point}
        if self.planning:
            message |= {"thinking": thinking, "planning": self.planning}
        self.lines.append(text)
        self.history.append(message)
        self.is_over = ends(self.point, text)

    def record(self) -> dict[str, Any]:
        """Return the dialogue in the official format."""
        return {
            "id": self.profile.id,
            "emo_point": self.point,
            "emo_state": f"Emotion-{band_of(self.point)}",
            "target": "eq",
            "player": self.profile.player,
            "scene": self.profile.scene,
            "character": self.profile.character,
            "topic": "",
            "task": self.profile.task,
            "history": self.history,
        }


def updated(point: int, change: int) -> int:
    """Return the emotion after a change, which is clamped to [-10, 10]; at most 100.

    Example:
        >>> updated(40, 25), updated(95, 10), updated(12, -30)
        (50, 100, 2)
    """
    return min(SUCCESS, point + max(-LARGEST_CHANGE, min(LARGEST_CHANGE, change)))


def change_of(rating: int, point: int) -> int:
    """Return the change of the emotion for a rating of the distress: towards 100 for 1, towards 0 for 5.

    Example:
        >>> change_of(1, 40), change_of(4, 40), change_of(3, 50)
        (60, -15, 0)
    """
    return SUCCESS - (rating - 1) * SUCCESS // (len(RATINGS) - 1) - point


def band_of(point: int) -> str:
    """Return the name of an emotion's band: S, A, B, C or F."""
    return next((name for low, name in _BANDS.items() if point >= low), "F")


def ends(point: int, text: str) -> bool:
    """Whether a message of the agent ends the dialogue, given the emotion after it."""
    return point >= SUCCESS or point < FAILURE or _GOODBYE.search(text) is not None


def read_planning(text: str) -> dict[str, Any]:
    r"""Return the five sections of an answer to the emotion call, under the official names.

    Raises:
        ValueError: It does not state a change.

    Example:
        >>> read_planning("Activity: She waits.\nChange: +5")
        {'activity': 'She waits.', 'TargetCompletion': '', 'content': '', 'analyse': '', 'change': 5}
    """
    changes = _CHANGE.findall(text)
    if not changes:
        raise ValueError("no change")
    _, *pieces = _SECTIONS.split(text)
    sections = dict(zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True))
    planning: dict[str, Any] = {key: sections.get(name, "") for name, key in _PLANNING.items()}
    return planning | {"change": int(re.sub("[−－]", "-", changes[-1]).replace("＋", "+"))}


def read_response(text: str) -> tuple[str, str]:
    r"""Return the message and the thinking of an answer to the second call; the message may be empty.

    Example:
        >>> read_response('Thinking: be curt\nResponse: "Fine."')
        ('Fine.', 'Thinking: be curt')
    """
    labels = [*_RESPONSE.finditer(text)]
    if not labels:
        return "", text.strip()
    response = text[labels[-1].end() :].strip().strip('"“”「」*').strip()
    return response, text[: labels[-1].start()].strip()


def _check_planning(key: str, text: str) -> str | None:
    return None if _CHANGE.search(text) else "no change"


def _check_rating(key: str, text: str) -> str | None:
    return None if text.strip() in RATINGS else "no rating"


def _check_response(key: str, text: str) -> str | None:
    return None if read_response(text)[0] else "no response"


# --- the run -----------------------------------------------------------------------------------


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Hold the dialogues and publish the result; continues an interrupted run.

    Raises:
        ConfigError: A file is missing or invalid.
        StoppedEarly: The user wants to stop; the texts so far are stored.
    """
    if resume != config.output:
        refuse_resume(resume, "evaluate sage resumes by itself")
    profiles = read_profiles(config.profiles)[: config.count]
    if config.is_small and any(profile.language != "en" for profile in profiles):
        raise ConfigError(
            f"{config.profiles}: a simulator of `sft seeker` speaks English; use Cactus's clients"
        )
    if dry_run:
        total = len(profiles) * len(config.seeds)
        openings = sum(not each.first_talk for each in profiles) * len(config.seeds)
        calls = len(config.policies) * (2 * (config.max_turns - 1) * total + openings)
        bounds = [(policy, total * config.max_turns) for policy in config.policies]
        log_bounds([*bounds, (config.simulator, calls)])
        return
    RunDirectory.continued(config.output, config)
    with StopRequest() as stopping:
        played = dict(_play(config, profiles, stopping))
    about = f"simulator {config.simulator.author}, at most {config.max_turns} turns"
    runs: dict[str, list[Finals]] = {}
    for (model, seed), dialogues in played.items():
        finals = {each.profile.id: each.final for each in dialogues}
        runs.setdefault(model, []).append(finals)
        path = config.output / "dialogues" / f"{model}_seed{seed}.jsonl"
        replace_rows(path, (each.record() for each in dialogues if each.problem is None))
    write_failed(config.output, itertools.chain.from_iterable(played.values()))
    publish(
        config,
        metrics(runs, about),
        title=titled(
            f"SAGE: final emotion (0 to 100, start {START}), success and failure",
            is_small=config.is_small,
        ),
        label_source=about,
        interval="95 % CI over profiles, seeds averaged",
    )


def _play(
    config: Config, profiles: Sequence[Profile], stopping: StopRequest
) -> Iterator[tuple[tuple[str, int], list[SentientDialogue]]]:
    """Yield the dialogues of each model and seed."""
    with opened(config.simulator, config.output, stopping) as agent:
        for policy in config.policies:
            with opened(policy, config.output, stopping) as supporter:
                for seed in config.seeds:
                    dialogues = [
                        SentientDialogue(f"{policy.name}/{seed}/{each.id}", profile=each)
                        for each in profiles
                    ]
                    _converse(agent, supporter, policy, dialogues, config, seed)
                    yield (policy.name, seed), dialogues


def _converse(
    agent: Asker,
    supporter: Asker,
    policy: Supporter,
    dialogues: Sequence[SentientDialogue],
    config: Config,
    seed: int,
) -> None:
    """Hold dialogues to their end."""
    language = dialogues[0].profile.language
    let_agents_feel, let_agents_speak = (
        _small_agents(agent, seed) if config.is_small else _agents(agent, config, language, seed)
    )
    for each in dialogues:
        if each.profile.first_talk:
            each.say(each.profile.first_talk)
    let_agents_speak([each for each in dialogues if not each.lines])
    for turn in range(1, config.max_turns + 1):
        active = [each for each in dialogues if each.problem is None and not each.is_over]
        reply(supporter, policy, active, language, seed)
        for each in active:
            if each.problem is None:
                each.history.append({"role": "assistant", "content": each.lines[-1]})
        if turn < config.max_turns:
            let_agents_feel(active)
            let_agents_speak(active)


_Act = Callable[[Sequence[SentientDialogue]], None]


def _agents(agent: Asker, config: Config, language: str, seed: int) -> tuple[_Act, _Act]:
    """Return what makes the sentient agents of some dialogues feel, and what makes them speak."""
    prompts = {
        name: load_prompt(config.prompts, f"sage_{name}.{language}")
        for name in ("emotion", "reply", "states")
    }
    states = dict(line.split(": ", 1) for line in prompts["states"].splitlines())

    def feel(each: SentientDialogue) -> Sequence[Message]:
        return _call(prompts["emotion"], each, agent.reserved)

    def say(each: SentientDialogue) -> Sequence[Message]:
        planning = "\n".join(f"{name}: {text}" for name, text in each.planning.items()) or "-"
        state = states[band_of(each.point)]
        return _call(prompts["reply"], each, agent.reserved, planning=planning, state=state)

    def let_agents_feel(feeling: Sequence[SentientDialogue]) -> None:
        for each, text in advance(agent, "emotion", feeling, feel, _check_planning, seed):
            each.feel(text)

    def let_agents_speak(speaking: Sequence[SentientDialogue]) -> None:
        for each, text in advance(agent, "message", speaking, say, _check_response, seed):
            each.say(*read_response(text))

    return let_agents_feel, let_agents_speak


def _small_agents(agent: Asker, seed: int) -> tuple[_Act, _Act]:
    """Return the same for an adapter of `sft seeker`, which rates its distress and speaks."""

    def say(each: SentientDialogue) -> tuple[Message, ...]:
        return seeker_messages(each.profile.player, each.turns, agent.reserved)

    def feel(each: SentientDialogue) -> Sequence[Message]:
        return rating_messages(say(each))

    def let_agents_feel(feeling: Sequence[SentientDialogue]) -> None:
        for each, text in advance(agent, "emotion", feeling, feel, _check_rating, seed):
            each.rate(int(text))

    def let_agents_speak(speaking: Sequence[SentientDialogue]) -> None:
        for each, text in advance(agent, "message", speaking, say, check_text, seed):
            each.say(text.strip())

    return let_agents_feel, let_agents_speak


def _call(
    template: str, each: SentientDialogue, reserved: Sequence[str], **more: str
) -> Sequence[Message]:
    profile = each.profile
    names = {Speaker.SEEKER: "Person", Speaker.SUPPORTER: "NPC"}
    dialogue = "\n".join(
        f"{names[speaker]}: {neutralise(text, reserved)}" for speaker, text in each.turns
    )
    values = {
        "player": profile.player,
        "character": profile.character,
        "scene": profile.scene,
        "task": profile.task,
        "emotion": each.point,
        "dialogue": dialogue or "-",
    }
    return (Message("user", (fill(template, **values, **more),)),)


# --- result ------------------------------------------------------------------------------------

Finals = Mapping[str, float]
"""The final emotion of each profile's dialogue; NaN if it failed."""


def metrics(runs: Mapping[str, Sequence[Finals]], about: str) -> Iterator[results.Metric]:
    """Yield final emotion, success and failure with CIs over profiles; seeds are averaged by profile.

    Args:
        runs: By model, the final emotions of each seed. The first model is compared with each of the others,
            paired by profile.
        about: Names the simulator.
    """
    points_of = {model: _by_profile(seeds, lambda point: point) for model, seeds in runs.items()}
    first, *_ = runs
    firsts = points_of[first]
    for model, seeds in runs.items():
        points = points_of[model]
        measures = {
            ("final emotion", ""): points,
            ("success", "%"): _by_profile(seeds, lambda point: float(point >= SUCCESS)),
            ("failure", "%"): _by_profile(seeds, lambda point: float(point < FAILURE)),
        }
        for (name, unit), values in measures.items():
            if values:
                share = _mean([*values.values()])
                yield results.measured(name, share, unit=unit, of=model, about=about)
        shared = [firsts[name] - points[name] for name in firsts if name in points]
        if first != model and shared:
            yield results.measured(
                "final emotion", _mean(shared), of=first, baseline=model, about=about
            )
        all_finals = [point for finals in seeds for point in finals.values()]
        yield results.Metric(
            name="failed dialogues",
            value=sum(map(math.isnan, all_finals)),
            n=len(all_finals),
            of=model,
            about=about,
        )


def _by_profile(seeds: Sequence[Finals], measure: Callable[[float], float]) -> dict[str, float]:
    """Return the mean of a measure over the seeds of each profile with a dialogue that did not fail."""
    values: dict[str, list[float]] = {}
    for name, point in itertools.chain.from_iterable(finals.items() for finals in seeds):
        if not math.isnan(point):
            values.setdefault(name, []).append(measure(point))
    return {name: fmean(each) for name, each in values.items()}


def _mean(values: Sequence[float]) -> Estimate:
    weights = bootstrap_weights(range(len(values)))
    return estimate(weighted_mean(weights, values), len(values))


# --- files -------------------------------------------------------------------------------------


class _OfficialProfile(BaseModel):
    """A profile of SAGE or RLVER."""

    id: str
    player: str
    scene: str
    main_cha: str
    task: str
    first_talk: str = ""


def read_profiles(path: Path) -> list[Profile]:
    """Read the profiles of SAGE or RLVER, or the clients of Cactus. Also gzipped.

    A client's reason for seeking counselling stands for the hidden intention.

    Raises:
        ConfigError: The file cannot be read, or has no profile.
    """
    if ".jsonl" in path.suffixes:
        profiles = [
            Profile(language="zh", character=each.main_cha, **each.model_dump(exclude={"main_cha"}))
            for each in read_rows(path, _OfficialProfile)
        ]
    else:
        with opened_text(path) as file:
            clients = parse_json(str(path), file.read())
        try:
            profiles = [_client(number, client) for number, client in enumerate(clients)]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a list of Cactus's clients ({error!r})") from error
    if not profiles:
        raise ConfigError(f"{path}: no profile")
    return profiles


def _client(number: int, client: Mapping[str, Any]) -> Profile:
    seeker, known = client["AI_client"], client["AI_counselor"]["CBT"]
    return Profile(
        id=f"{number}-{seeker['attitude']}",
        player=seeker["intake_form"],
        scene=seeker["attitude_instruction"],
        character=seeker["attitude"],
        task=known["reason_counseling"],
        first_talk=known["init_history_client"],
        language="en",
    )
