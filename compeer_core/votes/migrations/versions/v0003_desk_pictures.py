"""Pictures of what is annotated.

Revision ID: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "desk_pictures",
        sa.Column("item_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["item_id"], ["desk_items.id"], name="fk_desk_pictures_item_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("item_id", "name", name="pk_desk_pictures"),
    )


def downgrade() -> None:
    op.drop_table("desk_pictures")
