"""The tables of votes and annotation.

Constraints of the database guarantee one vote per battle and person, immutable revisions (a trigger rejects
changes), and that nothing outlives its owner (deletes cascade from `voters` and `annotators`). The migrations
beside this module create the tables; a test compares them with these definitions.
"""

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC. SQLite has no time zones, so the zone is added again on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC for the database."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the time with its zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Naming of constraints and types of columns."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        datetime: UtcTime(),
        Any: JSON(none_as_null=True),
    }


class VoterRow(Base):
    """A person, identified by the id in a signed cookie."""

    __tablename__ = "voters"

    id: Mapped[str] = mapped_column(primary_key=True)
    pseudonym: Mapped[str] = mapped_column(unique=True)
    """Exported instead of the id."""
    rater_group: Mapped[str] = mapped_column(default="")
    """Unused."""
    address_hash: Mapped[str | None] = mapped_column(index=True)
    """Salted; the salt is deleted after a day or two."""
    created_at: Mapped[datetime]


class SideRow(Base):
    """One side of a battle."""

    __tablename__ = "battle_sides"
    __table_args__ = (
        CheckConstraint("status IN ('writing', 'finished', 'stopped', 'failed')", name="status"),
        CheckConstraint("side IN (0, 1)", name="side"),
    )

    battle_id: Mapped[str] = mapped_column(
        ForeignKey("battles.id", ondelete="CASCADE"), primary_key=True
    )
    side: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    model: Mapped[str] = mapped_column(index=True)
    seed: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str]
    turn: Mapped[str | None] = mapped_column(deferred=True)
    reply: Mapped[str | None] = mapped_column(deferred=True)
    reply_length: Mapped[int | None]
    reward: Mapped[Any | None]
    seconds: Mapped[float | None]
    tokens: Mapped[int | None]
    leaked: Mapped[bool | None]
    error: Mapped[str | None]
    finished_at: Mapped[datetime | None]


class BattleRow(Base):
    """A comparison of two models by one person."""

    __tablename__ = "battles"

    id: Mapped[str] = mapped_column(primary_key=True)
    voter_id: Mapped[str] = mapped_column(ForeignKey("voters.id", ondelete="CASCADE"), index=True)
    opened_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    seed: Mapped[int] = mapped_column(BigInteger)
    blind: Mapped[bool]
    with_reasoning: Mapped[bool]
    language: Mapped[str]
    topic: Mapped[str]
    image_hash: Mapped[str | None]
    """Hash of all pictures of the history, in order; None if there are none."""
    judge: Mapped[str | None]
    verdict: Mapped[str | None]
    dialogue_id: Mapped[str]
    history: Mapped[Any | None] = mapped_column(deferred=True)
    """`CaseUtterance` rows; None if words are not stored."""
    imported: Mapped[bool]
    source_row: Mapped[str | None] = mapped_column(deferred=True)
    """The original row of an imported battle."""
    closed_reason: Mapped[str | None]

    sides: Mapped[list[SideRow]] = relationship(
        order_by=SideRow.side, passive_deletes=True, lazy="selectin"
    )


class PictureRow(Base):
    """A picture in a person's stored histories."""

    __tablename__ = "pictures"

    voter_id: Mapped[str] = mapped_column(
        ForeignKey("voters.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    data: Mapped[bytes]


class VoteRecord(Base):
    """A person's vote in a battle; its content is in the revisions."""

    __tablename__ = "votes"
    __table_args__ = (UniqueConstraint("battle_id", "voter_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    battle_id: Mapped[str] = mapped_column(ForeignKey("battles.id", ondelete="CASCADE"))
    voter_id: Mapped[str] = mapped_column(ForeignKey("voters.id", ondelete="CASCADE"), index=True)
    revealed_at: Mapped[datetime | None]


class RevisionRow(Base):
    """One revision of a vote."""

    __tablename__ = "vote_revisions"
    __table_args__ = (
        UniqueConstraint("vote_id", "number"),
        UniqueConstraint("vote_id", "token"),
        CheckConstraint("preference IN ('first', 'second', 'both', 'neither')", name="preference"),
        Index(None, "voter_id", "at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    vote_id: Mapped[int] = mapped_column(ForeignKey("votes.id", ondelete="CASCADE"))
    voter_id: Mapped[str] = mapped_column(ForeignKey("voters.id", ondelete="CASCADE"))
    number: Mapped[int]
    token: Mapped[str | None]
    """Id of the request, so that a repeated request adds nothing."""
    at: Mapped[datetime]
    preference: Mapped[str | None]
    """None if the vote was withdrawn."""
    tags: Mapped[Any]
    note: Mapped[str]
    steps: Mapped[Any | None]
    dwell_ms: Mapped[int | None]
    too_fast: Mapped[bool | None]
    not_both_seen: Mapped[bool | None]
    rate_limited: Mapped[bool]
    after_reveal: Mapped[bool]

    vote: Mapped[VoteRecord] = relationship(lazy="raise")


class SaltRow(Base):
    """The salt of the address hashes of a day."""

    __tablename__ = "salts"

    day: Mapped[str] = mapped_column(primary_key=True)
    salt: Mapped[bytes]


class SecretRow(Base):
    """A secret of the deployment, such as the key that signs cookies."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[bytes]


class DeletionRow(Base):
    """The counts of a deletion, without its content."""

    __tablename__ = "deletions"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    battles: Mapped[int]
    votes: Mapped[int]
    answers: Mapped[int]


# --- The annotation desk ------------------------------------------------------------------------


class AnnotatorRow(Base):
    """An annotator."""

    __tablename__ = "annotators"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    """A pseudonym."""
    token_hash: Mapped[str] = mapped_column(unique=True)
    may_adjudicate: Mapped[bool]
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class PassRow(Base):
    """A signed-in browser."""

    __tablename__ = "desk_passes"

    hash: Mapped[str] = mapped_column(primary_key=True)
    annotator_id: Mapped[int | None] = mapped_column(
        ForeignKey("annotators.id", ondelete="CASCADE"), index=True
    )
    """None for the desk's owner."""
    begun_at: Mapped[datetime]


class ItemRow(Base):
    """An item for annotation."""

    __tablename__ = "desk_items"

    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(index=True)
    """Position in the queue."""
    item: Mapped[Any]
    """An `AnnotationItem`."""
    record: Mapped[Any | None]
    """The unlabelled `CerRecord` of the item, hidden from annotators."""
    batch: Mapped[str] = mapped_column(index=True, server_default=text("''"))
    """The items that were imported together; empty without a name."""
    people: Mapped[int] = mapped_column(server_default="2")
    """How many independent answers are wanted, 1 or 2."""
    readings: Mapped[Any | None]
    """A list of `Annotation` by language models, hidden from annotators."""


class BatchPersonRow(Base):
    """An annotator of a batch. A batch without any is open to everybody."""

    __tablename__ = "desk_batch_people"

    batch: Mapped[str] = mapped_column(primary_key=True)
    annotator_id: Mapped[int] = mapped_column(
        ForeignKey("annotators.id", ondelete="CASCADE"), primary_key=True, index=True
    )


class DeskPictureRow(Base):
    """A picture in the history of an item."""

    __tablename__ = "desk_pictures"

    item_id: Mapped[str] = mapped_column(
        ForeignKey("desk_items.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(primary_key=True)
    data: Mapped[bytes]


class AssignmentRow(Base):
    """An item assigned to a person, with the draft and the drawn order of replies."""

    __tablename__ = "desk_assignments"

    annotator_id: Mapped[int] = mapped_column(
        ForeignKey("annotators.id", ondelete="CASCADE"), primary_key=True
    )
    item_id: Mapped[str] = mapped_column(
        ForeignKey("desk_items.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    assigned_at: Mapped[datetime]
    shown_first: Mapped[str]
    draft: Mapped[Any | None]
    saved_at: Mapped[datetime | None]
    tab: Mapped[str | None]
    """Id of the browser tab that may write."""
    tab_until: Mapped[datetime | None]


class AnswerRow(Base):
    """An `Annotation` at one time."""

    __tablename__ = "desk_answers"
    __table_args__ = (
        UniqueConstraint("item_id", "annotator_id", "number"),
        UniqueConstraint("item_id", "annotator_id", "token"),
        CheckConstraint("preference IN ('first', 'second', 'both', 'neither')", name="preference"),
        ForeignKeyConstraint(["item_id"], ["desk_items.id"], ondelete="CASCADE"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[str]
    annotator_id: Mapped[int] = mapped_column(
        ForeignKey("annotators.id", ondelete="CASCADE"), index=True
    )
    number: Mapped[int]
    token: Mapped[str | None]
    at: Mapped[datetime]
    steps: Mapped[Any]
    preference: Mapped[str | None]
    shown_first: Mapped[str]
    confidence: Mapped[int | None]
    note: Mapped[str]
    seconds: Mapped[float | None]
