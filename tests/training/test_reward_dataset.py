"""Judged turns: a mistake is one, what is right stays untouched, and pairs are what they say."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import (
    STEPS,
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    parse,
    render,
)
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Preference, Stage, Strategy
from tests.training.corpora_fixture import esconv_rows, write_esconv
from training.esconv import read_esconv
from training.faces import face_class_of
from training.reward_model.dataset import PREFERENCE_SHARES, judged_turns
from training.samples import JudgedTurn, Sample, SampleUtterance
from training.sft.dataset import build_samples


@pytest.fixture(scope="module")
def samples(small_corpora, tmp_path_factory):
    path = write_esconv(tmp_path_factory.mktemp("esconv") / "train.txt.gz", esconv_rows(64))
    return list(
        build_samples(
            read_esconv(path, "train"),
            {},
            face_class_of(small_corpora / "faces"),
            face_share=0,
            history_characters=400,
            seed=0,
        )
    )


@pytest.fixture(scope="module")
def judged(samples) -> list[JudgedTurn]:
    return list(judged_turns(samples, false_share=0.3, seed=0))


def sample(
    number: int,
    *,
    problem: str = "job crisis",
    emotion: Emotion = Emotion.FEAR,
    strategy: Strategy = Strategy.QUESTION,
    reply: str = "I see. Tell me more about what happened there.",
    core: str = "It is about work.",
) -> Sample:
    turn = SupportTurn(
        Reasoning(
            HistoryStep(core, Stage.EXPLORATION),
            EmotionStep("They shake.", SENTIMENT_OF[emotion], emotion, 3),
            StrategyStep("Ask.", strategy),
        ),
        reply,
    )
    return Sample(
        id=f"d{number}#1",
        dialogue_id=f"d{number}",
        problem=problem,
        strategy=strategy.value,
        history=(SampleUtterance(speaker=Speaker.SEEKER, text="Help."),),
        completion=render(turn),
    )


# --- steps ---------------------------------------------------------------------------------------


def test_a_step_is_labelled_wrong_exactly_where_it_was_changed(samples, judged):
    assert len(judged) == len(samples)
    for sample, turn in zip(samples, judged, strict=True):
        before, after = parse(sample.completion), parse(turn.sample.completion)
        same = tuple(a == b for a, b in zip(before.reasoning, after.reasoning, strict=True))
        assert turn.step_labels == same
        assert after.reply == before.reply
        assert turn.sample == sample.model_copy(update={"completion": turn.sample.completion})
        wrong = [part.value for part, right in zip(STEPS, same, strict=True) if not right]
        assert turn.rule == "; ".join([*wrong, turn.preference.value])


def test_a_mistake_differs_in_what_it_is_about(samples, judged):
    by_history = {parse(s.completion).reasoning.history: s for s in samples}
    for sample, turn in zip(samples, judged, strict=True):
        before, after = parse(sample.completion).reasoning, parse(turn.sample.completion).reasoning
        if not turn.step_labels[0]:
            donor = by_history.get(after.history)
            other_stage = after.history.text == before.history.text
            assert other_stage == (donor is None)
            if donor is not None:
                assert donor.problem != sample.problem
        if not turn.step_labels[1]:
            assert after.emotion.emotion != before.emotion.emotion
        if not turn.step_labels[2]:
            assert after.strategy.strategy != before.strategy.strategy


def test_two_greetings_do_not_lend_each_other_their_history_step():
    # after a greeting nothing is known, whatever the dialogue will turn out to be about
    greeting = {"emotion": Emotion.NEUTRAL, "core": "Nothing is known yet."}
    other = {"problem": "sleep problems", "strategy": Strategy.OTHERS}
    rows = [
        sample(0, reply="A hello.", **greeting),
        sample(1, reply="B hello.", **greeting, **other),
        sample(2, reply="C hello.", **other),
    ]

    for seed in range(40):
        turn = next(judged_turns(rows, false_share=1.0, seed=seed))
        history = parse(turn.sample.completion).reasoning.history
        assert history.text == "It is about work." or history.stage is not Stage.EXPLORATION


def within(count: int, draws: int, share: float) -> bool:
    """Four standard deviations of a binomial draw: one seed in 16,000 would fail."""
    return abs(count - draws * share) <= 4 * math.sqrt(draws * share * (1 - share))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_the_share_of_wrong_steps_is_near_the_setting(samples, share):
    turns = list(judged_turns(samples, false_share=share, seed=1))

    for step in range(3):
        wrong = sum(not turn.step_labels[step] for turn in turns)
        assert within(wrong, len(turns), share), (step, wrong)


def test_without_mistakes_every_turn_stays(samples):
    turns = list(judged_turns(samples, false_share=0.0, seed=0))

    assert [turn.sample for turn in turns] == samples
    assert all(turn.step_labels == (True, True, True) for turn in turns)


# --- pairs ---------------------------------------------------------------------------------------


def test_pairs_are_what_their_preference_says(samples, judged):
    replies = {}
    for s in samples:
        replies.setdefault(parse(s.completion).reply, set()).add(s.dialogue_id)
    for sample, turn in zip(samples, judged, strict=True):
        own = parse(sample.completion).reply
        assert turn.first != turn.second
        foreign = [text for text in (turn.first, turn.second) if text != own]
        match turn.preference:
            case Preference.FIRST:
                assert turn.first == own
            case Preference.SECOND:
                assert turn.second == own
            case Preference.NEITHER:
                assert len(foreign) == 2
            case Preference.BOTH:
                (shorter,) = foreign
                assert own.startswith(shorter.removesuffix("."))
                assert len(shorter.split()) >= 5
        if turn.preference is not Preference.BOTH:
            assert all(replies[text] - {sample.dialogue_id} for text in foreign)


def test_preferences_come_in_their_shares_and_their_order_is_balanced(samples):
    turns = [t for seed in range(5) for t in judged_turns(samples, false_share=0.3, seed=seed)]
    count = Counter(turn.preference for turn in turns)

    assert count[Preference.BOTH] > 0
    assert within(count[Preference.NEITHER], len(turns), PREFERENCE_SHARES[Preference.NEITHER])
    sided = count[Preference.FIRST] + count[Preference.SECOND]
    assert within(count[Preference.FIRST], sided, 0.5)
    both = [turn for turn in turns if turn.preference is Preference.BOTH]
    longer_first = sum(len(turn.first) > len(turn.second) for turn in both)
    assert within(longer_first, len(both), 0.5)


def test_a_reply_of_one_sentence_is_not_compared_with_itself():
    rows = [
        sample(n, problem=f"p{n}", emotion=emotion, strategy=strategy, reply=f"One sentence {n}.")
        for n, (emotion, strategy) in enumerate(zip(Emotion, Strategy, strict=False))
    ]

    turns = [turn for seed in range(20) for turn in judged_turns(rows, false_share=0, seed=seed)]

    assert {turn.preference for turn in turns} == {*Preference} - {Preference.BOTH}


def test_equal_replies_of_two_dialogues_make_no_pair():
    # "You are welcome." ends many a dialogue
    rows = [sample(n, reply="You are welcome.") for n in range(9)]
    rows += [sample(9, reply="Quite."), sample(10, reply="Rather.")]

    for seed in range(10):
        for turn in judged_turns(rows, false_share=0, seed=seed):
            assert turn.first != turn.second
            assert (turn.preference is Preference.NEITHER) == (
                parse(turn.sample.completion).reply not in {turn.first, turn.second}
            )


# --- the whole -----------------------------------------------------------------------------------


def test_the_seed_alone_decides(samples, judged):
    assert list(judged_turns(samples, false_share=0.3, seed=0)) == judged
    assert list(judged_turns(samples, false_share=0.3, seed=1)) != judged


@pytest.mark.parametrize(
    "alike",
    [
        {"problem": "job crisis", "emotion": Emotion.FEAR},
        {"problem": "job crisis", "strategy": Strategy.QUESTION},
        {"emotion": Emotion.FEAR, "strategy": Strategy.QUESTION},
    ],
)
def test_samples_too_much_alike_end_in_a_sentence_and_not_in_a_loop(alike):
    differing = {
        "problem": [f"p{n}" for n in range(4)],
        "emotion": [Emotion.FEAR, Emotion.ANGER, Emotion.GUILT, Emotion.PAIN],
        "strategy": [*Strategy][:4],
    }
    rows = [
        sample(n, reply=f"Reply {n}.", **({k: v[n] for k, v in differing.items()} | alike))
        for n in range(4)
    ]

    with pytest.raises(ConfigError, match="4 samples are too much alike"):
        [turn for seed in range(9) for turn in judged_turns(rows, false_share=1.0, seed=seed)]


def test_one_dialogue_has_no_foreign_reply():
    rows = [sample(0, reply=f"Reply {n}.") for n in range(4)]

    with pytest.raises(ConfigError, match="too much alike"):
        list(judged_turns(rows, false_share=0.0, seed=0))


def test_a_wrong_stage_keeps_the_text():
    step = HistoryStep("It is about work.", Stage.EXPLORATION)
    rows = [
        sample(n, problem=f"p{n}", emotion=e, strategy=s, reply=f"Reply {n}.", core=f"Core {n}.")
        for n, (e, s) in enumerate(zip(Emotion, Strategy, strict=False))
    ]

    seen = [
        parse(turn.sample.completion).reasoning.history
        for seed in range(30)
        for turn in judged_turns(rows, false_share=1.0, seed=seed)
        if turn.sample.dialogue_id == "d0"
    ]

    by_stage = [h for h in seen if h.text == "Core 0."]
    assert 5 <= len(by_stage) <= 25  # half of 30, give or take 3.6 standard deviations
    assert {h.stage for h in by_stage} == {Stage.COMFORTING, Stage.ACTION}
    assert replace(step, text="Core 0.") not in seen
