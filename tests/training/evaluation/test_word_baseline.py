"""The baseline of words alone: what it learns, and what it has no labels for."""

import pytest

from compeer_core.cer import Candidate
from compeer_core.judgement import Unscorable
from compeer_core.taxonomy import Preference
from tests.training.evaluation.test_reward import record, written
from training.data.pictures import Pictures
from training.evaluation.judge_ratings import rate
from training.evaluation.word_baseline import WordBaseline


def labelled(number: int, *, telling: bool = True, swapped: bool = False):
    """A turn whose second step is wrong, and whose reply is worse, in every second row."""
    right = number % 2 == 0
    word = "gladly" if telling and not right else "today"
    row = record(number, steps=(True, right, True), swapped=swapped)
    model = row.second if swapped else row.first
    turn = written(f"Why {word}?").replace("Low.", f"Low {word}.")
    changed = model.model_copy(update={"reply": f"Why {word}?", "turn": turn})
    better = Preference.FIRST if right else Preference.SECOND
    return row.model_copy(
        update={
            "second" if swapped else "first": changed,
            "preference": better.swapped() if swapped else better,
        }
    )


def test_a_word_that_tells_is_learnt_in_either_order():
    baseline = WordBaseline([labelled(n, swapped=n % 3 == 0) for n in range(40)])

    right, wrong = rate(baseline, [labelled(40), labelled(41, swapped=True)], Pictures())

    assert right.step_probabilities[1] > 0.6 and wrong.step_probabilities[1] < 0.4
    assert right.verdict is Preference.FIRST and wrong.verdict is Preference.SECOND
    # The other steps were always right, so nothing can be learnt.
    assert right.step_probabilities[0] is None and right.unscorable == 2


def test_without_telling_words_it_stays_at_the_prior():
    baseline = WordBaseline([labelled(n, telling=False) for n in range(40)])

    [rated] = rate(baseline, [labelled(41, telling=False)], Pictures())

    assert rated.step_probabilities[1] == pytest.approx(0.5, abs=0.05)


def test_only_findings_tell_a_word_that_the_conversation_contains_from_one_that_nobody_said():
    def row(number: int):
        """Right if the step names the seeker's pet; all pets are named equally often."""
        said, named = (("dog", "cat")[number // n % 2] for n in (1, 2))
        row = labelled(2 * number + (said != named), telling=False)
        seeker = row.case.history[-1].model_copy(update={"text": f"My {said} is gone."})
        turn = str(row.first.turn).replace("Low today.", f"Low for the {named}.")
        return row.model_copy(
            update={
                "case": row.case.model_copy(update={"history": (seeker,)}),
                "first": row.first.model_copy(update={"turn": turn}),
            }
        )

    rows = [row(n) for n in range(40)]
    for findings, chance in ((False, True), (True, False)):
        right, wrong = rate(WordBaseline(rows, findings=findings), [row(40), row(41)], Pictures())
        difference = right.step_probabilities[1] - wrong.step_probabilities[1]
        assert (abs(difference) < 0.1) == chance and (difference > 0.3) != chance


def test_bare_replies_are_judged_alone():
    baseline = WordBaseline([labelled(n) for n in range(40)])
    bare = record(42).model_copy(
        update={
            "first": Candidate(author="a", reply="Why gladly?"),
            "second": Candidate(author="b", reply="I see."),
        }
    )

    [rated] = rate(baseline, [bare], Pictures())

    assert rated.verdict is Preference.SECOND
    assert rated.step_probabilities == (None, None, None) and rated.unscorable == 0


def test_without_labels_nothing_is_scorable():
    [judgement] = WordBaseline([]).judge(
        record(1).case.dialogue(), [str(record(1).first.turn)], ["I see."]
    )

    assert isinstance(judgement.response, Unscorable)
    assert all(isinstance(step, Unscorable) for step in judgement.steps or ())
