"""The logic of the annotation desk: what is requested, checked, saved and shown.

`Annotating` answers parsed requests of a signed-in annotator. It knows nothing of HTTP, unlike
`annotate.routes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from compeer_core.annotation.annotations import MAX_NOTE_CHARACTERS
from compeer_core.annotation.desk import Annotator, Desk, Work
from compeer_core.annotation.report import Report
from compeer_core.config import FrozenModel
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.reasoning import STEPS, Part
from compeer_core.taxonomy import Preference
from ui_components.annotate import view
from ui_components.shared.texts import Texts

Place = Literal["work", "conflicts", "agreement", "people", "items"]
"""Sections of the desk; the last two are the owner's."""
MAX_SECONDS = 7 * 24 * 3600.0


class Form(FrozenModel):
    """A form, complete or partial."""

    model_config = ConfigDict(strict=True)

    steps: list[bool | None] = Field(default=[None] * 3, min_length=3, max_length=3)
    preference: Literal["first", "second", "both", "neither"] | None = None
    """In the order in which the annotator sees the replies."""
    confidence: int | None = Field(default=None, ge=1, le=5)
    note: str = ""
    seconds: float | None = Field(default=None, ge=0, le=MAX_SECONDS)


class PageRequest(FrozenModel):
    """A page's request."""

    place: Place = "work"
    item: str | None = None
    tab: str = Field(min_length=1, max_length=100)
    token: str = Field(default="", max_length=100)
    form: Form = Form()


@dataclass(frozen=True)
class PageState:
    """A page's next state."""

    html: str
    said: str = ""
    """For the status line and screen readers."""

    def as_json(self) -> dict[str, Any]:
        return {"html": self.html, "said": self.said}


def read_request(body: Mapping[str, Any]) -> PageRequest:
    """Parse a page's request.

    Raises:
        InputError: ``request_unusable``, or ``note_too_long``.
    """
    try:
        page_request = PageRequest.model_validate(body)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise InputError(f"{place}: {detail['msg']}", "request_unusable") from error
    if len(page_request.form.note) > MAX_NOTE_CHARACTERS:
        raise InputError(
            "the note is too long",
            "note_too_long",
            {"length": len(page_request.form.note), "limit": MAX_NOTE_CHARACTERS},
        )
    return page_request


class Annotating:
    """The desk of one annotator."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    # --- viewing --------------------------------------------------------------------------------

    def look(self, annotator: Annotator, page_request: PageRequest, texts: Texts) -> PageState:
        """Show a section of the desk, or an item that was assigned before.

        Raises:
            InputError: See `Desk.open_item`.
        """
        if page_request.item is not None:
            work = self._desk.open_item(annotator, page_request.item, page_request.tab)
            return self._with_item(annotator, page_request, work, texts)
        if page_request.place == "agreement":
            return self._with_agreement(annotator, texts)
        wants_conflicts = page_request.place == "conflicts" and annotator.may_adjudicate
        next_work = self._desk.next_item(annotator, page_request.tab, conflicts=wants_conflicts)
        if next_work is None:
            return self._with_nothing(annotator, page_request.place, texts)
        return self._with_item(annotator, page_request, next_work, texts)

    def report(self, annotator: Annotator) -> Report | None:
        """Return the agreement report, to those who may see it.

        Whoever decides conflicts may see it at any time; it covers items with two answers. All
        others see it once everything is done.
        """
        if not annotator.may_adjudicate and not self._desk.progress(annotator).is_over:
            return None
        return self._desk.report()

    def picture(self, annotator: Annotator, item_id: str, index: int) -> Image | None:
        """Return an image of an assigned item.

        Raises:
            InputError: ``item_not_yours``.
        """
        return self._desk.picture(annotator, item_id, index)

    def _with_item(
        self, annotator: Annotator, page_request: PageRequest, work: Work, texts: Texts
    ) -> PageState:
        conflict = None
        if work.decides:
            conflict = self._desk.conflict(annotator, work.item.id)
        place: Place = "conflicts" if work.decides else "work"
        return PageState(
            view.frame(
                self._around(annotator, place, texts, opened=work.item.id),
                view.item(work, conflict, texts),
                texts,
            )
        )

    def _with_nothing(self, annotator: Annotator, place: Place, texts: Texts) -> PageState:
        around = self._around(annotator, place, texts)
        return PageState(view.frame(around, view.nothing(around, texts), texts))

    def _with_agreement(self, annotator: Annotator, texts: Texts) -> PageState:
        around = self._around(annotator, "agreement", texts)
        report = self.report(annotator)
        return PageState(view.frame(around, view.agreement(report, around, texts), texts))

    def _around(
        self, annotator: Annotator, place: Place, texts: Texts, opened: str = ""
    ) -> view.Around:
        return view.Around(
            annotator=annotator,
            place=place,
            progress=self._desk.progress(annotator),
            begun=self._desk.begun(annotator),
            opened=opened,
        )

    # --- saving ---------------------------------------------------------------------------------

    def save_draft(self, annotator: Annotator, page_request: PageRequest) -> dict[str, str]:
        """Save a draft; return the time.

        Raises:
            InputError: See `Desk.save_draft`.
        """
        saved = self._desk.save_draft(
            annotator,
            _item(page_request),
            page_request.tab,
            page_request.form.model_dump(mode="json"),
        )
        return {"saved": saved.isoformat()}

    def hold(self, annotator: Annotator, page_request: PageRequest) -> dict[str, bool]:
        """Renew a tab's lock on its item; return whether it may write.

        Raises:
            InputError: ``item_not_yours``.
        """
        return {"may_write": self._desk.hold(annotator, _item(page_request), page_request.tab)}

    def leave(self, annotator: Annotator, page_request: PageRequest) -> dict[str, bool]:
        """Release a closed tab's lock.

        Raises:
            InputError: ``item_not_yours``.
        """
        self._desk.release(annotator, _item(page_request), page_request.tab)
        return {}

    def save(self, annotator: Annotator, page_request: PageRequest, texts: Texts) -> PageState:
        """Save an answer and show the next item.

        Raises:
            InputError: ``answer_incomplete``, ``reason_missing``, or see `Desk.answer`.
        """
        item_id = _item(page_request)
        work = self._desk.open_item(annotator, item_id, page_request.tab)
        form = page_request.form
        open_questions = self._questions(annotator, work)
        given = {
            **dict(zip(STEPS, form.steps, strict=True)),
            Part.REPLY: None if form.preference is None else Preference(form.preference),
        }
        missing = [part for part in open_questions if given[part] is None]
        if missing:
            raise InputError("questions are open", "answer_incomplete", {"count": len(missing)})
        if work.decides and not form.note.strip():
            raise InputError("a decision needs a reason", "reason_missing")
        history, emotion, strategy = (
            form.steps[number] if part in open_questions else None
            for number, part in enumerate(STEPS)
        )
        self._desk.answer(
            annotator,
            item_id,
            steps=(history, emotion, strategy),
            preference=form.preference if Part.REPLY in open_questions else None,
            confidence=form.confidence,
            note=form.note,
            seconds=form.seconds,
            token=page_request.token,
            tab=page_request.tab,
        )
        place: Place = "conflicts" if work.decides else "work"
        shown = self.look(annotator, PageRequest(place=place, tab=page_request.tab), texts)
        return PageState(shown.html, texts("annotate.said_saved", number=work.number))

    def take_back(self, annotator: Annotator, page_request: PageRequest, texts: Texts) -> PageState:
        """Undo the last answer and show it again.

        Raises:
            InputError: See `Desk.take_back`.
        """
        item_id = self._desk.take_back(annotator)
        work = self._desk.open_item(annotator, item_id, page_request.tab)
        shown = self._with_item(annotator, page_request, work, texts)
        return PageState(shown.html, texts("annotate.said_back", number=work.number))

    def _questions(self, annotator: Annotator, work: Work) -> list[Part]:
        """Return the questions of an item; the third annotator answers only those in dispute."""
        questions = list(work.item.questions)
        if not work.decides:
            return questions
        one, other = self._desk.conflict(annotator, work.item.id)
        return [part for part in questions if view.differs(one, other, part)]


def _item(page_request: PageRequest) -> str:
    if page_request.item is None:
        raise InputError("no item is named", "request_unusable")
    return page_request.item
