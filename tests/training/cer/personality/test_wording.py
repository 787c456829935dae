from collections import Counter

from training.cer.personality.wording import negations, numbers, questions, sentences, words


def test_words_are_words_in_english_and_characters_in_chinese() -> None:
    assert words("I can't, 2.5 times") == ["i", "can't", "2.5", "times"]
    assert words("我 OK 了", "zh") == ["我", "ok", "了"]


def test_sentences_end_at_marks_and_at_line_breaks() -> None:
    assert sentences('He said "no." Then he left\nme!') == ['He said "no."', "Then he left", "me!"]
    assert sentences("你好。“真的吗？”是的。") == ["你好。", "“真的吗？”是的。"]


def test_a_spelled_number_is_the_same_as_its_digits() -> None:
    assert numbers("two of 12") == numbers("2 of twelve") == Counter({"2": 1, "12": 1})
    assert numbers("one of them") == Counter()
    assert numbers("三个月，十分累", "zh") == Counter({"三": 1})


def test_a_negation_counts_once_in_every_form() -> None:
    for text in ("I do not know", "I don't know", "I don’t know", "i dont know"):
        assert negations(text) == 1
    assert negations("I cannot, and nobody can") == 2
    assert negations("note another knot") == 0


def test_chinese_words_that_deny_nothing_are_no_negations() -> None:
    assert negations("不过我非常难过，是不是", "zh") == 0
    assert negations("我没有睡好，不想说", "zh") == 2


def test_question_marks_of_both_widths_count() -> None:
    assert questions("Why? 为什么？") == 2
