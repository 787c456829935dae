"""The API as a program calls it: gradio_client against a running server."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import PIL.Image
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from compeer_core.safety import RiskKind, RiskSign
from compeer_core.turn import FRESH_DRAWS, draw_seed, take_turn
from tests.draws import Draws
from tests.pages import BROKEN, COMPLETE, LOOP, REPLY, SECOND_REPLY, make_services
from ui_components.server.app import build_server, serving
from ui_components.shared.services import Services

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

SEEKER = [{"role": "user", "content": "I lost my job."}]
EXCHANGE = [*SEEKER, {"role": "assistant", "content": "I am sorry to hear that."}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory):
    services = make_services(tmp_path_factory.mktemp("models"))
    with serving(build_server(services, api_only=True)) as address:
        yield Client(address, verbose=False, analytics_enabled=False)


def test_chat_returns_the_reply_its_reasoning_and_the_reward(client):
    answer = client.predict("I lost my job.", [], None, "", None, 7, api_name="/chat")

    assert answer["reply"] == REPLY
    assert answer["complete"] is True
    assert answer["model"] == "scripted-policy"
    assert answer["seed"] == 7
    assert 0 <= answer["first_token_seconds"] <= answer["seconds"]
    assert answer["tokens"] >= len(COMPLETE) / 16  # chunks, which also end with a step
    assert answer["reasoning"]["history"]["stage"] == "Exploration"
    assert answer["reasoning"]["emotion"] == {
        "text": "There is fear of the next days.",
        "sentiment": "Negative",
        "emotion": "Anxiety",
        "intensity": 4,
        "evidence": [],
    }
    assert answer["reasoning"]["strategy"]["strategy"] == "Reflection of Feelings"
    reward = answer["reward"]
    assert [step["correct"] for step in reward["steps"]] == [True, True, False]
    assert reward["steps"][2]["probability_correct"] == 0.34
    assert (reward["response"], reward["format"], reward["total"], reward["maximum"]) == (
        None,
        1,
        2,
        4,
    )


def test_chat_takes_the_history_a_model_a_strategy_and_a_picture(client, tmp_path: Path):
    PIL.Image.new("RGB", (40, 30), "olive").save(tmp_path / "photo.png")
    second = client.predict("My father ...", EXCHANGE, api_name="/chat")
    other = client.predict("hello", model="other", api_name="/chat")
    forced = client.predict("hello", strategy="Question", api_name="/chat")
    pictured = client.predict("", image=handle_file(tmp_path / "photo.png"), api_name="/chat")

    assert second["reply"] == SECOND_REPLY
    assert other["model"] == "other"
    assert forced["reasoning"]["strategy"]["strategy"] == "Question"
    assert pictured["reply"] == REPLY


def test_chat_returns_the_evidence_of_each_step(client, tmp_path: Path):
    message = "  😀 My boss shouted at me. "
    steps = client.predict(message, EXCHANGE, api_name="/chat")["reasoning"]
    evidence = steps["history"]["evidence"]
    quoted = [steps["history"]["text"][each["start"] : each["end"]] for each in evidence]

    assert quoted == ["lost my job", "my boss shouted", "I hate my job"]
    assert [each["ground"] for each in evidence] == ["found", "found", "not_said"]
    places = [(each["message"], each["message_start"], each["message_end"]) for each in evidence]
    assert places == [(0, 2, 13), (2, 2, 17), (None, None, None)]
    assert steps["emotion"]["evidence"] == [
        {
            "start": 0,
            "end": 27,
            "ground": "no_photo",
            "message": None,
            "message_start": None,
            "message_end": None,
        }
    ]
    assert steps["strategy"]["evidence"] == []

    PIL.Image.new("RGB", (40, 30), "olive").save(tmp_path / "photo.png")
    pictured = client.predict(message, image=handle_file(tmp_path / "photo.png"), api_name="/chat")
    assert pictured["reasoning"]["emotion"]["evidence"] == []


def test_a_reply_that_breaks_the_format_in_every_draw_is_withheld(client):
    answer = client.predict("broken", [], None, "", None, 7, api_name="/chat")

    assert answer["reply"] == ""
    assert answer["complete"] is False
    assert answer["reasoning"]["strategy"] is None
    assert answer["reasoning"]["history"]["stage"] is None
    assert answer["reward"]["total"] == -4
    assert answer["problems"] == ["<strategy> is missing"]
    assert answer["gate"]["draws"] == 1 + FRESH_DRAWS
    assert [draw["reasons"] for draw in answer["gate"]["rejected"]] == [["format"]] * 4
    assert [draw["seed"] for draw in answer["gate"]["rejected"]] == [7, *map(fresh_seed, (1, 2, 3))]
    assert (
        answer["gate"]["sentence"] == "The model did not produce a usable reply. You can try again."
    )


def fresh_seed(draw: int) -> int:
    return draw_seed(7, draw)


def test_a_reply_is_drawn_again_and_the_reasons_are_returned(client, monkeypatch):
    def drawn(policy, *rest, **named):
        return take_turn(replace(policy, backend=Draws(LOOP, COMPLETE)), *rest, **named)

    monkeypatch.setattr("ui_components.server.api.take_turn", drawn)
    answer = client.predict("I lost my job.", [], None, "", None, 7, api_name="/chat")

    assert (answer["reply"], answer["seed"]) == (REPLY, fresh_seed(1))
    assert answer["gate"] == {
        "draws": 2,
        "rejected": [{"seed": 7, "reasons": ["repeats_itself"]}],
        "sentence": "",
    }


def test_the_sentence_of_a_withheld_reply_is_in_the_language_of_the_message(client, monkeypatch):
    def drawn(policy, *rest, **named):
        return take_turn(replace(policy, backend=Draws(LOOP)), *rest, **named)

    monkeypatch.setattr("ui_components.server.api.take_turn", drawn)
    answer = client.predict("我很难过，不知道怎么办。", api_name="/chat")

    assert answer["reply"] == ""
    assert answer["gate"]["sentence"] == "模型没有写出可用的回复。你可以再试一次。"


def test_without_the_gate_a_reply_is_returned_as_it_is(tmp_path: Path):
    services = make_services(tmp_path, gated=False)
    with serving(build_server(services, api_only=True)) as address:
        client = Client(address, verbose=False, analytics_enabled=False)
        answer = client.predict("broken", api_name="/chat")

    assert answer["reply"] == "You have come a long way."
    assert answer["gate"] is None


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The last messages that reached a model."""
    messages: list[str] = []

    def watched(policy, judge, dialogue, *rest, **named):
        messages.append(dialogue.utterances[-1].text)
        return take_turn(policy, judge, dialogue, *rest, **named)

    monkeypatch.setattr("ui_components.server.api.take_turn", watched)
    return messages


def test_a_message_in_danger_gets_help_and_no_reply(client, asked):
    answer = client.predict("I took 30 tylenol an hour ago", api_name="/chat")
    risk = answer.pop("risk")

    assert asked == []
    assert answer == {
        "reply": "",
        "reasoning": {"history": None, "emotion": None, "strategy": None},
        "complete": False,
        "problems": [],
        "reward": None,
        "model": "scripted-policy",
        "seed": None,
        "seconds": 0.0,
        "first_token_seconds": None,
        "tokens": 0,
        "gate": None,
    }
    assert (risk["kind"], risk["where"]) == ("medical_emergency", "message")
    assert risk["withheld"] is True
    assert risk["sentence"].startswith("Call the emergency number now")
    assert risk["lines"][0] == {
        "number": "911",
        "name": "Ambulance, fire brigade and police",
        "kind": "emergency",
        "region": ["US", "CA"],
    }
    assert {line["kind"] for line in risk["lines"]} == {"crisis", "emergency"}


def test_help_speaks_the_language_of_the_message(client):
    risk = client.predict("我想死", api_name="/chat")["risk"]

    assert risk["kind"] == "suicide"
    assert "谢谢你愿意说出来" in risk["sentence"]
    assert risk["lines"][0]["number"] == "12356"
    assert risk["lines"][0]["name"] == "全国统一心理援助热线"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("I cut myself last night", "self_harm"),
        ("My husband hits me", "violence_suffered"),
        ("I want to kill someone", "violence"),
        ("My brother wants to kill himself", "other_in_danger"),
        ("Ten years ago I tried to kill myself", "past_self_harm"),
    ],
)
def test_every_kind_of_danger_withholds_the_reply(client, asked, text, kind):
    answer = client.predict(text, api_name="/chat")

    assert asked == []
    assert answer["reply"] == ""
    assert (answer["risk"]["kind"], answer["risk"]["withheld"]) == (kind, True)
    assert "a program can neither judge" in answer["risk"]["sentence"].lower()


def test_the_message_after_a_sign_gets_no_reply_either_and_the_second_one_does(client, asked):
    earlier = [
        {"role": "user", "content": "I want to kill myself"},
        {"role": "assistant", "content": "I want to kill myself, you said."},
    ]
    denial = client.predict("I was joking", earlier, api_name="/chat")

    assert asked == []
    assert denial["reply"] == ""
    assert (denial["risk"]["kind"], denial["risk"]["where"]) == ("suicide", "history")
    assert "your next message can get a reply" in denial["risk"]["sentence"]
    earlier += [{"role": "user", "content": "I was joking"}]
    after = client.predict("Thank you, I feel safer now.", earlier, api_name="/chat")
    assert after["reply"]
    assert (after["risk"]["where"], after["risk"]["withheld"]) == ("history", False)
    assert "Thank you for saying this" in after["risk"]["sentence"]


def test_a_hint_is_returned_with_the_reply_and_a_sign_before_withholds_it(tmp_path):
    services = make_services(tmp_path)
    services = Services(
        services.models,
        services.votes,
        risk_check=lambda text, language: (
            RiskSign(RiskKind.SUICIDE, is_hint="job" in text)
            if "job" in text or "letters" in text
            else None
        ),
    )

    def after(*earlier: str) -> list[dict[str, str]]:
        pairs = ((("user", said), ("assistant", "Go on.")) for said in earlier)
        return [{"role": role, "content": said} for pair in pairs for role, said in pair]

    with serving(build_server(services, api_only=True)) as address:
        client = Client(address, verbose=False, analytics_enabled=False)
        answer = client.predict("I lost my job.", after("My job."), api_name="/chat")
        next_ = client.predict("Never mind.", after("The letters lie here."), api_name="/chat")
        later = client.predict("Hi.", after("The letters.", "Never mind."), api_name="/chat")

    assert answer["reply"]
    risk = answer["risk"]
    assert (risk["hint"], risk["withheld"], risk["where"]) == (True, False, "message")
    assert risk["sentence"].endswith("If nobody is in danger, just carry on.")
    assert (next_["reply"], next_["risk"]["where"], next_["risk"]["withheld"]) == (
        "",
        "history",
        True,
    )
    assert later["reply"] and later["risk"] is None


def test_a_sign_of_the_supporters_is_none(client, asked):
    supporter = [SEEKER[0], {"role": "assistant", "content": "I want to kill myself"}]

    assert client.predict("What?", supporter, api_name="/chat")["risk"] is None
    assert len(asked) == 1


def test_earlier_messages_are_searched_from_the_newest_and_not_without_end(client):
    long_ago = [{"role": "user", "content": "I want to die"}]
    since = [{"role": "user", "content": "so it goes " * 1818}]

    assert client.predict("hello", [*long_ago, *since], api_name="/chat")["risk"] is None
    assert client.predict("hello", [*since, *long_ago], api_name="/chat")["risk"] is not None


def test_other_messages_have_no_risk_field_set(client):
    assert client.predict("I could kill for a coffee", api_name="/chat")["risk"] is None


def test_score_judges_a_turn_with_or_without_a_reference(client):
    alone = client.predict(SEEKER, COMPLETE, None, "", api_name="/score")
    broken = client.predict(SEEKER, BROKEN, api_name="/score")
    bare = client.predict(SEEKER, "I hear you.", api_name="/score")

    assert [step["correct"] for step in alone["steps"]] == [True, True, False]
    assert (alone["response"], alone["format"], alone["total"]) == (None, 1, 2)
    assert (broken["steps"], broken["format"], broken["total"]) == (None, -1, -4)
    assert (bare["steps"], bare["response"], bare["format"], bare["total"]) == (None,) * 4


def test_score_compares_with_a_reference(client):
    compared = client.predict(
        SEEKER, "I hear you.", "Cheer up!", "failing-judge", api_name="/score"
    )

    assert compared["response"]["verdict"] == "both"
    assert sum(compared["response"]["probabilities"].values()) == pytest.approx(1)
    assert compared["steps"] is None


def test_a_judge_that_fails_gives_no_number(client):
    failed = client.predict(SEEKER, COMPLETE, None, "failing-judge", api_name="/score")

    assert [step["correct"] for step in failed["steps"]] == [None] * 3
    assert failed["total"] is None


def test_models_lists_the_registry_without_paths(client):
    models = client.predict(api_name="/models")

    assert [model["name"] for model in models if model["default"]] == [
        "scripted-policy",
        "recorded-judge",
    ]
    assert "toml" not in str(models)


BAD_CHATS = [
    ({"message": ""}, "empty"),
    ({"message": "x" * 20_000}, "at most 4000"),
    ({"message": 5}, "message must be a string"),
    ({"message": "x", "model": "gone"}, "unknown model 'gone'"),
    ({"message": "x", "model": "wrong"}, "wrong.toml"),
    ({"message": "x", "model": None}, "model must be a string"),
    ({"message": "x", "strategy": "Hug"}, "strategy 'Hug'"),
    ({"message": "x", "seed": -2}, "seed must be"),
    ({"message": "x", "seed": "one"}, "seed must be"),
    ({"message": "x", "history": "hello"}, "list of messages"),
    ({"message": "x", "history": [{"role": "system", "content": "x"}]}, "unknown role 'system'"),
    ({"message": "x", "history": [{"role": "user", "content": ["x"]}]}, "string as content"),
    ({"message": "x", "history": SEEKER * 201}, "at most 200"),
    ({"message": "x", "history": [{"role": "user", "content": "x" * 20_001}]}, "at most 20000"),
    ({"message": "x", "image": "photo.png"}, "image must be a file"),
    ({"message": "please fail"}, "failure"),
]


@pytest.mark.parametrize(
    ("values", "sentence"), BAD_CHATS, ids=[sentence for _, sentence in BAD_CHATS]
)
def test_a_bad_value_gives_one_sentence(client, values, sentence):
    with pytest.raises(AppError, match=sentence) as raised:
        client.predict(api_name="/chat", **values)

    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"history": [], "turn": "x"}, "must be the seeker's"),
        ({"history": EXCHANGE, "turn": "x"}, "must be the seeker's"),
        ({"history": SEEKER, "turn": " "}, "turn is empty"),
        ({"history": SEEKER, "turn": "x" * 20_001}, "at most 20000"),
        ({"history": SEEKER, "turn": "x", "judge": "scripted-policy"}, "unknown model"),
        ({"history": SEEKER, "turn": "x", "reference": 3}, "reference must be a string"),
    ],
)
def test_a_bad_value_for_score_gives_one_sentence_too(client, values, sentence):
    with pytest.raises(AppError, match=sentence):
        client.predict(api_name="/score", **values)


def test_the_server_goes_on_after_a_bad_value(client):
    with pytest.raises(AppError):
        client.predict("", api_name="/chat")

    assert client.predict("I lost my job.", api_name="/chat")["reply"] == REPLY


def test_an_upload_that_is_no_picture_is_refused(client, tmp_path: Path):
    (tmp_path / "notes.png").write_text("words", encoding="utf-8")

    with pytest.raises(AppError, match="not an image"):
        client.predict("look", image=handle_file(tmp_path / "notes.png"), api_name="/chat")


def test_without_votes_the_leaderboard_is_empty(client):
    assert client.predict(api_name="/leaderboard") == []


def test_several_programs_are_served_one_after_the_other(client):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(client.predict, f"hello {n}", api_name="/chat") for n in range(4)]

    assert [job.result()["reply"] for job in jobs] == [REPLY] * 4
