"""What alembic runs. The caller has begun the transaction and holds the lock."""

from alembic import context

from compeer_core.votes.database import VERSION_TABLE
from compeer_core.votes.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite cannot change a column in place
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
