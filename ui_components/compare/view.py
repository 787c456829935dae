"""Renders a comparison: the rounds with their sides, and the ballot below them.

`talk_html` and `ballot_html` draw a `Comparison` alone, so that they can be tested without a
browser. Whatever could tell the sides apart (names, scores, the judge's verdict, time, tokens) is
read only from what the store has revealed after the vote.
"""

from collections.abc import Sequence

from compeer_core.judgement import Reward, StepOutcome, StepVerdict
from compeer_core.reasoning import LABELS, STEPS, Part, Unreadable
from compeer_core.safety import RiskState
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import Tag
from ui_components.chat.inspector import picture_address
from ui_components.chat.starters import STARTERS
from ui_components.compare.comparison import LETTERS, Comparison, Pair, Round, Side
from ui_components.shared.help import RiskCard, risk_card, standing_card
from ui_components.shared.models import Models
from ui_components.shared.templating import render
from ui_components.shared.terms import explained, terms_line
from ui_components.shared.texts import Texts

CHOICES = tuple(Preference)
"""In the order of the keys 1 to 4."""
_VOCABULARIES = {
    "stage": "stages",
    "sentiment": "sentiments",
    "emotion": "emotions",
    "strategy": "strategies",
}
_NAMED = {"emotion": "feeling", "strategy": "chosen"}
"""Labels whose text keys differ from their names."""


def talk_html(
    comparison: Comparison,
    texts: Texts,
    models: Models,
    *,
    now: float,
    keep_seconds: float,
    risk: RiskState,
) -> str:
    """Draw the rounds.

    Args:
        comparison: The comparison.
        texts: The words.
        models: To name them, if the visitor may know.
        now: The monotonic time, for how long models have been loading.
        keep_seconds: The lifetime of comparisons, which the page states.
        risk: What the visitor's messages mean, also those that were cleared.
    """
    last = comparison.last
    return render(
        "compare.html",
        t=texts,
        missing=len(models.entries("policy")) < 2,
        small=all(entry.small for entry in models.entries("policy")),
        hours=round(keep_seconds / 3600),
        starters=STARTERS,
        risk=_risk_card(comparison, texts),
        unanswered=comparison.unanswered,
        standing=None if comparison.risk else standing_card(texts, risk),
        earlier=[_earlier(round_, texts) for round_ in comparison.rounds[:-1]],
        round=None if last is None else _round(last, texts, models, now),
        number=len(comparison.rounds),
    )


def _risk_card(comparison: Comparison, texts: Texts) -> RiskCard | None:
    if comparison.risk is None:
        return None
    return risk_card(texts, comparison.risk, comparison.id, is_earlier=comparison.risk_is_earlier)


def _earlier(round_: Round, texts: Texts) -> dict[str, object]:
    number = round_.goes_on
    return {
        "said": round_.message.text,
        "pictures": _pictures(round_, texts),
        "reply": "" if number is None else round_.sides[number].reply,
        "went_on": _went_on(round_, texts),
    }


def _round(round_: Round, texts: Texts, models: Models, now: float) -> dict[str, object]:
    goes_on = round_.goes_on
    has_failed = any(side.has_failed for side in round_.sides)
    leaked = any(side.leaked for side in round_.sides)
    again = ""
    if round_.is_over and not round_.has_vote and (has_failed or leaked):
        kind = (
            "leaked" if not has_failed else "failed" if round_.active is None else "partly_failed"
        )
        again = texts(f"compare.{kind}_round")
    return {
        "key": round_.key,
        "said": round_.message.text,
        "pictures": _pictures(round_, texts),
        "blind": round_.blind,
        "kept": round_.keep_words,
        "running": not round_.is_over,
        "notice": _language_notice(round_, texts, models),
        "draw_again": again,
        "sides": [
            _side(round_, number, texts, models, goes_on=goes_on, now=now)
            for number in range(len(round_.sides))
        ],
        "went_on": _went_on(round_, texts),
    }


def _side(
    round_: Round, number: int, texts: Texts, models: Models, *, goes_on: int | None, now: float
) -> dict[str, object]:
    side = round_.sides[number]
    letter = LETTERS[number]
    able = side.is_over and not side.has_failed
    return {
        "number": number,
        "letter": letter,
        "name": _title(models, side.plan.model) if round_.names_of(number) else "",
        "running": not side.is_over,
        "words": side.words,
        "writing": side.progress.writing is Part.REPLY,
        "state": "running" if not side.is_over else "failed" if side.has_failed else "done",
        "status": _status(side, letter, texts, now),
        "leaked": bool(side.leaked) and able,
        "steps": _steps(side, texts) if round_.with_reasoning else [],
        "goes_on": goes_on == number,
        "can_go_on": able and goes_on is not None and goes_on != number,
        "announced": f"{letter}. {side.words}" if able else "",
    }


def _status(side: Side, letter: str, texts: Texts, now: float) -> str:
    progress = side.progress
    if side.has_failed:
        if progress.is_withheld:
            return texts("compare.unusable", side=letter)
        if progress.failure in {"model", "line", "places"}:
            return texts(f"compare.failed_{progress.failure}")
        key = "stopped_early" if progress.outcome == "stopped" or not progress.failure else "failed"
        return texts(f"compare.{key}", side=letter)
    if side.is_over:
        return texts("compare.stopped") if progress.outcome == "stopped" else ""
    match progress.phase:
        case "waiting":
            place = progress.place
            return texts("compare.waiting", place=place) if place else texts("compare.begins")
        case "loading":
            return texts("compare.loading", seconds=round(now - progress.since))
        case _:
            return texts("compare.writing" if progress.reply else "compare.thinking")


def _steps(side: Side, texts: Texts) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for part in STEPS:
        now = side.progress.parts[part]
        labels = [
            (texts(f"inspector.{_NAMED.get(name, name)}"), _label(name, now.labels[name], texts))
            for name in LABELS[part]
            if name in now.labels
        ]
        steps.append(
            {
                "name": texts(f"inspector.{part.value}"),
                "text": now.text,
                "labels": labels,
                "missing": now.state == "missing",
            }
        )
    return steps


def _label(name: str, value: object, texts: Texts) -> str:
    if isinstance(value, Unreadable):
        return value.text or texts("inspector.no_label")
    vocabulary = _VOCABULARIES.get(name)
    return texts.label(vocabulary, str(value)) if vocabulary else str(value)


def _went_on(round_: Round, texts: Texts) -> str:
    number = round_.goes_on
    if number is None:
        return ""
    kind = "chosen" if round_.chosen is not None else "drawn" if round_.was_drawn else "preferred"
    return texts(f"compare.goes_on_{kind}", side=LETTERS[number])


def _pictures(round_: Round, texts: Texts) -> list[dict[str, object]]:
    return [
        {
            "address": picture_address(round_.key, position),
            "alt": image.alt or texts("chat.photo", number=position + 1),
            "width": image.width,
            "height": image.height,
        }
        for position, image in enumerate(round_.message.images)
    ]


def _language_notice(round_: Round, texts: Texts, models: Models) -> str:
    """Say that a model may not support the language, but not which one."""
    entries = [models.entry("policy", side.plan.model) for side in round_.sides]
    able = all(entry is None or entry.speaks(round_.language) for entry in entries)
    return "" if able else texts("compare.language_notice")


def _title(models: Models, name: str) -> str:
    entry = models.entry("policy", name)
    return (entry.title or entry.name) if entry else name


# --- the ballot ----------------------------------------------------------------------------------


def ballot_html(comparison: Comparison, texts: Texts, models: Models, *, now: float) -> str:
    """Draw the ballot; empty if there is nothing to vote on.

    Args:
        comparison: The comparison.
        texts: The words.
        models: To name them, if the visitor may know.
        now: On the store's clock, for the time left to undo a vote.
    """
    last = comparison.last
    if last is None:
        return ""
    active = last.active
    shown = [pair for pair in last.pairs if pair.ballot.reveal is not None or pair is active]
    return render(
        "compare_ballot.html",
        t=texts,
        pairs=[_pair(last, pair, texts, models, now) for pair in shown],
        several=len(last.pairs) > 1,
        count=len(last.pairs),
    )


def _pair(round_: Round, pair: Pair, texts: Texts, models: Models, now: float) -> dict[str, object]:
    ballot = pair.ballot
    left, right = (LETTERS[number] for number in pair.sides)
    sides = [round_.sides[number] for number in pair.sides]
    waiting = [LETTERS[number] for number in pair.sides if not round_.sides[number].is_over]
    receipt = ballot.receipt
    preference = receipt.preference if receipt else None
    return {
        "battle": pair.battle,
        "number": round_.pairs.index(pair) + 1,
        "left": left,
        "right": right,
        "first": pair.sides[0],
        "second": pair.sides[1],
        "revision": ballot.revision,
        "state": "revealed" if ballot.reveal else "voted" if receipt else "open",
        "over": not waiting,
        "reason": _reason(waiting, texts),
        "can_stop": bool(waiting) and all(side.words.strip() for side in sides),
        "choices": [
            {
                "key": key,
                "value": choice.value,
                "text": _said(choice, left, right, texts),
                "chosen": choice is preference,
            }
            for key, choice in enumerate(CHOICES, start=1)
        ],
        "said": _said(preference, left, right, texts) if preference else "",
        "counts": _counts(round_, pair, texts),
        "undo_seconds": max(0.0, round(ballot.undo_until - now, 1)) if receipt else 0.0,
        "tags": [
            {
                "value": tag.value,
                "text": texts(f"compare.tag_{tag.value}"),
                "on": tag.value in ballot.tags,
            }
            for tag in Tag
        ],
        "note": ballot.note,
        "seen_names": ballot.seen_names,
        "reveal": _reveal(round_, pair, texts, models) if ballot.reveal else None,
    }


def _reason(waiting: Sequence[str], texts: Texts) -> str:
    if not waiting:
        return ""
    if len(waiting) == 1:
        return texts("compare.still_writing", side=waiting[0])
    return texts("compare.both_writing", first=waiting[0], second=waiting[1])


def _said(choice: Preference, left: str, right: str, texts: Texts) -> str:
    return texts(f"compare.choice_{choice.value}", first=left, second=right)


def _counts(round_: Round, pair: Pair, texts: Texts) -> str:
    """Say whether the vote counts, and why not."""
    receipt = pair.ballot.receipt
    if receipt is None:
        return ""
    if not round_.blind:
        return texts("compare.named_kept")
    if receipt.counted:
        return texts("compare.counts")
    reasons = [texts(f"compare.flag_{flag.value}") for flag in receipt.flags]
    return texts("compare.does_not_count", reasons=texts.listed(reasons))


def _reveal(round_: Round, pair: Pair, texts: Texts, models: Models) -> dict[str, object]:
    revealed = pair.ballot.reveal
    assert revealed is not None
    left, right = (LETTERS[number] for number in pair.sides)
    verdict = pair.verdict or revealed.verdict
    sides = [round_.sides[number] for number in pair.sides]
    titles = [_title(models, name) for name in revealed.models]
    return {
        "names": [
            {
                "letter": letter,
                "title": explained(title, texts),
                "name": name if name != title else "",
            }
            for letter, name, title in zip((left, right), revealed.models, titles, strict=True)
        ],
        "terms": terms_line(titles, texts),
        "verdict": _said(verdict, left, right, texts) if verdict else "",
        "verdict_note": _verdict_note(round_, pair, verdict, revealed.preference, texts),
        "agrees": None if verdict is None else verdict is revealed.preference,
        "rows": _rows(revealed.rewards, sides, texts),
    }


def _verdict_note(
    round_: Round, pair: Pair, verdict: Preference | None, voted: Preference, texts: Texts
) -> str:
    if verdict is not None:
        return texts("compare.agree" if verdict is voted else "compare.disagree")
    if not round_.judge:
        return texts("compare.no_judge")
    if any(round_.sides[number].progress.judge_failed for number in pair.sides):
        return texts("compare.judge_failed")
    return texts("compare.no_verdict" if pair.judged else "compare.judge_reads")


def _rows(
    rewards: tuple[Reward | None, Reward | None], sides: Sequence[Side], texts: Texts
) -> list[dict[str, object]]:
    """Draw the table under the names: the parts of the reward, the total, and the time."""
    rows: list[dict[str, object]] = [
        {
            "name": texts(f"inspector.{part.value}"),
            "cells": [
                _points(
                    each.steps[n] if each and each.steps else None,
                    texts,
                    side.progress.parts[part].verdict,
                )
                for each, side in zip(rewards, sides, strict=True)
            ],
        }
        for n, part in enumerate(STEPS)
    ]
    rows.append(
        {
            "name": texts("inspector.format"),
            "cells": [_points(each.format if each else None, texts) for each in rewards],
        }
    )
    totals = [
        texts("inspector.of_maximum", total=_signed(reward.total), maximum=reward.maximum)
        if reward and reward.total is not None
        else texts("inspector.not_scored")
        for reward in rewards
    ]
    rows.append({"name": texts("inspector.total"), "cells": [{"text": each} for each in totals]})
    if any(side.progress.rejected for side in sides):
        cells = [{"text": str(len(side.progress.rejected))} for side in sides]
        rows.append({"name": texts("compare.rejected"), "cells": cells})
    records = [side.progress.record for side in sides]
    if all(records):
        facts = [
            texts("compare.seconds_tokens", seconds=f"{record.seconds:.1f}", tokens=record.tokens)
            for record in records
            if record
        ]
        rows.append({"name": texts("compare.time"), "cells": [{"text": each} for each in facts]})
    return rows


def _points(
    value: float | None, texts: Texts, verdict: StepOutcome | None = None
) -> dict[str, object]:
    if value is None:
        return {"text": texts("inspector.not_scored")}
    if isinstance(verdict, StepVerdict) and verdict.is_unsure:
        return {"text": f"? {texts('inspector.unsure')} ({_signed(value)})"}
    good = value > 0
    return {
        "text": f"{'✓' if good else '✗'} {_signed(value)}",
        "good": good,
    }


def _signed(value: float) -> str:
    return f"{value:+.0f}".replace("-", "−") if value else "0"
