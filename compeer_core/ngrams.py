"""Words and n-grams of texts, English and Chinese: for the gate and for measures of repetition."""

import re
from collections import Counter
from collections.abc import Iterable

# In scripts without spaces, each character counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation.

    Example:
        >>> words_of("I'm here. 我在"), words_of("...")
        (['i', 'm', 'here', '我', '在'], [])
    """
    return _WORD.findall(text.casefold())


def runs_of(texts: Iterable[str], length: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of `length` words; none spans two texts."""
    return Counter(
        tuple(words[place : place + length])
        for words in map(words_of, texts)
        for place in range(len(words) - length + 1)
    )


def loops(text: str, length: int = 4, times: int = 3) -> bool:
    """Whether an n-gram of `length` words occurs at least `times` times.

    Example:
        >>> loops("I am so sorry, I am so sorry, I am so sorry."), loops("I am so sorry.")
        (True, False)
    """
    return max(runs_of([text], length).values(), default=0) >= times
