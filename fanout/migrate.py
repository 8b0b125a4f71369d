"""Bringing the schema up to date: forward only, one transaction, safe from any number of processes
at once.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import asyncpg

from .errors import SchemaMismatch
from .pool import MIGRATE, connect, reraise
from .settings import Settings
from .statements import load_migrations

if TYPE_CHECKING:
    from .pool import Connection, Pool

__all__ = ["MigrationReport", "check_schema", "migrate"]


# The schema's name is a checked setting, like in every statement.
_VERSION: Final = "SELECT COALESCE(max(version), 0) AS version FROM {}.migration"
_LIST: Final = "SELECT version, checksum FROM {}.migration"
_LANDED: Final = "INSERT INTO {}.migration (version, name, checksum) VALUES ($1, $2, $3)"


class MigrationReport(NamedTuple):
    """What a migration did: the schema's name, its version before and after."""

    schema: str
    before: int
    after: int


def expected_version() -> int:
    """The schema version that this program needs."""
    return load_migrations()[-1][0]


async def migrate(
    dsn: str, *, schema: str = "fanout", settings: Settings | None = None
) -> MigrationReport:
    """Create or update the tables in `schema`. Doing it twice, or from ten pods at once, is fine.

    Raises:
        ConfigurationError: `schema` cannot be one.
        SchemaMismatch: a newer version of fanout migrated this schema.
        DatabaseUnavailable: the server did not answer.
    """
    settings = Settings(**((settings or Settings()).model_dump() | {"schema_name": schema}))
    connection = await connect(dsn, settings, MIGRATE)
    try:
        # Waiting for another pod's migration is not a lost statement.
        # Read committed: what another pod committed while this one waited must be seen.
        async with connection.transaction(isolation="read_committed"):
            return await _migrate(connection, schema)
    except (OSError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        reraise(error)
    finally:
        await connection.close(timeout=settings.database_timeout)


async def _migrate(connection: Connection, schema: str) -> MigrationReport:
    # Held to the end of the transaction; IF NOT EXISTS alone races in the catalog.
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
        f"fanout migrate {schema}",
        timeout=300,
    )
    await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    await connection.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.migration "
        "(version integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL DEFAULT '', "
        "applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
    )
    landed = {
        row["version"]: row["checksum"] for row in await connection.fetch(_LIST.format(schema))
    }
    before = max(landed, default=0)
    if before > expected_version():
        raise SchemaMismatch(schema, before, expected_version())
    for version, name, sql in load_migrations(schema):
        checksum = sha256(sql.encode()).hexdigest()
        if version not in landed:
            await connection.execute(sql, timeout=300)
            await connection.execute(_LANDED.format(schema), version, name, checksum)
        elif landed[version] != checksum:
            raise SchemaMismatch(schema, before, expected_version(), _changed(version, name))
    return MigrationReport(schema, before, expected_version())


def _changed(version: int, name: str) -> str:
    return (
        f"migration {version} ({name}) is not the one that made this schema: another build of this "
        "version did. Drop the schema, or use a new one (FANOUT_SCHEMA_NAME)"
    )


async def schema_version(pool: Pool, schema: str) -> int:
    """The version that the database is at; 0: there is nothing yet."""
    exists = await pool.fetch("SELECT to_regclass($1) IS NOT NULL AS it", f"{schema}.migration")
    if not exists[0]["it"]:
        return 0
    rows: Any = await pool.fetch(_VERSION.format(schema))
    return int(rows[0]["version"])


async def check_schema(pool: Pool, schema: str) -> None:
    """Raises SchemaMismatch unless the schema is exactly this program's."""
    found = await schema_version(pool, schema)
    if found != expected_version():
        raise SchemaMismatch(schema, found, expected_version())
