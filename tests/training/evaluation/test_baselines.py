"""The paper's baselines: every entry of the list loads and is asked in its own form."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compeer_core.backends.protocol import Message
from compeer_core.backends.scripted import ScriptedBackend
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import BackendError
from compeer_core.model_pool import ModelPool, load_transformers
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import TurnFinished, parse
from compeer_core.registry import ModelEntry, Registry, SamplingOverrides, SourceKind
from tests.checkpoints import build_internvl, build_qwen, build_text
from tests.core.backends.openai.endpoint_server import Endpoint as StreamingEndpoint
from tests.core.backends.openai.endpoint_server import Reply, serving
from tests.core.conftest import Picture, picture  # noqa: F401  (a fixture)
from tests.core.example import DIALOGUE, TEXT
from tests.training.cer.endpoint import Endpoint
from training.evaluation.simulated_dialogues import Conversation, Supporter, opened, reply

LIST = Path("training/models/baselines.toml")
ENTRIES = {entry.name: entry for entry in Registry.from_toml(LIST).entries}
POLICIES = {name: entry for name, entry in ENTRIES.items() if entry.kind == "policy"}
JUDGES = {name: entry for name, entry in ENTRIES.items() if entry.kind == "judge"}
ARCHITECTURES = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "OpenGVLab/InternVL3-8B-hf": "internvl",
    "Qwen/Qwen3-8B": "qwen3",
    "internlm/internlm3-8b-instruct": "internlm3",
    "XiaomiMiMo/MiMo-VL-7B-RL": "qwen2_5_vl",
}
SPECIALISED = {"cpsycounx", "emollm", "soulchat2"}
HELLO = Dialogue.from_messages([{"role": "user", "content": "I feel sad"}])


def served(entries: dict[str, ModelEntry]) -> list[str]:
    return [name for name, entry in entries.items() if entry.where.kind is SourceKind.ENDPOINT]


def local(entries: dict[str, ModelEntry]) -> list[str]:
    return [name for name in entries if name not in served(entries)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random checkpoint of each architecture."""
    folder = tmp_path_factory.mktemp("architectures")
    return {
        "qwen2_5_vl": build_qwen(folder / "qwen2_5_vl", max_position_embeddings=4096),
        "internvl": build_internvl(folder / "internvl"),
        **{name: build_text(folder / name, name) for name in ("qwen2", "qwen3", "internlm3")},
    }


@pytest.fixture
def streaming() -> Iterator[StreamingEndpoint]:
    with serving() as endpoint:
        yield endpoint


def at(entry: ModelEntry, source: str, **changes: Any) -> Registry:
    return Registry([entry.model_copy(update={"source": source} | changes)], device="cpu")


def answer_of(policy: Policy, dialogue: Dialogue = HELLO) -> TurnFinished:
    *_, last = policy.respond(dialogue, Controls(), threading.Event())
    assert isinstance(last, TurnFinished)
    return last


# --- the list ------------------------------------------------------------------------------------


def test_general_models_stand_in_both_settings_and_specialised_ones_in_the_default_one() -> None:
    reasoning = {name for name, entry in POLICIES.items() if entry.style == "prompted"}
    general = {name.removesuffix("-reasoning") for name in reasoning}

    assert reasoning == {f"{name}-reasoning" for name in general}
    assert general | SPECIALISED == POLICIES.keys() - reasoning
    assert len(general) == 7
    assert len(JUDGES) == 5


# --- in process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*local(POLICIES), "soulchat2"])
def test_a_checkpoint_of_the_architecture_is_loaded_and_answers_a_picture(
    name: str,
    folders: dict[str, Path],
    picture: Picture,  # noqa: F811
) -> None:
    entry = POLICIES[name]
    folder = folders[ARCHITECTURES.get(entry.where.location, "qwen2")]
    short = SamplingOverrides(thinking=entry.sampling.thinking, max_new_tokens=8)
    registry = at(entry, str(folder), sampling=short)
    dialogue = Dialogue((Utterance(Speaker.SEEKER, "I feel sad", (picture(width=60),)),))

    stream = registry.policy().respond(dialogue, Controls(), threading.Event())
    assert isinstance([*stream][-1], TurnFinished)
    assert 0 < stream.tokens <= 8
    registry.close()


def test_a_language_model_switches_its_thoughts_and_refuses_a_picture_that_is_not_left_out(
    folders: dict[str, Path],
    picture: Picture,  # noqa: F811
) -> None:
    backend = load_transformers(str(folders["qwen3"]), pool=ModelPool())
    messages = [Message("user", ("Hi",))]
    ends = {
        thinking: backend._chat.template.render(messages, reply=True, thinking=thinking)[-20:]
        for thinking in (None, True, False)
    }

    assert ends[None] == ends[True]
    assert ends[False].endswith("<think>\n\n</think>\n\n")
    dialogue = Dialogue((Utterance(Speaker.SEEKER, "Look", (picture(),)),))
    with pytest.raises(BackendError, match="cannot see images"):
        answer_of(Policy("p", backend), dialogue)
    backend.close()


@pytest.mark.parametrize("name", local(JUDGES))
def test_a_zero_shot_judge_judges_in_process(name: str, folders: dict[str, Path]) -> None:
    registry = at(
        JUDGES[name], str(folders[ARCHITECTURES[JUDGES[name].where.location]]), languages=("en",)
    )
    judge = registry.judge()
    assert judge is not None
    [judgement] = judge.judge(HELLO, [parse(TEXT)], ["Calm down."])

    assert all(0 < verdict.probability_correct < 1 for verdict in judgement.steps)
    registry.close()


# --- behind an endpoint --------------------------------------------------------------------------


@pytest.mark.parametrize("name", served(POLICIES))
def test_a_served_model_is_asked_in_its_own_form(name: str, streaming: StreamingEndpoint) -> None:
    entry = POLICIES[name]

    def script(sent: Reply) -> None:
        sent.stream()
        sent.say(TEXT)
        sent.end()

    streaming(script)
    registry = at(entry, f"openai:{streaming.url}#{entry.where.model}")
    last = answer_of(registry.policy())
    registry.close()

    [body] = streaming.bodies
    *system, asked = body["messages"]
    assert last.reading.is_complete
    assert body["model"] == entry.where.model
    assert body["max_tokens"] == entry.sampling.applied().max_new_tokens
    assert asked == {"role": "user", "content": f"I feel sad{entry.message_suffix}"}
    assert [message["role"] for message in system] == (
        ["system"] if entry.style == "prompted" or entry.system_prompt else []
    )
    assert not entry.system_prompt or system[0]["content"] == entry.system_prompt


@pytest.mark.parametrize("name", served(JUDGES))
def test_a_served_judge_is_read_as_its_entry_says(name: str, streaming: StreamingEndpoint) -> None:
    entry = JUDGES[name]

    def script(sent: Reply) -> None:
        is_reply = "First" in str(sent.body["messages"][-1])
        word = "Both" if is_reply else "True"
        if "logprobs" in sent.body:
            place = {"token": word, "logprob": -0.1, "top_logprobs": []}
            choice = {"message": {"content": word}, "logprobs": {"content": [place]}}
        else:
            text = f"<think>Is it False? First?</think>It fits.\nVerdict: {word}"
            choice = {"message": {"content": text}, "finish_reason": "stop"}
        sent.answer({"choices": [choice]})

    streaming(script)
    registry = at(entry, f"openai:{streaming.url}#{entry.where.model}")
    judge = registry.judge()
    assert judge is not None
    [judgement] = judge.judge(DIALOGUE, [parse(TEXT)], ["Calm down."])
    registry.close()

    assert [verdict.correct for verdict in judgement.steps] == [True] * 3
    assert {"logprobs" in body for body in streaming.bodies} == {entry.verdicts == "logprobs"}


# --- thoughts, and the evaluations ---------------------------------------------------------------


@pytest.mark.parametrize("text", [f"<think>A <reply>?</reply>\n</think>\n\n{TEXT}", TEXT])
def test_thoughts_before_a_turn_are_no_part_of_it(text: str) -> None:
    sampling = SamplingOverrides(thinking=True).applied()
    policy = Policy("p", ScriptedBackend([text]), sampling=sampling)

    assert answer_of(policy).reading.turn == parse(TEXT)


def test_a_supporter_takes_over_an_entry_and_may_change_it(tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    lines = ('name = "mine"', 'kind = "policy"', 'source = "base"', 'adapter = "lora"')
    models.write_text("\n".join(("[[models]]", *lines)), encoding="utf-8")
    qwen = Supporter.model_validate({"entry": f"{LIST}#qwen3", "in_flight": 16, "thinking": False})

    assert (qwen.name, qwen.source, qwen.max_new_tokens) == ("qwen3", "hf:Qwen/Qwen3-8B", 4096)
    assert (qwen.in_flight, qwen.thinking) == (16, False)
    mine = Supporter.model_validate({"entry": f"{models}#mine"})
    assert (mine.source, mine.adapter) == (str(tmp_path / "base"), tmp_path / "lora")
    with pytest.raises(ValidationError, match=r"did you mean 'qwen3'"):
        Supporter.model_validate({"entry": f"{LIST}#qwen33"})


def test_a_supporter_is_asked_in_the_form_of_its_entry(tmp_path: Path) -> None:
    with Endpoint(answer=lambda body: "<think>Short.</think>\nTell me more.") as endpoint:
        supporter = Supporter.model_validate(
            {"entry": f"{LIST}#emollm", "source": endpoint.source, "thinking": True}
        )
        conversation = Conversation("one", ["我很难过"])
        with opened(supporter, tmp_path) as asker:
            reply(asker, supporter, [conversation], "zh", seed=0)

    [body] = endpoint.bodies
    assert conversation.lines == ["我很难过", "Tell me more."]
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["messages"] == [
        {"role": "system", "content": POLICIES["emollm"].system_prompt},
        {"role": "user", "content": "我很难过"},
    ]
    assert (body["temperature"], body["top_p"]) == (0.7, 0.8)
