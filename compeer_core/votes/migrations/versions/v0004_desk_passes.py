"""Browsers that annotators have come in with; what was deleted before is overwritten once.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "desk_passes",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("annotator_id", sa.Integer(), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["annotator_id"],
            ["annotators.id"],
            name="fk_desk_passes_annotator_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("hash", name="pk_desk_passes"),
    )
    op.create_index("ix_desk_passes_annotator_id", "desk_passes", ["annotator_id"], unique=False)
    if op.get_bind().dialect.name == "sqlite":
        # Older versions left traces of deleted words in the file (see compeer_core.votes.erasing).
        op.execute("PRAGMA user_version = 1")


def downgrade() -> None:
    op.drop_table("desk_passes")
