"""The serving benchmark: what it counts, and a run against the real app with scripted models."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from training.__main__ import main
from training.benchmark.serving import (
    MOST_CONVERSATIONS,
    Config,
    Load,
    Turn,
    has_cross_talk,
    has_own_word,
    metrics_of,
    secret_word,
)
from training.common.results import load

REPLIES = ("<reply>What about {}?</reply>", "<reply>How is {} now?</reply>")
TURN = (
    "<history>An exam was failed.\nStage: Exploration</history>\n"
    "<emotion>They are sad.\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
    "<strategy>Listen first.\nStrategy: Question</strategy>\n"
)
FIRST_DELAY, CHUNKS, DELAY = 0.8, 8, 0.2


def answered(conversation: int, seconds: float, text: str = "{}", reply: str = "Yes.") -> Turn:
    return Turn(conversation, seconds, text, reply, seconds / 4, tokens=30)


def values(loads: list[Load]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics_of(loads)}


def test_words_are_distinct_and_none_contains_another():
    words = [secret_word(number) for number in range(MOST_CONVERSATIONS)]

    assert all(sum(word in other for other in words) == 1 for word in words)


def test_a_single_run_has_no_range_and_two_have_one():
    runs = [Load(1, seconds, [answered(0, 10.0)], [2**30]) for seconds in (60.0, 30.0)]

    single, double = (next(metrics_of(loads)) for loads in (runs[:1], runs))

    assert (single.value, single.low, single.n) == (1, None, 1)
    assert (double.value, double.low, double.high, double.n) == (1.5, 1, 2, 2)


def test_another_seekers_word_is_cross_talk_in_a_reply_or_a_step_in_any_case():
    other = secret_word(5).upper()
    leaked = Turn(3, 1.0, json.dumps({"reasoning": {"history": {"text": f'"{other}"'}}}))
    own = Turn(5, 1.0, json.dumps({"reply": f"Does {other} know?"}))

    assert (has_cross_talk(leaked), has_own_word(leaked)) == (True, False)
    assert (has_cross_talk(own), has_own_word(own)) == (False, True)


def test_measures_are_counted():
    alone = Load(1, 60.0, [answered(0, 10.0), answered(0, 20.0)], [2**30])
    failed, withheld = Turn(1, 5.0), answered(1, 30.0, reply="")
    leaked = answered(0, 40.0, text=secret_word(1))
    both = Load(2, 40.0, [failed, withheld, leaked, leaked], [2**30, 2**31])

    found = values([alone, both])

    assert found["Turns per minute, 1 seeker"] == 2  # two turns in 60 s
    assert found["Turns per minute, 2 seekers"] == 4.5  # three without an error in 40 s
    assert found["Throughput relative to 1 seeker, 2 seekers"] == 2.25
    assert found["Speed over all seekers, 2 seekers"] == 2.25  # 90 tokens in 40 s
    assert found["First token after Send, median, 1 seeker"] == 3.75  # of 2.5 and 5 s
    assert found["Whole turn, median, 2 seekers"] == 40
    assert found["Whole turn, p95, 1 seeker"] == pytest.approx(19.5)
    assert found["Errors, 2 seekers"] == 1
    assert found["Turns without a reply, 2 seekers"] == 1
    assert found["Cross-talk, 1 seeker"] == 0
    assert found["Cross-talk, 2 seekers"] == 2
    assert found["Resident memory of the server, 2 seekers"] == 2


@pytest.mark.parametrize("seekers", [[], [2, 4], [1, 4, 4], [1, MOST_CONVERSATIONS + 1]])
def test_numbers_of_seekers_begin_with_one_and_ascend(seekers):
    with pytest.raises(ValidationError, match="must be"):
        Config(seekers=seekers)


def test_known_delays_are_measured_and_planted_cross_talk_is_found(tmp_path):
    texts = [TURN + reply.format(secret_word(0)) for reply in REPLIES]
    delays = {"first_delay_seconds": FIRST_DELAY, "delay_seconds": DELAY}
    turns = [{"text": text, "chunk_characters": -(-len(text) // CHUNKS)} | delays for text in texts]
    (tmp_path / "turns.json").write_text(json.dumps({"turns": turns}), encoding="utf-8")
    (tmp_path / "models.toml").write_text(
        '[[models]]\nname = "recorded"\nkind = "policy"\nsource = "scripted:turns.json"\n',
        encoding="utf-8",
    )
    root = Path(__file__).parents[3]
    flags = ["--forwarded-allow-ips", "127.0.0.1", "--turns-at-once", "1", "--models"]
    app = ["app.py", *flags, str(tmp_path / "models.toml"), "--data-dir", str(tmp_path)]
    (tmp_path / "serving.toml").write_text(
        f"""
        output = {json.dumps(str(tmp_path))}
        root = {json.dumps(str(root))}
        app = {json.dumps(app)}
        models = {json.dumps(str(tmp_path / "models.toml"))}
        messages = {json.dumps(str(root / "training/configs/benchmark_serving.txt"))}
        seekers = [1, 2]
        turns = 2
        conversations = 2
        long_turns = 2
        """,
        encoding="utf-8",
    )

    assert main(["benchmark", "serving", str(tmp_path / "serving.toml")]) == 0

    result = load(tmp_path / "serving_cpu.json")
    found = {metric.name: metric for metric in result.metrics}
    alone = FIRST_DELAY + CHUNKS * DELAY
    assert found["Whole turn, median, 1 seeker"].low >= alone
    assert FIRST_DELAY + DELAY <= found["First token after Send, median, 1 seeker"].value < alone
    assert found["Turns per minute, 1 seeker"].value < 60 / alone
    # The app takes one turn at a time here: the second seeker waits for the first.
    assert found["Throughput relative to 1 seeker, 2 seekers"].value == pytest.approx(1, rel=0.3)
    assert found["First token after Send, p95, 2 seekers"].value > alone + FIRST_DELAY
    # A chunk is a token. The next turn can begin while the last tokens of one are on their way.
    speed = CHUNKS / alone
    for seekers in ("1 seeker", "2 seekers"):
        assert speed / 2 < found[f"Speed over all seekers, {seekers}"].value < 1.05 * speed
        assert found[f"Errors, {seekers}"].value == 0
        assert found[f"Cross-talk, {seekers}"].value == 2  # the turns of conversation 1
        assert found[f"Own word, {seekers}"].value == 2  # and those of conversation 0
        assert found[f"Cross-talk, {seekers}"].n == 4
    assert 0.1 < found["Resident memory of the server, 1 seeker"].value < 4
    assert 0.5 < found["First token, turn 2 relative to turn 1"].value < 2
