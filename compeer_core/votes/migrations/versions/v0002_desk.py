"""The annotation desk: annotators, items, drafts and answers.

Revision ID: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "annotators",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.Text(), nullable=False),
        sa.Column("may_adjudicate", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_annotators"),
        sa.UniqueConstraint("name", name="uq_annotators_name"),
        sa.UniqueConstraint("token_hash", name="uq_annotators_token_hash"),
    )
    op.create_table(
        "desk_items",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("item", sa.JSON(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_desk_items"),
    )
    op.create_index("ix_desk_items_position", "desk_items", ["position"], unique=False)
    op.create_table(
        "desk_answers",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.Text(), nullable=False),
        sa.Column("annotator_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("steps", sa.JSON(), nullable=False),
        sa.Column("preference", sa.Text(), nullable=True),
        sa.Column("shown_first", sa.Text(), nullable=False),
        sa.Column("confidence", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "preference IN ('first', 'second', 'both', 'neither')",
            name="ck_desk_answers_preference",
        ),
        sa.ForeignKeyConstraint(
            ["annotator_id"],
            ["annotators.id"],
            name="fk_desk_answers_annotator_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["item_id"], ["desk_items.id"], name="fk_desk_answers_item_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_desk_answers"),
        sa.UniqueConstraint(
            "item_id", "annotator_id", "number", name="uq_desk_answers_item_id_annotator_id_number"
        ),
        sa.UniqueConstraint(
            "item_id", "annotator_id", "token", name="uq_desk_answers_item_id_annotator_id_token"
        ),
    )
    op.create_index("ix_desk_answers_annotator_id", "desk_answers", ["annotator_id"], unique=False)
    op.create_table(
        "desk_assignments",
        sa.Column("annotator_id", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.Text(), nullable=False),
        sa.Column("assigned_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("shown_first", sa.Text(), nullable=False),
        sa.Column("draft", sa.JSON(), nullable=True),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tab", sa.Text(), nullable=True),
        sa.Column("tab_until", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["annotator_id"],
            ["annotators.id"],
            name="fk_desk_assignments_annotator_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["item_id"], ["desk_items.id"], name="fk_desk_assignments_item_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("annotator_id", "item_id", name="pk_desk_assignments"),
    )
    op.create_index("ix_desk_assignments_item_id", "desk_assignments", ["item_id"], unique=False)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE TRIGGER desk_answers_stay BEFORE UPDATE ON desk_answers "
            "FOR EACH ROW EXECUTE FUNCTION compeer_refuse_change()"
        )
    else:
        op.execute(
            "CREATE TRIGGER desk_answers_stay BEFORE UPDATE ON desk_answers "
            "BEGIN SELECT RAISE(ABORT, 'what was answered is never changed'); END"
        )


def downgrade() -> None:
    for table in ("desk_answers", "desk_assignments", "desk_items", "annotators"):
        op.drop_table(table)
