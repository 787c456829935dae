"""Renders a comparison: the rounds with their sides, and the ballot below them.

`talk_html` and `ballot_html` draw a `Comparison` alone, so that they can be tested without a
browser. Whatever could tell the sides apart (names, scores, the judge's verdict, time, tokens) is
read only from what the store has revealed after the vote.
"""

from collections.abc import Mapping, Sequence

from compeer_core.judgement import Reward, StepOutcome, StepVerdict
from compeer_core.reasoning import LABELS, STEPS, Part, Unreadable
from compeer_core.safety import RiskState
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import Agreement, Tag
from ui_components.chat.inspector import picture_address
from ui_components.chat.reply_words import VERDICT_SIGNS, signed, verdict_kind
from ui_components.chat.starters import STARTERS
from ui_components.compare.comparison import LETTERS, Comparison, Pair, Round, Side
from ui_components.shared.help import RiskCard, risk_card, standing_card
from ui_components.shared.models import Models
from ui_components.shared.templating import render
from ui_components.shared.terms import explained, terms_line
from ui_components.shared.texts import Texts

CHOICES = tuple(Preference)
"""In the order of the keys 1 to 4."""


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
    leaked = round_.blind and any(side.leaked for side in round_.sides)
    again = replay = ""
    if round_.is_over and round_.has_vote and round_.active is None:
        replay = texts("compare.replay" if round_.blind else "compare.replay_named")
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
        "replay": replay,
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
    is_running = not side.is_over or round_.is_held(number)
    able = not is_running and not side.has_failed
    visible = round_.visible(number)
    words = visible[Part.REPLY]
    return {
        "number": number,
        "letter": letter,
        "name": _title(models, side.plan.model) if round_.names_of(number) else "",
        "running": is_running,
        "words": words,
        "writing": is_running,
        "state": "running" if is_running else "failed" if side.has_failed else "done",
        "status": _status(side, letter, texts, now, is_running=is_running, words=words),
        "leaked": bool(side.leaked) and able and round_.blind,
        "steps": _steps(side, texts, visible, is_running=is_running)
        if round_.with_reasoning
        else [],
        "favourite": number in round_.favourites,
        "goes_on": goes_on == number,
        "can_go_on": able and goes_on is not None and goes_on != number,
        "announced": f"{letter}. {words}" if able else "",
    }


def _status(
    side: Side, letter: str, texts: Texts, now: float, *, is_running: bool, words: str
) -> str:
    progress = side.progress
    if side.has_failed:
        if progress.is_withheld:
            return texts("compare.unusable", side=letter)
        if progress.failure in {"model", "line", "places"}:
            return texts(f"compare.failed_{progress.failure}")
        key = "stopped_early" if progress.outcome == "stopped" or not progress.failure else "failed"
        return texts(f"compare.{key}", side=letter)
    if not is_running:
        return texts("compare.stopped") if progress.outcome == "stopped" else ""
    match progress.phase:
        case "waiting":
            place = progress.place
            return texts("compare.waiting", place=place) if place else texts("compare.begins")
        case "loading":
            return texts("compare.loading", seconds=round(now - progress.since))
        case _:
            return texts("compare.writing" if words else "compare.thinking")


def _steps(
    side: Side, texts: Texts, visible: Mapping[Part, str], *, is_running: bool
) -> list[dict[str, object]]:
    """Draw the steps as far as they may be shown, each with its labels once it is shown in full."""
    steps: list[dict[str, object]] = []
    for part in STEPS:
        now = side.progress.parts[part]
        labels = now.labels if len(visible[part]) == len(now.text) else {}
        steps.append(
            {
                "name": texts(f"inspector.{part.value}"),
                "text": visible[part],
                "labels": [
                    (texts.label_title(name), _label(name, labels[name], texts))
                    for name in LABELS[part]
                    if name in labels
                ],
                "missing": now.state == "missing" and not is_running,
            }
        )
    return steps


def _label(name: str, value: object, texts: Texts) -> str:
    if isinstance(value, Unreadable):
        return value.text or texts("inspector.no_label")
    return texts.label_value(name, str(value))


def _went_on(round_: Round, texts: Texts) -> str:
    number = round_.goes_on
    if number is None:
        return ""
    if round_.chosen is not None:
        kind = "chosen"
    elif round_.answers & {Preference.FIRST, Preference.SECOND}:
        kind = "preferred" if len(round_.favourites) == 1 else "tied"
    else:
        kind = next(iter(round_.answers)).value if len(round_.answers) == 1 else "tied"
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


def ballot_html(
    comparison: Comparison,
    texts: Texts,
    models: Models,
    *,
    now: float,
    agreement: Agreement | None = None,
) -> str:
    """Draw the ballot; empty if there is nothing to vote on.

    Args:
        comparison: The comparison.
        texts: The words.
        models: To name them, if the visitor may know.
        now: On the store's clock, for the time left to undo a vote.
        agreement: How often the visitor and the judge agree.
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
        agreement=_agreement(agreement, texts),
    )


def _agreement(agreement: Agreement | None, texts: Texts) -> str:
    if agreement is None or not agreement.compared:
        return ""
    key = "agreement_once" if agreement.compared == 1 else "agreement"
    return texts(f"compare.{key}", agreed=agreement.agreed, compared=agreement.compared)


def _pair(round_: Round, pair: Pair, texts: Texts, models: Models, now: float) -> dict[str, object]:
    ballot = pair.ballot
    left, right = (LETTERS[number] for number in pair.sides)
    sides = [round_.sides[number] for number in pair.sides]
    waiting = [
        LETTERS[number]
        for number in pair.sides
        if not round_.sides[number].is_over or round_.is_held(number)
    ]
    receipt = ballot.receipt
    preference = receipt.preference if receipt else None
    can_undo = receipt is not None and not (round_.blind and ballot.seen_names)
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
        "blind": round_.blind,
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
        "undo_seconds": max(0.0, round(ballot.undo_until - now, 1)) if can_undo else 0.0,
        "tags": [
            {
                "value": tag.value,
                "text": texts(f"compare.tag_{tag.value}"),
                "on": tag.value in ballot.tags,
            }
            for tag in Tag
        ],
        "note": ballot.note,
        "saved": bool(ballot.tags or ballot.note or any(ballot.steps)),
        "reasoning": _reasoning(round_, pair, texts),
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
                "yours": revealed.preference in {answer, Preference.BOTH},
                "judges": verdict in {answer, Preference.BOTH},
            }
            for letter, name, title, answer in zip(
                (left, right), revealed.models, titles, CHOICES[:2], strict=True
            )
        ],
        "terms": terms_line(titles, texts),
        "verdict": _said(verdict, left, right, texts) if verdict else "",
        "verdict_note": _verdict_note(round_, pair, verdict, revealed.preference, texts),
        "agrees": None if verdict is None else verdict is revealed.preference,
        "chances": _chances(pair, left, right, texts),
        "explained": totals_explained(verdict, revealed.rewards, (left, right), texts),
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


def _chances(pair: Pair, left: str, right: str, texts: Texts) -> str:
    """Name the judge's probability of each answer."""
    if pair.chances is None:
        return ""
    answers = [
        texts(
            "compare.chance",
            choice=_said(choice, left, right, texts),
            percent=round(100 * pair.chances[choice]),
        )
        for choice in CHOICES
    ]
    return texts("compare.chances", answers=texts("compare.chance_apart").join(answers))


def totals_explained(
    verdict: Preference | None,
    rewards: tuple[Reward | None, Reward | None],
    letters: tuple[str, str],
    texts: Texts,
) -> str:
    """Say why the verdict need not follow the totals, and whether it contradicts them here."""
    totals = [reward.total if reward else None for reward in rewards]
    if verdict is None or totals[0] is None or totals[1] is None:
        return ""
    sentences = [texts("compare.verdict_explained")]
    if totals[0] != totals[1]:
        higher = CHOICES[0] if totals[0] > totals[1] else CHOICES[1]
        if verdict is higher.swapped():
            sides = dict(zip(CHOICES, letters, strict=False))
            sentences.append(
                texts("compare.totals_differ", preferred=sides[verdict], higher=sides[higher])
            )
    return texts("compare.sentence_apart").join(sentences)


def _reasoning(round_: Round, pair: Pair, texts: Texts) -> list[dict[str, object]]:
    """Draw the steps of both sides, with the visitor's marks and, once revealed, the verdicts."""
    ballot = pair.ballot
    if ballot.receipt is None:
        return []
    drawn = [
        _steps(side, texts, side.texts(with_reasoning=True), is_running=False)
        for side in (round_.sides[number] for number in pair.sides)
    ]
    if not any(step["text"] or step["labels"] for steps in drawn for step in steps):
        return []
    return [
        {
            "name": drawn[0][place]["name"],
            "sides": [
                drawn[side][place]
                | {
                    "letter": LETTERS[number],
                    "key": f"{side}-{place}",
                    "mark": marks[place] if (marks := ballot.steps[side]) else None,
                    "verdict": _step_verdict(
                        round_.sides[number].progress.parts[part].verdict, texts
                    )
                    if ballot.reveal
                    else None,
                }
                for side, number in enumerate(pair.sides)
            ],
        }
        for place, part in enumerate(STEPS)
    ]


def _step_verdict(verdict: StepOutcome | None, texts: Texts) -> dict[str, str]:
    """Draw the judge's verdict on a step, with its probability."""
    if not isinstance(verdict, StepVerdict):
        return {"kind": "unscored", "text": f"– {texts('inspector.not_scored')}"}
    kind = verdict_kind(verdict)
    sure = max(verdict.probability_correct, 1 - verdict.probability_correct)
    detail = (
        texts("inspector.unsure_detail", percent=round(100 * verdict.probability_correct))
        if kind == "unsure"
        else texts("inspector.sure", percent=round(100 * sure))
    )
    words = texts("compare.judged", verdict=texts(f"inspector.{kind}"), detail=detail)
    return {"kind": kind, "text": f"{VERDICT_SIGNS[kind]} {words}"}


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
        texts("inspector.of_maximum", total=signed(reward.total), maximum=reward.maximum)
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
        return {"text": f"? {texts('inspector.unsure')} ({signed(value)})"}
    good = value > 0
    return {
        "text": f"{'✓' if good else '✗'} {signed(value)}",
        "good": good,
    }
