"""Lists of phrases, and English text folded for them."""

from compeer_core.phrases import Phrases, stem, words_of


def test_a_phrase_ends_at_a_word_and_a_star_stands_for_any_ending():
    phrases = Phrases(["work", "depress*", "my  ex"])

    assert phrases.found("My Ex is Depressing. Workers work") == ["my ex", "depressing", "work"]
    assert "I don’t know" in Phrases(["don't"])


def test_texts_with_split_apostrophes_are_read_as_if_joined():
    assert words_of("I haven ' t slept") == ["i", "haven't", "slept"]


def test_endings_are_cut_only_where_enough_is_left():
    assert [stem(word) for word in ("jobs", "bed", "worries", "is")] == [
        "job",
        "bed",
        "worri",
        "is",
    ]
