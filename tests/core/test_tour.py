"""The tour's recordings: what is kept of them, how they are made, and that they are true."""

import datetime
import importlib.metadata
import json
import shutil
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS
from compeer_core.registry import Registry
from compeer_core.tour.__main__ import main
from compeer_core.tour.contents import Tally, Tour, load_tour
from compeer_core.tour.figures import FigureList, PaperFigure, load_figures
from compeer_core.tour.plan import ASSETS, FOLDER, Notes, Plan
from compeer_core.tour.recorder import Recorder, first_difference
from compeer_core.tour.recordings import StepJudged, load_recording, load_recordings, origin_of

MODELS = ASSETS / "models.toml"
RECORDINGS = load_recordings(FOLDER)
names = [one.file_name for one in RECORDINGS]
COMPLETE = (
    "<history>The seeker fears an exam.\nStage: Exploration</history>\n"
    "<emotion>Tense.\nSentiment: Negative\nEmotion: Fear\nIntensity: 4</emotion>\n"
    "<strategy>Ask.\nStrategy: Question</strategy>\n<reply>What worries you most?</reply>"
)


# --- what is shipped ------------------------------------------------------------------------------


@cache
def files_of(name, kind):
    """The hashes of a shipped model's files, which are large."""
    entry = Registry.from_toml(MODELS).entry(name, kind)
    return origin_of(entry, ASSETS, shipped=True).files


@pytest.mark.parametrize("recording", RECORDINGS, ids=names)
def test_a_recording_names_the_very_files_that_are_shipped(recording):
    assert recording.judged is not None
    assert files_of(recording.judged.judge.name, "judge") == recording.judged.judge.files
    if not recording.model.shipped:
        assert recording.stage in {"base", "por"}
        assert recording.model.card == ""
        return
    assert files_of(recording.model.name, "policy") == recording.model.files
    assert (ASSETS / recording.model.card).is_file()


def test_base_is_recorded_from_other_weights_than_what_was_trained_from_it():
    weights = {one.stage: one.model.files[one.model.weights] for one in RECORDINGS}

    assert weights["base"] != weights["sft"]


def test_situations_are_the_starters_of_the_chat_and_the_seed_is_the_plans():
    plan = load_toml(FOLDER / "plan.toml", Plan)
    for language in ("en", "zh"):
        path = ASSETS / "texts" / language / "page.toml"
        chat = tomllib.loads(path.read_text(encoding="utf-8"))["chat"]
        starters = [chat[f"starter_{number}"] for number in (1, 2, 3)]
        assert [case.said.in_language(language) for case in plan.cases] == starters
    assert {one.sampling.seed for one in RECORDINGS} == {plan.seed}


def test_every_note_is_about_the_words_that_are_recorded():
    by_name = {(one.case, one.stage): one.text_hash for one in RECORDINGS}
    notes = load_toml(FOLDER / "notes.toml", Notes).notes

    stale = [
        (note.case, note.stage) for note in notes if by_name[note.case, note.stage] != note.text
    ]
    assert stale == [], "read the new recordings, and write new notes"


def test_every_step_that_is_shown_has_been_read():
    tour = load_tour()
    shown = tour.plan.shown
    for case in tour.plan.cases:
        recording = tour.recording(case, shown)
        assert all(tour.opinion(recording, part) for part in STEPS), recording.file_name
    counted = tour.tally(shown)
    opinion = tour.opinion(
        tour.recordings[tour.plan.close_up.case, tour.plan.close_up.stage], tour.plan.close_up.part
    )

    assert counted.steps == 9
    assert opinion is not None
    assert not opinion.right


def test_tally_counts_by_hand():
    tour = load_tour()

    def judged_as(*correct: bool) -> Tour:
        """The tour with these verdicts on the first case, and no other case."""
        recording = tour.recordings["job", "sft"]
        assert recording.judged is not None
        steps = tuple(
            StepJudged(part=part, correct=one) for part, one in zip(STEPS, correct, strict=True)
        )
        judged = recording.judged.model_copy(update={"steps": steps})
        plan = tour.plan.model_copy(update={"cases": (tour.plan.case("job"),)})
        recordings = {("job", "sft"): recording.model_copy(update={"judged": judged})}
        return replace(tour, plan=plan, recordings=recordings)

    # The reader calls history and emotion wrong, and strategy right.
    assert judged_as(True, True, True).tally("sft") == Tally(3, 2, 0, 0)
    assert judged_as(False, True, True).tally("sft") == Tally(3, 2, 1, 0)
    assert judged_as(False, False, False).tally("sft") == Tally(3, 2, 2, 1)


def test_shipped_models_say_the_same_again():
    """Bits may differ between processors and versions of torch; the beginning may not."""
    kept = load_recording(FOLDER / "job.sft.json")
    plan = load_toml(FOLDER / "plan.toml", Plan)
    recorder = Recorder(plan, MODELS)
    again = next(iter(recorder.again(plan.stage("sft"))))
    recorder.close()
    assert kept.judged is not None
    assert again.judged is not None

    assert again.model == kept.model
    assert again.sampling == kept.sampling
    if kept.versions["torch"] == importlib.metadata.version("torch"):
        assert again.raw == kept.raw
    else:
        assert again.raw[:24] == kept.raw[:24]
    if again.raw == kept.raw:
        for now, then in zip(again.judged.steps, kept.judged.steps, strict=True):
            assert (now.part, now.correct) == (then.part, then.correct)
            assert now.probability_correct == pytest.approx(then.probability_correct, abs=2e-3)


# --- numbers --------------------------------------------------------------------------------------


def test_figures_are_those_of_the_results():
    tour = load_tour()
    result = json.loads((ASSETS / "results" / "esconv_nano.json").read_text(encoding="utf-8"))
    metric = next(
        one
        for one in result["metrics"]
        if (one["name"], one["of"]) == ("complete", "policy, sampled")
    )

    assert tour.figures["complete"].value == metric["value"]
    assert tour.figures["complete"].n == metric["n"]
    assert tour.figures["complete"].file == "results/esconv_nano.json"
    assert all(isinstance(one, PaperFigure) for one in tour.paper.values())
    assert not set(tour.figures) & set(tour.paper)
    # a file that compares several: the model is the one whose number it is
    assert tour.figures["judge_order_history"].model == "unifireward-small"


@pytest.mark.parametrize(
    "change", [{"metric": "no such"}, {"file": "none.json"}, {"of": "somebody"}, {"about": "x"}]
)
def test_a_figure_that_is_not_there_is_an_error(change):
    listed = load_toml(FOLDER / "figures.toml", FigureList)
    source = listed.figures[0].model_copy(update=change)

    with pytest.raises(ConfigError, match="complete"):
        load_figures(listed.model_copy(update={"figures": (source,)}), ASSETS)


# --- recording ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan of one situation and two stages, and scripted models for one of them."""
    (tmp_path / "turns.toml").write_text(f"[[turns]]\ntext = '''{COMPLETE}'''\n", encoding="utf-8")
    verdicts = ["{ True = 0.9, False = 0.1 }", "{ True = 0.2, False = 0.8 }"]
    answers = ", ".join([*verdicts, verdicts[0]])
    (tmp_path / "judge.toml").write_text(f"answers = [{answers}]\n", encoding="utf-8")
    (tmp_path / "models.toml").write_text(
        '[[models]]\nname = "trained"\nkind = "policy"\nsource = "scripted:turns.toml"\n'
        '[[models]]\nname = "judge"\nkind = "judge"\nsource = "scripted:judge.toml"\n',
        encoding="utf-8",
    )
    (tmp_path / "tour").mkdir()
    (tmp_path / "tour" / "plan.toml").write_text(
        """
seed = 7
shown = "after"
close_up = { case = "exam", stage = "after", part = "emotion" }
[[cases]]
name = "exam"
title = { en = "Exam", zh = "考试" }
said = { en = "I fear the exam.", zh = "我怕考试。" }
[[stages]]
name = "before"
model = "untrained"
shipped = false
title = { en = "Before", zh = "之前" }
what = { en = "Nothing.", zh = "无。" }
[[stages]]
name = "after"
model = "trained"
title = { en = "After", zh = "之后" }
what = { en = "All.", zh = "全部。" }
""",
        encoding="utf-8",
    )
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    return main(
        [*arguments, "--folder", str(folder / "tour"), "--models", str(folder / "models.toml")]
    )


def test_one_command_records_what_there_is_and_says_what_is_missing(folder, capsys):
    assert run(folder, "record") == 0
    told = capsys.readouterr().out
    recording = load_recording(folder / "tour" / "exam.after.json")

    assert "exam.after.json: recorded" in told
    assert "before: no model 'untrained' is listed" in told
    assert recording.raw == COMPLETE
    assert recording.said == "I fear the exam."
    assert recording.sampling.seed == 7
    assert recording.date == datetime.datetime.now(datetime.UTC).date()
    assert recording.judged is not None
    assert [step.correct for step in recording.judged.steps] == [True, False, True]
    assert (recording.judged.total, recording.judged.maximum) == (2, 4)


def test_words_stay_and_are_judged_anew_where_the_weights_are_not_at_hand(folder):
    run(folder, "record")
    path = folder / "tour" / "exam.after.json"
    before = load_recording(path)
    models = (folder / "models.toml").read_text(encoding="utf-8")
    (folder / "models.toml").write_text(models.replace('"trained"', '"gone"'), encoding="utf-8")
    answers = ", ".join(["{ True = 0.3, False = 0.7 }"] * 3)
    (folder / "judge.toml").write_text(f"answers = [{answers}]\n", encoding="utf-8")
    assert run(folder, "record") == 0
    after = load_recording(path)

    assert after.raw == before.raw
    assert after.model == before.model
    assert after.judged is not None
    assert before.judged is not None
    assert [step.correct for step in after.judged.steps] == [False, False, False]
    assert after.judged.judge.files != before.judged.judge.files


def test_a_turn_without_steps_costs_all_points_and_no_judge_is_asked(folder):
    (folder / "turns.toml").write_text('[[turns]]\ntext = "I see."\n', encoding="utf-8")
    run(folder, "record")
    judged = load_recording(folder / "tour" / "exam.after.json").judged

    assert judged is not None
    assert not judged.asked
    assert judged.steps == ()
    assert judged.total == -judged.maximum


def test_check_finds_a_text_that_is_no_longer_written(folder, capsys):
    run(folder, "record")
    assert run(folder, "check") == 0
    other = COMPLETE.replace("Tense", "Tired")
    (folder / "turns.toml").write_text(f"[[turns]]\ntext = '''{other}'''\n", encoding="utf-8")
    assert run(folder, "check") == 1
    at = first_difference(COMPLETE, other)

    assert f"different text from character {at} on" in capsys.readouterr().out


def test_kept_words_do_not_answer_another_message(folder, capsys):
    run(folder, "record")
    models = (folder / "models.toml").read_text(encoding="utf-8")
    (folder / "models.toml").write_text(models.replace('"trained"', '"gone"'), encoding="utf-8")
    plan = folder / "tour" / "plan.toml"
    text = plan.read_text(encoding="utf-8").replace("I fear the exam.", "I fear the dentist.")
    plan.write_text(text, encoding="utf-8")

    assert run(folder, "record") == 2
    assert "--weights after=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--weights", "nowhere"], "not STAGE=FOLDER"),
        (["--weights", "unknown=."], "no such stage"),
        (["--judge", "nobody"], "unknown model 'nobody'"),
        (["--folder", "/nowhere"], "cannot be read"),
        (["--colour"], "--help explains"),
    ],
)
def test_a_wrong_flag_is_one_sentence(folder, capsys, flags, said):
    assert run(folder, "record", *flags) == 2 if "--folder" not in flags else True
    if "--folder" in flags:
        assert main(["record", *flags]) == 2

    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_damaged_recording_is_named(folder):
    run(folder, "record")
    path = folder / "tour" / "exam.after.json"
    shutil.copy(path, folder / "tour" / "exam.other.json")
    with pytest.raises(ConfigError, match=r"requires the name exam\.after\.json"):
        load_recordings(folder / "tour")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"exam\.after\.json: "):
        load_recording(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('shown = "after"', 'shown = "never"'),
        ('part = "emotion"', 'part = "reply"'),
        ('case = "exam", stage', 'case = "none", stage'),
        ('name = "before"', 'name = "after"'),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(folder, old, new):
    plan = folder / "tour" / "plan.toml"
    plan.write_text(plan.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")

    with pytest.raises(ConfigError):
        load_toml(plan, Plan)
