"""The first SFT set: ESConv's supporter turns written in the output grammar.

Labels come from the corpus: the strategy of the turn, the emotion and problem of the dialogue, the
intensity between the seeker's ratings before and after (by the place of the turn), the stage from
the place of the turn. The sentences around them are put together from `wording.toml`, the seeker's
own words and the labels; no model wrote them and no person checked them.

Two rules depart from the dialogue-level labels, because a turn can plainly contradict them: a
seeker who has only greeted is Neutral, and thanks near the end of a talk that helped are Joy.

A third is there for the photos. They fit the label, so a policy that never looked would lose little.
Where the seeker has only greeted, the face may be all that tells: in a share of those turns (`told_share`)
it shows another feeling than calm, and that is the label then.

What the emotion step says of a photo is its label, or what an image tower takes it for (`read_as`): half of
the faces a small tower takes for something else, and to name them rightly a policy could only guess by the words.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.errors import ConfigError
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    render,
)
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Stage
from training.data.esconv import AnnotatedDialogue
from training.data.histories import first_kept
from training.data.samples import Sample, SampleUtterance

GREETING_WORDS = 6
"""A seeker who has said at most so many words in all has not told anything yet."""

QUOTED_WORDS = 12
"""The history step quotes at most so many words."""
FEWEST_QUOTED_WORDS = 3
"""And no sentence or clause of fewer, unless the message has no more: "Yes." says nothing of what follows."""

TOLD_BY_FACE = {
    "angry": Emotion.ANGER,
    "disgust": Emotion.DISGUST,
    "fear": Emotion.FEAR,
    "happy": Emotion.JOY,
    "sad": Emotion.SADNESS,
}
"""What a face tells where words do not; a surprised one may be glad or afraid."""
TOLD_INTENSITY = 3

_THANKS = re.compile(
    r"\b(thank\w*|helpful|helped|feel(?:ing)? (?:much |a (?:lot|little|bit) )?better|great idea)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_BETWEEN_CLAUSES = re.compile(r"[.!?,;:()\n\u2013\u2014]|\s-\s")
_OPENING = re.compile(rf"\s*(\S+(?:[^\S\n]+\S+){{0,{QUOTED_WORDS - 1}}})")
_MARKUP = re.compile(r"[<>\[\]{}\"]")


@dataclass(frozen=True)
class TurnLabels:
    """The closed labels of one supporter turn."""

    stage: Stage
    emotion: Emotion
    intensity: int
    told_by: str = ""
    """The face class that tells the emotion, where the words do not."""


def stage_at(place: float) -> Stage:
    """Return the stage at `place`, the share of the supporter's turns that came before, in [0, 1]."""
    return (Stage.EXPLORATION, Stage.COMFORTING, Stage.ACTION)[min(2, int(place * 3))]


def label_turn(source: AnnotatedDialogue, turn: int) -> TurnLabels:
    """Return the labels of the supporter turn with index `turn`, by the rules of this module."""
    before = source.dialogue.utterances[:turn]
    supporter_turns = [i for i, s in enumerate(source.strategies) if s is not None]
    place = supporter_turns.index(turn) / len(supporter_turns)
    said = [u.text for u in before if u.speaker is Speaker.SEEKER]
    drop = source.initial_intensity - source.final_intensity
    if sum(len(text.split()) for text in said) <= GREETING_WORDS:
        return TurnLabels(Stage.EXPLORATION, Emotion.NEUTRAL, 1)
    if place >= 0.6 and drop > 0 and said and _THANKS.search(said[-1]):
        return TurnLabels(stage_at(place), Emotion.JOY, 2)
    intensity = round(source.initial_intensity - drop * place)
    return TurnLabels(stage_at(place), source.emotion, min(5, max(1, intensity)))


def build_samples(
    dialogues: Iterable[AnnotatedDialogue],
    faces: Mapping[str, Sequence[str]],
    face_class_of: Mapping[Emotion, str],
    *,
    face_share: float,
    history_characters: int,
    seed: int,
    told_share: float = 0.0,
    other_share: float = 0.0,
    read_as: Mapping[str, str] | None = None,
) -> Iterator[Sample]:
    """Yield one sample per supporter turn that follows at least one seeker turn.

    Args:
        dialogues: Annotated source dialogues.
        faces: Names of the photos that may be used, by face class.
        face_class_of: The class shown beside each emotion.
        face_share: Share of turns whose last seeker message gets a fitting photo, in [0, 1].
        history_characters: Oldest turns are left out beyond this; the last turn always stays.
        seed: Draws the wording and the photos.
        told_share: Share of the turns after a mere greeting in which a face tells the emotion, in
            [0, 1]; these have a photo whatever `face_share` is.
        other_share: Share of the photos beside other turns whose face is of any class, in [0, 1]; the label of
            the turn stays.
        read_as: The class that the emotion step says a photo shows, by the photo's name; it says so first, and
            the emotion follows. None says the photo's label, before or after the first sentence.

    Raises:
        ConfigError: `read_as` leaves out a photo.
    """
    rng = np.random.default_rng(seed)
    for source in dialogues:
        for turn, strategy in enumerate(source.strategies):
            before = source.dialogue.utterances[:turn]
            if strategy is None or not before or before[-1].speaker is not Speaker.SEEKER:
                continue
            reply = re.sub(r"[<>]", "", source.dialogue.utterances[turn].text).strip()
            if not reply:
                continue  # nothing but mark-up
            labels = label_turn(source, turn)
            if told_share and labels.emotion is Emotion.NEUTRAL and rng.random() < told_share:
                labels = _told_by_face(labels, [one for one in TOLD_BY_FACE if faces.get(one)], rng)
            face_class = labels.told_by or face_class_of[labels.emotion]
            face = None
            if faces.get(face_class) and (labels.told_by or rng.random() < face_share):
                if other_share and not labels.told_by and rng.random() < other_share:
                    face_class = _draw(rng, [one for one in faces if faces[one]])
                face = str(rng.choice(faces[face_class]))
            seen = _seen_on(face, face_class, read_as)
            history = _history(before, face, history_characters)
            reasoning = Reasoning(
                _history_step(source, history, labels, rng),
                _emotion_step(history, labels, seen, read_as is not None, rng),
                StrategyStep(
                    _draw(rng, _wording()["strategy"]["reason"][strategy.value]), strategy
                ),
            )
            yield Sample(
                id=f"{source.dialogue.id}#{turn}",
                dialogue_id=source.dialogue.id,
                problem=source.problem,
                strategy=strategy.value,
                history=history,
                completion=render(SupportTurn(reasoning, reply)),
            )


def _told_by_face(
    labels: TurnLabels, classes: Sequence[str], rng: np.random.Generator
) -> TurnLabels:
    if not classes:
        return labels
    told_by = _draw(rng, classes)
    return TurnLabels(labels.stage, TOLD_BY_FACE[told_by], TOLD_INTENSITY, told_by)


def _history(
    before: Sequence[Utterance], face: str | None, limit: int
) -> tuple[SampleUtterance, ...]:
    kept = before[first_kept([len(utterance.text) for utterance in before], limit) :]
    last = len(kept) - 1
    return tuple(
        SampleUtterance(
            speaker=utterance.speaker, text=utterance.text, face=face if place == last else None
        )
        for place, utterance in enumerate(kept)
    )


def _history_step(
    source: AnnotatedDialogue,
    history: Sequence[SampleUtterance],
    labels: TurnLabels,
    rng: np.random.Generator,
) -> HistoryStep:
    words = _wording()
    if labels.emotion is Emotion.NEUTRAL or labels.told_by:
        sentences = [_draw(rng, words["history"]["unknown"])]
    else:
        problem = _draw(rng, words["problem"].get(source.problem, words["problem"]["other"]))
        sentences = [_draw(rng, words["history"]["issue"]).format(problem=problem)]
        if quote := exact_quote(history[-1].text):
            sentences.append(_draw(rng, words["history"]["quote"]).format(quote=quote))
    sentences.append(_draw(rng, words["history"]["stage"][labels.stage.value]))
    return HistoryStep(" ".join(sentences), labels.stage)


def _seen_on(face: str | None, face_class: str, read_as: Mapping[str, str] | None) -> str | None:
    """Return the class that is said of a photo."""
    if face is None or read_as is None:
        return face_class if face else None
    if face not in read_as:
        raise ConfigError(f"what a tower reads of the photo {face} is not there")
    return read_as[face]


def _emotion_step(
    history: Sequence[SampleUtterance],
    labels: TurnLabels,
    face_class: str | None,
    face_first: bool,
    rng: np.random.Generator,
) -> EmotionStep:
    words = _wording()["emotion"]
    sentences: list[str] = []
    if labels.told_by:
        sentences.append(_draw(rng, words["told"]))
    elif labels.emotion is Emotion.NEUTRAL:
        sentences.append(_draw(rng, words["neutral"]))
    elif labels.emotion is Emotion.JOY:
        sentences.append(_draw(rng, words["relief"]))
    else:
        name = _draw(rng, words["name"][labels.emotion.value])
        cue = _cue(history, words["words"][labels.emotion.value])
        pattern = _draw(rng, words["cue"] if cue else words["plain"])
        sentences.append(pattern.format(cue=cue, emotion=name))
        sentences.append(_draw(rng, words["intensity"][str(labels.intensity)]))
    if face_class is not None:
        place = 0 if face_first else int(rng.integers(0, 2))
        sentences.insert(place, _draw(rng, words["face"][face_class]))
    return EmotionStep(
        " ".join(sentences), SENTIMENT_OF[labels.emotion], labels.emotion, labels.intensity
    )


def exact_quote(text: str) -> str | None:
    """Return what is quoted of a message, letter for letter and of at most `QUOTED_WORDS`.

    That is its longest sentence of a fitting length, else its longest clause, else how it opens. What could be read
    as mark-up is not quoted; None if nothing is left.

    Example:
        >>> exact_quote("Hi. My boss shouted at me, again! Then he left.")
        'My boss shouted at me, again!'
    """
    fewest = min(FEWEST_QUOTED_WORDS, len(text.split()))
    for parts in (_SENTENCE.findall(text), _BETWEEN_CLAUSES.split(text)):
        fitting = [
            part.strip()
            for part in parts
            if fewest <= len(part.split()) <= QUOTED_WORDS and not _MARKUP.search(part)
        ]
        if fitting:
            return max(fitting, key=len)
    opening = _OPENING.match(text)
    return opening[1] if opening and not _MARKUP.search(opening[1]) else None


def _cue(history: Sequence[SampleUtterance], cues: Sequence[str]) -> str | None:
    """Return the latest word of the seeker's that is a cue, as they wrote it."""
    for utterance in reversed(history):
        if utterance.speaker is Speaker.SEEKER:
            found: list[str] = [
                w for w in re.findall(r"[A-Za-z']+", utterance.text) if w.lower() in cues
            ]
            if found:
                return found[-1]
    return None


def _draw(rng: np.random.Generator, variants: Sequence[str]) -> str:
    return variants[int(rng.integers(len(variants)))]


@cache
def _wording() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("wording.toml").read_text(encoding="utf-8"))
