"""The prompt of the small seeker: `sft seeker` trains an adapter on it, simulated dialogues use it.

The adapter plays a person who seeks support, in English: the situation is the system message, the
supporter is the user, and the person's own turns are the assistant's. Asked with `rating_messages`, it
says how strong the person's distress is, as the seekers of ESConv did before and after a dialogue.
"""

from collections.abc import Iterable, Sequence

from compeer_core.dialogue import Speaker
from compeer_core.messages import Message
from compeer_core.prompts import fill, neutralise

GREETING = (
    "Hello, I'm your personal assistant. You can confide in me about any worries or concerns "
    "you may have!"
)
"""What the supporter says first; the first line of every dialogue of ESC-Eval."""
RATINGS = ("1", "2", "3", "4", "5")
"""Answers to the question of `rating_messages`: the distress from 1 (very weak) to 5 (very strong)."""

_INSTRUCTION = "You seek support in a chat. Your situation:\n{{situation}}"
_QUESTION = "How strong is your distress now, from 1 to 5?"


def seeker_messages(
    situation: str, turns: Iterable[tuple[Speaker, str]], reserved: Iterable[str] = ()
) -> tuple[Message, ...]:
    """Return a dialogue as the seeker sees it; `GREETING` comes first unless the supporter opens it.

    Args:
        situation: What happened to the seeker.
        turns: The speakers, which alternate, and their texts.
        reserved: The model's control tokens, see `neutralise`.
    """
    reserved = tuple(reserved)
    chat = [
        Message("assistant" if speaker is Speaker.SEEKER else "user", (neutralise(text, reserved),))
        for speaker, text in turns
    ]
    if not chat or chat[0].role == "assistant":
        chat.insert(0, Message("user", (GREETING,)))
    system = fill(_INSTRUCTION, situation=neutralise(situation, reserved))
    return (Message("system", (system,)), *chat)


def rating_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a dialogue of `seeker_messages` that ends with the supporter, and the question after it."""
    *before, last = messages
    return (*before, Message(last.role, (f"{last.text}\n\n{_QUESTION}",)))


def situation_of_card(card: str) -> str:
    r"""Return a role card without the lines that say nothing.

    Example:
        >>> situation_of_card("Age: not mentioned\nGender: male\nProblem: He is alone.")
        'Gender: male\nProblem: He is alone.'
    """
    lines = (line.strip() for line in card.splitlines())
    return "\n".join(line for line in lines if not line.lower().endswith("not mentioned"))
