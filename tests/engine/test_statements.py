"""The SQL files: whole, and in the schema that was asked for."""

from __future__ import annotations

import re

import asyncpg
import pytest

from fanout import UsageError, migrate
from fanout.pool import connect
from fanout.settings import Settings
from fanout.statements import load_migrations, load_statements, statement

CODE = re.compile(r"--[^\n]*|'[^']*'")


@pytest.mark.parametrize("name", sorted(load_statements()))
def test_a_statement_is_whole_and_says_what_it_does(name: str) -> None:
    """Every include is resolved; the first line is a comment."""
    sql = statement(name)
    assert "-- include" not in sql
    assert sql.startswith("-- ")
    assert not sql.endswith(";")


@pytest.mark.parametrize("name", sorted(load_statements()))
def test_another_schema_leaves_nothing_of_ours_behind(name: str) -> None:
    """Every table is looked for where the setting says."""
    sql = CODE.sub("", statement(name, "elsewhere"))
    assert "fanout." not in sql
    if "fanout." in CODE.sub("", statement(name)):
        assert "elsewhere." in sql


def test_migrations_are_in_order_and_move_to_the_schema_too() -> None:
    """Versions ascend, each is there once."""
    versions = [version for version, _, _ in load_migrations()]
    assert versions == sorted(set(versions))
    for _, _, sql in load_migrations("elsewhere"):
        assert "fanout." not in CODE.sub("", sql)


def test_an_unknown_statement_is_told_with_those_there_are() -> None:
    """For `fanout sql NAME`."""
    with pytest.raises(UsageError, match=r"no statement 'nope'.*claim"):
        statement("nope")


async def test_every_statement_is_understood_by_the_server(empty_database: str) -> None:
    """In a schema of another name, with the default one not there at all."""
    await migrate(empty_database, schema="elsewhere")
    conn = await connect(empty_database, Settings(schema_name="elsewhere"), "test")
    try:
        for name, sql in load_statements("elsewhere").items():
            try:
                await conn.prepare(sql)
            except asyncpg.PostgresError as error:
                raise AssertionError(name) from error
        assert not await conn.fetchval("SELECT to_regnamespace('fanout') IS NOT NULL")
    finally:
        await conn.close()
