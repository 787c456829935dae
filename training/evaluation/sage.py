"""SAGE (Zhang et al., 2025, arXiv 2505.02847): `python -m training evaluate sage <config.toml>`.

A sentient agent plays a person with a hidden intention and talks to the model under test. On each reply it makes
two calls: the first decides how the reply changes its emotion (by at most 10, from a start of 40), the second
writes its next message. A dialogue ends in success at 100, in failure below 10, at a goodbye, or after
`max_turns` messages of the agent: 20 in COMPEER, 10 in the public code. The reply to the last message is
generated and not scored, as there.

The score is the mean final emotion over profiles and seeds. It depends on the simulator as much as on the
model, so every number names it; models are compared under the same simulator, paired by profile. Profiles are
read from a copy of the official repository (Tencent/digitalhuman), of RLVER, or of Cactus (English clients).
Dialogues are written in the official format and can be read from it:

```text
<output>/dialogues/<model>_seed<seed>.jsonl    a dialogue a line, in the official format
<output>/failed.jsonl                          dialogues without a usable text, and why
```

docs/training.md lists the differences from the official protocol.
"""

import datetime
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from compeer_core.row_files import parse_json, read_rows, replacing
from compeer_core.stats import Estimate, bootstrap_weights, estimate, weighted_mean
from training.cer.requests.asking import Asker
from training.cer.requests.generators import GeneratorSettings
from training.common import results
from training.common.interrupts import StopRequest
from training.common.run_directory import versions
from training.evaluation.simulated_dialogues import (
    PROMPTS,
    Conversation,
    Supporter,
    advance,
    load_prompt,
    log_bound,
    opened,
    reply,
)
from training.stages import refuse_resume

START, LARGEST_CHANGE, SUCCESS, FAILURE = 40, 10, 100, 10
_BANDS = {100: "S", 70: "A", 40: "B", 10: "C"}
_SECTIONS = re.compile(r"^\W*(Content|TargetCompletion|Activity|Analyse|Change)\W*?[:：]", re.M)
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


class Recorded(FrozenModel):
    """Dialogues of another program in the official format."""

    name: str
    """The model under test."""
    simulator: str
    max_turns: int = Field(default=10, ge=1)
    files: tuple[Path, ...] = Field(min_length=1)
    """A file per seed."""


class Config(FrozenModel):
    """`[evaluate sage]`: models under test, profiles and simulator."""

    output: Path
    """Folder of the run."""
    name: str = Field(pattern=r"^sage_[\w-]+$")
    """Name of the results file."""
    results: Path = results.FOLDER
    policies: tuple[Supporter, ...] = ()
    """The models under test. The first is compared with each of the others."""
    recorded: tuple[Recorded, ...] = ()
    """Models whose dialogues exist already."""
    profiles: Path | None = None
    """SAGE's or RLVER's profiles (`.jsonl`, Chinese), or Cactus's clients (`.json`, English); also `.gz`."""
    count: int | None = Field(default=None, gt=0)
    """The first so many profiles; None uses all."""
    simulator: GeneratorSettings | None = None
    """The model behind the sentient agent."""
    max_turns: int = Field(default=20, ge=1)
    """The agent's messages in a dialogue: 20 in COMPEER, 10 in the public code and leaderboard."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Each profile is played once per seed."""
    prompts: Path = PROMPTS
    """Folder of the agent's prompts; another folder replaces the wording."""
    command: str = "python -m training evaluate sage training/configs/evaluate_sage.toml"
    """The command that reproduces the result."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [each.name for each in self.policies]
        if len({*names}) < len(names) or len({*self.seeds}) < len(self.seeds):
            raise ValueError("two models have the same name, or a seed occurs twice")
        if not self.policies and not self.recorded:
            raise ValueError("nothing to evaluate: set policies or recorded")
        if self.policies and (self.profiles is None or self.simulator is None):
            raise ValueError("policies need profiles and a simulator")
        return self


@dataclass
class SentientDialogue(Conversation):
    """A dialogue with the state of the sentient agent."""

    profile: Profile = None  # type: ignore[assignment]
    point: int = START
    """The emotion."""
    planning: dict[str, Any] = field(default_factory=dict)
    """The sections of the last emotion call."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The messages in the official format."""
    is_over: bool = False

    @property
    def band(self) -> str:
        """The state's letter: S, A, B, C or F."""
        return next((name for low, name in _BANDS.items() if self.point >= low), "F")

    def feel(self, text: str) -> None:
        """Take over the answer to the emotion call."""
        self.planning = read_planning(text)
        self.point = updated(self.point, self.planning["change"])

    def say(self, text: str, thinking: str = "") -> None:
        """Add a message of the agent, and end the dialogue if it has to."""
        message: dict[str, Any] = {"role": "user", "content": text}
        if self.planning:
            message["thinking"] = thinking
        message["emotion-point"] = self.point
        if self.planning:
            message["planning"] = self.planning
        self.lines.append(text)
        self.history.append(message)
        self.is_over = ends(self.point, text)

    def record(self) -> dict[str, Any]:
        """Return the dialogue in the official format."""
        return {
            "id": self.profile.id,
            "emo_point": self.point,
            "emo_state": f"Emotion-{self.band}",
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
    return {
        "activity": sections.get("Activity", ""),
        "TargetCompletion": sections.get("TargetCompletion", ""),
        "content": sections.get("Content", ""),
        "analyse": sections.get("Analyse", ""),
        "change": int(re.sub("[−－]", "-", changes[-1]).replace("＋", "+")),
    }


def read_response(text: str) -> tuple[str, str]:
    r"""Return the message and the thinking of an answer to the second call; the message may be empty.

    Example:
        >>> read_response('Thinking: be curt\nResponse: "Fine."')
        ('Fine.', 'Thinking: be curt')
    """
    starts = [*_RESPONSE.finditer(text)]
    if not starts:
        return "", text.strip()
    return text[starts[-1].end() :].strip().strip('"“”「」*').strip(), text[
        : starts[-1].start()
    ].strip()


def _check_planning(key: str, text: str) -> str | None:
    return None if _CHANGE.search(text) else "no change"


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
    profiles = [] if config.profiles is None else read_profiles(config.profiles)[: config.count]
    runs = {
        (_about(each.simulator, each.max_turns), each.name): [
            read_finals(path) for path in each.files
        ]
        for each in config.recorded
    }
    if dry_run:
        dialogues = len(profiles) * len(config.seeds)
        for policy in config.policies:
            log_bound(policy, dialogues * config.max_turns)
        if config.simulator is not None:
            openings = sum(not each.first_talk for each in profiles) * len(config.seeds)
            calls = 2 * (config.max_turns - 1) * dialogues + openings
            log_bound(config.simulator, len(config.policies) * calls)
        return
    config.output.mkdir(parents=True, exist_ok=True)
    if config.simulator is not None:
        about = _about(config.simulator.author, config.max_turns)
        with StopRequest() as stopping:
            played = dict(_play(config, config.simulator, profiles, stopping))
        for (model, seed), dialogues in played.items():
            finals = {
                each.profile.id: math.nan if each.problem else float(each.point)
                for each in dialogues
            }
            runs.setdefault((about, model), []).append(finals)
            path = config.output / "dialogues" / f"{model}_seed{seed}.jsonl"
            _write(path, (each.record() for each in dialogues if each.problem is None))
        failed = (each for each in itertools.chain(*played.values()) if each.problem is not None)
        _write(
            config.output / "failed.jsonl",
            ({"dialogue": each.key, "problem": each.problem, **each.record()} for each in failed),
        )
    _publish(config, runs)


def _about(simulator: str, max_turns: int) -> str:
    return f"simulator {simulator}, at most {max_turns} turns"


def _play(
    config: Config,
    simulator: GeneratorSettings,
    profiles: Sequence[Profile],
    stopping: StopRequest,
) -> Iterator[tuple[tuple[str, int], list[SentientDialogue]]]:
    """Yield the dialogues of each model and seed."""
    with opened(simulator, config.output, stopping) as agent:
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
    prompts = {
        name: load_prompt(config.prompts, f"sage_{name}.{language}")
        for name in ("emotion", "reply", "states")
    }
    states = dict(line.split(": ", 1) for line in prompts["states"].splitlines())

    def feel(each: SentientDialogue) -> Sequence[Message]:
        return _call(prompts["emotion"], each, agent.reserved)

    def say(each: SentientDialogue) -> Sequence[Message]:
        planning = "\n".join(f"{name}: {text}" for name, text in each.planning.items()) or "-"
        state = states[each.band]
        return _call(prompts["reply"], each, agent.reserved, planning=planning, state=state)

    def let_agents_speak(speaking: Sequence[SentientDialogue]) -> None:
        for each, text in advance(agent, "message", speaking, say, _check_response, seed):
            each.say(*read_response(text))

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
            for each, text in advance(agent, "emotion", active, feel, _check_planning, seed):
                each.feel(text)
            let_agents_speak(active)


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


def metrics(runs: Mapping[tuple[str, str], Sequence[Finals]]) -> Iterator[results.Metric]:
    """Yield final emotion, success and failure with CIs over profiles; seeds are averaged by profile.

    Args:
        runs: By simulator and model, the final emotions of each seed. The first model of a simulator is
            compared with each of the others, paired by profile.
    """
    first_of: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for (about, model), seeds in runs.items():
        points = _by_profile(seeds, lambda point: point)
        measures = {
            ("final emotion", ""): points,
            ("success", "%"): _by_profile(seeds, lambda point: float(point >= SUCCESS)),
            ("failure", "%"): _by_profile(seeds, lambda point: float(point < FAILURE)),
        }
        for (name, unit), values in measures.items():
            if values:
                share = _mean([*values.values()])
                yield results.measured(name, share, unit=unit, of=model, about=about)
        first, first_points = names.setdefault(about, model), first_of.setdefault(about, points)
        shared = [first_points[name] - points[name] for name in first_points if name in points]
        if first != model and shared:
            yield results.measured(
                "final emotion", _mean(shared), of=first, baseline=model, about=about
            )
        failed = sum(math.isnan(point) for finals in seeds for point in finals.values())
        yield results.Metric(
            name="failed dialogues", value=failed, n=len(seeds[0]), of=model, about=about
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


def _publish(config: Config, runs: Mapping[tuple[str, str], Sequence[Finals]]) -> None:
    simulators = dict.fromkeys(about for about, _ in runs)
    result = results.Result(
        name=config.name,
        title=f"SAGE: final emotion (0 to 100, start {START}), success and failure",
        date=datetime.datetime.now(datetime.UTC).date(),
        model=", ".join(dict.fromkeys(model for _, model in runs)),
        label_source="; ".join(simulators),
        command=config.command,
        versions=versions(("torch", "transformers", "peft")),
        interval="95 % CI over profiles, seeds averaged",
        compared="Model",
        metrics=tuple(metrics(runs)),
    )
    results.publish(result, config.results, config.output)


# --- files -------------------------------------------------------------------------------------


class _Final(BaseModel):
    """What counts in a dialogue of the official format."""

    id: str
    emo_point: int


class _OfficialProfile(BaseModel):
    """A profile of SAGE or RLVER."""

    id: str
    player: str
    scene: str
    main_cha: str
    task: str
    first_talk: str = ""


def read_finals(path: Path) -> dict[str, float]:
    """Return the final emotion by profile of a file in the official format.

    Raises:
        ConfigError: It cannot be read, or is another file.
    """
    return {each.id: float(each.emo_point) for each in read_rows(path, _Final)}


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


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
