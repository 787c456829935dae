"""The marks in a step: what it quotes is linked, what nobody said is named, and all of it stays text."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.grounding import StepChecker
from compeer_core.images import Image
from compeer_core.reasoning import Part
from tests.pages import Visitor, make_services
from ui_components.chat.grounding_view import grounding_line, marked_pieces
from ui_components.chat.inspector import inspector_html
from ui_components.shared.progress import PartProgress, Progress
from ui_components.shared.session import Session, Turn
from ui_components.shared.texts import load_texts

ENGLISH = load_texts("en")


def progress_of(history: str = "", reply: str = "") -> Progress:
    progress = Progress(model="policy")
    parts = {
        **progress.parts,
        Part.HISTORY: PartProgress("writing", history),
        Part.REPLY: PartProgress("done" if reply else "ahead", reply),
    }
    return replace(progress, parts=parts)


def session_of(*messages: str, history: str, image: Image | None = None) -> Session:
    """A conversation whose last turn has that step; the supporter has replied to the others."""
    images = () if image is None else (image,)
    turns = [Turn(Utterance(Speaker.SEEKER, text, images)) for text in messages]
    turns = [
        replace(turn, progress=progress_of(reply=f"Reply {n}")) for n, turn in enumerate(turns)
    ]
    session = Session(turns=(*turns[:-1], replace(turns[-1], progress=None)))
    checker = StepChecker(session.dialogue())
    progress = progress_of(history).checked(Progress(model="policy"), checker)
    return replace(session, turns=(*turns[:-1], replace(turns[-1], progress=progress)))


def step_of(session: Session) -> PartProgress:
    progress = session.turns[-1].progress
    assert progress is not None
    return progress.parts[Part.HISTORY]


def pieces_of(session: Session) -> list[dict[str, Any]]:
    return marked_pieces(Part.HISTORY, step_of(session), session, ENGLISH)


def kinds_and_texts(session: Session) -> list[tuple[str, str]]:
    return [(str(piece["kind"]), str(piece["text"])) for piece in pieces_of(session)]


def drawn(session: Session, language: str = "en") -> str:
    return inspector_html(session, load_texts(language))


def test_a_quotation_links_to_its_words_in_the_message_or_reply():
    session = session_of("My boss shouted.", "I cried.", history='"boss", then "reply 0"')
    links = [piece for piece in pieces_of(session) if piece["kind"] == "found"]

    assert [(link["target"], link["start"], link["end"]) for link in links] == [
        ("said-0", 3, 7),
        ("reply-0", 0, 7),
    ]
    assert [link["note"] for link in links] == [
        "quoted from your message 1",
        "quoted from reply 1",
    ]
    html = drawn(session)
    assert 'href="#said-0" data-quotation="history-1" data-start="3" data-end="7">boss<span' in html
    assert '<span class="vh"> (quoted from your message 1)</span></a>' in html


def test_words_that_nobody_said_are_marked_in_words():
    html = drawn(session_of("My boss shouted.", history='They hate "my job".'))

    assert '"' not in re.search(r"<mark>(.*?)</mark>", html)[1]  # type: ignore[index]
    assert '<mark>my job</mark> <b class="ground">not said</b>' in html
    assert "Quotations: 1 not said." in html


def test_a_sentence_about_a_photo_is_marked_only_without_a_photo():
    sentence = "In the photo they look sad."
    html = drawn(session_of("I am alone.", history=f"Alone. {sentence}"))

    assert f'<mark>{sentence}</mark> <b class="ground">no photo</b>' in html
    assert "Sentences about a photo that was not sent: 1." in html
    assert "<mark>" not in drawn(
        session_of("I am alone.", history=sentence, image=Image(b"x", 1, 1))
    )


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        # a quotation inside the sentence
        (
            'In the photo, "my boss" smiles. Yes.',
            [
                ("no_photo", 'In the photo, "'),
                ("found", "my boss"),
                ("no_photo", '" smiles.'),
                ("", " Yes."),
            ],
        ),
        # a quotation that goes on after the sentence
        (
            'In the photo "he is. So sad" now',
            [
                ("no_photo", 'In the photo "'),
                ("not_said", "he is. So sad"),
                ("", '" now'),
            ],
        ),
        # a quotation that contains the sentence
        (
            '"Look. In the photo I cry. See"',
            [("", '"'), ("not_said", "Look. In the photo I cry. See"), ("", '"')],
        ),
    ],
)
def test_overlapping_marks_are_cut_into_pieces_and_lose_no_text(history, expected):
    session = session_of("My boss shouted.", history=history)

    assert kinds_and_texts(session) == expected
    notes = [piece["note"] for piece in pieces_of(session) if piece["kind"] == "no_photo"]
    assert notes[-1:] == (["no photo"] if notes else [])
    assert not any(notes[:-1])  # once for each sentence


@pytest.mark.parametrize("marks", ["“”", "「」", "『』", '""'])
def test_chinese_quotation_marks_and_words(marks):
    history = f"他说{marks[0]}睡不着{marks[1]}，又说{marks[0]}不想上班{marks[1]}。照片里他很累。"
    session = session_of("我昨晚睡不着觉", history=history)
    html = drawn(session, "zh")

    assert ">睡不着<span" in html
    assert "引自你的第 1 条消息" in html
    assert '<mark>不想上班</mark> <b class="ground">没有人说过</b>' in html
    assert '<b class="ground">没有照片</b>' in html
    assert "引用：1 处有原话、1 处没有人说过。 对话中没有照片，却有 1 句提到照片。" in html


def test_hostile_text_stays_text_in_every_kind_of_mark():
    said = "<script>stolen(1)</script> & 'x'"
    history = f'“{said}” “<img src=x onerror=stolen(2)>” In the photo <b onclick="stolen(3)">.'
    html = drawn(session_of(said, history=history))

    assert "&lt;script&gt;stolen(1)&lt;/script&gt; &amp; &#39;x&#39;<span" in html
    assert "<mark>&lt;img src=x onerror=stolen(2)&gt;</mark>" in html
    assert not re.search(r"<script|<img|<b onclick", html)


def test_a_step_without_evidence_has_one_plain_piece_and_no_line():
    session = session_of("Hello.", history="The seeker says hello.")

    assert kinds_and_texts(session) == [("", "The seeker says hello.")]
    assert grounding_line(session.turns[-1].progress, ENGLISH) is None
    assert grounding_line(None, ENGLISH) is None


def test_only_steps_whose_text_has_changed_are_checked():
    checked: list[str] = []

    class Watched(StepChecker):
        def check(self, text):
            checked.append(text)
            return super().check(text)

    session = session_of("My boss shouted.", history='"my boss"')
    before = session.turns[-1].progress
    assert before is not None
    parts = {**before.parts, Part.EMOTION: PartProgress("writing", '"my job"')}
    after = replace(before, parts=parts).checked(before, Watched(session.dialogue()))

    assert checked == ['"my job"']
    assert after.parts[Part.HISTORY] == before.parts[Part.HISTORY]
    assert len(after.parts[Part.EMOTION].evidence) == 1


def test_a_streamed_reply_is_checked_against_its_conversation(tmp_path: Path):
    text = (
        '<history>They say "lost my job" and "hate my boss".\nStage: Exploration</history>\n'
        "<emotion>In the photo they look sad.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4"
        "</emotion>\n<strategy>Listen.\nStrategy: Question</strategy>\n<reply>Why is that?</reply>"
    )
    visitor = Visitor(make_services(tmp_path, ({"text": text, "chunk_characters": 9},)))
    asyncio.run(visitor.send("I lost my job."))

    line = "Quotations: 1 found in the conversation, 1 not said."
    assert line in visitor.screen["inspector"]
    assert 'id="said-0">I lost my job.' in visitor.screen["conversation"]
    assert 'id="reply-0">Why is that?' in visitor.screen["conversation"]
    progress = visitor.session.turns[0].progress
    assert [len(progress.parts[part].evidence) for part in Part] == [2, 1, 0, 0]
