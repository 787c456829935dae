"""From dialogues to cases: rounds, histories, labels, and which layout of a dialogue counts."""

import json
import re
import resource
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.cer import Case
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Emotion, Strategy
from tests.training.cer.source_dialogues import source_dialogue
from tests.training.corpora_fixture import write_faces
from training.cer.corpora import LOADERS
from training.cer.esconv_rules import Config, rule_rows
from training.cer.records import Dropped, SourceUtterance
from training.cer.requests.engines import LocalEngine
from training.cer.steps.cases import (
    Settings,
    draw_cases,
    placed,
    printable,
    rated_turns,
    rounds_of,
    turns_of,
)
from training.data.pictures import Pictures
from training.data.records import read_records

SEEKER, SUPPORTER = Speaker.SEEKER, Speaker.SUPPORTER
ALL = Settings(rounds_per_dialogue="all")


def seeker(text, **labels):
    return SourceUtterance(speaker=SEEKER, text=text, **labels)


def supporter(text, **labels):
    return SourceUtterance(speaker=SUPPORTER, text=text, **labels)


def talk(*said, id="esconv/lines/train/1", **fields):
    values = {"source_id": "esconv/a", "licence": "CC BY-NC 4.0"} | fields
    return source_dialogue(id, *said, **values)


# Written out by hand: joined turns 0 to 6, of which 2, 4 and 6 are rounds.
TALK = talk(
    supporter("Welcome!", strategy=Strategy.OTHERS),
    seeker("Hi."),
    seeker("I lost my job.", emotion=Emotion.FEAR),
    supporter("When?", strategy=Strategy.QUESTION),
    supporter("That must be hard for you.", strategy=Strategy.REFLECTION),
    supporter("Very hard.", strategy=Strategy.REFLECTION),
    seeker("In May.", feedback=4),
    supporter("I see.", strategy=Strategy.RESTATEMENT),
    seeker("Yes."),
    seeker("Thanks.", feedback=2),
    seeker("Bye.", feedback=5),
    supporter("Take care."),
    emotion=Emotion.ANXIETY,
    problem="job crisis",
    intensity_before=5,
    intensity_after=2,
)


def drawn(tmp_path, rows, config=ALL, pictures=None, seed=0, **others):
    write_rows(tmp_path / "dialogues.jsonl", rows)
    report = draw_cases(
        tmp_path / "dialogues.jsonl", tmp_path / "cases.jsonl", config, pictures, seed, **others
    )
    return list(read_records(tmp_path / "cases.jsonl", Case)), report


# --- By hand ----------------------------------------------------------------------------------


def test_rounds_histories_and_labels_by_hand(tmp_path):
    (first, second, third), report = drawn(tmp_path, [TALK])

    assert [(said.speaker, said.text) for said in second.history] == [
        (SUPPORTER, "Welcome!"),
        (SEEKER, "Hi.\nI lost my job."),
        (SUPPORTER, "When?\nThat must be hard for you.\nVery hard."),
        (SEEKER, "In May."),
    ]
    assert [case.id for case in (first, second, third)] == [f"{TALK.id}#{n}" for n in range(3)]
    assert [(case.round, case.rounds) for case in (first, second, third)] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert [case.original for case in (first, second, third)] == [
        "When?\nThat must be hard for you.\nVery hard.",
        "I see.",
        "Take care.",
    ]
    assert first.labels.strategies == (Strategy.REFLECTION, Strategy.QUESTION)
    assert second.labels.strategies == (Strategy.RESTATEMENT,)
    assert third.labels.strategies == ()
    assert (first.labels.emotion, first.labels.emotion_of) == (Emotion.FEAR, "utterance")
    assert (second.labels.emotion, second.labels.emotion_of) == (Emotion.ANXIETY, "dialogue")
    # rated 4 before the second round, 2 (the first of its turn) before the third, nothing after
    assert [case.labels.feedback for case in (first, second, third)] == [4, 2, None]
    assert (first.labels.intensity_before, first.labels.intensity_after) == (5, 2)
    assert (first.labels.problem, first.licence, first.split) == (
        "job crisis",
        "CC BY-NC 4.0",
        "train",
    )
    assert (report.read, report.written, report.dropped) == (1, 3, {})
    assert report.figures["rounds"] == 3
    assert report.figures["with feedback"] == 2
    assert report.figures["with emotion"] == 3


def test_a_rating_counts_for_all_turns_since_the_last_one(tmp_path):
    rows = [
        talk(
            *(seeker("a"), supporter("b"), seeker("c"), supporter("d")),
            *(seeker("e", feedback=3), supporter("f")),
        )
    ]

    assert [case.labels.feedback for case in drawn(tmp_path, rows)[0]] == [3, 3, None]


def test_a_rating_of_the_supporters_is_not_the_seekers(tmp_path):
    rows = [talk(seeker("a"), supporter("b"), seeker("c"), supporter("d", feedback=1))]

    assert {case.labels.feedback for case in drawn(tmp_path, rows)[0]} == {None}


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, ["aaaa", "bbbb", "cccc", "dddd", "eeee"]),
        ({"history_characters": 20}, ["aaaa", "bbbb", "cccc", "dddd", "eeee"]),
        ({"history_characters": 19}, ["bbbb", "cccc", "dddd", "eeee"]),
        ({"history_characters": 11}, ["dddd", "eeee"]),
        ({"history_characters": 1}, ["eeee"]),
        ({"history_characters": 12}, ["cccc", "dddd", "eeee"]),
    ],
)
def test_the_oldest_turns_are_left_out_and_the_last_stays(tmp_path, limits, kept):
    rows = [
        talk(
            *(seeker("aaaa"), supporter("bbbb"), seeker("cccc"), supporter("dddd")),
            *(seeker("eeee"), supporter("ffff")),
        )
    ]
    *_, last = drawn(tmp_path, rows, ALL.model_copy(update=limits))[0]

    assert [said.text for said in last.history] == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (" a  b ", "a  b"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x00\x1bb\x7f\ud800", "ab"),
        ("\u200b\ufeff", ""),
        ("\x07", ""),
        ("\u00a0tired\u00a0\U0001f614", "tired\u00a0\U0001f614"),
        ("</reply> stays", "</reply> stays"),
        ("\u2028\u5f88\u7d2f", "\u5f88\u7d2f"),
    ],
)
def test_only_unprintable_characters_are_removed(text, kept):
    assert printable(text) == kept


def test_an_invisible_utterance_is_ignored(tmp_path):
    rows = [talk(seeker("a"), supporter("\u200b"), seeker("b"), supporter("c\x00"), seeker("d"))]
    (case,), report = drawn(tmp_path, rows)

    assert ([said.text for said in case.history], case.original) == (["a\nb"], "c")
    assert report.figures["utterances unprintable"] == 1


def test_a_dialogue_without_a_round_is_counted(tmp_path):
    rows = [
        talk(supporter("a"), seeker("b"), id="mesc/csv/1", source_id="mesc/1"),
        talk(seeker("b"), supporter("\x00"), id="mesc/csv/2", source_id="mesc/2"),
        talk(seeker("b"), supporter("c"), id="mesc/csv/3", source_id="mesc/3"),
    ]
    result, report = drawn(tmp_path, rows)

    assert [case.dialogue_id for case in result] == ["mesc/csv/3"]
    assert report.dropped == {"mesc": {"no supporter turn after a seeker turn": 2}}
    assert report.read == 3


def test_the_same_id_gives_cases_once(tmp_path):
    result, report = drawn(tmp_path, [TALK, TALK])

    assert len(result) == len({case.id for case in result}) == 3
    assert report.dropped == {"esconv": {"repeated dialogue": 1}}


def test_the_order_of_reasons_does_not_depend_on_what_an_engine_reads_first(tmp_path):
    class Ahead(LocalEngine):
        def map(self, function, items):
            yield from function(iter([*items]))

    silent = talk(supporter("a"), seeker("b"), id="esconv/lines/train/2", source_id="esconv/2")
    rows = [silent, TALK, TALK]
    reports = [drawn(tmp_path, rows, engine=engine)[1] for engine in (LocalEngine(), Ahead())]

    assert [json.dumps(report.dropped) for report in reports] == [
        json.dumps({"esconv": {"no supporter turn after a seeker turn": 1, "repeated dialogue": 1}})
    ] * 2


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_split_comes_with_the_dialogue(tmp_path, split):
    result, _ = drawn(tmp_path, [TALK.model_copy(update={"split": split})])

    assert {case.split for case in result} == {split}


@pytest.mark.parametrize("given", [None, "failed"])
def test_a_dialogue_without_a_split_is_named(tmp_path, given):
    with pytest.raises(ConfigError, match=f"{TALK.id}: split is {given!r}"):
        drawn(tmp_path, [TALK.model_copy(update={"split": given})])
    assert not (tmp_path / "cases.jsonl").exists()


@pytest.mark.parametrize("wrong", [0, -1, "every"])
def test_the_number_of_rounds_is_validated(wrong):
    with pytest.raises(ValueError, match="rounds_per_dialogue"):
        Settings(rounds_per_dialogue=wrong)


# --- Layouts ----------------------------------------------------------------------------------

LINES = talk(
    *(seeker("Hi."), seeker("I can't sleep."), supporter("Since when?")),
    *(seeker("May."), supporter("I see."), seeker("Thank you!"), supporter("Bye.")),
)
MULTI = talk(
    *(seeker("Hi . I can ' t sleep ."), supporter("Since when ?")),
    *(seeker("May .", feedback=4), supporter("I see ."), seeker("Thank you !", feedback=5)),
    id="esconv/multiesc/train/9",
)
WINDOW = talk(seeker("May."), supporter("I see."), id="esconv/windows/train/3")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_one_layout_yields_cases_and_another_lends_its_ratings(tmp_path, order):
    rows = [LINES, MULTI, WINDOW]
    result, report = drawn(tmp_path, [rows[n] for n in order])

    assert [case.dialogue_id for case in result] == [LINES.id] * 3
    assert [case.labels.feedback for case in result] == [4, 5, None]
    assert report.dropped == {"esconv": {"another layout of the dialogue": 2}}
    assert (report.figures["ratings lent"], report.figures["ratings placed"]) == (2, 2)


def test_ratings_can_be_lent_by_rows_that_a_filter_removed(tmp_path):
    write_rows(tmp_path / "all.jsonl", [MULTI, LINES])
    result, report = drawn(tmp_path, [LINES], lenders=tmp_path / "all.jsonl")

    assert [case.labels.feedback for case in result] == [4, 5, None]
    assert report.dropped == {}


def test_a_layout_that_alone_is_left_yields_cases_with_its_own_ratings(tmp_path):
    write_rows(tmp_path / "all.jsonl", [MULTI, LINES])
    result, report = drawn(tmp_path, [MULTI], lenders=tmp_path / "all.jsonl")

    assert [case.labels.feedback for case in result] == [4, 5]
    assert report.figures["ratings lent"] == 0


def test_of_equal_layouts_the_longest_row_counts(tmp_path):
    longer = talk(
        *(seeker("May."), supporter("I see."), seeker("Thank you!"), supporter("Bye.")),
        id="esconv/windows/train/4",
    )
    result, _ = drawn(tmp_path, [WINDOW, longer])

    assert {case.dialogue_id for case in result} == {longer.id}


def test_answers_to_one_question_are_separate_dialogues(tmp_path):
    rows = [
        talk(seeker("Q"), supporter(text), id=f"pair/{n}", source_id="pair/q")
        for n, text in enumerate(("good", "bad"))
    ]
    result, report = drawn(tmp_path, rows)

    assert [case.original for case in result] == ["good", "bad"]
    assert report.dropped == {}


def test_a_rating_goes_to_the_turn_with_the_same_words():
    turns = turns_of(LINES)

    def rated(*said):
        return rated_turns(turns_of(talk(*said)))

    shifted = rated(supporter("Hello!"), *MULTI.utterances)
    assert [each.position for each in shifted] == [3, 5]
    assert placed(shifted, turns) == {2: 4, 4: 5}
    assert placed(rated(seeker("Quite another thing.", feedback=3)), turns) == {}
    # of 19 letters in both, 14 are shared; then 16 of 17
    assert placed(rated(seeker("Think you too.", feedback=3)), turns) == {}
    assert placed(rated(seeker("Thank youu.", feedback=3)), turns) == {4: 3}
    # the supporter's words are no place for it
    assert placed(rated(seeker("I see.", feedback=3)), turns) == {}


def test_ratings_of_equal_words_keep_their_order():
    said = [seeker("Yes."), supporter("a"), seeker("Yes."), supporter("b"), seeker("Yes.")]
    rated = rated_turns(
        turns_of(
            talk(*(each.model_copy(update={"feedback": 1 + n}) for n, each in enumerate(said)))
        )
    )

    assert placed(rated, turns_of(talk(*said))) == {0: 1, 2: 3, 4: 5}


# --- Draws ------------------------------------------------------------------------------------


def corpus(count, length=12):
    return [
        talk(
            *(
                seeker(f"{number}, {turn}: so it is.") if turn % 2 == 0 else supporter(f"{turn}?")
                for turn in range(2 * length)
            ),
            id=f"dailydialog/{number}",
            source_id=f"dailydialog/{number}",
            emotion=list(Emotion)[number % len(Emotion)],
            split=("train", "valid", "test")[number % 3],
        )
        for number in range(count)
    ]


def test_a_few_rounds_are_drawn_in_order_and_more_from_the_middle(tmp_path):
    result, report = drawn(tmp_path, corpus(300), Settings(rounds_per_dialogue=3))

    assert len(result) == 900
    assert report.figures["rounds"] == 3600
    rounds = [case.round for case in result]
    triples = list(zip(rounds[::3], rounds[1::3], rounds[2::3], strict=True))
    assert all(a < b < c for a, b, c in triples)
    assert len(set(triples)) > 80
    assert rounds.count(5) > 2 * rounds.count(0)


def test_draws_depend_on_the_dialogue_and_the_seed_alone(tmp_path):
    rows = corpus(40)
    config = Settings(rounds_per_dialogue=2)
    result, _ = drawn(tmp_path, rows, config)
    reverse, _ = drawn(tmp_path, rows[::-1], config)
    few, _ = drawn(tmp_path, rows[10:20], config)
    other, _ = drawn(tmp_path, rows, config, seed=1)

    assert {case.id: case for case in reverse} == {case.id: case for case in result}
    assert few == result[20:40]
    assert [case.id for case in other] != [case.id for case in result]


def test_a_share_of_cases_shows_a_face_that_fits(tmp_path):
    pictures = Pictures(faces=write_faces(tmp_path / "faces", train=2, valid=1, muxspace=0))
    rows = corpus(60)
    config = Settings(rounds_per_dialogue=4, face_share=0.3)
    result, report = drawn(tmp_path, rows, config, pictures)
    plain, _ = drawn(tmp_path, rows, Settings(rounds_per_dialogue=4))

    shown = [case for case in result if case.history[-1].images]
    assert len(shown) == report.figures["with picture"] == pytest.approx(72, abs=20)
    assert not any(said.images for case in result for said in case.history[:-1])
    for case in shown:
        (name,) = case.history[-1].images
        _, _, split, face_class, _ = name.split("/")
        assert split == ("train" if case.split == "train" else "valid")
        if case.labels.emotion is Emotion.JOY:
            assert face_class == "happy"
        if case.labels.emotion is Emotion.ANGER:
            assert face_class == "angry"
        pictures.open(name)
    assert drawn(tmp_path, rows[::-1], config, pictures)[0][-4:] == result[:4]
    # but for the photos, the cases are the same
    assert [case.id for case in result] == [case.id for case in plain]


def test_a_case_with_a_picture_or_without_an_emotion_gets_no_face(tmp_path):
    pictures = Pictures(faces=write_faces(tmp_path / "faces"))
    rows = [
        talk(
            seeker("a", images=("mine.png",)),
            supporter("b"),
            seeker("c"),
            supporter("d"),
            emotion=emotion,
            id=f"avamerg/{emotion}",
            source_id=f"avamerg/{emotion}",
        )
        for emotion in (Emotion.JOY, None)
    ]
    joy_one, joy_two, none_one, none_two = drawn(
        tmp_path, rows, ALL.model_copy(update={"face_share": 1.0}), pictures
    )[0]

    assert [said.images for said in joy_one.history] == [("mine.png",)]
    assert joy_two.history[-1].images[0].startswith("faces/")
    assert [case.history[-1].images for case in (none_one, none_two)] == [("mine.png",), ()]


def test_faces_need_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="face_share"):
        drawn(tmp_path, [TALK], Settings(face_share=0.5))


# --- Whatever is said -------------------------------------------------------------------------

UTTERANCES = st.lists(
    st.builds(
        SourceUtterance,
        speaker=st.sampled_from(Speaker),
        text=st.text(min_size=1, max_size=12),
        strategy=st.none() | st.sampled_from(Strategy),
        feedback=st.none() | st.integers(1, 5),
    ),
    min_size=1,
    max_size=14,
)


@given(said=UTTERANCES, seed=st.integers(0, 3))
@settings(deadline=None)
def test_every_case_is_a_round_of_its_dialogue(tmp_path_factory, said, seed):
    folder = tmp_path_factory.getbasetemp() / "open"
    folder.mkdir(exist_ok=True)
    row = talk(*said)
    result, report = drawn(folder, [row], Settings(rounds_per_dialogue=2), None, seed)

    turns = turns_of(row)
    rounds = rounds_of(turns)
    assert all(a.speaker is not b.speaker for a, b in pairwise(turns))
    assert len(result) == min(2, len(rounds)) == report.written
    assert report.written or report.dropped_count == 1
    assert [case.round for case in result] == sorted({case.round for case in result})
    for case in result:
        position = rounds[case.round]
        assert case.original == turns[position].text
        assert [said.text for said in case.history] == [turn.text for turn in turns[:position]]
        assert len(set(case.labels.strategies)) == len(case.labels.strategies)
    assert printable(printable("".join(part.text for part in said))) == printable(
        "".join(part.text for part in said)
    )


@given(said=UTTERANCES)
def test_a_dialogue_lends_itself_all_its_ratings_that_have_letters(said):
    turns = turns_of(talk(*said))
    rated = rated_turns(turns)

    assert placed(rated, turns) == {each.position: each.feedback for each in rated}


# --- Size -------------------------------------------------------------------------------------


def test_three_thousand_dialogues_do_not_stay_in_memory(tmp_path):
    path = tmp_path / "dialogues.jsonl"
    line = talk(*(part for n in range(15) for part in (seeker("x" * 200), supporter("y" * 200))))
    row = json.loads(line.model_dump_json())
    with path.open("w", encoding="utf-8") as file:
        for number in range(3000):
            row |= {"id": f"esconv/lines/train/{number}", "source_id": f"esconv/{number}"}
            file.write(json.dumps(row) + "\n")
    assert path.stat().st_size > 24_000_000
    draw_cases(path, tmp_path / "cases.jsonl", Settings(rounds_per_dialogue=1))  # warm

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    report = draw_cases(path, tmp_path / "cases.jsonl", Settings(rounds_per_dialogue=3))
    seconds = time.monotonic() - begun

    assert report.written == 9_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000  # KiB
    assert seconds < 60


# --- The real corpus --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def esconv(corpora, tmp_path_factory):
    """All of ESConv's layouts in one file, each dialogue's in the split of its lines."""
    rows = [
        row
        for name, file, split in (
            ("esconv_windows", "thu-coai_devWithStrategy_short.tsv.gz", "valid"),
            ("esconv_multiesc", "multiesc_valid.txt.gz", "valid"),
            ("esconv_multiesc", "multiesc_test.txt.gz", "test"),
            ("esconv", "train.txt.gz", "train"),
            ("esconv", "valid.txt.gz", "valid"),
            ("esconv", "test.txt.gz", "test"),
        )
        for row in LOADERS[name](corpora / "esconv" / file, Dropped(), split)
    ]
    folder = tmp_path_factory.mktemp("esconv")
    write_rows(folder / "dialogues.jsonl", rows)
    report = draw_cases(folder / "dialogues.jsonl", folder / "cases.jsonl", ALL)
    return list(read_records(folder / "cases.jsonl", Case)), report


@pytest.mark.corpora
def test_all_ratings_of_esconv_find_their_turn(esconv):
    result, report = esconv

    assert report.figures["ratings lent"] == report.figures["ratings placed"] == 2103
    rated = [case for case in result if case.labels.feedback is not None]
    assert {case.split for case in rated} == {"valid", "test"}


@pytest.mark.corpora
def test_each_dialogue_of_esconv_yields_cases_once(esconv):
    result, _ = esconv
    lines = [case for case in result if case.dialogue_id.startswith("esconv/lines")]

    assert len({case.dialogue_id for case in lines}) == 1261
    assert len({case.source_id for case in result}) == len({case.dialogue_id for case in result})
    assert not any("multiesc" in case.dialogue_id for case in result)


@pytest.mark.corpora
def test_the_cases_of_esconv_are_those_of_the_rows_by_rule(esconv, corpora, tmp_path):
    cases = {case.id: case for case in esconv[0] if case.split == "train"}
    rows = list(rule_rows(Config(esconv=corpora / "esconv", output=tmp_path), "train"))

    assert {row.case.id for row in rows} == cases.keys()
    for row in rows:
        case = cases[row.case.id]
        assert row.case.history == case.history
        assert row.case.original == re.sub("[<>]", "", case.original).strip()
        assert row.case.labels == case.labels
