"""Batches of items, who works on them, answers of language models, and sessions of the desk's owner.

Revision ID: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column(
        "desk_items", sa.Column("batch", sa.Text(), nullable=False, server_default=sa.text("''"))
    )
    op.add_column(
        "desk_items", sa.Column("people", sa.Integer(), nullable=False, server_default="2")
    )
    op.add_column("desk_items", sa.Column("readings", sa.JSON(), nullable=True))
    op.create_index("ix_desk_items_batch", "desk_items", ["batch"], unique=False)
    op.create_table(
        "desk_batch_people",
        sa.Column("batch", sa.Text(), nullable=False),
        sa.Column("annotator_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["annotator_id"],
            ["annotators.id"],
            name="fk_desk_batch_people_annotator_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("batch", "annotator_id", name="pk_desk_batch_people"),
    )
    op.create_index(
        "ix_desk_batch_people_annotator_id", "desk_batch_people", ["annotator_id"], unique=False
    )
    with op.batch_alter_table("desk_passes") as passes:
        passes.alter_column("annotator_id", existing_type=sa.Integer(), nullable=True)


def downgrade() -> None:
    op.execute("DELETE FROM desk_passes WHERE annotator_id IS NULL")
    with op.batch_alter_table("desk_passes") as passes:
        passes.alter_column("annotator_id", existing_type=sa.Integer(), nullable=False)
    op.drop_table("desk_batch_people")
    op.drop_index("ix_desk_items_batch", "desk_items")
    for column in ("readings", "people", "batch"):
        op.drop_column("desk_items", column)
