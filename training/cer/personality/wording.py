"""Surface counts of a text: words, sentences, numbers, negations.

The lexical traits, the rule rewriter's guarantees and the final filter share them, so that all three
mean the same by "a negation". They are made for English and Chinese; any other language is read like
English: by letters between spaces.
"""

import re
from collections import Counter

_ENGLISH_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+(?:[.,:]\d+)*")
_CHINESE_WORD = re.compile(r"[\u3400-\u9fff]|[A-Za-z]+(?:['’][A-Za-z]+)*|\d+(?:[.,:]\d+)*")
_SENTENCE_END = re.compile(
    r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)])\s+|(?<=[。！？])(?![”’」』）。！？…])"
)
_QUESTION_MARK = re.compile("[?？]")

_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
# Without "one" and "second", which are more often a pronoun and a moment than numbers.
_SPELLED = (
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "hundred thousand million billion half dozen twice"
)
_NUMBER_WORDS = _SPELLED.split()
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b", re.IGNORECASE)
_VALUES = {word: str(value) for value, word in enumerate(_NUMBER_WORDS[1:20], start=2)} | {
    word: str(value) for value, word in zip(range(20, 100, 10), _NUMBER_WORDS[19:27], strict=True)
}
_CHINESE_NUMBER = re.compile(
    "(?!十分(?!钟))[两二三四五六七八九十百千]+(?=[个年岁天月次点周小分号位名块元])"
)

_BARE_NEGATIONS = "aint arent cant couldnt didnt doesnt dont hadnt hasnt havent isnt shouldnt wasnt"
_NEGATION = re.compile(
    r"\b(?:no|not|never|none|nobody|nothing|nowhere|neither|nor|cannot|without|hardly|barely|"
    rf"\w+n['’]t|{'|'.join(_BARE_NEGATIONS.split())}|werent|wont|wouldnt)\b",
    re.IGNORECASE,
)
# Words that contain the character of a negation but negate nothing.
_CHINESE_HARMLESS = re.compile(
    "不过|不仅|不但|不断|不妨|不错|差不多|不管|不论|不同|不得不|不久|非常|除非|是非|无论|无非|"
    "别人|特别|分别|区别|个别|告别|别的|(.)不\\1|没错|有没有"
)
_CHINESE_NEGATION = re.compile("[不没无别非未莫勿]")


def words(text: str, language: str = "en") -> list[str]:
    """Return the words of a text in lower case; for Chinese, its characters.

    Example:
        >>> words("I don't know 3 of them."), words("我很累", "zh")
        (['i', "don't", 'know', '3', 'of', 'them'], ['我', '很', '累'])
    """
    pattern = _CHINESE_WORD if language == "zh" else _ENGLISH_WORD
    return [word.lower() for word in pattern.findall(text)]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, stripped; line breaks end sentences too.

    Example:
        >>> sentences("Hello. How are you?")
        ['Hello.', 'How are you?']
    """
    pieces = (piece for line in text.split("\n") for piece in _SENTENCE_END.split(line))
    return [piece.strip() for piece in pieces if piece and piece.strip()]


def numbers(text: str, language: str = "en") -> Counter[str]:
    """Return the numbers of a text with their counts; small spelled-out numbers become digits.

    Example:
        >>> sorted(numbers("two of 12 people"))
        ['12', '2']
    """
    counts = Counter(_DIGITS.findall(text))
    if language == "zh":
        return counts + Counter(_CHINESE_NUMBER.findall(text))
    spelled = (word.lower() for word in _NUMBER_WORD.findall(text))
    return counts + Counter(_VALUES.get(word, word) for word in spelled)


def negations(text: str, language: str = "en") -> int:
    """Return the number of negations in a text.

    All forms count once: "do not", "don't" and "dont" are the same.

    Example:
        >>> negations("I don't know, and he does not either"), negations("我不过是没睡好", "zh")
        (2, 1)
    """
    if language == "zh":
        return len(_CHINESE_NEGATION.findall(_CHINESE_HARMLESS.sub("", text)))
    return len(_NEGATION.findall(text))


def questions(text: str) -> int:
    """Return the number of question marks in a text."""
    return len(_QUESTION_MARK.findall(text))
