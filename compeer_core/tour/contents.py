"""The contents of the tour, read from its files and checked against each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, Part
from compeer_core.tour.figures import Figure, FigureList, PaperFigure, load_figures
from compeer_core.tour.plan import ASSETS, FOLDER, Case, Note, Notes, Opinion, Plan, Stage, Words
from compeer_core.tour.recordings import Recording, load_recordings


@dataclass(frozen=True)
class Tally:
    """Verdicts of the reader and the judge on the same steps."""

    steps: int
    wrong: int
    """Steps that the reader calls incorrect."""
    noticed: int
    """How many of those the judge also calls incorrect."""
    false_alarms: int
    """Steps that only the judge calls incorrect."""


@dataclass(frozen=True)
class Tour:
    """The contents of the tour."""

    plan: Plan
    recordings: Mapping[tuple[str, str], Recording]
    """By case and stage."""
    notes: Mapping[tuple[str, str], Note]
    """Those about the recorded text."""
    read_by: Words
    figures: Mapping[str, Figure]
    paper: Mapping[str, PaperFigure]
    paper_address: str

    def stages(self) -> list[Stage]:
        """Return the stages with recordings of every case, in the order of training."""
        return [
            stage
            for stage in self.plan.stages
            if all((case.name, stage.name) in self.recordings for case in self.plan.cases)
        ]

    def missing_stages(self) -> list[Stage]:
        """Return the planned stages without recordings."""
        there = self.stages()
        return [stage for stage in self.plan.stages if stage not in there]

    def recording(self, case: Case, stage: str) -> Recording:
        """Return a recording.

        Raises:
            ConfigError: There is none.
        """
        recording = self.recordings.get((case.name, stage))
        if recording is None:
            raise ConfigError(f"the tour has no recording of case {case.name!r}, stage {stage!r}")
        return recording

    def opinion(self, recording: Recording, part: Part) -> Opinion | None:
        """Return the reader's comment on a recorded step."""
        note = self.notes.get((recording.case, recording.stage))
        steps: Iterable[Opinion] = note.steps if note else ()
        return next((opinion for opinion in steps if opinion.part == part), None)

    def tally(self, stage: str) -> Tally:
        """Compare the judge's verdicts with the reader's over the cases of a stage."""
        both = [
            (opinion.right, judged.correct)
            for case in self.plan.cases
            for recording in [self.recording(case, stage)]
            for part in STEPS
            if (opinion := self.opinion(recording, part)) is not None
            and recording.judged is not None
            and (judged := recording.judged.step(part)) is not None
        ]
        return Tally(
            steps=len(both),
            wrong=sum(not right for right, _ in both),
            noticed=sum(not right and correct is False for right, correct in both),
            false_alarms=sum(right and correct is False for right, correct in both),
        )


def load_tour(folder: Path = FOLDER, assets: Path = ASSETS) -> Tour:
    """Read the tour.

    Raises:
        ConfigError: A file is missing, invalid, or inconsistent with the others.
    """
    plan = load_toml(folder / "plan.toml", Plan)
    notes = load_toml(folder / "notes.toml", Notes)
    listed = load_toml(folder / "figures.toml", FigureList)
    recordings = {
        (recording.case, recording.stage): recording for recording in load_recordings(folder)
    }
    for case in plan.cases:
        for stage in plan.stages:
            recording = recordings.get((case.name, stage.name))
            if recording is not None and recording.said != case.said.en:
                raise ConfigError(
                    f"{folder / recording.file_name}: plan.toml has another message; record the case again"
                )
        if (case.name, plan.shown) not in recordings:
            raise ConfigError(f"{folder}: there is no recording {case.name}.{plan.shown}.json")
    return Tour(
        plan=plan,
        recordings=recordings,
        notes={
            (note.case, note.stage): note
            for note in notes.notes
            if (recording := recordings.get((note.case, note.stage))) is not None
            and recording.text_hash == note.text
        },
        read_by=notes.by,
        figures=load_figures(listed, assets),
        paper={figure.name: figure for figure in listed.paper},
        paper_address=listed.paper_address,
    )
