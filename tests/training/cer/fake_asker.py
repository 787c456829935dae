"""A generator for the tests of steps that ask one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from training.cer.requests.asking import Answer, Check, Question

AHEAD = 3


class FakeAsker:
    """Answers by a function of the last message, and reads ahead as the real one does.

    What a check refuses has no text.
    """

    name = "fake"
    reserved = ()

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        self.keys: list[str] = []

    def ask(
        self, questions: Iterable[Question], check: Check, *, label: str, total: int | None = None
    ) -> Iterator[Answer]:
        ahead: deque[Question] = deque()
        for question in questions:
            self.keys.append(question.key)
            ahead.append(question)
            if len(ahead) > AHEAD:
                yield self._answered(ahead.popleft(), check)
        for question in ahead:
            yield self._answered(question, check)

    def _answered(self, question: Question, check: Check) -> Answer:
        text = self._answer(question.messages[-1].text)
        problem = check(question.key, text)
        return Answer(key=question.key, text=None if problem else text, problem=problem, tries=1)
