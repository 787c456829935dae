"""Judgements that corpora hold already: each rule by hand, then the public files."""

import csv
from collections import Counter

import pytest

from compeer_core.cer import CerRecord
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference
from training.cer.steps.human_labels import (
    LABELLED_TWICE,
    NOT_DOMINATED,
    SAME_REPLY,
    UNPAIRED,
    VOTES_TOO_CLOSE,
    JudgedCorpus,
    judgements,
)
from training.data.records import read_records


def write_csv(path, *rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path.name


def judged(folder, name, *paths, use="evaluate", seed=0):
    """Return the report, and the rows turned back into the order of the corpus."""
    corpus = JudgedCorpus(name=name, paths=paths, use=use)
    output = folder / "human.jsonl"
    report = judgements([corpus], folder, output, seed=seed)
    return report, list(read_records(output, CerRecord))


def in_order(record):
    """(reply, other reply, preference) with the replies in alphabetical order."""
    first, second, preference = record.first.reply, record.second.reply, record.preference
    if first > second:
        first, second, preference = second, first, preference.swapped()
    return first, second, preference.value


# --- empathy_ratings -----------------------------------------------------------------------------

RATED = (
    *("dialog_id", "emotion", "situation", "speaker_uttr", "response_human", "response_chatgpt"),
    *("response_chatgpt_empathy", "rating_human", "rating_chatgpt", "rating_chatgpt_empathy"),
    *("miti_human", "miti_chatgpt", "miti_chatgpt_empathy"),
)


@pytest.mark.parametrize(
    ("ratings", "preferences"),
    [
        ("123", ["second", "second", "second"]),
        ("321", ["first", "first", "first"]),
        ("331", ["both", "first", "first"]),
        ("221", ["both", "first", "first"]),
        ("112", ["neither", "second", "second"]),
    ],
)
def test_the_higher_rating_is_preferred_and_equals_are_both_or_neither(
    tmp_path, ratings, preferences
):
    row = ("c1", "sad", "It was May.", "My cat died.", "A", "B", "C", *ratings, "[]", "[]", "[]")

    report, rows = judged(tmp_path, "empathy_ratings", write_csv(tmp_path / "r.csv", RATED, row))

    assert [in_order(row) for row in rows] == [
        (*pair, preference)
        for pair, preference in zip(("AB", "AC", "BC"), preferences, strict=True)
    ]
    assert {row.case.original for row in rows} == {"A"}
    assert {c.reply: c.author for row in rows for c in row.candidates} == {
        "A": "corpus",
        "B": "chatgpt",
        "C": "chatgpt_empathy",
    }
    assert rows[0].preference_by.kind == "person"
    assert "empathy_ratings" in rows[0].preference_by.name
    assert rows[0].case.history[0].text == "My cat died."
    assert report.written == 3
    assert report.figures.get("empathy_ratings: both rated 2", 0) == (ratings == "221")


# --- pair ----------------------------------------------------------------------------------------

TIERS = ("prompt", "hq1", "hq2", "mq1", "lq1", "lq2", "lq3", "lq4", "lq5")


def test_tiers_are_compared_and_of_the_low_ones_one_pair_is_drawn(tmp_path):
    name = write_csv(tmp_path / "p.csv", TIERS, ("I smoke.", *"abcdefgh"))

    _, rows = judged(tmp_path, "pair", name)

    result = {in_order(row) for row in rows}
    # 2 x 1 high and medium, 2 x 5 high and low, 1 x 5 medium and low, 1 high and high, 1 low and low
    assert len(rows) == len(result) == 19
    assert {(a, b, "first") for a in "ab" for b in "cdefgh"} < result
    assert {("c", low, "first") for low in "defgh"} < result
    assert ("a", "b", "both") in result
    ((one, other, _),) = [row for row in result if row[2] == "neither"]
    assert set(one + other) < set("defgh")


def test_a_tier_that_repeats_another_is_no_pair(tmp_path):
    name = write_csv(tmp_path / "p.csv", TIERS, ("I smoke.", "a", "b", "c", "A ", "", "", "", ""))

    report, rows = judged(tmp_path, "pair", name)

    # a-c, b-c, b-A, c-A, a-b; the four empty ones are the loader's to count
    assert len(rows) == 5
    assert report.dropped["pair"][SAME_REPLY] == 1
    assert report.dropped["pair"]["no answer"] == 4


# --- counselchat ---------------------------------------------------------------------------------

CHAT = ("questionID", "questionTitle", "questionText", "answerText", "upvotes", "topic", "split")


def chat(answer, votes, question="Q?", split="train", number="1"):
    return (number, question, f"{question} Really?", answer, votes, "sleep", split)


def test_more_votes_are_preferred_and_an_answer_counts_once(tmp_path):
    name = write_csv(
        tmp_path / "c.csv",
        CHAT,
        chat("A", 0),
        chat("B", 1),
        chat("C", 3),
        chat("C", 3, number="7"),  # the same question under another topic
        chat("E", 3),
        chat("D", 3, question="Another?"),
    )

    report, rows = judged(tmp_path, "counselchat", name, use="train")

    assert {in_order(row): row.preference_by.kind for row in rows} == {
        ("A", "B", "second"): "person",
        ("A", "C", "second"): "people",
        ("B", "C", "second"): "people",
        ("A", "E", "second"): "people",
        ("B", "E", "second"): "people",
    }
    assert report.dropped["counselchat"] == {SAME_REPLY: 1, VOTES_TOO_CLOSE: 1}
    assert rows[0].case.labels.problem == "sleep"


def test_a_question_is_in_one_split_and_in_the_test_set_if_any_row_of_it_is(tmp_path):
    # of the repeated answer only the first row makes a pair, but the second is in the test set
    name = write_csv(
        tmp_path / "c.csv",
        CHAT,
        chat("A", 0),
        chat("B", 1),
        chat("B", 1, split="test"),
        chat("A", 0, question="Else?", split="val"),
        chat("B", 1, question="Else?", split="val"),
        chat("A", 0, question="Both?", split="val"),
        chat("B", 1, question="Both?", split="test"),
    )

    _, rows = judged(tmp_path, "counselchat", name, use="train")
    _, tested = judged(tmp_path, "counselchat", name)

    assert [row.case.split for row in rows] == ["test", "valid", "test"]
    assert {row.case.split for row in tested} == {"test"}


# --- epitome -------------------------------------------------------------------------------------

EPITOME = ("sp_id", "rp_id", "seeker_post", "response_post", "level", "rationales")


def epitome(folder, levels):
    """`levels` maps a reply to its level in each of the three files."""
    return [
        write_csv(
            folder / f"{name}.csv",
            EPITOME,
            *[("s", reply[0], "I am lost.", reply[0], each[n], "x|") for reply, each in levels],
        )
        for n, name in enumerate(("emotional", "interpretations", "explorations"))
    ]


def test_a_reply_that_is_nowhere_lower_and_once_higher_is_preferred(tmp_path):
    names = epitome(tmp_path, [("a", "210"), ("b", "200"), ("c", "020"), ("d", "200")])

    report, rows = judged(tmp_path, "epitome", *names, use="train")

    # a beats b and d; c is higher in one and lower in another; b and d are equal
    assert {in_order(row) for row in rows} == {("a", "b", "first"), ("a", "d", "first")}
    assert report.dropped["epitome"] == {NOT_DOMINATED: 4}
    assert len({row.case.split for row in rows}) == 1


def test_a_reply_needs_one_level_of_each_mechanism(tmp_path):
    names = epitome(tmp_path, [("a", "210"), ("b", "200"), ("b", "201"), ("b", "200")])

    report, _ = judged(tmp_path, "epitome", *names)

    assert report.dropped["epitome"] == {LABELLED_TWICE: 1}
    with pytest.raises(ConfigError, match="epitome needs three files"):
        judged(tmp_path, "epitome", names[0])


# --- ed_pairs ------------------------------------------------------------------------------------


def test_a_persons_reply_is_preferred_by_rule(tmp_path):
    end = "<|endoftext|>"
    name = write_csv(
        tmp_path / "ed.csv",
        ("0", f"I won! {end}", f"Great! {end}"),
        ("1", f"I won! {end}", f"oh no . {end}"),
        ("0", f"I lost. {end}", f"Sorry. {end}"),
        ("1", f"I ran. {end}", f"ok {end}"),
        ("0", f"I fell. {end}", f"Ouch. {end}"),
        ("1", f"I fell. {end}", f"ouch. {end}"),
    )

    report, (row,) = judged(tmp_path, "ed_pairs", name)

    assert in_order(row) == ("Great!", "oh no .", "first")
    assert row.preference_by.kind == "rule"
    assert row.case.original == "Great!"
    assert report.dropped["ed_pairs"] == {UNPAIRED: 1, SAME_REPLY: 1}


# --- all of them ---------------------------------------------------------------------------------


def many(folder, count=300):
    rows = [
        (f"c{n}", "sad", "It was May.", f"My cat died, {n}.", "A", "B", "C", *"312", *["[]"] * 3)
        for n in range(count)
    ]
    return write_csv(folder / "r.csv", RATED, *rows), write_csv(
        folder / "back.csv", RATED, *rows[::-1]
    )


def test_orders_and_splits_depend_on_the_seed_and_the_row_alone(tmp_path):
    forth, back = many(tmp_path)

    _, rows = judged(tmp_path, "empathy_ratings", forth, use="train")
    _, again = judged(tmp_path, "empathy_ratings", back, use="train")
    _, other = judged(tmp_path, "empathy_ratings", forth, use="train", seed=1)

    assert sorted(rows, key=lambda row: row.id) == sorted(again, key=lambda row: row.id)
    swapped = sum(a.first != b.first for a, b in zip(rows, other, strict=True))
    assert 370 < swapped < 530  # 900 pairs, deviation 15
    first = sum(row.preference is Preference.FIRST for row in rows)
    assert 390 < first < 510
    by_source = {}
    for row in rows:
        by_source.setdefault(row.case.source_id, set()).add(row.case.split)
    assert all(len(splits) == 1 for splits in by_source.values())
    shares = Counter(next(iter(splits)) for splits in by_source.values())
    assert 200 < shares["train"] < 270
    assert min(shares["valid"], shares["test"]) > 10


def test_a_corpus_is_named_once_and_its_file_must_be_there(tmp_path):
    corpus = JudgedCorpus(name="pair", paths=("none.csv",))

    with pytest.raises(ConfigError, match="listed twice"):
        judgements([corpus, corpus], tmp_path, tmp_path / "h.jsonl", seed=0)
    with pytest.raises(ConfigError, match=r"none\.csv: no such file"):
        judgements([corpus], tmp_path, tmp_path / "h.jsonl", seed=0)
    assert list(tmp_path.glob("h.jsonl")) == []


# --- the public files ----------------------------------------------------------------------------

MECHANISMS = ("emotional-reactions", "interpretations", "explorations")
PUBLIC = (
    JudgedCorpus(name="empathy_ratings", paths=("empathy_ratings/dataset_and_ratings.csv.gz",)),
    JudgedCorpus(name="pair", paths=("pair/pair_data.csv",)),
    JudgedCorpus(
        name="counselchat", paths=("counselchat/20200325_counsel_chat.csv.gz",), use="train"
    ),
    JudgedCorpus(
        name="epitome",
        paths=tuple(f"epitome/{name}-reddit.csv.gz" for name in MECHANISMS),
        use="train",
    ),
    JudgedCorpus(
        name="ed_pairs",
        paths=tuple(
            f"ed_response_pairs/{name}_user_system_conv.csv.gz" for name in ("valid", "test")
        ),
    ),
)


def test_the_public_files_have_the_known_counts(corpora, tmp_path):
    report = judgements(PUBLIC, corpora, tmp_path / "human.jsonl", seed=0)
    figures = report.figures

    def listed(name):
        prefix = f"{name}, in the corpus's order: "
        return {key.removeprefix(prefix): n for key, n in figures.items() if key.startswith(prefix)}

    # 1,600 contexts with 3 replies; `both` is 1,687 good and 442 okay ones
    assert listed("empathy_ratings") == {
        "first": 1023,
        "second": 1578,
        "both": 1687 + 442,
        "neither": 70,
    }
    assert figures["empathy_ratings: both rated 2"] == 442
    # 255 prompts with 2 x 1 + 2 x 5 + 1 x 5 pairs of different tiers
    assert listed("pair") == {"first": 255 * 17, "both": 255, "neither": 255}
    # 2,521 by the ids of questions, which count one answer under up to 12 topics
    assert listed("counselchat") == {"first": 1773}
    assert report.dropped["counselchat"][SAME_REPLY] == 120
    # 36 posts have two replies
    assert listed("epitome") == {"first": 11, "second": 7}
    assert listed("ed_pairs") == {"first": 5632 + 3780 - 1}

    ids, splits, sides = set(), {}, Counter()
    for row in read_records(tmp_path / "human.jsonl", CerRecord):
        ids.add(row.id)
        splits.setdefault(row.case.source_id, set()).add(row.case.split)
        sides[row.preference] += 1
        if row.case.corpus not in {"counselchat", "epitome"}:
            assert row.case.split == "test"
    assert len(ids) == report.written
    assert all(len(result) == 1 for result in splits.values())
    assert abs(sides[Preference.FIRST] - sides[Preference.SECOND]) < 500  # deviation 132
