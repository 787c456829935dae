"""What a rule finds in a step, in words for a judge: where its words come from, and whether its quotations are exact.

A small judge misjudges mostly what a rule can look up, such as a word that nobody said. Told the findings with its
question, it can weigh them together with the meaning. A judge of `models.toml` gets them with `findings = true`, if it
was trained with them.
"""

import re
from collections.abc import Iterable
from functools import cache

from compeer_core.dialogue import Dialogue, Speaker
from compeer_core.grounding import Ground, StepChecker
from compeer_core.ngrams import words_of
from compeer_core.prompts import findings_line
from compeer_core.reasoning import Step

SHOWN = 4
"""Maximum number of words that are named."""

_GRAMMAR = frozenset(
    ["seeker", "say", "says", "said", "talk", "talks", "feel", "feels", "feeling", "now"]
)
"""Words of almost every step."""
_PIECES = frozenset(["s", "t", "m", "re", "ve", "ll", "d", "don"])
"""What `words_of` leaves of contractions."""
_ENDING = re.compile(r"(?<=\w{3})(?:ing|ed|es|s|ly)$")


class StepFindings:
    """Finds where the words of steps come from, for one conversation.

    Args:
        dialogue: The conversation before the turn.
        language: Of the findings, one of `compeer_core.prompts.LANGUAGES`.
    """

    def __init__(self, dialogue: Dialogue, language: str = "en") -> None:
        self._language = language
        self._checker = StepChecker(dialogue)
        seeker = [u.text for u in dialogue if u.speaker is Speaker.SEEKER]
        supporter = [u.text for u in dialogue if u.speaker is not Speaker.SEEKER]
        self._sources = [_stems(seeker[-1:]), _stems(seeker[:-1]), _stems(supporter)]

    def of(self, step: Step) -> str:
        """Return the findings about a step as one line.

        The content words of its text are counted in tenths by where they stem from: the seeker's last message,
        earlier ones, the supporter alone, or nobody.

        Example:
            >>> from compeer_core.dialogue import Utterance
            >>> from compeer_core.reasoning import HistoryStep
            >>> from compeer_core.taxonomy import Stage
            >>> dialogue = Dialogue((Utterance(Speaker.SEEKER, "My boss shouted."),))
            >>> step = HistoryStep('The "boss" shouts at dogs.', Stage.EXPLORATION)
            >>> StepFindings(dialogue).of(step)
            'Words: last message 7, earlier 0, supporter 0, nobody 3 (dogs). Quotations: 1 said, 0 not said.'
        """
        words = [word for word in words_of(step.text) if _is_content(word)]
        counts = [0, 0, 0, 0]
        unsaid: dict[str, None] = {}
        for word in words:
            stem = _stem(word)
            place = next((n for n, known in enumerate(self._sources) if stem in known), 3)
            counts[place] += 1
            if place == 3:
                unsaid[word] = None
        grounds = [evidence.ground for evidence in self._checker.check(step.text)]
        return findings_line(
            tenths=[round(10 * count / max(1, len(words))) for count in counts],
            unsaid=list(unsaid)[:SHOWN],
            said=grounds.count(Ground.FOUND),
            not_said=grounds.count(Ground.NOT_SAID),
            language=self._language,
        )


def _stems(texts: Iterable[str]) -> frozenset[str]:
    return frozenset(_stem(word) for text in texts for word in words_of(text))


def _stem(word: str) -> str:
    return _ENDING.sub("", word)


def _is_content(word: str) -> bool:
    return word not in _common_words()


@cache
def _common_words() -> frozenset[str]:
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS  # slow to import

    return frozenset(ENGLISH_STOP_WORDS) | _GRAMMAR | _PIECES
