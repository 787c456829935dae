"""Battles, votes and their revisions, and who gave them.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "deletions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("battles", sa.Integer(), nullable=False),
        sa.Column("votes", sa.Integer(), nullable=False),
        sa.Column("answers", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deletions"),
    )
    op.create_table(
        "salts",
        sa.Column("day", sa.Text(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("day", name="pk_salts"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )
    op.create_table(
        "voters",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("pseudonym", sa.Text(), nullable=False),
        sa.Column("rater_group", sa.Text(), nullable=False),
        sa.Column("address_hash", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_voters"),
        sa.UniqueConstraint("pseudonym", name="uq_voters_pseudonym"),
    )
    op.create_index("ix_voters_address_hash", "voters", ["address_hash"], unique=False)
    op.create_table(
        "battles",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("voter_id", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("blind", sa.Boolean(), nullable=False),
        sa.Column("with_reasoning", sa.Boolean(), nullable=False),
        sa.Column("language", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("image_hash", sa.Text(), nullable=True),
        sa.Column("judge", sa.Text(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("dialogue_id", sa.Text(), nullable=False),
        sa.Column("history", sa.JSON(), nullable=True),
        sa.Column("imported", sa.Boolean(), nullable=False),
        sa.Column("source_row", sa.Text(), nullable=True),
        sa.Column("closed_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["voter_id"], ["voters.id"], name="fk_battles_voter_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_battles"),
    )
    op.create_index("ix_battles_voter_id", "battles", ["voter_id"], unique=False)
    op.create_table(
        "pictures",
        sa.Column("voter_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["voter_id"], ["voters.id"], name="fk_pictures_voter_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("voter_id", "name", name="pk_pictures"),
    )
    op.create_table(
        "battle_sides",
        sa.Column("battle_id", sa.Text(), nullable=False),
        sa.Column("side", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("turn", sa.Text(), nullable=True),
        sa.Column("reply", sa.Text(), nullable=True),
        sa.Column("reply_length", sa.Integer(), nullable=True),
        sa.Column("reward", sa.JSON(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=True),
        sa.Column("leaked", sa.Boolean(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "status IN ('writing', 'finished', 'stopped', 'failed')", name="ck_battle_sides_status"
        ),
        sa.CheckConstraint("side IN (0, 1)", name="ck_battle_sides_side"),
        sa.ForeignKeyConstraint(
            ["battle_id"], ["battles.id"], name="fk_battle_sides_battle_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("battle_id", "side", name="pk_battle_sides"),
    )
    op.create_index("ix_battle_sides_model", "battle_sides", ["model"], unique=False)
    op.create_table(
        "votes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("battle_id", sa.Text(), nullable=False),
        sa.Column("voter_id", sa.Text(), nullable=False),
        sa.Column("revealed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["battle_id"], ["battles.id"], name="fk_votes_battle_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["voter_id"], ["voters.id"], name="fk_votes_voter_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_votes"),
        sa.UniqueConstraint("battle_id", "voter_id", name="uq_votes_battle_id_voter_id"),
    )
    op.create_index("ix_votes_voter_id", "votes", ["voter_id"], unique=False)
    op.create_table(
        "vote_revisions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("vote_id", sa.Integer(), nullable=False),
        sa.Column("voter_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("preference", sa.Text(), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("steps", sa.JSON(), nullable=True),
        sa.Column("dwell_ms", sa.Integer(), nullable=True),
        sa.Column("too_fast", sa.Boolean(), nullable=True),
        sa.Column("not_both_seen", sa.Boolean(), nullable=True),
        sa.Column("rate_limited", sa.Boolean(), nullable=False),
        sa.Column("after_reveal", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "preference IN ('first', 'second', 'both', 'neither')",
            name="ck_vote_revisions_preference",
        ),
        sa.ForeignKeyConstraint(
            ["vote_id"], ["votes.id"], name="fk_vote_revisions_vote_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["voter_id"], ["voters.id"], name="fk_vote_revisions_voter_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_vote_revisions"),
        sa.UniqueConstraint("vote_id", "number", name="uq_vote_revisions_vote_id_number"),
        sa.UniqueConstraint("vote_id", "token", name="uq_vote_revisions_vote_id_token"),
    )
    op.create_index(
        "ix_vote_revisions_voter_id_at", "vote_revisions", ["voter_id", "at"], unique=False
    )
    # Answers are added and never changed; whole people may go, with all that is theirs.
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION compeer_refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'what was answered is never changed'; END $$"
        )
        op.execute(
            "CREATE TRIGGER vote_revisions_stay BEFORE UPDATE ON vote_revisions "
            "FOR EACH ROW EXECUTE FUNCTION compeer_refuse_change()"
        )
    else:
        op.execute(
            "CREATE TRIGGER vote_revisions_stay BEFORE UPDATE ON vote_revisions "
            "BEGIN SELECT RAISE(ABORT, 'what was answered is never changed'); END"
        )


def downgrade() -> None:
    for table in (
        "vote_revisions",
        "votes",
        "battle_sides",
        "pictures",
        "battles",
        "voters",
        "deletions",
        "salts",
        "secrets",
    ):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION compeer_refuse_change()")
