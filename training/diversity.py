"""How different texts are from each other.

A policy that collapses says the same to everybody, or the same again and again. The measures, from
words to meaning:

- distinct-n: the share of all runs of n words that are different (Li et al. 2016, arXiv 1510.03055).
  It falls with the amount of text, so only equal amounts can be compared.
- loops: the share of texts that hold one run of words several times;
- the Vendi score: how many different texts there are in effect, by the similarity of their
  embeddings (Friedman and Dieng 2023, arXiv 2210.02410): exp of the entropy of the eigenvalues of
  K / n, where K holds the cosines. 1 if all say the same, n if none resembles another.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

# Letters of scripts that are written without spaces count as words of their own.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in small letters, without punctuation.

    Example:
        >>> words_of("I'm here. 我在"), words_of("...")
        (['i', 'm', 'here', '我', '在'], [])
    """
    return _WORD.findall(text.casefold())


def distinct(texts: Sequence[str], length: int) -> float | None:
    """Return the share of runs of `length` words that are different; None where there are none.

    Example:
        >>> distinct(["that is hard", "that is sad"], 2)  # 4 pairs, "that is" twice
        0.75
    """
    runs = [
        tuple(words[place : place + length])
        for words in map(words_of, texts)
        for place in range(len(words) - length + 1)
    ]
    return len(set(runs)) / len(runs) if runs else None


def loops(text: str, length: int = 4, times: int = 3) -> bool:
    """Whether some run of `length` words comes `times` times or more.

    Example:
        >>> loops("I am so sorry, I am so sorry, I am so sorry."), loops("I am so sorry.")
        (True, False)
    """
    words = words_of(text)
    runs = Counter(tuple(words[place : place + length]) for place in range(len(words) - length + 1))
    return max(runs.values(), default=0) >= times


def vendi_score(embeddings: ArrayLike) -> float:
    """Return how many different texts there are in effect.

    Args:
        embeddings: Shape (n, dimension); their lengths do not matter. One that is all zeros (an
            empty text) is like no other but itself.

    Raises:
        ValueError: There are no embeddings.

    Example:
        >>> round(vendi_score([[1, 0], [2, 0]]), 6), round(vendi_score([[1, 0], [0, 1]]), 6)
        (1.0, 2.0)
    """
    vectors = np.atleast_2d(np.asarray(embeddings, dtype=np.float64))
    if vectors.size == 0:
        raise ValueError("there are no embeddings")
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    kernel = unit @ unit.T
    np.fill_diagonal(kernel, 1.0)
    share = np.clip(np.linalg.eigvalsh(kernel / len(kernel)), 0.0, None)
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))
