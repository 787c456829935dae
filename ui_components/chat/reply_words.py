"""The state of a reply in words, for conversation and inspector."""

from collections import Counter
from collections.abc import Sequence

from compeer_core.gate import RejectedDraw
from compeer_core.reasoning import LabelValue, Part, Unreadable
from compeer_core.unifireward import (
    ResponseVerdict,
    Reward,
    StepOutcome,
    StepVerdict,
    Unscorable,
)
from ui_components.shared.progress import Progress
from ui_components.shared.texts import Texts


def status_line(progress: Progress | None, texts: Texts, seconds: float = 0.0) -> str:
    """Return one sentence on the state of a reply; empty if it is complete."""
    if progress is None:
        return texts("status.unfinished")
    if progress.outcome == "running":
        return _running_line(progress, texts, seconds)
    if progress.outcome == "stopped":
        return texts("status.stopped")
    if progress.outcome == "failed":
        if progress.failure == "model":
            return texts("model.failed", model=progress.model)
        if progress.failure == "line":
            return texts("errors.too_many_waiting")
        if progress.failure == "places":
            return texts("errors.too_many_of_yours")
        return texts("status.failed")
    if progress.is_withheld:
        return texts("gate.withheld")
    return "" if progress.reply.strip() else texts("status.empty_reply")


def _running_line(progress: Progress, texts: Texts, seconds: float) -> str:
    if progress.phase == "waiting":
        if progress.place:
            return texts("status.waiting", place=progress.place)
        return texts("status.waiting_first")
    if progress.phase == "loading":
        return texts("status.loading", model=progress.model, seconds=round(seconds))
    if progress.phase == "judging":
        return texts("status.judging")
    if progress.rejected and not progress.has_words:
        return texts("gate.drawing_again", reasons=reasons(progress.rejected[-1:], texts))
    if progress.writing is not None:
        return texts(f"status.{progress.writing}")
    done = [part for part, now in progress.parts.items() if now.state == "done"]
    if not done:
        return texts("status.thinking")
    if progress.judge is not None and progress.parts[done[-1]].verdict is None:
        return texts("status.judging")
    ahead = [part for part, now in progress.parts.items() if now.state == "ahead"]
    return texts(f"status.{ahead[0]}" if ahead else "status.thinking")


def reasons(draws: Sequence[RejectedDraw], texts: Texts) -> str:
    """Return why the gate rejected these draws, each reason once."""
    faults = dict.fromkeys(fault for draw in draws for fault in draw.faults)
    return texts.listed([texts(f"gate.{fault}") for fault in faults])


def summary(progress: Progress, texts: Texts) -> list[str]:
    """Return a reply's labels in a few words, for the chip under it."""
    words: list[str] = []
    stage = readable(progress.parts[Part.HISTORY].labels.get("stage"))
    emotion = readable(progress.parts[Part.EMOTION].labels.get("emotion"))
    intensity = readable(progress.parts[Part.EMOTION].labels.get("intensity"))
    strategy = readable(progress.parts[Part.STRATEGY].labels.get("strategy"))
    if stage is not None:
        words.append(texts.label("stages", str(stage)))
    if emotion is not None:
        word = texts.label("emotions", str(emotion))
        words.append(word if intensity is None else f"{word} {intensity}/5")
    if strategy is not None:
        words.append(texts.label("strategies", str(strategy)))
    return words


def reward_of(progress: Progress | None) -> Reward | None:
    """Return a reply's reward, None if it was not judged."""
    if progress is None or progress.record is None or progress.record.judgement is None:
        return None
    return progress.record.judgement.reward()


def steps_in_words(progress: Progress | None, texts: Texts) -> str:
    """Return how many steps are judged right; empty if the judge was not asked.

    An unsure verdict counts as neither right nor wrong.
    """
    record = progress.record if progress else None
    if record is None or record.judgement is None or record.judgement.steps is None:
        return ""
    steps = record.judgement.steps
    counts = Counter(verdict_kind(step) for step in steps)
    if not counts["unsure"] and not counts["unscored"]:
        return texts("inspector.steps_right", right=counts["right"], count=len(steps))
    kinds = ("right", "unsure", "wrong", "unscored")
    return texts(
        "inspector.steps_counted",
        list=texts.listed(
            [texts(f"inspector.count_{kind}", count=counts[kind]) for kind in kinds if counts[kind]]
        ),
    )


def verdict_kind(outcome: StepOutcome | ResponseVerdict) -> str:
    """Return "right", "unsure", "wrong" or "unscored"."""
    if isinstance(outcome, Unscorable):
        return "unscored"
    if outcome.is_unsure:
        return "unsure"
    is_right = outcome.correct if isinstance(outcome, StepVerdict) else outcome.at_least_as_good
    return "right" if is_right else "wrong"


def total_in_words(progress: Progress | None, texts: Texts) -> str:
    """Return the total with its maximum, or that there is none."""
    reward = reward_of(progress)
    if reward is None or reward.total is None:
        return texts("inspector.not_scored")
    return texts("inspector.of_maximum", total=signed(reward.total), maximum=reward.maximum)


VERDICT_SIGNS = {"right": "✓", "unsure": "?", "wrong": "✗"}


def signed(value: float) -> str:
    """Return a number with its sign, using a real minus sign.

    Example:
        >>> signed(1.0), signed(-4.0), signed(0.0), signed(0.25)
        ('+1', '−4', '0', '+0.25')
    """
    if value == 0:
        return "0"
    return f"{value:+.3g}".replace("-", "−")


def readable(value: LabelValue | None) -> str | int | None:
    return None if isinstance(value, Unreadable) else value
