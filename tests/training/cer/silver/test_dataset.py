"""The silver rule by hand, branch for branch; then what must always hold; then the step as a whole."""

import tomllib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.cer import Case, CerRecord, HumanLabels
from compeer_core.phrases import words_of
from compeer_core.reasoning import EmotionStep, HistoryStep, Reasoning, StrategyStep, Unreadable
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Preference, Sentiment, Stage, Strategy
from tests.cases import case_of, said, turn_text
from training.cer.silver import dataset as silver
from training.cer.silver.replies import (
    Assessment,
    assess_generated,
    assess_original,
    is_copy,
    repeats_itself,
)
from training.cer.silver.steps import (
    Habits,
    count_habits,
    expected_intensity,
    judge_emotion,
    judge_history,
    judge_steps,
    judge_strategy,
)
from training.cer.silver.words import Context, words
from training.cer.steps.generation import GeneratedTurn
from training.cer.steps.raking import (
    Row,
    UnreachableError,
    choose,
    dependence,
    false_shares_of,
    rake,
    table_of,
)
from training.data.records import read_records

LISTS = words()
TOLD = ("My boss fired me on Monday and I am worried about my job.",)


def make_case(
    *texts,
    round=3,
    rounds=10,
    strategies=(Strategy.QUESTION,),
    emotion=Emotion.ANXIETY,
    problem="job crisis",
    before=4,
    after=2,
    feedback=None,
    emotion_of="dialogue",
    original="Have you looked for another job since Monday?",
    dialogue="esconv/lines/train/1",
    split="train",
):
    """`texts` are the seeker's turns; the supporter says "I see." between them."""
    texts = [text for each in texts or TOLD for text in ("I see.", each)][1:]
    return case_of(
        dialogue,
        id=f"{dialogue}#{round}",
        corpus="esconv",
        split=split,
        round=round,
        rounds=rounds,
        history=said(*texts),
        original=original,
        labels=HumanLabels(
            strategies=strategies,
            emotion=emotion,
            emotion_of=emotion_of if emotion else None,
            problem=problem,
            intensity_before=before,
            intensity_after=after,
            feedback=feedback,
        ),
    )


def history_of(case, text, stage=Stage.EXPLORATION):
    return judge_history(HistoryStep(text, stage), Context(case, LISTS))


def emotion_of(case, emotion, intensity=3, history_right=True, sentiment=None, text="It shows."):
    step = EmotionStep(text, sentiment or SENTIMENT_OF[emotion], emotion, intensity)
    return judge_emotion(step, Context(case, LISTS), history_right)


def strategy_of(case, strategy, earlier=(True, True), habits=None):
    step = StrategyStep("It fits.", strategy)
    return judge_strategy(step, Context(case, LISTS), habits or Habits(), earlier)


def habits_of(turns):
    """What people do after a first message of a worried seeker, in the first third."""
    return Habits(
        turns={"worry, Exploration, begins": turns, "any, Exploration, begins": 100},
        used={
            # 8 of 40 is 20 %, 5 of 40 is 12.5 %
            "worry, Exploration, begins": {Strategy.REFLECTION: 8, Strategy.INFORMATION: 5},
            "any, Exploration, begins": {Strategy.INFORMATION: 90},
        },
    )


HABITS = habits_of(40)


# --- words ------------------------------------------------------------------------------------


def test_every_problem_of_the_word_lists_can_be_found():
    path = Path(silver.__file__).with_name("words.toml")
    problems = tomllib.loads(path.read_text(encoding="utf-8"))["problems"]

    assert all(each.keys() <= {"names", "signs", "near"} for each in problems.values())
    assert all(each["names"] for each in problems.values())
    assert all(near <= LISTS.problems for near in LISTS.near.values())


def test_of_names_that_overlap_the_longest_counts():
    assert LISTS.named("stress about school work") == {"academic pressure"}
    assert LISTS.named("trouble at work and with parents") == {
        "job crisis",
        "conflict with parents",
        "issues with parents",
    }


# --- history ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "text", "right"),
    [
        (TOLD, "The talk is about trouble at work.", True),
        (TOLD, "The talk is about a breakup.", False),
        # friends are named three times, as is the job of the label: boss, fired, job
        ((TOLD[0] + " My friend, her friend, a friend.",), "It is about friends.", False),
        # four times against three
        (
            (TOLD[0] + " My friend, a friend, two friends, friendship.",),
            "It is about friends.",
            True,
        ),
        (TOLD, "It is not clear yet what brings the seeker here.", False),
        # 8 words are more than a greeting, but up to 15 the problem may be unknown
        (("I would like to talk about something today",), "The problem is not known.", True),
        (("Hello there",), "The problem is not known.", True),
        (("Hello there",), "The seeker is dealing with trouble at work.", False),
        (("Hello there",), "This is a hard time.", False),
        # vague, but 3 of 3 telling words of the quotation (boss, fired, monday) are the seeker's
        (TOLD, 'A hard time. They said: "My boss fired me on Monday"', True),
        # 2 of 5: boss, fired of boss, fired, neighbour, stole, bicycle
        (TOLD, 'A hard time. "My boss fired the neighbour who stole a bicycle"', False),
        (TOLD, 'A hard time. "Monday"', False),  # one word is too few
        (TOLD, "This is a hard time.", False),
        # an invented quotation is let pass beside the right problem
        (TOLD, 'Trouble at work. "The neighbour stole my bicycle"', True),
    ],
)
def test_the_issue_of_a_history_step(said, text, right):
    assert history_of(make_case(*said), text).right is right


def test_a_problem_that_nobody_labelled_is_not_judged_unless_the_seeker_speaks_of_it():
    case = make_case(problem=None)

    assert history_of(case, "It is about a breakup.").right is None
    assert history_of(case, "It is about trouble at work.").right is True  # said three times
    assert history_of(case, "It is about a breakup.", Stage.ACTION).right is False


@pytest.mark.parametrize(
    ("round", "stage", "strategy", "right"),
    [
        (2, Stage.EXPLORATION, Strategy.OTHERS, True),  # place 0.2, inside the first third
        (4, Stage.EXPLORATION, Strategy.OTHERS, True),  # 0.4 - 0.333 = 0.067, within 0.15
        (5, Stage.EXPLORATION, Strategy.OTHERS, False),  # 0.167 beyond
        (5, Stage.EXPLORATION, Strategy.QUESTION, True),  # within 0.25, and usual for Question
        (6, Stage.EXPLORATION, Strategy.QUESTION, False),  # 0.267
        (3, Stage.COMFORTING, Strategy.OTHERS, True),  # 0.033 before the second third
        (2, Stage.ACTION, Strategy.SUGGESTIONS, False),  # 0.467
        (5, Stage.ACTION, Strategy.SUGGESTIONS, True),  # 0.167, usual for suggestions
        (9, Stage.ACTION, Strategy.QUESTION, True),
    ],
)
def test_a_stage_fits_its_third_or_nearly_and_the_strategy(round, stage, strategy, right):
    case = make_case(round=round, strategies=(strategy,))

    assert history_of(case, "It is about work.", stage).right is right


def test_before_disclosure_the_stage_is_exploration():
    case = make_case("Hello", round=9)
    unknown = "The problem is not known."

    assert history_of(case, unknown, Stage.EXPLORATION).right is True
    assert history_of(case, unknown, Unreadable("Hm")).right is False


def test_both_faults_of_a_step_are_named():
    verdict = history_of(make_case(), "It is about a breakup.", Stage.ACTION)

    assert verdict.because == (
        "names breakup with partner, while the dialogue is about job crisis and says Action in "
        "round 4 of 10"
    )


# --- emotion ----------------------------------------------------------------------------------


def test_the_expected_intensity_lies_on_a_line_between_the_ratings():
    assert expected_intensity(make_case(before=5, after=1, round=5)) == 3.0  # half-way
    assert expected_intensity(make_case(before=5, after=None)) == 5
    assert expected_intensity(make_case(before=None, after=None)) is None


@pytest.mark.parametrize(
    ("emotion", "intensity", "right"),
    [
        # expected: 4 + (2 - 4) * 3 / 10 = 3.4
        (Emotion.ANXIETY, 3, True),
        (Emotion.ANXIETY, 4, True),
        (Emotion.ANXIETY, 2, True),  # 1.4 away
        (Emotion.ANXIETY, 5, False),  # 1.6 away
        (Emotion.FEAR, 3, True),  # of one family
        (Emotion.SADNESS, 3, False),
        (Emotion.JOY, 2, False),
        (Emotion.NEUTRAL, 1, False),  # "worried" is a feeling
    ],
)
def test_emotion_and_intensity(emotion, intensity, right):
    assert emotion_of(make_case(), emotion, intensity).right is right


def test_a_near_emotion_needs_the_history_step():
    case = make_case()

    assert emotion_of(case, Emotion.FEAR, history_right=False).right is False
    assert emotion_of(case, Emotion.FEAR, history_right=None).right is False
    assert emotion_of(case, Emotion.ANXIETY, history_right=False).right is True


def test_a_sentiment_that_contradicts_the_emotion_is_wrong():
    assert emotion_of(make_case(), Emotion.ANXIETY, sentiment=Sentiment.POSITIVE).right is False


@pytest.mark.parametrize(
    ("text", "intensity", "right"),
    [
        ("Behind these words is anxiety. The feeling is strong.", 4, True),
        ("Behind these words is anxiety. The feeling is not strong.", 4, False),
        ("Behind these words is anxiety. The feeling is strong.", 3, True),
        ("Being put off speaks from it.", 3, False),  # of the family of anger
        ('The word "sad" points to worry.', 3, True),  # a quotation names nothing
    ],
)
def test_words_that_contradict_the_labels_make_the_step_wrong(text, intensity, right):
    assert emotion_of(make_case(), Emotion.ANXIETY, intensity, text=text).right is right


def test_an_unreadable_label_is_wrong():
    gloom = emotion_of(make_case(), Unreadable("Gloom"), sentiment=Sentiment.NEGATIVE)

    assert gloom.right is False


def test_before_disclosure_only_neutral_is_right():
    case = make_case("Hi", round=0)

    assert emotion_of(case, Emotion.NEUTRAL, 1, history_right=False).right is True
    assert emotion_of(case, Emotion.NEUTRAL, 4).right is False
    assert emotion_of(case, Emotion.ANXIETY, 4).right is False
    short_but_told = make_case("I feel so sad", emotion=Emotion.SADNESS, round=0)
    assert emotion_of(short_but_told, Emotion.SADNESS, 4).right is True


def test_without_a_word_of_feeling_neutral_is_right_beside_the_label():
    case = make_case("My boss fired me on Monday and now I look for a job.")

    assert emotion_of(case, Emotion.NEUTRAL, 2).right is True
    assert emotion_of(case, Emotion.ANXIETY, 3).right is True


@pytest.mark.parametrize(
    ("round", "after", "last", "right"),
    [
        (7, 2, "Thank you so much.", True),
        (7, None, "Thank you so much.", True),  # nobody rated the end
        (7, 4, "Thank you so much.", False),  # as strong as before
        (5, 2, "Thank you so much.", False),  # too early
        (7, 2, "I have to go on.", False),
        (7, 2, "Bye, take care", True),
    ],
)
def test_thanks_near_the_end_may_be_joy(round, after, last, right):
    case = make_case(*TOLD, last, round=round, after=after)

    assert emotion_of(case, Emotion.JOY, 2).right is right


def test_the_emotion_of_a_single_utterance_is_taken_as_it_is():
    case = make_case("Hi", emotion_of="utterance", before=None)

    assert emotion_of(case, Emotion.ANXIETY, 5).right is True
    assert emotion_of(case, Emotion.NEUTRAL, 1).right is False


# --- strategy ---------------------------------------------------------------------------------


def test_what_the_person_did_is_right_whatever_came_before():
    case = make_case(strategies=(Strategy.OTHERS, Strategy.QUESTION))

    for earlier in product((True, False, None), repeat=2):
        assert strategy_of(case, "Question", earlier).right is True


@pytest.mark.parametrize(
    ("strategy", "earlier", "turns", "right"),
    [
        ("Reflection of Feelings", (True, True), 40, True),  # 20 % of 40 turns
        ("Information", (True, True), 40, False),  # 12.5 %
        ("Reflection of Feelings", (False, True), 40, False),
        ("Reflection of Feelings", (True, False), 40, False),
        ("Reflection of Feelings", (None, True), 40, False),
        # of fewer than 30 turns the family is left out: 90 of 100
        ("Information", (True, True), 30, True),  # 16.7 %
        ("Reflection of Feelings", (True, True), 29, False),
    ],
)
def test_a_usual_strategy_passes_after_right_steps(strategy, earlier, turns, right):
    case = make_case(*TOLD, round=0)

    assert strategy_of(case, strategy, earlier, habits_of(turns)).right is right


def test_a_strategy_that_cannot_be_read_is_wrong_and_one_that_nobody_labelled_is_not_judged():
    assert strategy_of(make_case(), Unreadable("Hug")).right is False
    assert strategy_of(make_case(strategies=()), "Question").right is None


def test_habits_are_counted_on_the_train_split_alone():
    cases = [
        make_case(round=0, strategies=(Strategy.QUESTION, Strategy.OTHERS)),
        make_case("Hi", "I am sad", round=8, emotion=Emotion.SADNESS),
        make_case(round=0, split="test"),
        make_case(round=0, strategies=()),
    ]
    habits = count_habits(cases, LISTS)

    assert habits.turns == {
        "worry, Exploration, begins": 1,
        "any, Exploration, begins": 1,
        "sorrow, Action, told": 1,
        "any, Action, told": 1,
    }
    assert habits.used["worry, Exploration, begins"] == {Strategy.QUESTION: 1, Strategy.OTHERS: 1}


# --- replies ----------------------------------------------------------------------------------


def original(case):
    return assess_original(case.original, Context(case, LISTS))


def generated(reply, strategy="Question", wrong=0, case=None):
    return assess_generated(reply, strategy, wrong, Context(case or make_case(), LISTS))


FAILED = "esconv/original/failed/3"


@pytest.mark.parametrize(
    ("feedback", "dialogue", "acceptable", "by_person"),
    [
        (None, "esconv/lines/train/1", True, False),
        (3, "esconv/lines/train/1", True, True),
        (2, "esconv/lines/train/1", False, True),
        (None, FAILED, False, True),
        (3, FAILED, False, True),
        (4, FAILED, True, True),
        (1, FAILED, False, True),
    ],
)
def test_people_decide_about_the_original(feedback, dialogue, acceptable, by_person):
    result = original(make_case(feedback=feedback, dialogue=dialogue))

    assert (result.acceptable, result.by_person) == (acceptable, by_person)


def test_an_original_that_says_nothing_is_not_acceptable_unless_the_talk_closes():
    assert not original(make_case(original="I see.")).acceptable
    assert original(make_case(original="Why?")).acceptable
    assert original(make_case(original="I am unemployed")).acceptable
    assert original(make_case("Hi", original="I see.")).acceptable
    assert original(make_case(*TOLD, "Thank you", original="You too!")).acceptable


@pytest.mark.parametrize(
    ("reply", "strategy", "wrong", "fault"),
    [
        ("Did your boss say why you lost the job?", "Question", 1, None),
        ("Did your boss say why you lost the job?", "Question", 2, "2 steps before it are wrong"),
        ("Why so?", "Question", 0, "it has 2 words"),
        ("My boss fired me on Monday?", "Question", 0, "it repeats an earlier turn"),
        ("Is it your boss, or is it your boss?", "Question", 0, "it repeats itself"),
        ("I understand that.", "Others", 0, "it says nothing"),
        (
            "Do bicycles, cars, planes like music?",
            "Question",
            0,
            "it is not about what the seeker said",
        ),
        ("You are welcome, how is it?", "Question", 0, "it takes a thank-you that was not said"),
        ("I am glad to hear that, how is it?", "Question", 0, "it is glad of what is no good news"),
        (
            "Your boss did not say why.",
            "Question",
            0,
            "it does not carry out its strategy (Question)",
        ),
        ("How are you?", Unreadable("Hug"), 0, "it does not carry out its strategy (unreadable)"),
    ],
)
def test_faults_of_a_generated_reply(reply, strategy, wrong, fault):
    assert generated(reply, strategy, wrong).faults == ((fault,) if fault else ())


def test_pity_before_anything_was_told_is_out_of_place():
    result = generated("I am sorry to hear that. How are you?", case=make_case("Hi"))

    assert result.faults == ("it feels for what was not told",)


def test_copies_and_repetitions():
    earlier = ["My boss fired me on Monday and I cried"]

    # 3 of its 4 runs of three words are the earlier turn's: 0.75; then 3 of 5
    assert is_copy(words_of("boss fired me on Monday again"), earlier)
    assert not is_copy(words_of("boss fired me on Monday once again"), earlier)
    assert not is_copy(words_of("boss fired me on"), earlier)  # too short to tell
    assert repeats_itself(words_of("is it true or is it true"))
    assert not repeats_itself(words_of("is it true or is it not"))


@pytest.mark.parametrize(
    ("first", "second", "preference"),
    [
        (0.5, 0.9, Preference.SECOND),
        (0.9, 0.5, Preference.FIRST),
        (0.5, 0.7, Preference.BOTH),  # the margin itself
        (None, 0.1, Preference.SECOND),
        (0.1, None, Preference.FIRST),
        (None, None, Preference.NEITHER),
    ],
)
def test_the_four_preferences(first, second, preference):
    made = [
        Assessment(("bad",) if score is None else (), score or 0.9, False)
        for score in (first, second)
    ]

    assert silver.prefer(*made) is preference


def test_scores_are_worked_out_from_content_length_steps_and_ratings():
    # "boss" is one of 3 telling words; 6 of 12 words: (1/3 + 1/2) / 2 = 0.41667
    reply = "Did your boss say so again?"
    assert generated(reply).score == pytest.approx(5 / 12)
    assert generated(reply, wrong=1).score == pytest.approx(5 / 12 - 0.25)
    # a person wrote it, and a rating of 5 is two points above the middle
    score = original(make_case(original=reply, feedback=5)).score
    assert score == pytest.approx(5 / 12 + 0.15 + 0.25)


# --- what must always hold --------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["The problem is not known.", "It is about work.", "It is about a breakup.", "A hard time."]
)
TEXTS_SAID = st.lists(
    st.sampled_from(
        [
            "Hi",
            *TOLD,
            "Thank you, that helped",
            "My girlfriend left me",
            "I feel so sad",
            "Bye",
            "<b>",
        ]
    ),
    min_size=1,
    max_size=4,
)
CASES = st.builds(
    lambda texts, place, labels: make_case(
        *texts, round=place[0], rounds=place[0] + place[1], **labels
    ),
    TEXTS_SAID,
    st.tuples(st.integers(0, 9), st.integers(1, 9)),
    st.fixed_dictionaries(
        {
            "strategies": st.lists(
                st.sampled_from(Strategy), min_size=1, max_size=3, unique=True
            ).map(tuple),
            "emotion": st.sampled_from(
                [e for e in Emotion if e not in {Emotion.JOY, Emotion.NEUTRAL}]
            ),
            "emotion_of": st.sampled_from(["dialogue", "utterance"]),
            "problem": st.sampled_from(sorted(LISTS.problems)),
            "before": st.integers(1, 5),
            "after": st.none() | st.integers(1, 5),
        }
    ),
)
REASONINGS = st.builds(
    Reasoning,
    st.builds(HistoryStep, TEXTS, st.sampled_from(Stage)),
    st.builds(
        lambda emotion, intensity: EmotionStep(
            "It shows.", SENTIMENT_OF[emotion], emotion, intensity
        ),
        st.sampled_from(Emotion),
        st.integers(1, 5),
    ),
    st.builds(StrategyStep, st.just("It fits."), st.sampled_from([s.value for s in Strategy])),
)


@given(CASES, REASONINGS)
def test_a_wrong_earlier_step_never_makes_a_later_one_right(case, reasoning):
    context = Context(case, LISTS)

    def emotion(history):
        return judge_emotion(reasoning.emotion, context, history).right

    def strategy(*earlier):
        return judge_strategy(reasoning.strategy, context, HABITS, earlier).right

    assert emotion(True) or not emotion(False)
    for history, feeling in product((True, False), repeat=2):
        assert strategy(True, True) or not strategy(history, feeling)


def test_without_chaining_a_wrong_step_spoils_no_later_one():
    reasoning = Reasoning(
        HistoryStep("It is about a breakup.", Stage.EXPLORATION),  # people labelled the job
        EmotionStep("It shows.", SENTIMENT_OF[Emotion.FEAR], Emotion.FEAR, 3),  # near anxiety
        StrategyStep("It fits.", "Reflection of Feelings"),  # usual here
    )
    context = Context(make_case(*TOLD, round=0), LISTS)

    assert judge_steps(reasoning, context, HABITS).labels == (False, False, False)
    assert judge_steps(reasoning, context, HABITS, chained=False).labels == (False, True, True)


@given(CASES, REASONINGS)
def test_chaining_only_takes_away(case, reasoning):
    context = Context(case, LISTS)
    chained = judge_steps(reasoning, context, HABITS).labels
    free = judge_steps(reasoning, context, HABITS, chained=False).labels

    assert chained[0] == free[0]
    assert all(loose or not strict for strict, loose in zip(chained, free, strict=True))


# --- raking and dependence --------------------------------------------------------------------


def test_raking_reaches_the_targets_and_keeps_odds_ratios():
    counts = np.array([[[30.0, 8], [6, 2]], [[9, 3], [4, 5]]])
    table = rake(counts, [0.4, 0.25, 0.25])

    assert false_shares_of(table) == pytest.approx([0.4, 0.25, 0.25])
    for history in (0, 1):
        before, after = counts[history], table[history]
        assert after[0, 0] * after[1, 1] / (after[0, 1] * after[1, 0]) == pytest.approx(
            before[0, 0] * before[1, 1] / (before[0, 1] * before[1, 0])
        )


@pytest.mark.parametrize(
    "patterns",
    [
        [],
        [(True, True, False), (True, False, True)],  # the first step is never wrong
        # the first two steps are always alike, so 0.4 and 0.2 cannot be had together
        [(True, True, True), (True, True, False), (False, False, True), (False, False, False)],
    ],
)
def test_targets_that_cannot_be_reached_are_refused(patterns):
    with pytest.raises(UnreachableError):
        rake(table_of(patterns), [0.4, 0.2, 0.2])


@st.composite
def rows_of_all_patterns(draw):
    counts = draw(st.lists(st.integers(4, 40), min_size=8, max_size=8))
    patterns = [
        p for p, n in zip(product((True, False), repeat=3), counts, strict=True) for _ in range(n)
    ]
    groups = draw(st.integers(1, 400))
    return [Row(str(i), str(i % groups), pattern) for i, pattern in enumerate(patterns)]


@given(rows_of_all_patterns(), st.integers(1, 3))
def test_the_choice_hits_its_targets_and_never_takes_a_row_or_a_group_too_often(rows, per_group):
    targets = [0.4, 0.25, 0.3]
    taken = choose(rows, targets, per_group=per_group, seed=1)
    chosen = [row for row in rows if row.id in taken]

    assert len(chosen) == len(taken)
    assert all(sum(r.group == row.group for r in chosen) <= per_group for row in chosen)
    assert taken == choose(rows[::-1], targets, per_group=per_group, seed=1)
    if chosen:
        # four patterns make up a share, and each may be off by one row
        got = false_shares_of(table_of([row.pattern for row in chosen]))
        assert np.abs(got - targets).max() <= 4 / len(chosen)


def test_as_many_rows_are_taken_as_the_scarcest_pattern_allows():
    # independent at one half: the wanted share of TTT is 0.6 * 0.75 * 0.75 = 0.3375, and there are 27
    rows = [
        Row(f"{pattern}{i}", f"{pattern}{i}", pattern)
        for pattern in product((True, False), repeat=3)
        for i in range(27)
    ]
    taken = choose(rows, [0.4, 0.25, 0.25], per_group=1, seed=0)

    assert len(taken) == 80  # 27 / 0.3375


def test_an_id_that_stands_twice_is_refused():
    row = Row("a", "a", (True, True, True))
    with pytest.raises(ValueError, match="occurs twice"):
        choose([row, row], [0.4, 0.2, 0.2], per_group=1, seed=0)


def test_dependence_by_hand():
    # history wrong in 4 of 10, and then the emotion in 3 of 4; else in 2 of 6
    rows = [(False, False, True)] * 3 + [(False, True, True)] + [(True, False, True)] * 2
    rows += [(True, True, True)] * 4
    result = dependence(rows, 1)

    assert (result.wrong_after_wrong, result.wrong_after_right) == (0.75, pytest.approx(1 / 3))
    # (4 * 3 - 2 * 1) / sqrt(6 * 4 * 5 * 5) = 10 / 24.4949
    assert result.phi == pytest.approx(0.408248, abs=1e-6)
    # sum p log2(p / (p_row p_column)): .4 log2(.4/.3) + .2 log2(.2/.3) + .1 log2(.1/.2) + .3 log2(.3/.2)
    assert result.bits == pytest.approx(0.124511, abs=1e-6)


def test_dependence_of_labels_that_never_vary_is_not_a_number():
    result = dependence([(True, True, True)] * 3, 2)

    assert (result.wrong_after_wrong, result.phi, result.bits) == (None, None, 0.0)


# --- the step as a whole ----------------------------------------------------------------------


def judged_turn(problem="work", **changes):
    reply = "Did your boss say why you lost the job?"
    return turn_text(reply, history=f"It is about {problem}.", **changes)


def generated_turn(case, text, sample=0):
    return GeneratedTurn(
        id=f"{case.id}/policy/{sample}",
        case=case,
        author="policy",
        sample=sample,
        seed=0,
        text=text,
        reply="x",
        problems=(),
    )


PATTERNS = list(product((True, False), repeat=3))


@pytest.fixture
def files(tmp_path):
    """For each of the eight patterns eight turns of the train split, on 64 histories."""
    cases = [
        make_case(round=2, dialogue=f"esconv/lines/train/{n}", before=3, after=3) for n in range(64)
    ]
    turns = []
    for n, case in enumerate(cases):
        history, emotion, strategy = PATTERNS[n % 8]
        text = judged_turn(
            "work" if history else "a breakup",
            emotion=Emotion.ANXIETY if emotion else Emotion.SHAME,
            strategy="Question" if strategy else "Information",
        )
        turns.append(generated_turn(case, text))
    chinese = cases[0].model_copy(update={"language": "zh"})
    unlabelled = make_case(emotion=None)
    turns += [
        generated_turn(cases[0], turns[0].text, 1),
        generated_turn(cases[0], "<reply>Hello</reply>", 2),
        generated_turn(chinese, turns[0].text, 3),
        generated_turn(unlabelled, turns[0].text, 4),
    ]
    write_rows(tmp_path / "cases.jsonl", cases)
    write_rows(tmp_path / "turns.jsonl", turns)
    return tmp_path


def label(folder, name="silver", **settings):
    output, judged = folder / f"{name}.jsonl", folder / f"{name}_judged.jsonl"
    report = silver.label(
        folder / "cases.jsonl",
        folder / "turns.jsonl",
        output,
        judged,
        silver.Settings(**settings),
        seed=3,
    )
    return report, list(read_records(output, CerRecord)), list(read_records(judged, CerRecord))


def test_rows_are_judged_and_drawn_to_the_targets(files):
    report, taken, judged = label(files)

    assert (report.read, len(judged)) == (68, 64)
    assert report.dropped == {
        "esconv": {
            "repeated turn for the same history": 1,
            "incomplete turn": 1,
            "no word lists for the language": 1,
            "too few human labels": 1,
        }
    }
    # alike in all patterns: 8 / (0.6 * 0.7 * 0.7) = 27.2
    assert report.written == len(taken) == 27
    assert report.figures["train.raw.wrong.history"] == 0.5
    assert report.figures["train.raw.pattern.TFF"] == 8
    assert report.figures["train.selected.wrong.history"] == pytest.approx(0.4, abs=0.05)
    assert report.figures["train.selected.wrong.strategy"] == pytest.approx(0.3, abs=0.05)
    assert report.figures["judged but not selected"] == 37
    assert {row.id for row in taken} <= {row.id for row in judged}


def test_the_train_split_may_have_shares_of_its_own(files):
    even = {"train_false_shares": (0.5, 0.5, 0.5)}
    report, taken, _ = label(files, **even)

    # alike in all patterns, so all are taken: 8 / (0.5 * 0.5 * 0.5) = 64
    assert report.written == len(taken) == 64
    assert report.figures["train.selected.wrong.emotion"] == 0.5
    assert silver.Settings(**even).false_shares_in("test") == (0.4, 0.3, 0.3)
    assert silver.Settings(false_shares=None, **even).false_shares_in("train") is None


def test_a_row_says_what_the_rule_found_and_who_decided(files):
    _, _, judged = label(files)
    row = next(r for r in judged if r.id == "esconv/lines/train/2#2/policy/0")
    candidate = next(c for c in row.candidates if c.author == "policy")

    assert candidate.steps == (True, False, True)
    assert (candidate.steps_by.kind, candidate.steps_by.name) == ("rule", "silver/1 steps, chained")
    # boss and job of 3, 9 words of 12, one wrong step: (2/3 + 3/4) / 2 - 1/4 = 0.458
    assert candidate.reason == (
        "history right: names the problem of the dialogue (job crisis), Exploration fits round 3 of "
        "10; emotion wrong: sees Shame, where people labelled Anxiety; strategy right: Question is "
        "what the person did; reply acceptable (score 0.46)"
    )
    assert row.preference_by.name == "silver/1 replies, chained"


def test_a_row_of_the_control_says_so(files):
    _, _, judged = label(files, chained=False, false_shares=None)
    row = next(r for r in judged if r.id == "esconv/lines/train/2#2/policy/0")
    candidate = next(c for c in row.candidates if c.author == "policy")

    assert candidate.steps_by.name == "silver/1 steps, not chained"
    assert row.preference_by.name == "silver/1 replies, not chained"


def test_either_reply_comes_first_and_the_preference_follows(files):
    _, _, judged = label(files)
    outcomes = {
        (row.first.author, row.preference)
        for row in judged
        if next(c for c in row.candidates if c.author == "policy").steps == (False, False, False)
    }

    # three wrong steps: the original is better, wherever it stands
    assert outcomes == {("corpus", Preference.FIRST), ("policy", Preference.SECOND)}


def test_the_same_settings_give_the_same_bytes_and_the_order_of_turns_is_free(files):
    label(files, "one")
    turns = list(read_records(files / "turns.jsonl", GeneratedTurn))
    _, first, _ = label(files, "two")
    assert (files / "one.jsonl").read_bytes() == (files / "two.jsonl").read_bytes()

    write_rows(files / "turns.jsonl", turns[63::-1])
    _, second, _ = label(files, "three")
    assert {row.id: row for row in first} == {row.id: row for row in second}


def test_shares_that_leave_no_room_are_refused():
    with pytest.raises(ValueError, match="less than 1"):
        silver.Settings(false_shares=(1.0, 0.2, 0.2))


def test_greetings_are_at_most_a_tenth_of_what_is_taken_from(files):
    cases = list(read_records(files / "cases.jsonl", Case))
    turns = list(read_records(files / "turns.jsonl", GeneratedTurn))
    greeted = [make_case("Hi", round=0, dialogue=f"esconv/lines/train/g{n}") for n in range(40)]
    known = judged_turn().replace("It is about work.", "The problem is not known.")
    known = known.replace("Anxiety", "Neutral").replace("Negative", "Neutral")
    turns += [generated_turn(case, known) for case in greeted]
    write_rows(files / "cases.jsonl", [*cases, *greeted])
    write_rows(files / "turns.jsonl", turns)

    def greetings(**settings):
        report, taken, _ = label(files, **settings)
        assert report.figures["train.raw.pattern.TTT"] == 48
        return sum("train/g" in row.id for row in taken)

    # 8 others are all right: 8 * 0.2 / 0.8 = 2
    assert greetings(greeting_share=0.2) <= 2
    assert greetings(greeting_share=0.0) == 0
    assert greetings(greeting_share=1.0) > 2


def test_all_rows_are_kept_where_the_targets_cannot_be_had_and_the_report_says_so(files):
    turns = list(read_records(files / "turns.jsonl", GeneratedTurn))
    write_rows(files / "turns.jsonl", [turns[0], turns[8]])  # both all right
    report, taken, _ = label(files)

    assert len(taken) == 2
    assert report.figures["train.selected.note"] == (
        "all rows are selected: step 1 has the same label in all rows with weight"
    )
    assert report.figures["test.raw.rows"] == 0


def test_without_targets_all_rows_are_taken(files):
    _, taken, judged = label(files, false_shares=None)

    assert [row.id for row in taken] == [row.id for row in judged]
