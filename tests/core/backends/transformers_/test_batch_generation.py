"""A batch reads what its prompts share once; the texts are those of each prompt alone."""

import threading

import pytest

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.batch_generation import Prompt, generate_turns

pytestmark = pytest.mark.usefixtures("one_core")

SAMPLING = Sampling(temperature=0.8, max_new_tokens=12)


def written(chat, prompts):
    turns = chat.owner.call(
        lambda: generate_turns(chat, None, prompts, SAMPLING, threading.Event())
    )
    return [[turn.text for turn in of_prompt] for of_prompt in turns]


def growing(*content) -> list[list[Message]]:
    """The histories of a dialogue, each with all that came before."""
    dialogue = [
        Message("system", ("Be kind to everybody who writes to you.",)),
        Message("user", content),
    ]
    for reply, answer in (("That is sad.", "yes it is"), ("What happened?", "he left me")):
        dialogue += [Message("assistant", (reply,)), Message("user", (answer,))]
    return [dialogue[:end] for end in (2, 4, 6)]


@pytest.mark.parametrize("with_picture", [False, True])
def test_histories_of_a_dialogue_are_read_once(qwen, picture, monkeypatch, with_picture):
    chat = qwen._chat
    first = growing("I feel bad ", picture(1)) if with_picture else growing("I feel bad today")
    second = growing("I feel bad ", picture(2)) if with_picture else growing("My dog is ill")
    prompts = [Prompt(messages, (n, n + 10)) for n, messages in enumerate([*first, *second])]
    alone = [written(chat, [prompt])[0] for prompt in prompts]
    unread: list[int] = []
    run = type(chat).run

    def counted(self, state, *arguments, **options):
        unread.append(state.unread)
        return run(self, state, *arguments, **options)

    monkeypatch.setattr(type(chat), "run", counted)

    assert written(chat, prompts) == alone
    lengths = [len(chat.encode_fitting(prompt.messages, 12)[0].ids) for prompt in prompts]
    assert unread[0] == lengths[0]
    assert sum(unread[:3]) < lengths[2] + 40  # a reply opens with words that are read again
    # Another picture, though it has as many tokens: nothing of its dialogue is copied.
    assert unread[3] == lengths[3] if with_picture else unread[3] < lengths[3]
    assert sum(unread) < 0.7 * sum(lengths)
