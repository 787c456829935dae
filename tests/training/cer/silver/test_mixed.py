"""Turns put together from steps of other histories: labelled by the rule, balanced, for training only."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from compeer_core.cer import CerRecord
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    parse,
    render,
)
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Stage, Strategy
from tests.training.cer.silver.test_dataset import make_case
from training.cer.silver import dataset as silver
from training.cer.silver.mixed import Mixing, Steps, mix, mixed_turn, take_apart
from training.cer.silver.steps import Habits, count_habits, judge_steps
from training.cer.silver.words import Context, words
from training.cer.steps.generation import GeneratedTurn
from training.data.records import read_records

LISTS = words()
SETTINGS = silver.Settings()
JOB = HistoryStep("The talk is about trouble at work.", Stage.EXPLORATION)
BREAKUP = HistoryStep("The talk is about a breakup.", Stage.EXPLORATION)
WORRY = EmotionStep("It shows.", SENTIMENT_OF[Emotion.ANXIETY], Emotion.ANXIETY, 3)
ANGER = EmotionStep("It shows.", SENTIMENT_OF[Emotion.ANGER], Emotion.ANGER, 3)
ASK = (StrategyStep("It fits.", Strategy.QUESTION), "What happened on Monday?")
TELL = (StrategyStep("It fits.", Strategy.INFORMATION), "Notice periods are set by law.")
BANK = Steps("nano", (JOB, BREAKUP), (WORRY, ANGER), (ASK, TELL))


def generated(case, history, emotion, ending, *, sample=0, text=None):
    turn = SupportTurn(Reasoning(history, emotion, ending[0]), ending[1])
    return GeneratedTurn(
        id=f"{case.id}/nano/{sample}",
        case=case,
        author="nano",
        sample=sample,
        seed=sample,
        text=render(turn) if text is None else text,
        reply=ending[1],
    )


@pytest.mark.parametrize("wanted", list(product((True, False), repeat=3)))
def test_each_step_is_right_or_wrong_as_wanted(wanted):
    # By hand: people labelled a job crisis, anxiety and a question; of the bank's steps the first
    # of each kind is right and the second is wrong, whatever came before.
    rng = np.random.default_rng(0)
    turn = mixed_turn(make_case(), wanted, BANK, Habits(), SETTINGS, 60, LISTS, rng)

    assert turn.reasoning.history == (JOB if wanted[0] else BREAKUP)
    assert turn.reasoning.emotion == (WORRY if wanted[1] else ANGER)
    assert (turn.reasoning.strategy, turn.reply) == (ASK if wanted[2] else TELL)


@pytest.mark.parametrize(
    "bank",
    [
        Steps("nano", (BREAKUP,), (WORRY,), (ASK,)),
        Steps("nano", (JOB,), (ANGER,), (ASK,)),
        Steps("nano", (JOB,), (WORRY,), (TELL,)),
    ],
)
def test_a_turn_is_given_up_where_no_step_is_as_wanted(bank):
    rng = np.random.default_rng(0)

    assert mixed_turn(make_case(), (True,) * 3, bank, Habits(), SETTINGS, 60, LISTS, rng) is None


def test_only_complete_turns_of_the_train_split_are_taken_apart():
    train, test = make_case(), make_case(split="test", dialogue="esconv/lines/test/1")
    turns = [
        generated(train, JOB, WORRY, ASK),
        generated(train, BREAKUP, ANGER, TELL, text="<history>cut"),
        generated(test, BREAKUP, ANGER, TELL),
    ]

    assert take_apart(turns) == Steps("nano", (JOB,), (WORRY,), (ASK,))
    assert take_apart(turns[1:]) is None


@pytest.fixture
def files(tmp_path):
    cases = [make_case(dialogue=f"esconv/lines/train/{number}") for number in range(40)]
    others = [
        make_case(dialogue="esconv/lines/test/1", split="test"),
        make_case(dialogue="esconv/lines/train/u", emotion=None),
    ]
    write_rows(tmp_path / "cases.jsonl", [*cases, *others])
    turns = [generated(cases[0], JOB, WORRY, ASK), generated(cases[1], BREAKUP, ANGER, TELL)]
    write_rows(tmp_path / "turns.jsonl", turns)
    return tmp_path


def mixed(folder, name="mixed.jsonl", seed=0):
    arguments = (folder / "cases.jsonl", folder / "turns.jsonl", folder / name)
    report = mix(*arguments, SETTINGS, Mixing(rows_per_case=3), seed)
    return report, list(read_records(folder / name, CerRecord))


def test_labels_are_what_the_rule_says_of_the_turn_as_it_stands(files):
    report, records = mixed(files)

    assert report.read == 120
    assert report.written == len(records) == 120
    habits = count_habits([record.case for record in records], LISTS)
    for record in records:
        (one,) = (each for each in record.candidates if each.steps is not None)
        case = record.case
        reasoning = parse(one.turn).reasoning
        result = judge_steps(reasoning, case, Context(case, LISTS), habits, SETTINGS.steps, LISTS)
        assert one.steps == result.labels
        assert one.author == "nano, mixed"
        assert one.steps_by.kind == "rule"
        assert case.split == "train"
        assert case.labels.emotion is not None


def test_no_step_tells_what_another_one_is(files):
    _, records = mixed(files)
    patterns = Counter(
        one.steps for record in records for one in record.candidates if one.steps is not None
    )

    # 120 rows over 8 patterns are 15 each; 3 to 30 is more than three standard deviations.
    assert set(patterns) == set(product((True, False), repeat=3))
    assert 3 <= min(patterns.values()) <= max(patterns.values()) <= 30


def test_the_same_seed_gives_the_same_file_and_another_one_does_not(files):
    first, second, other = (
        mixed(files, name, seed) and (files / name).read_bytes()
        for name, seed in (("a.jsonl", 0), ("b.jsonl", 0), ("c.jsonl", 1))
    )

    assert first == second
    assert first != other


def test_without_a_complete_turn_there_is_nothing_to_mix(files):
    write_rows(files / "turns.jsonl", [])

    report, records = mixed(files)
    assert (report.written, records) == (0, [])
