"""A judge that sees words alone: TF-IDF and logistic regression, trained on labelled rows.

It reads a step without its conversation, and two replies without theirs. A reward model that is not
better has learnt at most the style of mistakes. With findings it also reads what a rule finds in a step
(`compeer_core.findings`): a reward model that gets them too should use the conversation for more.
"""

from collections.abc import Sequence

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from compeer_core.cer import CerRecord
from compeer_core.dialogue import Dialogue
from compeer_core.findings import StepFindings
from compeer_core.judgement import (
    NO_REFERENCE,
    Judgement,
    ReplyOutcome,
    ResponseVerdict,
    StepOutcome,
    StepVerdict,
    Unscorable,
)
from compeer_core.reasoning import STEPS, Part, part_of, read, render_step
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import Turn
from training.evaluation.judge_ratings import judged_turn

UNTRAINED = Unscorable("the baseline has no labels of two kinds for this question")


class WordBaseline:
    """The baseline with the interface of a judge."""

    def __init__(self, records: Sequence[CerRecord], *, findings: bool = False) -> None:
        """Train one classifier per step and one for the reply."""
        self.name = "TF-IDF with findings" if findings else "TF-IDF"
        self._findings = findings
        texts: dict[Part, list[str]] = {part: [] for part in Part}
        labels: dict[Part, list[str]] = {part: [] for part in Part}
        for record in records:
            judged = judged_turn(record)
            for part, text in self._step_texts(judged.turn, record.case.dialogue()).items():
                if (label := judged.steps[STEPS.index(part)]) is not None:
                    texts[part].append(text)
                    labels[part].append(str(label))
            if judged.preference is not None and judged.reference is not None:
                texts[Part.REPLY].append(_pair(judged.reply, judged.reference))
                labels[Part.REPLY].append(judged.preference.value)
        self._classifiers: dict[Part, Pipeline] = {
            part: make_pipeline(
                TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\S+"),
                LogisticRegression(C=3, max_iter=1000, class_weight="balanced"),
            ).fit(texts[part], labels[part])
            for part in Part
            if len(set(labels[part])) > 1
        }

    def judge(
        self, dialogue: Dialogue, turns: Sequence[Turn], references: Sequence[str | None]
    ) -> list[Judgement]:
        """Judge turns as `compeer_core.unifireward.Judge.judge` does; only findings read the dialogue."""
        pairs = zip(turns, references, strict=True)
        return [self._judge_one(dialogue, str(turn), reference) for turn, reference in pairs]

    def _judge_one(self, dialogue: Dialogue, turn: str, reference: str | None) -> Judgement:
        reading = read(turn)
        reply = reading.turn.reply if reading.is_complete else turn
        response: ReplyOutcome = NO_REFERENCE
        if reference is not None:
            response = self._preference(_pair(reply, reference))
        if not reading.is_complete:
            return Judgement(None, response, is_complete=None)
        texts = self._step_texts(turn, dialogue)
        steps = tuple(self._verdict(part, text) for part, text in texts.items())
        return Judgement(steps, response, is_complete=True)

    def _step_texts(self, turn: str, dialogue: Dialogue) -> dict[Part, str]:
        reading = read(turn)
        if not reading.is_complete:
            return {}
        texts = {part_of(step): render_step(step) for step in reading.turn.reasoning}
        if self._findings:
            of = StepFindings(dialogue).of
            for step in reading.turn.reasoning:
                texts[part_of(step)] += f"\n{of(step)}"
        return texts

    def _verdict(self, part: Part, text: str) -> StepOutcome:
        if part not in self._classifiers:
            return UNTRAINED
        probability = self._probabilities(part, text)["True"]
        return StepVerdict(probability >= 0.5, probability)

    def _preference(self, pair: str) -> ReplyOutcome:
        if Part.REPLY not in self._classifiers:
            return UNTRAINED
        given = self._probabilities(Part.REPLY, pair)
        probabilities = {name: given.get(name.value, 0.0) for name in Preference}
        return ResponseVerdict(max(probabilities, key=lambda n: probabilities[n]), probabilities)

    def _probabilities(self, part: Part, text: str) -> dict[str, float]:
        classifier = self._classifiers[part]
        return dict(
            zip(classifier.classes_, classifier.predict_proba([text])[0].tolist(), strict=True)
        )


def _pair(reply: str, reference: str) -> str:
    """Return two replies as one text whose words show which reply they are from."""
    marked = [f"own:{word}" for word in reply.lower().split()]
    return " ".join([*marked, *(f"other:{word}" for word in reference.lower().split())])
