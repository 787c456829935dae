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
from compeer_core.reasoning import STEPS, Part
from compeer_core.registry import Registry
from compeer_core.tour.__main__ import main
from compeer_core.tour.contents import Tally, Tour, load_tour
from compeer_core.tour.figures import FigureList, PaperFigure, load_figures
from compeer_core.tour.plan import ASSETS, FOLDER, Note, Notes, Opinion, Plan, Words
from compeer_core.tour.recorder import Recorder, first_difference
from compeer_core.tour.recordings import (
    StepJudged,
    load_recording,
    load_recordings,
    origin_of,
    save_recording,
)

MODELS = ASSETS / "models.toml"
RECORDINGS = load_recordings(FOLDER)
names = [one.file_name for one in RECORDINGS]
WORDS = Words(en="Because.", zh="因为。")
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
    return origin_of(entry, ASSETS).files


@pytest.mark.parametrize("recording", RECORDINGS, ids=names)
def test_a_recording_names_the_very_files_that_are_shipped(recording):
    assert recording.judged is not None
    assert files_of(recording.judged.judge.name, "judge") == recording.judged.judge.files
    if recording.model.shipped:
        assert files_of(recording.model.name, "policy") == recording.model.files
        assert (ASSETS / recording.model.card).is_file()
    else:
        assert recording.model.card == ""


def test_situations_begin_with_the_starters_of_the_chat_and_the_seed_is_the_plans():
    plan = load_toml(FOLDER / "plan.toml", Plan)
    for language in ("en", "zh"):
        path = ASSETS / "texts" / language / "page.toml"
        chat = tomllib.loads(path.read_text(encoding="utf-8"))["chat"]
        starters = [chat[f"starter_{number}"] for number in (1, 2, 3)]
        assert [case.said.in_language(language) for case in plan.cases][:3] == starters
    assert {one.sampling.seed for one in RECORDINGS} == {plan.seed}


def test_every_note_is_about_the_words_that_are_recorded():
    by_name = {(one.case, one.stage): one.text_hash for one in RECORDINGS}
    notes = load_toml(FOLDER / "notes.toml", Notes).notes

    stale = [
        (note.case, note.stage) for note in notes if by_name[note.case, note.stage] != note.text
    ]
    assert stale == [], "read the new recordings, and write new notes"


def test_every_part_of_the_newest_turns_has_been_read():
    tour = load_tour()

    for recording in tour.newest():
        assert all(tour.opinion(recording, part) for part in Part), recording.file_name
    assert tour.tally().steps == len(STEPS) * len(tour.plan.cases)


NONE_WRONG = dict.fromkeys(Part, True)


def read_as(opinions: dict[str, dict[Part, bool]], judged: dict[Part, bool] = NONE_WRONG) -> Tour:
    """The tour with these verdicts of the reader by case, and of the judge on every turn."""
    tour = load_tour()
    stage = tour.stages()[-1].name
    steps = tuple(StepJudged(part=part, correct=judged[part]) for part in STEPS)
    recordings, notes = dict(tour.recordings), {}
    for case, verdicts in opinions.items():
        recording = recordings[case, stage]
        assert recording.judged is not None
        recordings[case, stage] = recording.model_copy(
            update={"judged": recording.judged.model_copy(update={"steps": steps})}
        )
        parts = tuple(
            Opinion(part=part, right=right, why=WORDS) for part, right in verdicts.items()
        )
        notes[case, stage] = Note(
            case=case, stage=stage, text=recording.text_hash, summary=WORDS, parts=parts
        )
    cases = tuple(tour.plan.case(case) for case in opinions)
    plan = tour.plan.model_copy(update={"cases": cases})
    return replace(tour, plan=plan, recordings=recordings, notes=notes)


def test_tally_counts_by_hand():
    opinions = {"job": {**NONE_WRONG, Part.HISTORY: False, Part.EMOTION: False}}

    def tally(*correct: bool) -> Tally:
        return read_as(opinions, dict(zip(STEPS, correct, strict=True))).tally()

    assert tally(True, True, True) == Tally(3, 2, 0, 0)
    assert tally(False, True, True) == Tally(3, 2, 1, 0)
    assert tally(False, False, False) == Tally(3, 2, 2, 1)


def test_success_and_failure_follow_the_rule_and_not_a_choice():
    wrong_reply = {**NONE_WRONG, Part.REPLY: False}
    wrong_step = {**NONE_WRONG, Part.STRATEGY: False}
    tour = read_as({"job": wrong_reply, "friend": wrong_step, "exam": NONE_WRONG})

    assert [one.case for one in tour.successes()] == ["exam"]
    assert [(one.case, part) for one, part in tour.failures()] == [
        ("friend", Part.STRATEGY),  # a step goes before a reply
        ("job", Part.REPLY),
    ]
    assert read_as({"job": {}}).successes() == []  # nobody has read it


def test_shipped_models_say_the_same_again():
    """Bits may differ between processors and versions of torch; the beginning may not."""
    kept = next(one for one in reversed(load_tour().newest()) if one.model.shipped)
    recorder = Recorder(load_toml(FOLDER / "plan.toml", Plan), MODELS)
    again = recorder.again(kept)
    assert again is not None
    again = recorder.judged(again)
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
    result = json.loads((ASSETS / "results" / "reading_small.json").read_text(encoding="utf-8"))
    metric = next(
        one
        for one in result["metrics"]
        if (one["name"], one["of"]) == ("answers the message", "compeer-small-2")
    )
    figure = tour.figures["answers_before"]

    assert (figure.value, figure.n) == (metric["value"], metric["n"])
    assert figure.file == "results/reading_small.json"
    # a file that compares several: the model is the one whose number it is
    assert figure.model == "compeer-small-2"
    assert all(isinstance(one, PaperFigure) for one in tour.paper.values())
    assert not set(tour.figures) & set(tour.paper)


@pytest.mark.parametrize(
    "change", [{"metric": "no such"}, {"file": "none.json"}, {"of": "somebody"}, {"about": "x"}]
)
def test_a_figure_that_is_not_there_is_an_error(change):
    listed = load_toml(FOLDER / "figures.toml", FigureList)
    source = listed.figures[0].model_copy(update=change)

    with pytest.raises(ConfigError, match="answers_before"):
        load_figures(listed.model_copy(update={"figures": (source,)}), ASSETS)


# --- recording ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan of one situation and two stages, and a scripted model and judge."""
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
[[cases]]
name = "exam"
title = { en = "Exam", zh = "考试" }
said = { en = "I fear the exam.", zh = "我怕考试。" }
[[stages]]
name = "before"
title = { en = "Before", zh = "之前" }
what = { en = "Nothing.", zh = "无。" }
[[stages]]
name = "after"
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


def test_one_command_records_a_stage_from_a_listed_model(folder, capsys):
    assert run(folder, "record", "after=trained") == 0
    told = capsys.readouterr().out
    recording = load_recording(folder / "tour" / "exam.after.json")

    assert told == "exam.after.json: recorded from trained\nexam.after.json: judged\n"
    assert recording.raw == COMPLETE
    assert recording.said == "I fear the exam."
    assert recording.command == "python -m compeer_core.tour record after=trained"
    assert recording.sampling.seed == 7
    assert recording.date == datetime.datetime.now(datetime.UTC).date()
    assert recording.judged is not None
    assert [step.correct for step in recording.judged.steps] == [True, False, True]
    assert (recording.judged.total, recording.judged.maximum) == (2, 4)


@pytest.mark.parametrize(("old", "new"), [('"trained"', '"gone"'), ("turns.toml", "other.toml")])
def test_words_stay_and_are_judged_anew_where_the_weights_are_not_listed_any_more(
    folder, capsys, old, new
):
    run(folder, "record", "after=trained")
    path = folder / "tour" / "exam.after.json"
    before = load_recording(path)
    models = (folder / "models.toml").read_text(encoding="utf-8")
    (folder / "models.toml").write_text(models.replace(old, new), encoding="utf-8")
    (folder / "other.toml").write_text('[[turns]]\ntext = "I see."\n', encoding="utf-8")
    answers = ", ".join(["{ True = 0.3, False = 0.7 }"] * 3)
    (folder / "judge.toml").write_text(f"answers = [{answers}]\n", encoding="utf-8")
    assert run(folder, "record") == 0
    after = load_recording(path)

    assert after.raw == before.raw
    assert (before.model.shipped, after.model.shipped) == (True, False)
    assert after.model.files == before.model.files
    assert after.judged is not None
    assert before.judged is not None
    assert [step.correct for step in after.judged.steps] == [False, False, False]
    assert after.judged.judge.files != before.judged.judge.files
    capsys.readouterr()
    assert run(folder, "check") == 0
    assert "its weights are not listed any more" in capsys.readouterr().out


def test_a_turn_without_steps_costs_all_points_and_no_judge_is_asked(folder):
    (folder / "turns.toml").write_text('[[turns]]\ntext = "I see."\n', encoding="utf-8")
    run(folder, "record", "after=trained")
    judged = load_recording(folder / "tour" / "exam.after.json").judged

    assert judged is not None
    assert not judged.asked
    assert judged.steps == ()
    assert judged.total == -judged.maximum


def test_check_finds_a_text_that_is_no_longer_written(folder, capsys):
    run(folder, "record", "after=trained")
    assert run(folder, "check") == 0
    path = folder / "tour" / "exam.after.json"
    kept = load_recording(path)
    other = COMPLETE.replace("Tense", "Tired")
    save_recording(kept.model_copy(update={"raw": other}), folder / "tour")
    assert run(folder, "check") == 1
    at = first_difference(COMPLETE, other)

    assert f"different text from character {at} on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["after"], "not STAGE=MODEL"),
        (["never=trained"], "plan.toml has no stage 'never', only before, after"),
        (["after=nobody"], "unknown model 'nobody'"),
        (["after=trained", "--judge", "nobody"], "unknown model 'nobody'"),
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
    run(folder, "record", "after=trained")
    path = folder / "tour" / "exam.after.json"
    shutil.copy(path, folder / "tour" / "exam.other.json")
    with pytest.raises(ConfigError, match=r"requires the name exam\.after\.json"):
        load_recordings(folder / "tour")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"exam\.after\.json: "):
        load_recording(path)


def test_a_plan_that_names_two_stages_alike_is_refused(folder):
    plan = folder / "tour" / "plan.toml"
    text = plan.read_text(encoding="utf-8").replace('name = "before"', 'name = "after"')
    plan.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="duplicate name"):
        load_toml(plan, Plan)


@pytest.mark.parametrize("said", ["I fear the dentist.", None])
def test_a_recording_of_another_message_or_case_is_refused(tmp_path, said):
    folder = shutil.copytree(FOLDER, tmp_path / "tour")
    kept = load_recordings(folder)[0]
    change = {"said": said} if said else {"case": "other"}
    save_recording(kept.model_copy(update=change), folder)

    with pytest.raises(ConfigError, match="another message, or no such case"):
        load_tour(folder)


def test_a_tour_without_a_whole_stage_is_refused(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "tour")
    for path in folder.glob("job.*.json"):
        path.unlink()

    with pytest.raises(ConfigError, match=r"no stage .* has recordings of all its cases"):
        load_tour(folder)
