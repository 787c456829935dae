"""Dialogues between a supporter under test and a simulated seeker: what ESC-Eval and SAGE share.

All dialogues advance together, one utterance at a time, so an endpoint has many requests in flight and a
checkpoint gets full batches. Every text is stored before it is used (`training.cer.requests.asking`): an
interrupted run resumes by itself and repeats no request. A dialogue without a usable text fails and is
counted; the others continue.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.logs import brief
from compeer_core.messages import Message, Role
from compeer_core.policy import Style
from compeer_core.prompts import neutralise, policy_messages
from compeer_core.reasoning import reply_of
from compeer_core.registry import Registry
from training.cer.requests.asking import Asker, Check, Question
from training.cer.requests.generators import GeneratorSettings
from training.cer.requests.seeding import seed_for
from training.common import results
from training.common.fingerprints import digest, fingerprint
from training.common.interrupts import StopRequest
from training.common.jsonl import append_rows, replace_rows
from training.common.run_directory import versions

_log = logging.getLogger(__name__)

PROMPTS = Path(__file__).with_name("prompts")
FAILED = "failed.jsonl"
REQUESTS = "requests.jsonl"
"""The requests of each model, with retries and failures by reason; a line per model and start."""


class Supporter(GeneratorSettings):
    """A model under test: any source that `GeneratorSettings` loads."""

    name: str = Field(pattern=r"^[\w.\-]+$")
    entry: str = ""
    """`FILE#NAME`: a policy of a list of models, such as `training/models/baselines.toml#qwen3`. Its settings are
    taken over; keys beside it replace them. `exact_quotations` is refused: these dialogues are written without it."""
    style: Style = "trained"
    """"prompted" asks for the three steps of reasoning in a system message; "trained" does not."""
    system_prompt: str = ""
    """A system message in the style "trained", for a model that needs one."""
    message_suffix: str = ""
    """Appended to the seeker's last message, such as " /no_think"."""

    @model_validator(mode="before")
    @classmethod
    def _takes_over_its_entry(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("entry"):
            return values
        path, _, name = str(values["entry"]).rpartition("#")
        entry = Registry.from_toml(Path(path)).entry(name, "policy").located(Path(path).parent)
        prompt = {"style", "system_prompt", "message_suffix", "sees_images"}
        taken = entry.model_dump(include={"name", "source", "adapter"} | prompt)
        return taken | entry.sampling.model_dump(exclude_none=True) | values

    @model_validator(mode="after")
    def _has_one_system_message(self) -> Self:
        if self.system_prompt and self.style == "prompted":
            raise ValueError("the style 'prompted' has its own system message; drop system_prompt")
        return self


class SimulationConfig(FrozenModel):
    """What the two configs share."""

    output: Path
    """Folder of the run."""
    name: str = Field(pattern=r"^[\w-]+$")
    """Name of the results file."""
    results: Path = results.FOLDER
    policies: tuple[Supporter, ...] = ()
    """The models under test. The first is compared with each of the others."""
    count: int | None = Field(default=None, gt=0)
    """The first so many cards or profiles; None uses all."""
    prompts: Path | None = None
    """Folder with other prompts of seekers and judges; None uses the shipped ones."""
    command: str = ""
    """The command that reproduces the result."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [policy.name for policy in self.policies]
        if len({*names}) < len(names):
            raise ValueError("two policies have the same name")
        return self


@dataclass
class Conversation:
    """A dialogue as it advances."""

    key: str
    """Its name among the dialogues of a model."""
    lines: list[str] = field(default_factory=list)
    """The utterances; the seeker's first, then in turn."""
    problem: str | None = None
    """Why it failed; None if it has not."""

    @property
    def turns(self) -> Iterator[tuple[Speaker, str]]:
        """The utterances with their speakers."""
        for number, line in enumerate(self.lines):
            yield (Speaker.SUPPORTER if number % 2 else Speaker.SEEKER), line


Conversing = TypeVar("Conversing", bound=Conversation)


@contextmanager
def opened(
    settings: GeneratorSettings, folder: Path, stopping: StopRequest | None = None
) -> Iterator[Asker]:
    """Open a model whose texts are stored in a folder; a checkpoint loads at its first request.

    Its texts depend on its weights and the libraries, so these have a subfolder of their own.

    Raises:
        CheckpointError: The tokenizer of a checkpoint cannot be loaded.
    """
    paths = [Path(settings.where.location), settings.adapter] if settings.in_process else []
    weights = [fingerprint(path) for path in paths if path is not None and path.exists()]
    identity = [weights, versions(("torch", "transformers"))] if settings.in_process else []
    asker = Asker(settings, folder / "answers" / digest(identity)[:16], stopping=stopping)
    try:
        asker.reserved  # noqa: B018  (loads the tokenizer)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{settings.source}: its tokenizer cannot be loaded ({brief(error)}); check the folder or "
            "the name, and that transformers has its architecture"
        ) from error
    try:
        yield asker
    finally:
        asker.close()
        line = {"model": asker.name, **asker.counts.model_dump(mode="json")}
        append_rows(folder / REQUESTS, [line])


def advance(
    asker: Asker,
    label: str,
    conversations: Iterable[Conversing],
    messages: Callable[[Conversing], Sequence[Message]],
    check: Check,
    seed: int,
) -> Iterator[tuple[Conversing, str]]:
    """Ask a model about each conversation that has not failed; yield those with a usable text.

    A conversation without one gets its `problem`.
    """
    active = [each for each in conversations if each.problem is None]
    questions = [
        Question(
            f"{each.key}/{len(each.lines)}",
            tuple(messages(each)),
            seed_for(seed, label, each.key, str(len(each.lines))),
        )
        for each in active
    ]
    answers = asker.ask(questions, check, label=label, total=len(questions))
    for conversation, answer in zip(active, answers, strict=True):
        if answer.text is None:
            conversation.problem = f"{label}: {answer.problem}"
        else:
            yield conversation, answer.text


def reply(
    asker: Asker,
    supporter: Supporter,
    conversations: Iterable[Conversing],
    language: str,
    seed: int,
) -> None:
    """Let the supporter answer each conversation. It sees the utterances and nothing else."""

    def messages(conversation: Conversing) -> Sequence[Message]:
        utterances = tuple(Utterance(speaker, text) for speaker, text in conversation.turns)
        return policy_messages(
            Dialogue(utterances),
            supporter.style,
            language,
            asker.reserved,
            system_prompt=supporter.system_prompt,
            message_suffix=supporter.message_suffix,
        )

    label = f"{supporter.name} replies"
    for conversation, text in advance(asker, label, conversations, messages, _check_reply, seed):
        conversation.lines.append(reply_of(text))


def seeker_chat(conversation: Conversation, reserved: Iterable[str]) -> Iterator[Message]:
    """Yield the utterances as a simulated seeker sees them: its own are the assistant's."""
    for speaker, text in conversation.turns:
        role: Role = "assistant" if speaker is Speaker.SEEKER else "user"
        yield Message(role, (neutralise(text, reserved),))


def _check_reply(key: str, text: str) -> str | None:
    return None if reply_of(text) else "no reply"


def check_text(key: str, text: str) -> str | None:
    """Return why a text is unusable as an utterance; None if it is usable."""
    return None if text.strip() else "empty text"


def load_prompt(folder: Path | None, name: str) -> str:
    """Return the text of a prompt file, without outer white space; None is the folder of the shipped ones.

    Raises:
        ConfigError: It cannot be read.
    """
    path = (folder or PROMPTS) / f"{name}.md"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); `prompts` needs every file of {PROMPTS}"
        ) from error


def titled(title: str, *, is_small: bool) -> str:
    """Return the title of a result; a simulation with the small seeker says that it is one."""
    return f"{results.SMALL_SIMULATION}: {title}" if is_small else title


def log_bounds(requests: Iterable[tuple[GeneratorSettings, int]]) -> None:
    """Log upper bounds of the requests and the text of each model, for a dry run."""
    for settings, count in requests:
        tokens = count * settings.max_new_tokens
        price = settings.price_per_million_output
        cost = "" if price is None else f", at most {tokens * price / 1e6:.2f} for them"
        _log.info(
            "%s: at most %d requests and %d output tokens%s", settings.author, count, tokens, cost
        )


def write_failed(output: Path, conversations: Iterable[Conversation]) -> None:
    """Write the dialogues that failed, and why."""
    failed = [each for each in conversations if each.problem is not None]
    rows = [{"dialogue": each.key, "problem": each.problem, "lines": each.lines} for each in failed]
    replace_rows(output / FAILED, rows)


def publish(config: SimulationConfig, metrics: Iterable[results.Metric], **values: Any) -> None:
    """Publish a result; `values` are the fields of `results.Result` that an evaluation knows."""
    rows = tuple(metrics)
    result = results.made(
        ("torch", "transformers", "peft"),
        name=config.name,
        model=", ".join(dict.fromkeys(row.of for row in rows)),
        command=config.command,
        compared="Model",
        metrics=rows,
        **values,
    )
    results.publish(result, config.results, config.output)
