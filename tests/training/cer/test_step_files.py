"""Steps that are done once: what is skipped, what is done again, and what a kill leaves."""

from pathlib import Path

import pytest

from training.cer.records import StepReport
from training.cer.step_files import Steps


class Mill:
    """Three steps, each of which changes the letters of the one before in its own way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[str] = []
        self.settings = {"read": "abc", "upper": True, "join": "-"}
        self.fails_in = self.unanswered_in = ""

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def grind(self) -> Steps:
        self.said: list[str] = []
        steps = self.steps = Steps(self.folder, self.said.append)
        for name, source in (("read", None), ("upper", "read"), ("join", "upper")):
            steps.run(
                name,
                lambda name=name, source=source: self._work(name, source),
                settings=self.settings[name],
                inputs=[] if source is None else [self.path(source)],
                outputs=[self.path(name)],
            )
        return steps

    def _work(self, name: str, source: str | None) -> StepReport:
        setting = self.settings[name]
        text = str(setting) if source is None else self.path(source).read_text(encoding="utf-8")
        if name == "upper" and setting:
            text = text.upper()
        if name == "join":
            text = str(setting).join(text)
        self.path(name).write_text(text, encoding="utf-8")
        if self.fails_in == name:
            raise KeyboardInterrupt
        if self.unanswered_in == name:
            self.steps.unfinished += 3
        self.done.append(name)
        return StepReport(step=name, read=1, written=len(text))


@pytest.fixture
def mill(tmp_path: Path) -> Mill:
    return Mill(tmp_path)


def test_a_finished_step_does_not_run_again(mill):
    first = mill.grind()
    second = mill.grind()

    assert mill.done == ["read", "upper", "join"]
    assert mill.path("join").read_text(encoding="utf-8") == "A-B-C"
    assert second.reports == first.reports


def test_a_changed_setting_repeats_its_step_and_later_ones(mill):
    mill.grind()
    mill.done.clear()
    mill.settings["upper"] = False
    mill.grind()

    assert mill.done == ["upper", "join"]
    assert mill.path("join").read_text(encoding="utf-8") == "a-b-c"


def test_a_change_without_effect_skips_later_steps(mill):
    mill.settings["read"] = "ABC"
    mill.grind()
    mill.done.clear()
    mill.settings["upper"] = False
    mill.grind()

    assert mill.done == ["upper"]


@pytest.mark.parametrize("damage", ["gone", "longer"])
def test_a_changed_output_is_written_again(mill, damage):
    mill.grind()
    mill.done.clear()
    if damage == "gone":
        mill.path("upper").unlink()
    else:
        mill.path("upper").write_text("A B C", encoding="utf-8")
    mill.grind()

    assert mill.done == ["upper"]
    assert mill.path("upper").read_text(encoding="utf-8") == "ABC"


def test_a_step_that_was_interrupted_after_its_output_is_not_done(mill):
    mill.grind()
    mill.settings["upper"] = False
    mill.fails_in = "upper"
    with pytest.raises(KeyboardInterrupt):
        mill.grind()
    mill.done.clear()
    mill.fails_in = ""
    mill.settings["upper"] = True  # as it was when the note was written
    mill.grind()

    assert mill.done == ["upper"]
    assert mill.path("upper").read_text(encoding="utf-8") == "ABC"


def test_a_step_with_unanswered_questions_is_not_finished_but_later_ones_are(mill):
    mill.unanswered_in = "upper"

    mill.grind()

    assert any("3 questions were not answered" in sentence for sentence in mill.said)
    mill.unanswered_in = ""
    mill.grind()
    assert mill.done == ["read", "upper", "join", "upper"]
    mill.grind()
    assert mill.done == ["read", "upper", "join", "upper"]


@pytest.mark.parametrize("note", ["reports/upper.json", "reports/done/upper.json"])
def test_a_record_of_another_version_means_not_finished(mill, note):
    mill.grind()
    mill.done.clear()
    (mill.folder / note).write_text('{"made_by": "another version"}', encoding="utf-8")
    mill.grind()

    assert mill.done == ["upper"]
