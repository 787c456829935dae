"""The page's texts: the same keys in every language, and a key for everything shown."""

import re
import tomllib
from pathlib import Path

import pytest

from compeer_core.reasoning import Part, ProblemKind
from compeer_core.taxonomy import ESCONV_STRATEGIES, Emotion, Sentiment, Stage
from ui_components.shared.texts import ASSETS, LANGUAGES, choose_language, load_texts, region_of

CODE = Path("ui_components")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
CJK = re.compile("[\u4e00-\u9fff]")


def test_every_language_has_the_same_keys():
    english, chinese = (set(load_texts(language).words) for language in LANGUAGES)

    assert english ^ chinese == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_screen_takes_a_key_of_another_one(language):
    tables = [
        name
        for path in (ASSETS / "texts" / language).glob("*.toml")
        for name in tomllib.loads(path.read_text(encoding="utf-8"))
    ]

    assert sorted(tables) == sorted(set(tables))


def test_a_sentence_has_the_same_placeholders_in_every_language():
    english, chinese = (load_texts(language).words for language in LANGUAGES)

    for key, sentence in english.items():
        assert set(PLACEHOLDER.findall(sentence)) == set(PLACEHOLDER.findall(chinese[key])), key


def test_chinese_is_complete():
    for key, sentence in load_texts("zh").words.items():
        letters = PLACEHOLDER.sub("", sentence)
        assert CJK.search(letters) or not re.search("[A-Za-z]", letters), key


def test_every_key_that_the_code_names_exists(repository):
    named = re.compile(
        r"""(?:\btexts?|\bt|i18n)\(\s*f?["']([a-z_]+\.[\w.]+)["']|both\(languages, '([\w.]+)'"""
    )
    words = load_texts("en").words
    found = [
        key
        for path in (repository / CODE).rglob("*")
        if path.suffix in {".py", ".html"}
        for match in named.findall(path.read_text(encoding="utf-8"))
        for key in match
        if key
    ]

    assert len(found) > 60
    # A composed key ends in its fixed part.
    whole = [key for key in found if not key.endswith("_")]
    assert [key for key in whole if key not in words] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_label_and_every_problem_has_words(language):
    words = load_texts(language).words
    wanted = [
        *(f"stages.{label}" for label in Stage),
        *(f"sentiments.{label}" for label in Sentiment),
        *(f"emotions.{label}" for label in Emotion),
        *(f"strategies.{name}" for name in ESCONV_STRATEGIES.names),
        *(f"inspector.problem_{kind}" for kind in ProblemKind),
        *(f"inspector.part_{part}" for part in Part),
        *(f"status.{part}" for part in Part),
        *(f"chat.{kind}" for kind in ("cleared", "edited", "retried")),
    ]

    assert [key for key in wanted if key not in words] == []


@pytest.mark.parametrize(
    ("chosen", "accepted", "default", "expected"),
    [
        (None, None, None, "en"),
        (None, "zh-CN,zh;q=0.9,en;q=0.8", None, "zh"),
        (None, "en;q=0.3, zh-TW;q=0.9", None, "zh"),
        (None, "fr-FR, de;q=0.7", None, "en"),
        (None, "zh;q=0, en", None, "en"),
        (None, "zh-CN", "en", "en"),
        ("zh", "en-US", "en", "zh"),
        ("xx", "zh", None, "zh"),
    ],
)
def test_the_choice_of_the_visitor_comes_before_the_server_and_the_browser(
    chosen, accepted, default, expected
):
    assert choose_language(chosen, accepted, default) == expected


def test_the_country_comes_from_the_browser_else_from_the_language():
    assert region_of("fr,en-GB;q=0.5", "en") == "GB"
    assert region_of("zh-Hans", "zh") == "CN"


def test_a_missing_value_is_an_error_and_not_a_gap():
    with pytest.raises(KeyError):
        load_texts("en")("errors.message_too_long", limit=3)


def test_a_value_that_looks_like_a_placeholder_stays_as_it_is():
    assert "{limit}" in load_texts("en")("errors.image_not_image", name="{limit}")
