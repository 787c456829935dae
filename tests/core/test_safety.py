"""Signs of danger: what must be seen, what must not, and help lines that say where they come from."""

import datetime
import json
import math
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core import safety
from compeer_core.dialogue import language_of
from compeer_core.errors import ConfigError
from compeer_core.safety import (
    RiskKind,
    RiskSentences,
    RiskSign,
    RiskState,
    find_risk,
    forbids_reply,
    load_help_lines,
    risk_sentences,
)

MESSAGES = [
    json.loads(line)
    for line in (Path(__file__).parent / "risk_messages.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
"""A `kind` of "none" is a look-alike. `tuning` was in sight of the phrases, and so were the writers of `wide` that have
names, except two; `held`, `fresh` and `final` were not."""

SUICIDE = (
    "I want to die",
    "i just wanna die",
    "I don't want to live anymore.",
    "I dont want to be here any more",
    "I wish I was never born",
    "I wish I were dead",
    "i want to kill myself",
    "I can't stop thinking about killing myself",
    "I’ve been thinking about suicide every night",
    "I tried to hang myself last year",
    "I am going to end my life",
    "sometimes I think about ending it all",
    "Everyone would be better off without me.",
    "they'd be better off if I were gone",
    "There is no reason to live",
    "what is the point of living",
    "life isn't worth living",
    "my life is not worth living",
    "I feel suicidal again",
    "I'm having suicidal thoughts",
    "I was so low that I attempted suicide",
    "I hope I don't wake up tomorrow",
    "I want to overdose",
    "I want to end my life tonight",
    "I will end my life together with her",
    "I want to end my life to stop the pain",
    "I'd rather die than go on like this",
    "My New Year's resolution is to not kill myself",
    "I feel like jumping off a bridge",
    "I am thinking of jumping in front of a train",
    "I never wanted to die before, but now I want to die",
    "My boss is killing me, and honestly I want to kill myself",
    "I can't go on living like this",
    "kill my self",
    "I just want to end it.",
    "Everyday I ask myself why I haven't killed myself",
    "I can't go five minutes without thinking about suicide",
    "I woke up with suicidal thoughts",
    "i hope i die soon",
    "If I died right now, no one would notice",
    "nobody would care if I was gone",
    "it would be so much easier to just be dead",
    "I almost committed suicide after she left",
    "我想死",
    "真的不想活了",
    "我不想再活下去了",
    "活着没意思",
    "感觉活着没有意义",
    "我想自杀",
    "我有自杀的念头",
    "我想过轻生",
    "我活不下去了",
    "还不如死了算了",
    "我想结束自己的生命",
    "我站在楼顶，想跳楼",
    "没有我你们会过得更好",
    "我已经写好了遗书",
    "我痛苦得想死",
    "妈妈总是骂我，我想死",
    "I keep thinking about driving into a bridge pillar",
    "I don't feel safe with myself tonight",
)
SELF_HARM = (
    "I want to hurt myself",
    "I started cutting myself again",
    "I've been self-harming for a year",
    "I feel the urge to cut myself when I am sad",
    "I hurt myself on purpose",
    "I cut myself for the first time",
    "I cut myself last night",
    "cut myself",
    "我又开始自残了",
    "我忍不住想伤害自己",
    "我用刀片划自己的手臂",
    "I held a lighter against my palm",
)
MEDICAL_EMERGENCY = (
    "I took all my pills",
    "I took 30 tylenol an hour ago",
    "I slit my wrists",
    "Help, the bleeding won't stop",
    "我割腕了",
    "One side of my face is numb",
    "My throat is closing up",
)
VIOLENCE_SUFFERED = (
    "My husband hits me",
    "I was raped",
    "我老公打我",
    "My landlord hits me",
)
VIOLENCE = (
    "I keep having thoughts about killing people",
    "I have urges to hurt someone",
    "I am going to stab him",
    "I want to kill someone",
    "我想杀了他",
    "I want to hurt my baby",
)
OTHER_IN_DANGER = (
    "My brother wants to kill himself",
    "She threatened to kill herself if I leave",
    "my friend is suicidal and I don't know what to do",
    "My daughter says she wants to die",
    "我朋友说他想自杀",
    "她甚至威胁要自杀",
    "我丈夫有自杀的想法",
    "He is hitting my mum",
)
PAST_SELF_HARM = (
    "I took 30 pills two years ago",
    "When I was fifteen I slit my wrists",
    "Ten years ago I tried to kill myself.",
    "我以前割过腕，也想过自杀",
    "高中时我想自杀",
)
HARMLESS = (
    "I could kill for a coffee",
    "I'm dying to see you",
    "I laughed so hard I thought I'd die",
    "I nearly died of embarrassment",
    "This job is killing me",
    "I killed myself laughing at that",
    "I've been killing myself to finish this thesis",
    "I shot myself in the foot with that email",
    "he'd rather die than admit a mistake",
    "I have no thoughts of ending my life",
    "I have no reason to kill myself",
    "I took all my meds like I'm supposed to",
    "I cut my arm on a fence",
    "he hits me up for cash",
    "My phone died again",
    "I'm dead tired",
    "That cake is to die for",
    "I want to die on that hill",
    "My boyfriend will kill me when he sees the bill",
    "I could kill him, he forgot our anniversary",
    "I'm going to kill it at the interview",
    "Have you seen Suicide Squad?",
    "I volunteer at a suicide prevention line",
    "I need to cut myself some slack",
    "I cut myself shaving",
    "I accidentally cut myself with a knife",
    "I hurt myself playing football",
    "I want to shoot him a quick text",
    "I want to end it with my girlfriend",
    "In the end it all worked out",
    "I don't want to live with my parents",
    "I don't want to live here anymore",
    "I'm not suicidal, just tired",
    "I would never kill myself",
    "I don't want to die, I am scared of this illness",
    "I'm not going to kill myself",
    "I have never felt suicidal",
    "I have no suicidal thoughts",
    "I just want to end it with him",
    "It would be better to just be friends",
    "My grandfather is going to die soon",
    "I don't want to spend my life savings",
    "I am too shy to change myself and express myself",
    "My father killed himself ten years ago and I miss him",
    "I lost a friend to suicide",
    "The death of my dog broke my heart",
    "想死你了",
    "妈，我想死你们了",
    "笑死我了",
    "今天累死了",
    "尴尬得想死",
    "我不想死，我怕这个病",
    "我不会自杀的",
    "我从来没有想过自杀",
    "这家店跳楼价大甩卖",
    "公司快活不下去了",
    "我不想活在过去",
    "他的自杀式努力",
    "辞职一了百了",
    "别伤害自己",
    "我爷爷去世了，我很难过",
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, RiskKind.SUICIDE) for text in SUICIDE),
        *((text, RiskKind.SELF_HARM) for text in SELF_HARM),
        *((text, RiskKind.MEDICAL_EMERGENCY) for text in MEDICAL_EMERGENCY),
        *((text, RiskKind.VIOLENCE_SUFFERED) for text in VIOLENCE_SUFFERED),
        *((text, RiskKind.VIOLENCE) for text in VIOLENCE),
        *((text, RiskKind.OTHER_IN_DANGER) for text in OTHER_IN_DANGER),
        *((text, RiskKind.PAST_SELF_HARM) for text in PAST_SELF_HARM),
    ],
)
def test_a_sign_of_danger_is_seen_for_what_it_is(text, kind):
    sign = find_risk(text, language_of(text))

    assert sign is not None
    assert sign.kind is kind


@pytest.mark.parametrize("text", HARMLESS)
def test_an_idiom_a_denial_or_a_loss_is_no_sign(text):
    assert find_risk(text, language_of(text)) is None


@pytest.mark.parametrize("language", ["en", "zh", "fr", "und"])
def test_a_sign_is_seen_whatever_language_the_message_seems_to_be_in(language):
    assert find_risk("我想死。I want to die.", language) is not None
    assert find_risk("I WANT\n TO   DIE", language) is not None


def test_danger_to_the_writer_comes_before_danger_to_others():
    sign = find_risk(
        "My brother wants to kill himself. I want to hurt someone. I want to die.", "en"
    )

    assert sign is not None
    assert sign.kind is RiskKind.SUICIDE
    assert sign.phrase == "want to die"


def test_the_gravest_sign_counts_in_whichever_language_it_stands():
    sign = find_risk("My brother wants to kill himself. 我想死。", "en")

    assert sign is not None
    assert sign.phrase == "想死"


def test_an_idiom_does_not_hide_a_sign_beside_it():
    assert find_risk("I could kill for a coffee, and I want to kill myself", "en") is not None
    assert find_risk("想死你了，可是我想死", "zh") is not None


@settings(deadline=None)  # the first call reads the phrases
@given(st.text(), st.sampled_from(["en", "zh", "und"]))
def test_any_text_can_be_looked_at(text, language):
    sign = find_risk(text, language)

    assert sign is None or sign.phrase


# --- disguises -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "I want to **die**",
        "I want to <b>di</b>e",
        "<p>I want to</p><p>die</p>",
        'I want to <span style="color: red">die</span>',
        "[I want](https://example.com) to die",
        "I want to d&#105;e",
        "I want to d\u200bi\u00ade",
        "Ｉ ｗａｎｔ ｔｏ ｄｉｅ",
        "𝐈 𝐰𝐚𝐧𝐭 𝐭𝐨 𝐝𝐢𝐞",
        "I want tö díé",
        "I w4nt to d1e",
        "I want to d.i.e.",
        "I want to d-i-e",
        "I want to d i e",
        "i w a n t t o d i e",
        "iwanttodie",
        "I wnat to dieeee",
        "I want to d*e",
        "I wаnt to diе",  # two Cyrillic letters
        "I WANT TO DIE!!!",
    ],
)
def test_a_disguise_hides_nothing(text):
    sign = find_risk(text, "en")

    assert sign is not None
    assert sign.phrase == "want to die"


@pytest.mark.parametrize(
    "text", ["我準備自殺", "我想從樓上跳下去", "我想自 杀", "我想自*杀", "我想紫砂"]
)
def test_chinese_is_seen_in_both_scripts_and_in_disguise(text):
    sign = find_risk(text, "zh")

    assert sign is not None
    assert sign.kind is RiskKind.SUICIDE


@pytest.mark.parametrize(
    "text",
    ["I bought a 紫砂壶", "<3 <3", "a < b > c", "2 + 2 = 4", "k", "d i y", "**", "[](", "&#;"],
)
def test_folding_makes_no_sign_out_of_nothing(text):
    assert find_risk(text) is None


# --- how many are found ----------------------------------------------------------------------------


def counted(split: str) -> tuple[int, int, int, int]:
    """Return signs found, signs, false alarms, look-alikes."""
    rows = [row for row in MESSAGES if row["split"] == split]
    signs = [row for row in rows if row["kind"] != "none"]
    looks = [row for row in rows if row["kind"] == "none"]
    found = sum(find_risk(row["text"]) is not None for row in signs)
    alarms = sum(find_risk(row["text"]) is not None for row in looks)
    return found, len(signs), alarms, len(looks)


def test_the_messages_are_what_they_say():
    assert len({row["text"] for row in MESSAGES}) == len(MESSAGES) >= 160
    assert {row["kind"] for row in MESSAGES} == {*RiskKind, "none"} - {RiskKind.PAST_SELF_HARM}
    assert {row["split"] for row in MESSAGES} == {"tuning", "held", "wide", "fresh", "final"}
    assert sum(row["kind"] == "none" for row in MESSAGES) >= 0.4 * len(MESSAGES)


def test_nearly_all_signs_are_found_and_hardly_any_look_alike_on_the_messages_in_sight():
    found, signs, alarms, looks = counted("tuning")

    assert found >= 0.95 * signs
    assert alarms <= 0.05 * looks


@pytest.mark.parametrize("split", ["tuning", "held", "wide", "fresh", "final"])
def test_the_module_docstring_has_the_measured_numbers(split):
    found, signs, alarms, looks = counted(split)
    text = " ".join((safety.__doc__ or "").split())

    assert f"find {found} of {signs} signs, with {alarms} false alarms in {looks}" in text
    assert f"has {len(MESSAGES):,} messages" in text


# --- what follows from a sign ----------------------------------------------------------------------


def test_every_sign_forbids_a_reply():
    assert all(forbids_reply(kind) for kind in RiskKind)
    assert not forbids_reply(None)


def test_a_sign_and_the_next_message_get_no_reply_and_the_second_one_does():
    sign = RiskState().after(RiskSign(RiskKind.VIOLENCE))
    denial = sign.after(None)
    second = denial.after(None)

    assert RiskState().after(None) == RiskState()
    assert [state.withheld_for for state in (RiskState(), sign, denial, second)] == [
        None,
        RiskKind.VIOLENCE,
        RiskKind.VIOLENCE,
        None,
    ]
    assert second.kind is RiskKind.VIOLENCE  # help stays reachable
    assert second.after(RiskSign(RiskKind.SUICIDE)) == RiskState(RiskKind.SUICIDE)


def test_a_hint_withholds_no_reply_and_help_stays_reachable():
    hint = RiskSign(RiskKind.SUICIDE, is_hint=True)
    state = RiskState().after(hint)

    assert (state.kind, state.withheld_for) == (RiskKind.SUICIDE, None)
    assert state.after(None) == RiskState(RiskKind.SUICIDE, 1, is_hint=True)
    assert state.after(RiskSign(RiskKind.VIOLENCE)).withheld_for is RiskKind.VIOLENCE


def test_a_hint_counts_as_a_sign_after_one():
    hint = RiskSign(RiskKind.SUICIDE, is_hint=True)
    sign = RiskState().after(RiskSign(RiskKind.SELF_HARM))

    assert sign.after(hint) == RiskState(RiskKind.SUICIDE)
    assert sign.after(None).after(None).after(hint).withheld_for is RiskKind.SUICIDE
    assert RiskState().after(hint).after(hint).is_hint


FIRST_STEPS = {
    RiskKind.MEDICAL_EMERGENCY: ("Call the emergency number now", "请马上拨打急救电话"),
    RiskKind.SUICIDE: ("call one of these lines now", "现在就拨打下面的热线"),
    RiskKind.SELF_HARM: ("call the emergency number first", "请先拨打急救电话"),
    RiskKind.VIOLENCE_SUFFERED: ("get to a safe place first", "请先到安全的地方"),
    RiskKind.VIOLENCE: ("First get away from that person", "请先离开那个人"),
    RiskKind.OTHER_IN_DANGER: ("stay with them, and ask them directly", "陪在对方身边，直接问"),
    RiskKind.PAST_SELF_HARM: ("talk about it with somebody you trust", "和信任的人、医生谈谈"),
}


@pytest.mark.parametrize("kind", RiskKind)
def test_every_kind_has_a_short_sentence_with_a_first_step_and_the_limits_of_a_program(kind):
    english, chinese = risk_sentences().kinds[kind]("en"), risk_sentences().kinds[kind]("zh")
    first_step, first_step_in_chinese = FIRST_STEPS[kind]

    assert first_step in english
    assert first_step_in_chinese in chinese
    assert "program can neither judge" in english
    assert "程序无法判断" in chinese
    assert len(english) <= 330
    assert len(chinese) <= 120
    for sentence in (english, chinese):
        assert not set("0123456789!！") & set(sentence)  # numbers are the help lines' business


def test_an_emergency_begins_with_the_emergency_number():
    sentence = risk_sentences().kinds[RiskKind.MEDICAL_EMERGENCY]

    assert sentence("en").startswith("Call the emergency number now")
    assert sentence("zh").startswith("请马上拨打急救电话")


def test_the_sentence_after_a_sign_says_when_a_reply_may_come():
    afterwards = risk_sentences().afterwards

    assert "your next message can get a reply" in afterwards("en")
    assert "下一条消息可以得到回复" in afterwards("zh")
    assert "SOS" in afterwards("en")
    assert "SOS" in afterwards("zh")


def test_the_sentences_say_that_no_professional_reviewed_them_and_none_may_be_missing():
    text = (safety.VOCABULARIES / "risk_sentences.toml").read_text(encoding="utf-8")

    assert "No crisis professional has reviewed these sentences" in text
    with pytest.raises(ValueError, match="no sentence for medical_emergency, other_in_danger"):
        RiskSentences.model_validate(
            {
                "kinds": {"suicide": {"en": "a", "zh": "b"}},
                "afterwards": {"en": "a", "zh": "b"},
                "hint": {"en": "a", "zh": "b"},
            }
        )


# --- what surrounds a sign -------------------------------------------------------------------------


def test_what_is_long_over_is_no_sign_unless_something_says_that_it_came_back():
    over = "Ten years ago I tried to kill myself, and therapy got me through it."

    assert find_risk(over) is None
    assert find_risk(f"{over} Lately it is back.") is not None
    assert find_risk(f"{over} Now I want to die.") is not None
    assert find_risk("Ten years ago I tried to kill myself.") is not None


def test_a_story_takes_back_signs_about_others_and_not_the_writers_own():
    assert find_risk("In the novel she wants to kill herself") is None
    assert find_risk("She read a novel. Now she wants to kill herself") is not None
    assert find_risk("I read it in a novel and now I want to kill myself") is not None


# --- hostile messages ------------------------------------------------------------------------------

HOSTILE = [
    "a", "i ", "k-", "!k", "他", "想", "自杀", "我把一瓶", "没有没有", "不", "kill ", "not ", "no no ",
    "i want to ", "want to want to ", "i i want to die ", "suicidal ", "my child ", "my ", "he hits me ",
    "i cut my ", "took all the ", "pills ", "d i e ", "k.i.l.l.", "<", "<a ", "<a x=", "<!--", "[", "[a](",
    "*", "_", "(", '"', "&", "&#107;", "&#" + "9" * 50, "\u200b", "\u0301", "\ufdfa", "\u33af", "\ud800",
    "殺", "𝓴", "in the movie she ", "the song goes ", "if i died aaaa ", "x" * 5000,
]  # fmt: skip
LIMIT_SECONDS = 0.5
"""Ten times what 20,000 characters take on the slowest machine seen."""
LARGEST_GROWTH = 8.0
"""Four times the text takes four times as long in linear time, 16 times as long in quadratic time."""


def seconds_of(text: str) -> float:
    begun = time.thread_time()
    find_risk(text, "en")
    return time.thread_time() - begun


def check_time(text: str) -> None:
    """Check that the time is linear in the text's length, by the least times of a few interleaved tries."""
    quarter, whole = math.inf, math.inf
    for _ in range(6):
        quarter = min(quarter, seconds_of(text[: len(text) // 4]))
        whole = min(whole, seconds_of(text))
        if whole < LARGEST_GROWTH * quarter:
            break
    assert whole < LIMIT_SECONDS
    assert whole < LARGEST_GROWTH * quarter


@pytest.mark.parametrize("piece", HOSTILE, ids=lambda piece: ascii(piece[:12]))
def test_a_long_hostile_message_costs_little_time(piece):
    find_risk("the first call reads the phrases")

    check_time((piece * 20_000)[:20_000])


def test_a_long_message_of_the_phrases_own_words_costs_little_time():
    phrases = (safety.VOCABULARIES / "risk_phrases.toml").read_text(encoding="utf-8")
    words = sorted(set("".join(c if c.isalpha() else " " for c in phrases).split()))
    drawn = random.Random(0)
    for count in (2, 5, 20, 200):
        some = drawn.sample(words, count)
        check_time(" ".join(drawn.choice(some) for _ in range(10_000))[:20_000])


# --- Help lines -------------------------------------------------------------------------------


def test_the_help_lines_say_where_they_come_from_and_that_nobody_confirmed_them():
    for line in load_help_lines().lines:
        assert line.source
        assert line.name.en
        assert line.name.zh
        assert line.checked >= datetime.date(2026, 11, 21)
        assert line.confirmed == "not yet confirmed by a person"


@pytest.mark.parametrize(
    ("region", "numbers"),
    [
        ("CN", ["12356", "120", "110"]),
        ("us", ["988", "911"]),
        ("CA", ["988", "911"]),
        ("GB", ["116 123", "999"]),
        ("IE", ["116 123", "999", "112"]),
        ("DE", ["0800 111 0 111", "112"]),
        ("IT", ["112"]),
        ("EU", ["112"]),
        ("HK", ["18111", "999"]),
        ("TW", ["1925", "119", "110"]),
        ("SG", ["1767", "995", "999"]),
        ("IN", ["14416", "112"]),
        ("AU", ["13 11 14", "000"]),
        ("NZ", ["1737", "111"]),
    ],
)
def test_the_lines_of_a_region_come_first_and_all_others_after(region, numbers):
    lines = load_help_lines()
    shown = [line.number for line in lines.for_region(region)]
    urgent = lines.for_region(region, "emergency")

    assert shown[: len(numbers)] == numbers
    assert len(shown) == len(lines.lines)
    assert urgent[0].kind == "emergency"
    assert sorted(line.number for line in urgent[: len(numbers)]) == sorted(numbers)


def test_every_region_with_a_crisis_line_has_an_emergency_number():
    lines = load_help_lines().lines
    regions = {
        kind: {region for line in lines if line.kind == kind for region in line.regions}
        for kind in ("crisis", "emergency")
    }

    assert regions["crisis"] <= regions["emergency"]


def test_an_unknown_region_changes_no_order():
    lines = load_help_lines()

    assert lines.for_region("XX") == lines.lines


def test_a_number_that_cannot_be_dialled_is_refused(tmp_path):
    path = tmp_path / "lines.toml"
    path.write_text(
        '[[lines]]\nregions = ["CN"]\nnumber = "call us"\nkind = "crisis"\nsource = "x"\n'
        'name = { en = "a", zh = "b" }\nchecked = 2026-01-01\nconfirmed = ""\n',
        encoding="utf-8",
    )

    with pytest.raises(ConfigError, match=r"lines\.0\.number"):
        load_help_lines(path)
