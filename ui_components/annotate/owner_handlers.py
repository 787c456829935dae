"""The logic of the owner's part of the desk: annotators, imports, assignments, agreement.

`Managing` answers the owner; `annotate.owner_routes` lets nobody else reach it. Each action returns the section
it belongs to, with a sentence about what was done.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from compeer_core.annotation.desk import Desk
from compeer_core.annotation.items import (
    KNOWN,
    NO_TURN,
    NOT_DRAWN,
    NOT_READ,
    SAMPLES,
    Added,
    add_items,
)
from compeer_core.annotation.owner import DeskOwner
from compeer_core.errors import ConfigError, InputError
from ui_components.annotate import owner_view
from ui_components.annotate.handlers import PageState
from ui_components.shared.texts import ASSETS, Texts

SAMPLE_ITEMS = ASSETS / "annotation" / "samples.jsonl"
MAX_NAME = 60
_LEFT_OUT = {
    KNOWN: "left_known",
    NO_TURN: "left_no_turn",
    NOT_READ: "left_not_read",
    NOT_DRAWN: "left_not_drawn",
}


class Managing:
    """The desk of its owner."""

    def __init__(self, desk: Desk, owner: DeskOwner, database: str) -> None:
        """Manage a desk.

        `database` is its URL, without the password.
        """
        self._desk = desk
        self._owner = owner
        self._database = database

    def look(self, place: str, texts: Texts, *, said: str = "", token: str = "") -> PageState:
        """Show a section: ``items`` or ``agreement``, otherwise ``people``.

        Args:
            place: The section.
            texts: The words.
            said: What was just done.
            token: A new annotator's token, which is shown this once.
        """
        if place == "items":
            content = owner_view.items(
                self._owner.batches(), self._owner.people(), self._database, texts
            )
        elif place == "agreement":
            content = owner_view.agreement(
                [
                    (
                        state,
                        self._desk.report(batch=state.name),
                        self._owner.reader_agreement(state.name) if state.read else None,
                    )
                    for state in self._owner.batches()
                ],
                texts,
            )
        else:
            place = "people"
            content = owner_view.people(self._owner.people(), token, self._database, texts)
        return PageState(owner_view.frame(place, content, texts, said=said), said)

    # --- annotators -----------------------------------------------------------------------------

    def add_person(self, name: str, may_adjudicate: bool, texts: Texts) -> PageState:
        """Add an annotator and show their link.

        Raises:
            InputError: ``name_missing`` or ``person_exists``.
        """
        name = name.strip()[:MAX_NAME]
        if not name:
            raise InputError("an annotator needs a name", "name_missing")
        try:
            token = self._desk.add_annotator(name, may_adjudicate=may_adjudicate)
        except ConfigError as error:
            raise InputError(str(error), "person_exists", {"name": name}) from error
        return self.look("people", texts, said=texts("owner.said_added", name=name), token=token)

    def renew_link(self, name: str, texts: Texts) -> PageState:
        """Replace the link of an annotator and show the new one.

        Raises:
            InputError: ``person_unknown``.
        """
        try:
            token = self._desk.renew_token(name)
        except ConfigError as error:
            raise InputError(str(error), "person_unknown") from error
        return self.look("people", texts, said=texts("owner.said_renewed", name=name), token=token)

    def revoke(self, name: str, texts: Texts) -> PageState:
        """Revoke the link of an annotator.

        Raises:
            InputError: ``person_unknown``.
        """
        try:
            self._desk.revoke(name)
        except ConfigError as error:
            raise InputError(str(error), "person_unknown") from error
        return self.look("people", texts, said=texts("owner.said_revoked", name=name))

    # --- items ----------------------------------------------------------------------------------

    def add_samples(self, texts: Texts) -> PageState:
        """Add the items that ship, for practice."""
        added = add_items(self._desk, SAMPLE_ITEMS, batch=SAMPLES)
        return self._imported(added, texts)

    def add_file(
        self, files: Mapping[str, Path], batch: str, share: float, texts: Texts
    ) -> PageState:
        """Add the items of a file, all or none. Pictures are named and not shown.

        Args:
            files: ``items``, and optionally their ``key`` and a reader's ``answers``. Messages name them
                without their folders.
            batch: The name of the batch; empty for a default.
            share: A random share, in (0, 1].
            texts: The words.

        Raises:
            InputError: ``file_missing``, ``share_unusable``, or ``import_unusable`` with the problem, which
                names file and line.
        """
        if "items" not in files:
            raise InputError("there is no file of items", "file_missing")
        if not 0 < share <= 1:
            raise InputError(
                f"the share must be above 0 and at most 1, got {share}", "share_unusable"
            )
        answers = files.get("answers")
        default = "" if answers else files["items"].name.partition(".")[0]
        try:
            added = add_items(
                self._desk,
                files["items"],
                key=files.get("key"),
                read_by=answers,
                batch=batch.strip()[:MAX_NAME] or default,
                share=share,
            )
        except ConfigError as error:
            problem = str(error)
            for file in files.values():
                problem = problem.replace(f"{file.parent}/", "")
            raise InputError(problem, "import_unusable", {"problem": problem}) from error
        return self._imported(added, texts)

    def assign(self, batch: str, people: Sequence[str], overlap: float, texts: Texts) -> PageState:
        """Choose who gets a batch, and the share that two people answer.

        Raises:
            InputError: See `DeskOwner.assign`.
        """
        self._owner.assign(batch, list(people), overlap)
        return self.look("items", texts, said=texts("owner.said_assigned"))

    def remove(self, batch: str, texts: Texts) -> PageState:
        """Delete a batch with its answers.

        Raises:
            InputError: ``batch_unknown``.
        """
        count = self._owner.remove(batch)
        return self.look("items", texts, said=texts("owner.said_removed", count=count))

    def _imported(self, added: Added, texts: Texts) -> PageState:
        sentences = [texts("owner.said_imported", count=added.items)]
        sentences += [
            texts(f"owner.{_LEFT_OUT[reason]}", count=count)
            for reason, count in added.left_out.items()
        ]
        return self.look("items", texts, said=" ".join(sentences))
