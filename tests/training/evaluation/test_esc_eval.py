"""ESC-Eval: the dialogue loop, verdicts, per cents, and the official files."""

import json
from pathlib import Path

import pytest

from compeer_core import row_files
from compeer_core.dialogue import Speaker
from compeer_core.errors import CheckpointError, ConfigError
from tests.training.cer.endpoint import Endpoint, asked, at, refused
from training.cer.requests import asking
from training.common import results
from training.data.seeker_prompt import seeker_messages
from training.evaluation import esc_eval
from training.evaluation.esc_eval import GREETINGS, Config, Judge
from training.evaluation.esc_eval_scores import DIMENSIONS, Scores, read_verdict
from training.stages import WaitingForPeople

RUBRICS = {
    "key_list": [*DIMENSIONS],
    "dimension_list": [f"name of {key}" for key in DIMENSIONS],
    "prompt_EN": [f"rubric of {key}\n" for key in DIMENSIONS],
    "prompt_ZH": [f"Chinese rubric of {key}\n" for key in DIMENSIONS],
}
CARDS = [{"id": number, "base": f"card {number}", "language": "english"} for number in range(2)]


def speak(body):
    """The seeker counts its lines, policies answer them, and the judge gives a 3."""
    if body["model"] == "seeker":
        card = body["messages"][0]["content"].partition("card ")[2][0]
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        return f" trouble {card}.{spoken} "
    if body["model"].startswith("judge"):
        return "3"
    return f"{body['model']} heard {asked(body)}"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "cards.json").write_text(json.dumps(CARDS), encoding="utf-8")
    (tmp_path / "rubrics.json").write_text(json.dumps(RUBRICS), encoding="utf-8")
    return tmp_path


def config_of(files, url, **changes):
    def model(name):
        return {"source": f"openai:{url}#{name}", "backoff_seconds": 0.01, "tries": 2, "retries": 1}

    values = {
        "output": files / "run",
        "results": files / "results",
        "name": "esc_eval_test",
        "rubrics": files / "rubrics.json",
        "cards": {"en": files / "cards.json"},
        "seeker": model("seeker"),
        "policies": [{"name": "kind", **model("kind")}],
        "judges": [{"name": "judge", **model("judge")}],
    }
    values |= changes
    for key in ("policies", "judges"):
        values[key] = [
            {"name": each, **model(each)} if isinstance(each, str) else each for each in values[key]
        ]
    return Config.model_validate(values)


def table_of(config):
    metrics = results.load(config.results / f"{config.name}.json").metrics
    return {(metric.about, metric.label, metric.name): metric for metric in metrics}


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_five_rounds_in_which_the_model_sees_neither_card_nor_greeting(files):
    with Endpoint(answer=speak) as endpoint:
        config = config_of(files, endpoint.url)
        esc_eval.run(config)
        bodies = endpoint.bodies
        esc_eval.run(config)
        assert endpoint.requests == len(bodies) == 2 * (5 + 5 + 7)  # the second run asks nothing

    dialogue = read_json(config.output / "result" / "kind_en.json")["1"]
    expected = [f"AI assistant：{GREETINGS['en']}"]
    for number in range(5):
        expected.append(f"ESC-Role：trouble 1.{number}")
        expected.append(f"AI assistant：kind heard trouble 1.{number}")
    assert dialogue == expected

    [last] = [
        body["messages"]
        for body in bodies
        if body["model"] == "kind" and asked(body) == "trouble 1.4"
    ]
    assert [message["role"] for message in last] == ["user", "assistant"] * 4 + ["user"]
    assert not {"card", GREETINGS["en"]} & {message["content"] for message in last}
    assert "card" not in json.dumps(last)

    openings = [
        body["messages"]
        for body in bodies
        if body["model"] == "seeker" and len(body["messages"]) == 2
    ]
    assert all([each["role"] for each in opening] == ["system", "user"] for opening in openings)
    cards = sorted(system["content"].partition("card ")[2][0] for system, _ in openings)
    assert cards == ["0", "1"]  # requests may arrive in any order
    assert {greeting["content"] for _, greeting in openings} == {GREETINGS["en"]}


def test_a_trained_seeker_gets_its_own_prompt_and_the_result_its_heading(files):
    with Endpoint(answer=speak) as endpoint:
        config = config_of(files, endpoint.url)
        small = config.model_copy(update={"seeker": trained(config.seeker)})
        esc_eval.run(small)
        bodies = [body for body in endpoint.bodies if body["model"] == "seeker"]

    last = max((body["messages"] for body in bodies), key=len)
    heard = read_json(small.output / "result" / "kind_en.json")
    spoken = [line.partition("：")[2] for line in heard[last[0]["content"][-1]]]
    turns = [
        ((Speaker.SEEKER, Speaker.SUPPORTER)[n % 2], text) for n, text in enumerate(spoken[1:-2])
    ]
    expected = seeker_messages(f"card {last[0]['content'][-1]}", turns)
    assert [(each["role"], each["content"]) for each in last] == [
        (each.role, each.text) for each in expected
    ]
    assert results.load(small.results / f"{small.name}.json").title.startswith("Small simulation: ")


def test_a_trained_seeker_speaks_english(files):
    config = config_of(files, "http://localhost/v1")
    values = config.model_dump() | {
        "seeker": trained(config.seeker).model_dump(),
        "cards": {"zh": files / "cards.json"},
    }

    with pytest.raises(ValueError, match="speaks English"):
        Config.model_validate(values)


def trained(seeker):
    return seeker.model_copy(update={"style": "trained"})


def test_judge_gets_rubric_and_dialogue_and_the_files_are_official(files):
    with Endpoint(answer=speak) as endpoint:
        config = config_of(files, endpoint.url, count=1)
        esc_eval.run(config)
        questions = [asked(body) for body in endpoint.bodies if body["model"] == "judge"]

    assert len(questions) == 7
    assert questions[0].startswith("rubric of fluency\n")
    assert "name of fluency score" in questions[0]
    assert "**用户**trouble 0.0\n\n**AI助手**：kind heard trouble 0.0" in questions[0]
    path = config.output / "score" / "judge" / "kind_en.json"
    expected = {"0": dict.fromkeys(DIMENSIONS, 3)}
    assert path.read_bytes() == json.dumps(expected, indent=4).encode()
    assert table_of(config)["en, judge", "kind", "Average"].value == 75.0


@pytest.mark.parametrize(
    ("text", "strict", "official"),
    [
        ("3", 3, 3),
        (" **4**\n", 4, 4),
        ("3 out of 4", None, 3),
        ("10", None, 0),
        ("scale 0-4: 3", None, 0),
        ("-1", None, 1),
        ("3.5", None, 3),
        ("5", None, None),
        ("good", None, None),
    ],
)
def test_parsers(text, strict, official):
    assert read_verdict(text) == strict
    assert read_verdict(text, "official") == official


def test_unreadable_verdicts_are_excluded_and_counted(files):
    def answer(body):
        if "rubric of human" in asked(body) and "trouble 0" in asked(body):
            return "It is a 10."
        return "1" if "trouble 0" in asked(body) and body["model"] == "judge" else speak(body)

    with Endpoint(answer=answer) as endpoint:
        strict = config_of(files, endpoint.url)
        esc_eval.run(strict)
        table = table_of(strict)
        official = config_of(
            files,
            endpoint.url,
            judges=[
                {"name": "judge", "source": f"openai:{endpoint.url}#judge", "parser": "official"}
            ],
        )
        esc_eval.run(official)

    # (1 + 3) / 2 / 4 in six dimensions; Humanoid has the readable 3 only
    assert table["en, judge", "kind", "Fluency"].value == 50.0
    assert (table["en, judge", "kind", "Humanoid"].value, 1) == (
        75.0,
        table["en, judge", "kind", "Humanoid"].n,
    )
    assert table["en, judge", "kind", "Average"].value == pytest.approx((6 * 50 + 75) / 7)
    unreadable = table["en, judge", "kind", "unreadable verdicts"]
    assert (unreadable.value, unreadable.n) == (1, 2 * 7)
    scores = read_json(strict.output / "score" / "judge" / "kind_en.json")
    # The official parser reads the 0 of "10".
    assert scores["0"]["human"] == 0
    assert table_of(official)["en, judge", "kind", "Humanoid"].value == 100 * 3 / 2 / 4


def test_judges_apart_and_averaged_and_policies_compared_on_the_same_cards(files):
    def answer(body):
        if body["model"] == "judge-b":
            return "4" if "kind heard" in asked(body) else "2"
        return speak(body)

    with Endpoint(answer=answer) as endpoint:
        config = config_of(
            files, endpoint.url, policies=["kind", "curt"], judges=["judge", "judge-b"]
        )
        esc_eval.run(config)

    table = table_of(config)
    assert table["en, judge", "kind", "Average"].value == 75.0
    assert table["en, judge-b", "kind", "Average"].value == 100.0
    assert table["en, mean of judges", "kind", "Average"].value == 87.5
    assert table["en, mean of judges", "curt", "Average"].value == 62.5
    difference = table["en, mean of judges", "difference (kind - curt)", "Average"]
    # Equal in every dialogue, so that the paired interval has no width.
    assert (difference.value, difference.low, difference.high) == (25.0, 25.0, 25.0)
    assert difference.n == 2


def test_a_comparison_counts_the_dialogues_that_both_policies_completed(files):
    def answer(body):
        is_mute = body["model"] == "curt" and asked(body) == "trouble 0.2"
        return "<emotion>Sad</emotion>" if is_mute else speak(body)

    with Endpoint(answer=answer) as endpoint:
        config = config_of(files, endpoint.url, policies=["kind", "curt"])
        esc_eval.run(config)

    table = table_of(config)
    assert table["en, judge", "kind", "Average"].n == 2
    assert table["en, judge", "difference (kind - curt)", "Average"].n == 1


def test_a_dialogue_without_a_reply_fails_and_the_others_continue(files):
    def answer(body):
        is_mute = body["model"] == "kind" and asked(body) == "trouble 0.2"
        return "<emotion>Sad</emotion>" if is_mute else speak(body)

    with Endpoint(answer=answer) as endpoint:
        config = config_of(files, endpoint.url)
        esc_eval.run(config)

    assert [*read_json(config.output / "result" / "kind_en.json")] == ["1"]
    [line] = (config.output / "failed.jsonl").read_text(encoding="utf-8").splitlines()
    failed = json.loads(line)
    assert (failed["problem"], len(failed["lines"])) == ("kind replies: no reply", 5)
    table = table_of(config)
    assert (table["en", "kind", "failed dialogues"].value, 1) == (
        1,
        table["en, judge", "kind", "Average"].n,
    )


def test_a_request_that_failed_is_sent_again_by_the_next_run(files):
    with Endpoint(answer=speak, fault=at({1: refused(413)})) as endpoint:
        config = config_of(files, endpoint.url)
        esc_eval.run(config)
        assert table_of(config)["en", "kind", "failed dialogues"].value == 1
        esc_eval.run(config)

    assert table_of(config)["en", "kind", "failed dialogues"].value == 0
    lines = (config.output / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum(len(json.loads(line)["unanswered"]) for line in lines) == 1


def test_adapters_have_the_names_of_esc_rank(tmp_path):
    judge = Judge(name="esc-rank", source="hf:base", adapter=tmp_path / "{adapter}")

    assert judge.settings("tech", "en").adapter == tmp_path / "tech_en"
    assert judge.settings("tech", "zh").adapter == tmp_path / "tech"
    served = Judge(name="esc-rank", source="openai:http://localhost/v1#{adapter}")
    assert served.settings("fluency", "en").where.model == "fluency_en"
    with pytest.raises(
        ConfigError, match=r"fluency_en; download ESC-RANK with `hf download .*vLLM"
    ):
        judge.check_adapters("en")


def test_a_base_that_cannot_be_loaded_names_the_ways_out(files, monkeypatch):
    def refuse(settings):
        if settings.in_process:
            raise ValueError("internlm2 needs trust_remote_code")
        return ()

    monkeypatch.setattr(asking, "reserved_tokens", refuse)
    for key in DIMENSIONS:
        (files / "rank" / f"{key}_en").mkdir(parents=True)
    (files / "base").mkdir()
    judge = {"name": "rank", "source": f"{files}/base", "adapter": files / "rank" / "{adapter}"}
    with Endpoint(answer=speak) as endpoint:
        config = config_of(files, endpoint.url, judges=[judge])
        ways = r"needs trust_remote_code.*InternLM2.*vLLM.*score\.py"
        with pytest.raises(CheckpointError, match=ways):
            esc_eval.run(config)


def test_scores_of_another_program_are_awaited_and_then_read(files):
    with Endpoint(answer=speak) as endpoint:
        config = config_of(
            files, endpoint.url, judges=[{"name": "rank", "scores": files / "score"}], count=1
        )
        with pytest.raises(WaitingForPeople, match=r"rate the files of .*result"):
            esc_eval.run(config)
        (files / "score").mkdir()
        scores = {"0": dict.fromkeys(DIMENSIONS, 2) | {"overall": -1}}
        (files / "score" / "kind_en.json").write_text(json.dumps({"1": {}}), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"kind_en\.json: has scores of 1 dialogues.* is 0"):
            esc_eval.run(config)
        (files / "score" / "kind_en.json").write_text(json.dumps(scores), encoding="utf-8")
        esc_eval.run(config)

    table = table_of(config)
    assert table["en, rank", "kind", "Skillful"].value == 50.0
    assert table["en, rank", "kind", "unreadable verdicts"].value == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": []}, "nothing to evaluate"),
        ({"cards": {}}, "nothing to evaluate"),
        ({"seeker": None}, "need cards and a seeker"),
        ({"rubrics": None}, "need rubrics"),
        ({"policies": ["kind", "kind"]}, "the same name"),
        ({"judges": [{"name": "none"}]}, "either source or scores"),
        ({"transcripts": [Path("llama3.json")]}, "a name like"),
        (
            {"policies": [{"name": "a", "source": "b", "style": "prompted", "system_prompt": "c"}]},
            "drop",
        ),
    ],
)
def test_configs_that_cannot_work_are_refused(files, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(files, "http://localhost/v1", **changes)


def test_dry_run_states_a_bound_and_asks_nothing(files, caplog):
    caplog.set_level("INFO")
    config = config_of(files, "http://localhost:9/v1")

    esc_eval.run(config, dry_run=True)

    assert "kind: at most 10 requests and 5120 output tokens" in caplog.text
    assert "judge: at most 14 requests and 224 output tokens" in caplog.text
    assert not config.output.exists()


def test_the_official_scores_are_recomputed_from_their_files(corpora, tmp_path):
    official = corpora / "esc_eval"
    transcripts = sorted((official / "result" / "2024-06-24").glob("*.json"))
    config = Config(
        name="esc_eval_official",
        output=tmp_path / "run",
        results=tmp_path / "results",
        transcripts=tuple(transcripts),
        judges=(Judge(name="esc-rank", scores=official / "score"),),
    )

    esc_eval.run(config)

    # Three dialogues each. score.py rates most 3 in six dimensions and 2 overall.
    expected = {
        ("en", "llama3"): (75, 75, 75, 75, 125 / 3, 75, 50),
        ("zh", "llama3"): (200 / 3, 75, 75, 75, 25, 75, 50),
        ("en", "Qwen_7B"): (75, 75, 75, 75, 25, 75, 50),
        ("zh", "Qwen_7B"): (75, 75, 75, 75, 125 / 3, 75, 50),
    }
    table = table_of(config)
    for (language, model), values in expected.items():
        about = f"{language}, esc-rank"
        measured = [table[about, model, name].value for name in DIMENSIONS.values()]
        assert measured == pytest.approx(values), (language, model)
        assert table[about, model, "Average"].value == pytest.approx(sum(values) / 7)
        assert table[about, model, "unreadable verdicts"].value == 0


def test_official_files_survive_reading_and_writing_byte_for_byte(corpora, tmp_path):
    official = corpora / "esc_eval"
    for path in (*(official / "result").rglob("*.json"), *(official / "score").glob("*.json")):
        kind = Scores if path.parent.name == "score" else esc_eval.Transcripts
        esc_eval.write_file(tmp_path / "copy.json", row_files.read_json(path, kind))
        assert (tmp_path / "copy.json").read_bytes() == path.read_bytes()


def test_official_rubrics_and_cards_are_read(corpora, tmp_path, caplog):
    caplog.set_level("INFO")
    official = corpora / "esc_eval"
    config = config_of(
        tmp_path,
        "http://localhost:9/v1",
        rubrics=official / "rubric_prompts.json",
        cards={code: official / "data" / f"card_high_{code}.json" for code in ("en", "zh")},
    )

    esc_eval.run(config, dry_run=True)

    assert "seeker: at most 1650 requests" in caplog.text  # 5 for each of 167 + 163 cards
