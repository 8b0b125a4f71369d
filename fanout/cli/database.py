"""Which database: --dsn, else DATABASE_URL, else an embedded server that runs already."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from fanout import embedded
from fanout.embedded import EmbeddedServer
from fanout.engine import Engine
from fanout.errors import ConfigurationError
from fanout.settings import Settings

from .exits import clean

__all__ = ["Database", "Dsn", "Schema", "found", "opened", "place"]

Dsn = Annotated[
    str | None,
    typer.Option(
        help="The database, as postgresql://user@host/name. Default: DATABASE_URL, else the "
        "embedded server that runs.",
        show_default=False,
    ),
]
Schema = Annotated[
    str | None,
    typer.Option(
        help="The schema of the tables. Default: FANOUT_SCHEMA_NAME, else fanout.",
        show_default=False,
    ),
]

NO_DATABASE: Final = (
    "Give --dsn postgresql://…, set DATABASE_URL, or start an embedded one with `fanout dev`"
)


@dataclass(frozen=True, slots=True)
class Database:
    """Where to go, and the hold on the embedded server while one is used."""

    dsn: str
    settings: Settings
    server: EmbeddedServer | None = None


def found(dsn: str | None, schema: str | None) -> Database:
    """The database to use; says on stderr which, where nobody named it. Starts none.

    Raises:
        ConfigurationError: there is none; names the remedies.
    """
    settings = settings_for(schema)
    if named := checked(dsn, "--dsn") or checked(os.environ.get("DATABASE_URL"), "DATABASE_URL"):
        if not dsn and sys.stderr.isatty():
            say(f"using {place(named)} (DATABASE_URL)")
        return Database(named, settings)
    server = embedded.find()
    if server is None:
        raise ConfigurationError(
            "dsn", "no database is named, and no embedded one runs", NO_DATABASE
        )
    say(f"using the embedded PostgreSQL in {server.cluster.home}")
    return Database(server.dsn(), settings, server)


def settings_for(schema: str | None) -> Settings:
    """Settings of a command: it reads and steers, it does not migrate behind anyone's back."""
    if schema is None:
        return Settings(migrate_on_start=False)
    return Settings(migrate_on_start=False, schema_name=schema)


def checked(dsn: str | None, field: str) -> str | None:
    """`dsn` if it can be one. Raises ConfigurationError, which does not repeat it: passwords."""
    if not dsn:
        return None
    if not dsn.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError(
            field, "is no PostgreSQL address", "Give postgresql://user@host:5432/name"
        )
    try:
        _ = urlsplit(dsn).port
    except ValueError as error:
        raise ConfigurationError(
            field,
            f"cannot be read ({type(error).__name__})",
            "Percent-encode special characters in it",
        ) from None
    return dsn


def place(dsn: str) -> str:
    """Host and name of a database, without user and password."""
    parts = urlsplit(dsn)
    if not parts.hostname:
        return clean(f"{parts.path.lstrip('/') or 'postgres'} over a unix socket")
    return clean(f"{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}")


def say(line: str) -> None:
    """A remark, on stderr, where it does not mix with what a script reads."""
    print(f"fanout: {line}", file=sys.stderr)  # noqa: T201 - the CLI's voice


@asynccontextmanager
async def opened(dsn: str | None, schema: str | None) -> AsyncIterator[Engine]:
    """An engine without handlers on the database to use, started."""
    database = await asyncio.to_thread(found, dsn, schema)
    try:
        async with Engine(database.dsn, settings=database.settings) as engine:
            yield engine
    finally:
        if database.server is not None:
            database.server.release()
