"""Signs of danger: what must be seen, what must not, and help lines that say where they come from."""

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.dialogue import language_of
from compeer_core.errors import ConfigError
from compeer_core.safety import RiskKind, find_risk, load_help_lines

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
    "I took all my pills",
    "I want to overdose",
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
)
SELF_HARM = (
    "I want to hurt myself",
    "I started cutting myself again",
    "I've been self-harming for a year",
    "I feel the urge to cut myself when I am sad",
    "I hurt myself on purpose",
    "I cut myself for the first time",
    "我又开始自残了",
    "我忍不住想伤害自己",
    "我用刀片划自己的手臂",
)
VIOLENCE = (
    "I keep having thoughts about killing people",
    "I have urges to hurt someone",
    "I am going to stab him",
    "I want to kill someone",
    "我想杀了他",
)
OTHER_IN_DANGER = (
    "My brother wants to kill himself",
    "She threatened to kill herself if I leave",
    "my friend is suicidal and I don't know what to do",
    "My daughter says she wants to die",
    "我朋友说他想自杀",
    "她甚至威胁要自杀",
    "我丈夫有自杀的想法",
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
        *((text, RiskKind.VIOLENCE) for text in VIOLENCE),
        *((text, RiskKind.OTHER_IN_DANGER) for text in OTHER_IN_DANGER),
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


@pytest.mark.parametrize(
    "piece", ["kill ", "i want to ", "想", "not ", " ", "suicidal ", "my child "]
)
def test_a_long_message_costs_little_time(piece):
    find_risk(piece * (4000 // len(piece)), "en")  # else the test's time limit would end it


# --- Help lines -------------------------------------------------------------------------------


def test_the_help_lines_say_where_they_come_from_and_that_nobody_confirmed_them():
    lines = load_help_lines().lines

    assert {line.number for line in lines} == {"12356", "988", "116 123", "112"}
    for line in lines:
        assert line.source
        assert line.name.en
        assert line.name.zh
        assert line.checked == datetime.date(2026, 11, 21)
        assert line.confirmed == "not yet confirmed by a person"


@pytest.mark.parametrize(
    ("region", "numbers"),
    [
        ("CN", ["12356"]),
        ("us", ["988"]),
        ("GB", ["116 123"]),
        ("DE", ["112"]),
        ("EU", ["112"]),
        ("IE", ["116 123", "112"]),
    ],
)
def test_the_lines_of_a_region_come_first_and_all_others_after(region, numbers):
    shown = [line.number for line in load_help_lines().for_region(region)]

    assert shown[: len(numbers)] == numbers
    assert len(shown) == 4


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
