"""`sql` and `explain`: what runs, and how PostgreSQL would run it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import asyncpg
import typer

from fanout.pool import Connection, connect, translated
from fanout.statements import load_statements, statement

from .database import Dsn, Schema, found, settings_for
from .output import console

__all__ = ["explain", "plan_of", "sql"]

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The statement's name; `fanout sql` lists them.")
]


def sql(
    name: Annotated[
        str | None, typer.Argument(help="The statement's name; without one, they are listed.")
    ] = None,
    schema: Schema = None,
) -> None:
    """Print the SQL of a statement, or list the statements. Needs no database."""
    schema_name = settings_for(schema).schema_name
    if name is not None:
        console.print(statement(name, schema_name), markup=False)
        return
    statements = load_statements(schema_name)
    width = max(map(len, statements))
    for each, text in statements.items():
        summary = text.partition("\n")[0].removeprefix("-- ") if text.startswith("--") else ""
        console.print(f"{each:<{width}}  {summary}", markup=False)


def explain(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Print the plan of a statement as the engine's sessions get it. Runs and changes nothing."""
    database = found(dsn, schema)
    text = statement(name, database.settings.schema_name)

    async def plan() -> list[str]:
        connection = await connect(database.dsn, database.settings, "explain")
        try:
            return await plan_of(connection, text)
        except (OSError, asyncpg.InterfaceError) as error:
            raise translated(error) from error
        finally:
            await connection.close(timeout=5)
            if database.server is not None:
                database.server.release()

    console.print("\n".join(asyncio.run(plan())), markup=False)


async def plan_of(connection: Connection, text: str) -> list[str]:
    """The lines of its generic plan. A prepared statement: EXPLAIN (GENERIC_PLAN) came with
    PostgreSQL 16 only.
    """
    types = [parameter.name for parameter in (await connection.prepare(text)).get_parameters()]
    arguments = ", ".join(_nothing(name) for name in types)
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE fanout_explained AS {text}")
        call = f"EXECUTE fanout_explained({arguments})" if types else "EXECUTE fanout_explained"
        lines = [row[0] for row in await connection.fetch(f"EXPLAIN (VERBOSE, COSTS) {call}")]
        await connection.execute("DEALLOCATE fanout_explained")  # no rollback does that
        return lines
    finally:
        await transaction.rollback()


def _nothing(type_name: str) -> str:
    """NULL or an empty array of a type; `type_name` is what the server said the parameter is."""
    return f"'{{}}'::{type_name}" if type_name.endswith("[]") else f"NULL::{type_name}"
