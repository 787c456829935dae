"""The grammar of a turn: written and read back, whole or in pieces, and never misread."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compeer_core.errors import CompletionError
from compeer_core.reasoning import (
    LABELS,
    STEPS,
    EmotionStep,
    HistoryStep,
    LabelKnown,
    Part,
    PartFinished,
    PartStarted,
    Problem,
    ProblemKind,
    Reasoning,
    StrategyStep,
    StreamingParser,
    SupportTurn,
    TextWritten,
    TurnFinished,
    Unreadable,
    label_line,
    parse,
    part_of,
    read,
    render,
    render_step,
)
from compeer_core.taxonomy import (
    ESCONV_STRATEGIES,
    Emotion,
    Sentiment,
    Stage,
    Strategy,
    StrategyEntry,
    StrategyVocabulary,
    read_label,
)

TURN = SupportTurn(
    Reasoning(
        HistoryStep("They lost their job.\n\nIt came without warning.", Stage.EXPLORATION),
        EmotionStep("Worried about rent.", Sentiment.NEGATIVE, Emotion.ANXIETY, 4),
        StrategyStep("Name the worry first.", Strategy.REFLECTION),
    ),
    "That sounds frightening.\nI am with you.",
)
TEXT = """<history>They lost their job.

It came without warning.
Stage: Exploration</history>
<emotion>Worried about rent.
Sentiment: Negative
Emotion: Anxiety
Intensity: 4</emotion>
<strategy>Name the worry first.
Strategy: Reflection of Feelings</strategy>
<reply>That sounds frightening.
I am with you.</reply>"""

HISTORY = "<history>a\nStage: Action</history>"
EMOTION = "<emotion>b\nSentiment: Neutral\nEmotion: Neutral\nIntensity: 1</emotion>"
STRATEGY = "<strategy>c\nStrategy: Others</strategy>"
REPLY = "<reply>d</reply>"


def problems_of(text: str) -> list[str]:
    return [f"{problem.kind}:{problem.part or ''}" for problem in read(text).problems]


# --- One turn, by hand ------------------------------------------------------------------------


def test_a_turn_is_written_exactly_as_the_grammar_says():
    assert render(TURN) == TEXT


def test_a_written_turn_is_read_back():
    assert parse(TEXT) == TURN
    assert read(TEXT).is_complete
    assert read(TEXT).unreadable == ()


def test_one_step_is_written_without_its_tags():
    assert render_step(TURN.reasoning.emotion) == (
        "Worried about rent.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4"
    )


def test_the_events_of_a_turn():
    parser = StreamingParser()
    events = parser.feed(HISTORY + EMOTION + STRATEGY + REPLY) + parser.close()

    reading = read(HISTORY + EMOTION + STRATEGY + REPLY)
    assert events == [
        PartStarted(Part.HISTORY),
        TextWritten(Part.HISTORY, "a"),
        LabelKnown(Part.HISTORY, "stage", Stage.ACTION),
        PartFinished(Part.HISTORY, HistoryStep("a", Stage.ACTION)),
        PartStarted(Part.EMOTION),
        TextWritten(Part.EMOTION, "b"),
        LabelKnown(Part.EMOTION, "sentiment", Sentiment.NEUTRAL),
        LabelKnown(Part.EMOTION, "emotion", Emotion.NEUTRAL),
        LabelKnown(Part.EMOTION, "intensity", 1),
        PartFinished(Part.EMOTION, EmotionStep("b", Sentiment.NEUTRAL, Emotion.NEUTRAL, 1)),
        PartStarted(Part.STRATEGY),
        TextWritten(Part.STRATEGY, "c"),
        LabelKnown(Part.STRATEGY, "strategy", "Others"),
        PartFinished(Part.STRATEGY, StrategyStep("c", "Others")),
        PartStarted(Part.REPLY),
        TextWritten(Part.REPLY, "d"),
        PartFinished(Part.REPLY, "d"),
        TurnFinished(reading),
    ]


def test_text_is_passed_on_as_soon_as_it_can_be_told_from_a_tag_or_a_label():
    parser = StreamingParser()
    steps = [
        ("<history>Los", [PartStarted(Part.HISTORY), TextWritten(Part.HISTORY, "Los")]),
        ("t <", [TextWritten(Part.HISTORY, "t")]),  # may be a tag, and the space may be the end
        ("3\n", [TextWritten(Part.HISTORY, " <3")]),
        ("Sta", []),  # may be a label line
        ("ff left.\nS", [TextWritten(Part.HISTORY, "\nStaff left.")]),
        ("tage: Act", []),
        ("ion\n", [LabelKnown(Part.HISTORY, "stage", Stage.ACTION)]),
    ]

    assert [parser.feed(chunk) for chunk, _ in steps] == [events for _, events in steps]


# --- Three outcomes stay apart ----------------------------------------------------------------


def test_a_label_outside_the_vocabulary_is_unreadable_and_the_turn_complete():
    reading = read(TEXT.replace("Anxiety", "Worried sick").replace("4", "9"))

    assert reading.is_complete
    assert reading.turn.reasoning.emotion == EmotionStep(
        "Worried about rent.", Sentiment.NEGATIVE, Unreadable("Worried sick"), Unreadable("9")
    )
    assert [(one.part, one.name, one.text) for one in reading.unreadable] == [
        (Part.EMOTION, "emotion", "Worried sick"),
        (Part.EMOTION, "intensity", "9"),
    ]


def test_an_absent_label_line_is_unreadable_with_no_text():
    reading = read(TEXT.replace("\nStage: Exploration", ""))

    assert reading.is_complete
    assert reading.turn.reasoning.history.stage == Unreadable("")


def test_a_missing_part_makes_the_turn_incomplete_and_leaves_the_others_readable():
    reading = read(HISTORY + STRATEGY + REPLY)

    assert reading.problems == (Problem(ProblemKind.MISSING, Part.EMOTION),)
    assert reading.emotion is None
    assert reading.history == HistoryStep("a", Stage.ACTION)
    assert reading.steps == (reading.history, None, reading.strategy)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("Intensity: 5", 5),
        ("intensity : 5.", 5),
        ("  INTENSITY:5", 5),
        ("Intensity：5。", 5),
        ("Intensity: 0", Unreadable("0")),
        ("Intensity: 6", Unreadable("6")),
        ("Intensity: 4/5", Unreadable("4/5")),
        ("Intensity: 4.5", Unreadable("4.5")),
        ("Intensity: four", Unreadable("four")),
        ("Intensity: ４", Unreadable("４")),
        ("Intensity:", Unreadable("")),
    ],
)
def test_an_intensity_is_a_digit_from_one_to_five(line, value):
    reading = read(f"<emotion>x\n{line}</emotion>")

    assert reading.emotion is not None
    assert reading.emotion.intensity == value


def test_the_last_label_line_of_a_name_counts():
    reading = read("<history>a\nStage: Action\nStage: Comforting</history>")

    assert reading.history == HistoryStep("a", Stage.COMFORTING)


def test_text_after_a_label_line_is_still_text():
    reading = read("<history>a\nStage: Action\nb</history>")

    assert reading.history == HistoryStep("a\nb", Stage.ACTION)


def test_a_label_of_another_part_is_text():
    reading = read("<history>a\nEmotion: Joy\nStage: Action</history>")

    assert reading.history == HistoryStep("a\nEmotion: Joy", Stage.ACTION)


# --- What can be wrong with a text ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["missing:history", "missing:emotion", "missing:strategy", "missing:reply"]),
        (HISTORY + EMOTION + STRATEGY, ["missing:reply"]),
        (HISTORY + EMOTION + STRATEGY + "<reply></reply>", ["empty:reply"]),
        (HISTORY + EMOTION + STRATEGY + "<reply> \n </reply>", ["empty:reply"]),
        (HISTORY + EMOTION + "<strategy>Strategy: Others</strategy>" + REPLY, ["empty:strategy"]),
        (HISTORY + EMOTION + STRATEGY + "<reply>cut off", ["unclosed:reply"]),
        (HISTORY + EMOTION + STRATEGY + "<reply>cut off</rep", ["unclosed:reply"]),
        (HISTORY + EMOTION + "<strategy>x" + REPLY, ["unclosed:strategy"]),
        (HISTORY + EMOTION + STRATEGY + REPLY + REPLY, ["repeated:reply"]),
        (EMOTION + HISTORY + STRATEGY + REPLY, ["out_of_order:history"]),
        ("Sure! " + HISTORY + EMOTION + STRATEGY + REPLY, ["outside_text:"]),
        (HISTORY + "x" + EMOTION + "y" + STRATEGY + REPLY, ["outside_text:"]),
        (HISTORY + EMOTION + STRATEGY + REPLY + "</reply>", ["outside_text:"]),
        (HISTORY + EMOTION + STRATEGY + REPLY + "<|im_end|>", ["outside_text:"]),
        (
            HISTORY + EMOTION + STRATEGY + "<reply>d</emotion></reply>",
            ["unclosed:reply", "outside_text:"],
        ),
        (" \n" + HISTORY + "\t" + EMOTION + "\n\n" + STRATEGY + REPLY + "\n", []),
    ],
)
def test_what_is_wrong_is_named(text, problems):
    assert problems_of(text) == problems


@pytest.mark.parametrize("tag", ["<Reply>", "< reply>", "<reply >", "<REPLY>", "‹reply›"])
def test_only_the_exact_tag_counts(tag):
    assert "missing:reply" in problems_of(HISTORY + EMOTION + STRATEGY + tag + "d</reply>")


def test_a_part_that_is_cut_short_keeps_what_was_written():
    reading = read(HISTORY + "<emotion>worn ou")

    assert reading.emotion == EmotionStep("worn ou", Unreadable(), Unreadable(), Unreadable())
    assert reading.problems[0] == Problem(ProblemKind.UNCLOSED, Part.EMOTION)


def test_a_repeated_part_has_no_events_and_the_first_one_counts():
    parser = StreamingParser()
    events = parser.feed("<reply>one</reply><reply>two</reply>") + parser.close()

    assert [event for event in events if isinstance(event, TextWritten)] == [
        TextWritten(Part.REPLY, "one")
    ]
    assert parser.finish().reply == "one"


def test_an_empty_part_finishes_without_content_and_with_its_labels():
    parser = StreamingParser()

    assert parser.feed("<strategy>\nStrategy: Question</strategy>") == [
        PartStarted(Part.STRATEGY),
        LabelKnown(Part.STRATEGY, "strategy", "Question"),
        PartFinished(Part.STRATEGY, None),
    ]


def test_an_incomplete_turn_is_an_error_that_keeps_the_text():
    with pytest.raises(
        CompletionError, match="<reply> is not closed; <emotion> is missing"
    ) as caught:
        parse(HISTORY + STRATEGY + "<reply>d")

    assert caught.value.text == HISTORY + STRATEGY + "<reply>d"
    assert set(caught.value.problems) == {"<emotion> is missing", "<reply> is not closed"}


def test_a_closed_parser_takes_no_more_text():
    parser = StreamingParser()
    parser.feed(TEXT)
    first = parser.close()

    assert parser.close() == first[-1:]
    with pytest.raises(RuntimeError, match="closed"):
        parser.feed("x")


# --- Values that could not be read back are refused -------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "x ",
        "\nx",
        "a <reply> b",
        "a</history>",
        "a\nStage: Action",
        "stage : ",
        "Stage：x",
    ],
)
def test_free_text_that_could_not_be_read_back_is_refused(text):
    with pytest.raises(ValueError, match="history"):
        HistoryStep(text, Stage.ACTION)


@pytest.mark.parametrize("reply", ["", " a", "a </reply>", "<history>"])
def test_a_reply_that_could_not_be_read_back_is_refused(reply):
    with pytest.raises(ValueError, match="reply"):
        SupportTurn(TURN.reasoning, reply)


@pytest.mark.parametrize("text", [" x", "a\nb", "<reply>"])
def test_an_unreadable_label_is_one_plain_line(text):
    with pytest.raises(ValueError, match="must be one line"):
        Unreadable(text)


@pytest.mark.parametrize("stage", ["Exploration", "Explore", None, Unreadable("action")])
def test_a_stage_is_a_member_or_cannot_be_read(stage):
    with pytest.raises(ValueError, match="stage"):
        HistoryStep("x", stage)


@pytest.mark.parametrize("intensity", [0, 6, True, 2.0, "3", Unreadable("3")])
def test_an_intensity_is_a_number_of_the_scale_or_cannot_be_read(intensity):
    with pytest.raises(ValueError, match="intensity"):
        EmotionStep("x", Sentiment.NEUTRAL, Emotion.NEUTRAL, intensity)


@pytest.mark.parametrize("strategy", ["", " Question", "a\nb", "<reply>"])
def test_a_strategy_is_a_name_that_can_stand_on_a_line(strategy):
    with pytest.raises(ValueError, match=r"strategy|one line"):
        StrategyStep("x", strategy)


def test_another_vocabulary_is_read_when_it_is_given():
    own = StrategyVocabulary((StrategyEntry("Listening", "e", "z"),))
    turn = SupportTurn(
        Reasoning(TURN.reasoning.history, TURN.reasoning.emotion, StrategyStep("x", "Listening")),
        "y",
    )

    assert parse(render(turn), own) == turn
    assert parse(render(turn)).reasoning.strategy.strategy == Unreadable("Listening")


def test_parts_labels_and_steps_belong_together():
    assert tuple(part_of(step) for step in TURN.reasoning) == STEPS
    for step in TURN.reasoning:
        assert all(hasattr(step, name) for name in LABELS[part_of(step)])
    assert (Part.REPLY.opening, Part.REPLY.closing) == ("<reply>", "</reply>")
    assert label_line("intensity", 3) == "Intensity: 3"


# --- Properties -------------------------------------------------------------------------------

# Texts made of the pieces that matter, so that tags, labels and half of either are common.
PIECES = (
    *(tag for part in Part for tag in (part.opening, part.closing)),
    *(f"{name.capitalize()}:" for part in Part for name in LABELS[part]),
    *(
        "<",
        ">",
        "/",
        "</",
        "<his",
        "tory>",
        "Sta",
        "ge",
        ":",
        "：",
        "\n",
        " ",
        "\t",
        "\r",
        "\u3000",
    ),
    *("\u2028", "\x1c", "\x85", "Action", "Joy", "negative.", "3", "Question", "a", "我", "\ud800"),
)
grammatical = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
any_text = st.text() | grammatical | st.tuples(grammatical, st.text(), grammatical).map("".join)


def made(build, *arguments):
    """Values of a constructor, without those it refuses."""

    def attempt(values):
        try:
            return build(*values)
        except ValueError:
            return None

    return st.tuples(*arguments).map(attempt).filter(lambda value: value is not None)


free_text = (st.text() | grammatical).map(str.strip)
unreadable = made(Unreadable, (st.just("") | st.text() | grammatical).map(str.strip))
histories = made(HistoryStep, free_text, st.sampled_from(Stage) | unreadable)
emotions = made(
    EmotionStep,
    free_text,
    st.sampled_from(Sentiment) | unreadable,
    st.sampled_from(Emotion) | unreadable,
    st.integers(1, 5) | unreadable,
)
strategies = made(
    StrategyStep,
    free_text,
    st.sampled_from(ESCONV_STRATEGIES.names)
    | unreadable.filter(lambda label: read_label(Strategy, label.text) is None),
)
turns = made(SupportTurn, st.builds(Reasoning, histories, emotions, strategies), free_text)


@given(turns)
def test_every_turn_that_can_exist_is_read_back(turn):
    assert parse(render(turn)) == turn


@given(any_text)
@example("<history>\u3000Stage: x")
@example("<history>\rStage: x</history>")
@example("<emotion>\nEmotion\n:</emotion>")
def test_reading_never_raises_and_parsing_raises_only_its_own_error(text):
    reading = read(text)

    assert reading.raw == text
    try:
        assert parse(text) == reading.turn
    except CompletionError as error:
        assert not reading.is_complete
        assert error.text == text
        assert error.problems
    else:
        assert reading.is_complete


def coalesce(events):
    """Join consecutive text events of one part."""
    joined = []
    for event in events:
        last = joined[-1] if joined else None
        both_texts = isinstance(event, TextWritten) and isinstance(last, TextWritten)
        if both_texts and last.part is event.part:
            joined[-1] = TextWritten(event.part, last.text + event.text)
        else:
            joined.append(event)
    return joined


@given(any_text, st.lists(st.integers(0, 200), max_size=30))
def test_however_a_text_is_cut_its_events_are_the_same(text, cuts):
    whole = StreamingParser()
    expected = coalesce(whole.feed(text) + whole.close())

    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = StreamingParser()
    events = []
    for start, end in itertools.pairwise(borders):
        events += pieces.feed(text[start:end])
    events += pieces.close()

    assert coalesce(events) == expected
    assert events[-1] == TurnFinished(read(text))


@given(any_text)
def test_what_is_read_can_be_written_and_read_again(text):
    reading = read(text)
    steps = [step for step in reading.steps if step is not None]
    rendered = [
        f"{part_of(step).opening}{render_step(step)}{part_of(step).closing}" for step in steps
    ]

    again = read("".join(rendered))

    assert [step for step in again.steps if step is not None] == steps


@given(any_text)
def test_events_add_up_to_the_reading(text):
    parser = StreamingParser()
    events = coalesce(parser.feed(text) + parser.close())

    finished = {event.part: event.content for event in events if isinstance(event, PartFinished)}
    started = [event.part for event in events if isinstance(event, PartStarted)]
    reading = events[-1].reading
    assert started == list(finished)
    assert len(set(started)) == len(started)
    for part, value in zip(Part, (*reading.steps, reading.reply), strict=True):
        assert finished.get(part) == value
        written = "".join(
            event.text for event in events if isinstance(event, TextWritten) and event.part is part
        )
        assert written == (getattr(value, "text", value) or "")
        known = {
            event.name: event.value
            for event in events
            if isinstance(event, LabelKnown) and event.part is part
        }
        if value is not None:
            assert known == {name: getattr(value, name) for name in LABELS[part]}


@given(st.lists(st.sampled_from(list(Part)), unique=True))
def test_a_turn_is_complete_exactly_if_all_parts_are_there_in_order(parts):
    texts = dict(zip(Part, (HISTORY, EMOTION, STRATEGY, REPLY), strict=True))

    assert read("".join(texts[part] for part in parts)).is_complete == (parts == list(Part))
