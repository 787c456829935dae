"""SAGE: the sentient agent's state, the dialogue loop, the numbers, and the public files."""

import decimal
import gzip
import json
import math
import re

import pytest

from compeer_core.errors import ConfigError
from tests.training.cer.endpoint import Endpoint, asked
from training.common import results
from training.evaluation import sage
from training.evaluation.sage import (
    Config,
    band_of,
    ends,
    metrics,
    read_planning,
    read_profiles,
    read_response,
    updated,
)

FIELDS = {
    "player": "A nurse.",
    "scene": "Night shifts.",
    "main_cha": "负面型",
    "task": "be praised",
}


def profile_of(name, **changes):
    return {"id": name, **FIELDS, "first_talk": f"I am {name}."} | changes


def agent(changes):
    """A simulator that changes the emotion of each person by its own constant."""

    def answer(body):
        question = asked(body)
        if body["model"] != "simulator":
            return f"I hear: {question}"
        name = re.search(r"I am (\w+)\.", question)
        change = changes[name[1] if name else "quiet"]
        if "Change:" in question:
            return f"Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: n\nChange: {change}"
        spoken = question.count("Person:")
        opening = "I am quiet." if spoken == 0 else f"message {spoken}"
        return f"Thinking: why\nResponse: {opening}"

    return answer


@pytest.fixture
def profiles(tmp_path):
    path = tmp_path / "profiles.jsonl"

    def write(*rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def config_of(folder, url, profiles, **changes):
    def model(name):
        return {"source": f"openai:{url}#{name}", "backoff_seconds": 0.01, "tries": 2, "retries": 1}

    values = {
        "output": folder / "run",
        "results": folder / "results",
        "name": "sage_test",
        "profiles": profiles,
        "simulator": model("simulator"),
        "policies": [{"name": "kind", **model("kind")}],
        "seeds": [0],
        "max_turns": 4,
    }
    return Config.model_validate(values | changes)


def table_of(config):
    found = results.load(config.results / f"{config.name}.json").metrics
    return {(metric.about, metric.label, metric.name): metric for metric in found}


def rows_of(path):
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("Change: +5", 5),
        ("Change：-10", -10),
        ('{"Activity": "x", "Change": "-5"}', -5),
        ("Change: −3 points", -3),
        ("Activity: Change is hard.\nChange: 0", 0),
    ],
)
def test_change_is_read(text, change):
    assert read_planning(text)["change"] == change


def test_sections_are_read_and_a_missing_change_is_an_error():
    planning = read_planning(
        "**Content**: c\nd\nTargetCompletion: t\nActivity: a\nAnalyse: n\nChange: 1"
    )

    assert planning == {
        "activity": "a", "TargetCompletion": "t", "content": "c\nd", "analyse": "n", "change": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no change"):
        read_planning("Change: much better")


def test_response_follows_the_last_label():
    assert read_response("Thinking: a Response: b\nResponse: “Hm.”")[0] == "Hm."
    assert read_response("Just a text")[0] == ""


@pytest.mark.parametrize(
    ("point", "text", "is_over"),
    [
        (100, "Thanks", True),
        (99, "Thanks", False),
        (10, "No", False),
        (9, "No", True),
        (50, "谢谢你，再见！", True),
        (50, "Okay, goodbye.", True),
        (50, "I said goodbye to him", False),
        (50, "不想说再见，可是没办法", False),
    ],
)
def test_ends(point, text, is_over):
    assert ends(point, text) is is_over


def test_dialogues_end_in_success_in_failure_or_at_the_last_turn(tmp_path, profiles):
    path = profiles(profile_of("glad"), profile_of("angry"), profile_of("calm"))
    changes = {"glad": 30, "angry": -16, "calm": 2}
    with Endpoint(answer=agent(changes)) as endpoint:
        config = config_of(tmp_path, endpoint.url, path, max_turns=8)
        sage.run(config)
        count = endpoint.requests
        bodies = endpoint.bodies
        sage.run(config)
        assert endpoint.requests == count  # everything is stored

    # glad: 40 + 6 * 10; angry: 40 - 4 * 10, ends at 0; calm: 40 + 7 * 2, the 8th reply is not scored
    glad, angry, calm = rows_of(config.output / "dialogues" / "kind_seed0.jsonl")
    assert [each["emo_point"] for each in (glad, angry, calm)] == [100, 0, 54]
    assert [each["emo_state"][-1] for each in (glad, angry, calm)] == ["S", "F", "B"]
    assert [len(each["history"]) for each in (glad, angry, calm)] == [13, 9, 16]
    assert calm["history"][0] == {"role": "user", "content": "I am calm.", "emotion-point": 40}
    assert calm["history"][2] == {
        "role": "user",
        "content": "message 1",
        "thinking": "Thinking: why",
        "emotion-point": 42,
        "planning": {
            "activity": "a", "TargetCompletion": "t", "content": "c", "analyse": "n", "change": 2,
        },
    }  # fmt: skip
    assert count == 3 * (6 + 4 + 7) + 1
    heard = [body["messages"] for body in bodies if body["model"] == "kind"]
    assert "praised" not in json.dumps(heard)

    table, about = table_of(config), "simulator simulator, at most 8 turns"
    assert table[about, "kind", "final emotion"].value == pytest.approx((100 + 0 + 54) / 3)
    assert table[about, "kind", "success"].value == pytest.approx(100 / 3)
    assert table[about, "kind", "failure"].value == pytest.approx(100 / 3)


def test_a_trained_simulator_rates_its_distress_and_speaks(tmp_path):
    def answer(body):
        if body["model"] != "simulator":
            return "I hear you."
        if "How strong is your distress" in asked(body):
            return "1" if len(body["messages"]) < 6 else " 5\n"
        return "I am tired."

    with Endpoint(answer=answer) as endpoint:
        client = {"intake_form": "A nurse.", "attitude": "neutral", "attitude_instruction": "Calm."}
        known = {"reason_counseling": "Sleep.", "init_history_client": "Hello."}
        path = tmp_path / "clients.json"
        rows = [{"AI_client": client, "AI_counselor": {"CBT": known}}]
        path.write_text(json.dumps(rows), encoding="utf-8")
        config = config_of(tmp_path, endpoint.url, path, max_turns=3)
        small = config.model_copy(
            update={"simulator": config.simulator.model_copy(update={"style": "trained"})}
        )
        sage.run(small)

    [dialogue] = rows_of(small.output / "dialogues" / "kind_seed0.jsonl")
    points = [each["emotion-point"] for each in dialogue["history"][::2]]
    assert points == [40, 50, 40]
    assert dialogue["history"][2]["content"] == "I am tired."
    assert dialogue["history"][2]["planning"]["change"] == 60
    assert results.load(small.results / f"{small.name}.json").title.startswith("Small simulation: ")


def test_a_trained_simulator_speaks_english(tmp_path, profiles):
    config = config_of(tmp_path, "http://localhost/v1", profiles(profile_of("calm")))
    simulator = config.simulator.model_copy(update={"style": "trained"})

    with pytest.raises(ConfigError, match="speaks English"):
        sage.run(config.model_copy(update={"simulator": simulator}), dry_run=True)


def test_the_agent_opens_a_profile_without_a_first_message(tmp_path, profiles):
    row = {key: text for key, text in profile_of("quiet").items() if key != "first_talk"}
    with Endpoint(answer=agent({"quiet": 1})) as endpoint:
        config = config_of(tmp_path, endpoint.url, profiles(row), max_turns=1)
        sage.run(config)
        assert endpoint.requests == 2

    [dialogue] = rows_of(config.output / "dialogues" / "kind_seed0.jsonl")
    assert [each["content"] for each in dialogue["history"]] == [
        "I am quiet.",
        "I hear: I am quiet.",
    ]


def test_a_dialogue_without_a_change_fails_and_is_counted(tmp_path, profiles):
    changes = {"calm": 5, "odd": "a lot"}
    with Endpoint(answer=agent(changes)) as endpoint:
        config = config_of(
            tmp_path, endpoint.url, profiles(profile_of("calm"), profile_of("odd")), max_turns=2
        )
        sage.run(config)

    [failed] = rows_of(config.output / "failed.jsonl")
    assert failed["dialogue"] == "kind/0/odd"
    assert (failed["problem"], len(failed["lines"])) == ("emotion: no change", 2)
    table, about = table_of(config), "simulator simulator, at most 2 turns"
    assert table[about, "kind", "final emotion"].value == 45.0
    assert table[about, "kind", "failed dialogues"].value == 1


def test_models_are_compared_by_profile_over_seeds():
    def finals(*points):
        return dict(zip("abcd", points, strict=True))

    runs = {
        "first": [finals(100, 50, 5, 45), finals(90, 60, 15, 35)],
        "second": [finals(90, 40, -5, 35), finals(80, 50, 5, 25)],
        "third": [finals(50, 50, 50, math.nan)],
    }
    table = {(each.about, each.label, each.name): each for each in metrics(runs, "simulator s")}

    mean = table["simulator s", "first", "final emotion"]
    assert (mean.value, mean.n) == (50.0, 4)
    assert table["simulator s", "first", "success"].value == 100 / 8
    assert table["simulator s", "second", "failure"].value == 100 / 4
    difference = table["simulator s", "difference (first - second)", "final emotion"]
    # 10 points in every dialogue: the paired interval has no width
    assert (difference.value, difference.low, difference.high) == pytest.approx((10, 10, 10))
    third = table["simulator s", "third", "final emotion"]
    assert (third.value, third.n) == (50.0, 3)
    failed = table["simulator s", "third", "failed dialogues"]
    assert (failed.value, failed.n) == (1, 4)
    assert table["simulator s", "first", "failed dialogues"].n == 8  # four profiles, two seeds
    without = table["simulator s", "difference (first - third)", "final emotion"]
    assert (without.value, without.n) == (pytest.approx((95 + 55 + 10) / 3 - 50), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": []}, "at least 1 item"),
        ({"seeds": [1, 1]}, "a seed occurs twice"),
    ],
)
def test_configs_that_cannot_work_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, "http://localhost/v1", tmp_path / "profiles.jsonl", **changes)


def test_a_file_without_profiles_is_named(tmp_path):
    path = tmp_path / "clients.json"
    path.write_text("[{}]", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"clients\.json: not a list of Cactus's clients"):
        read_profiles(path)


# --- public files --------------------------------------------------------------------------------

DEEPSEEK = "deepseek-v3-2024-1227_based_simulator"
README_NAMES = {
    "claude3.7-think": "Claude3.7-Think",
    "deepseek-v3-0324": "DeepSeek-V3-0324",
    "gpt-4.5": "GPT-4.5-Preview",
    "gpt-4o-0808": "GPT-4o",
    "llama3.3-70b": "Llama3.3-70B",
    "openai-o4mini": "o4-mini",
}
UNDER_GPT_4O = {"gpt-4o-0806": (52.13, 14, 18), "llama3.3-70b": (49.43, 15, 25)}


def test_the_public_leaderboard_is_recomputed_from_its_files(corpora):
    finals: dict[str, dict[str, list[dict[str, float]]]] = {}
    for path in sorted((corpora / "sage" / "dataset").glob("*/*.jsonl.gz")):
        model = path.name.partition("_result")[0]
        points = {each["id"]: float(each["emo_point"]) for each in rows_of(path)}
        finals.setdefault(path.parent.name, {})[model] = [points]
    table = {
        (each.about, each.label, each.name): each.value
        for simulator, runs in finals.items()
        for each in metrics(runs, simulator)
    }
    readme = (corpora / "sage" / "README.md").read_text(encoding="utf-8")
    cells = [re.findall(r"<td>([^<]+)</td>", row) for row in readme.split("<tr>")]
    published = {row[0]: row[3:6] for row in cells if len(row) == 8}
    for simulator, model in [(name, model) for name, runs in finals.items() for model in runs]:
        names = ("final emotion", "success", "failure")
        score, success, failure = (table[simulator, model, name] for name in names)
        if simulator == DEEPSEEK:
            tenth = decimal.Decimal(str(round(score, 6))).quantize(
                decimal.Decimal("0.1"), decimal.ROUND_HALF_UP
            )
            row = [str(tenth), f"{success:.0f}", f"{failure:.0f}"]
            assert row == published[README_NAMES[model]]
        else:
            assert (score, success, failure) == pytest.approx(UNDER_GPT_4O[model])


def test_the_public_dialogues_follow_the_same_rules(corpora):
    for path in (corpora / "sage" / "dataset").glob("*/*.jsonl.gz"):
        for dialogue in rows_of(path):
            point = sage.START
            messages = [each for each in dialogue["history"] if each["role"] == "user"]
            for number, message in enumerate(messages):
                if number:
                    point = updated(point, message["planning"]["change"])
                assert point == message["emotion-point"]
                is_last = number == len(messages) - 1
                assert ends(point, message["content"]) == (is_last and number < 9) or (
                    is_last and number == 9
                )
            assert point == dialogue["emo_point"]
            assert dialogue["emo_state"] == f"Emotion-{band_of(point)}"


def test_profiles_of_three_projects_are_read(corpora):
    folder = corpora / "sage" / "profile"
    with_talk = read_profiles(folder / "simulator_profile_withfirsttalk.jsonl.gz")
    without = read_profiles(folder / "simulator_profile.jsonl.gz")
    rlver = read_profiles(corpora / "rlver" / "train_profile.jsonl.gz")
    cactus = read_profiles(corpora / "cactus_clients" / "evaluation.json.gz")

    assert [len(each) for each in (with_talk, without, rlver, cactus)] == [100, 100, 500, 360]
    assert all(each.first_talk for each in (*with_talk, *cactus))
    assert not any(each.first_talk for each in (*without, *rlver))
    assert {each.language for each in cactus} == {"en"}
    assert len({each.id for each in cactus}) == 360
