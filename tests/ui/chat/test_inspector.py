"""The inspector drawn from records: every state has words, and model output stays text."""

import re
import threading
from dataclasses import replace

import pytest

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.scripted import ScriptedBackend, ScriptedScorer, ScriptedTurn
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import BackendError
from compeer_core.images import Image
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import Part, PartStarted
from compeer_core.taxonomy import Preference
from compeer_core.turn import take_turn
from compeer_core.unifireward import Judge, ResponseVerdict
from tests.draws import Draws
from tests.pages import BROKEN, COMPLETE, HOSTILE, REPLY, SECOND
from ui_components.chat.inspector import inspector_html
from ui_components.chat.reply_words import signed
from ui_components.shared.progress import Progress
from ui_components.shared.session import Branch, Session, Turn
from ui_components.shared.texts import load_texts

ENGLISH = load_texts("en")
SURE = Judge(
    "judge", ScriptedScorer([{"True": 0.9, "False": 0.1}, "True", {"True": 0.3, "False": 0.7}])
)
BROKEN_JUDGE = Judge("judge", ScriptedScorer([BackendError("out of memory")]))


def turn(text: str | ScriptedTurn, judge: Judge | None = SURE, stop_at: Part | None = None) -> Turn:
    """A turn as folded by the page; cut off where a part begins, if requested."""
    policy = Policy("policy", ScriptedBackend([text]))
    stop = threading.Event()
    dialogue = Dialogue.from_messages([{"role": "user", "content": "I lost my job."}])
    progress = Progress(model="policy", judge=judge.name if judge else None)
    for event in take_turn(policy, judge, dialogue, Controls(), stop):
        progress = progress.after(event)
        if stop_at is not None and isinstance(event, PartStarted) and event.part is stop_at:
            stop.set()
    return Turn(Utterance(Speaker.SEEKER, "I lost my job."), progress)


def gated_turn(*texts: str) -> Turn:
    """A turn with the gate, whose draws are these texts."""
    progress = Progress(model="policy", judge="judge")
    dialogue = Dialogue.from_messages([{"role": "user", "content": "I lost my job."}])
    controls = Controls(sampling=Sampling(seed=5))
    policy = Policy("policy", Draws(*texts))
    for event in take_turn(policy, SURE, dialogue, controls, threading.Event(), gated=True):
        progress = progress.after(event)
    return Turn(Utterance(Speaker.SEEKER, "I lost my job."), progress)


def drawn(*turns: Turn, language: str = "en", **session: object) -> str:
    html = inspector_html(Session(turns=turns, **session), load_texts(language))  # type: ignore[arg-type]
    return re.sub(r"\s+", " ", html)


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_without_a_turn_it_says_what_will_be_here():
    assert "reasoning behind each reply" in drawn()


def test_a_judged_turn_shows_each_step_with_its_verdict_and_probability():
    html = drawn(turn(COMPLETE))

    assert html.count("<b>judged correct</b>") == 2
    assert html.count("<b>judged incorrect</b>") == 1
    assert [int(share) for share in re.findall(r"(\d+) % confident", html)] == [90, 90, 70]
    # Two right, one wrong, and the format: 1 + 1 - 1 + 1 of 4.
    assert "2 of 3 steps judged correct" in words(html)
    assert "Reply not judged: no baseline to compare it with" in words(html)
    assert "steps +1 +1 −1 · reply no baseline · format +1" in words(html).replace("  ", " ")
    assert "+2 of 4" in html


@pytest.mark.parametrize(
    ("probabilities", "line", "chinese"),
    [
        ((0.9, 0.8, 0.7), "3 of 3 steps judged correct", "3 步中有 3 步判为正确"),
        ((0.9, 0.2, 0.1), "1 of 3 steps judged correct", "3 步中有 1 步判为正确"),
        (
            (0.9, 0.6, 0.3),
            "steps judged: 1 correct, 1 unsure, 1 incorrect",
            "1 步正确、1 步拿不准、1 步错误",
        ),
        ((0.35, 0.5, 0.65), "steps judged: 3 unsure", "各步判断：3 步拿不准"),
        ((0.34, 0.66, 0.7), "2 of 3 steps judged correct", "3 步中有 2 步判为正确"),
    ],
)
def test_the_line_at_the_top_counts_unsure_verdicts_as_neither(probabilities, line, chinese):
    answers = [{"True": p, "False": 1 - p} for p in probabilities]
    judged = turn(COMPLETE, Judge("judge", ScriptedScorer(answers)))
    html = drawn(judged)

    assert f'<p class="tally"><span class="vh">Score: </span><b>{line}</b></p>' in html
    assert html.index('class="tally"') < html.index('class="cards"')
    assert chinese in drawn(judged, language="zh")


def test_an_unsure_verdict_has_a_word_a_mark_and_a_probability():
    html = drawn(turn(COMPLETE, Judge("judge", ScriptedScorer([{"True": 0.45, "False": 0.55}]))))

    unsure = '<span class="sign" aria-hidden="true">?</span> <b>unsure</b>'
    assert html.count(unsure) == 3
    assert html.count('<span class="detail">45 % likely correct</span>') == 3
    assert "judged incorrect" not in html


def test_a_step_that_could_not_be_scored_is_counted_apart():
    judge = Judge("judge", ScriptedScorer(["True", BackendError("out of memory"), "True"]))

    assert "steps judged: 1 correct, 2 not scored" in drawn(turn(COMPLETE, judge))


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (0.8, "✓ Reply judged at least as good as reply 1 by sft 90 % confident"),
        (0.4, "? Unsure whether the reply is as good as reply 1 by sft 50 % likely"),
        (0.1, "✗ Reply judged worse than reply 1 by sft 80 % confident"),
    ],
)
def test_the_verdict_on_a_reply_names_its_baseline(first, sentence):
    verdict = ResponseVerdict(
        Preference.FIRST if first > 0.5 else Preference.SECOND,
        {
            Preference.FIRST: first,
            Preference.BOTH: 0.1,
            Preference.SECOND: 0.9 - first,
            Preference.NEITHER: 0.0,
        },
    )
    earlier = replace(turn(COMPLETE).progress, model="sft", number=1)
    progress = replace(turn(SECOND).progress, number=2, compared_with=1, reply_verdict=verdict)
    html = drawn(Turn(Utterance(Speaker.SEEKER, "hello"), progress, aside=(Branch(earlier),)))

    assert sentence in words(html)


def test_the_short_name_of_a_model_is_explained_on_hover_and_in_a_line():
    progress = turn(COMPLETE).progress
    named = replace(progress, model="small-urp", record=replace(progress.record, model="small-urp"))
    html = drawn(Turn(Utterance(Speaker.SEEKER, "hello"), named))

    assert re.search(r'small-<abbr title="URP: like UR[^"]+">urp</abbr>', html)
    assert "URP: like UR, but replies that repeat" in words(html)


def test_a_regenerated_reply_says_why_and_its_rejected_draws_are_on_demand():
    loop = HOSTILE.replace("</reply>", " I am here." * 9 + "</reply>")
    html = drawn(gated_turn(loop, COMPLETE))

    assert "Regenerated: it contained markup, it repeated itself." in html
    assert '<details data-fold="draws"><summary>Rejected draws (1)</summary>' in html
    assert "Draw 1, seed 5: it contained markup, it repeated itself" in html
    assert "<script" not in html
    assert "<img" not in html
    assert REPLY in html  # in the raw output


def test_a_withheld_reply_says_so_and_is_only_in_its_details():
    html = drawn(gated_turn("<reply>No steps.</reply>"))

    assert "The model did not produce a usable reply." in html
    assert "No usable reply after 4 draws: it broke the format." in html
    assert html.count("<summary>Rejected draws (4)</summary>") == 1
    assert "No steps." not in words(re.sub(r"<details.*?</details>", "", html))
    assert "模型没有写出可用的回复" in drawn(gated_turn("<reply>No steps.</reply>"), language="zh")


def test_the_labels_are_shown_as_a_stepper_a_bar_and_one_of_eight():
    html = drawn(turn(SECOND))

    assert '<li class="is-past" >Exploration</li>' in html
    assert '<li class="is-now" aria-current="step">Comforting</li>' in html
    assert html.count('class="on"') == 3
    assert "3 of 5" in html
    assert html.count('class="is-other"') == 7
    assert html.count('class="is-chosen"') == 1
    assert html.count('data-strategy="Providing Suggestions"') == 1


def test_a_turn_that_lacks_a_part_shows_its_text_what_is_missing_and_the_penalty():
    html = drawn(turn(BROKEN))

    assert "the part “strategy” is missing" in html
    assert "format reward is −1" in html
    assert "−4 of 4" in html
    assert "The model wrote “Explore”" in html
    assert "&lt;reply&gt;You have come a long way.&lt;/reply&gt;" in html


@pytest.mark.parametrize("text", ["", "plain words", "<history>", "</reply>", "\x00"])
def test_no_output_leaves_the_inspector_blank(text):
    html = drawn(turn(text))

    assert html.count("This part is missing.") == 3
    assert "does not follow the format" in html


def test_a_judge_that_fails_is_not_a_number():
    html = drawn(turn(COMPLETE, BROKEN_JUDGE))

    assert html.count("the judge failed on this part") == 3
    assert "no total: a part could not be scored" in html


def test_without_a_judge_nothing_is_scored_and_the_reason_is_given():
    html = drawn(turn(COMPLETE, judge=None))

    assert html.count("no judge") >= 3
    assert "no total: no judge" in html


def test_a_reply_that_was_stopped_is_not_blamed_for_what_it_lacks():
    html = drawn(turn(COMPLETE, stop_at=Part.EMOTION))

    assert "You stopped this reply" in html
    assert "does not follow the format" not in html
    assert "format reward is −1" not in html
    assert "This part is missing" not in html
    assert "gave no label" not in html
    assert "the reply is unfinished" in html


def test_a_failed_reply_says_so_and_keeps_its_text():
    html = drawn(turn(ScriptedTurn(text=COMPLETE[:70], ending="failed")))

    assert "The reply could not be generated" in html
    assert "The seeker lost a job" in html


def test_a_finished_part_waits_for_its_verdict():
    progress = Progress(model="m", judge="judge", phase="writing")
    parts = {**progress.parts, Part.HISTORY: replace(progress.parts[Part.HISTORY], state="done")}
    running = replace(progress, parts=parts)
    html = drawn(Turn(Utterance(Speaker.SEEKER, "hello"), running))

    assert "judging" in html
    assert html.count("Not written yet") == 2


def test_what_a_model_writes_cannot_become_html_or_script():
    html = drawn(turn(HOSTILE))

    assert "<script" not in html
    assert "<img" not in html
    assert "<b>Hug</b>" not in html
    assert "&lt;b&gt;Hug&lt;/b&gt;" in html


def test_totals_over_the_turns_are_a_line_and_a_sentence():
    html = drawn(turn(COMPLETE), turn(BROKEN), turn(COMPLETE, judge=None))

    assert "turn 1: +2 of 4, turn 2: −4 of 4, turn 3: not scored" in html
    assert html.count("<circle") == 2
    assert "<svg" not in drawn(turn(COMPLETE))  # one point is no line


def test_another_turn_can_be_inspected():
    html = drawn(turn(COMPLETE), turn(SECOND), selected=0)

    assert "Turn 1 of 2" in html
    assert "Reflection of Feelings</b>" in html


def test_the_picture_that_was_used_stands_beside_the_emotion():
    pictured = turn(COMPLETE)
    pictured = replace(
        pictured,
        message=replace(pictured.message, images=(Image(b"x", 1, 1, alt="A <wet> street"),)),
    )
    html = drawn(pictured)

    assert f'src="pictures/{pictured.key}/0" alt="A &lt;wet&gt; street"' in html


def test_chinese_words_stand_around_english_labels():
    html = drawn(turn(SECOND), language="zh")

    assert "安抚" in html
    assert "羞愧" in html
    assert "肯定对方的优点和努力" in html
    ours = re.sub(r"<pre.*?</pre>", "", html)  # without what the model wrote
    assert not re.search(r"judged|Sentiment|Turn \d", ours)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, "+1"), (-1.0, "−1"), (0.0, "0"), (2.4, "+2.4"), (-0.126, "−0.126")],
)
def test_numbers_carry_a_sign_that_can_be_read(value, expected):
    assert signed(value) == expected
