"""The contents of the tour, read from its files and checked against each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, Part
from compeer_core.tour.figures import Figure, FigureList, PaperFigure, load_figures
from compeer_core.tour.plan import ASSETS, FOLDER, Note, Notes, Opinion, Plan, Stage, Words
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
        """Return the stages with recordings of every case, in the order of their making."""
        return [
            stage
            for stage in self.plan.stages
            if all((case.name, stage.name) in self.recordings for case in self.plan.cases)
        ]

    def turns(self, stage: str) -> list[Recording]:
        """Return the recordings of a stage, in the order of the cases."""
        return [self.recordings[case.name, stage] for case in self.plan.cases]

    def newest(self) -> list[Recording]:
        """Return the recordings of the last stage."""
        return self.turns(self.stages()[-1].name)

    def opinion(self, recording: Recording, part: Part) -> Opinion | None:
        """Return the reader's comment on a recorded step or reply."""
        note = self.notes.get((recording.case, recording.stage))
        parts: Iterable[Opinion] = note.parts if note else ()
        return next((opinion for opinion in parts if opinion.part == part), None)

    def successes(self) -> list[Recording]:
        """Return the newest turns in which the reader calls every step and the reply correct."""
        return [turn for turn in self.newest() if all(self._is_right(turn, part) for part in Part)]

    def failures(self) -> list[tuple[Recording, Part]]:
        """Return what the reader calls incorrect in the newest complete turns: the steps, then the replies."""
        return [
            (turn, part)
            for parts in (STEPS, (Part.REPLY,))
            for turn in self.newest()
            if turn.reading.is_complete
            for part in parts
            if self._is_right(turn, part) is False
        ]

    def tally(self) -> Tally:
        """Compare the judge's verdicts with the reader's on the newest turns."""
        both = [
            (opinion.right, judged.correct)
            for recording in self.newest()
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

    def _is_right(self, recording: Recording, part: Part) -> bool | None:
        opinion = self.opinion(recording, part)
        return None if opinion is None else opinion.right


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
    said = {case.name: case.said.en for case in plan.cases}
    for one in recordings.values():
        if said.get(one.case) != one.said:
            raise ConfigError(
                f"{folder / one.file_name}: plan.toml has another message, or no such case; "
                f"delete the file or record it again"
            )
    tour = Tour(
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
    if not tour.stages():
        raise ConfigError(f"{folder}: no stage of plan.toml has recordings of all its cases")
    return tour
