"""Roles of the database: who may read, who may write, and what nobody is given by default."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import urlsplit

import asyncpg
import pytest

from fanout.statements import load_migrations, load_statements
from tests.cases.lab import Calls, counters, engine_on, until_true
from tests.factories import insert_batch

READER = """
    GRANT USAGE ON SCHEMA fanout TO {role};
    GRANT SELECT ON fanout.batches, fanout.children, fanout.failures, fanout.workers, fanout.stuck
        TO {role};
"""
"""The grants of a role that watches."""

RUNTIME = """
    GRANT USAGE ON SCHEMA fanout TO {role};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fanout TO {role};
    GRANT USAGE ON ALL SEQUENCES IN SCHEMA fanout TO {role};
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fanout TO {role};
"""
"""The grants of a role that submits and works, and that does not own the tables."""

SUBMITTER = """
    GRANT USAGE ON SCHEMA fanout TO {role};
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fanout TO {role};
    GRANT SELECT, INSERT ON fanout.job TO {role};
    GRANT SELECT ON fanout.kind TO {role};
"""
"""The grants of a role that only submits."""


class Roles(NamedTuple):
    reader: str
    runtime: str
    submitter: str
    stranger: str

    def dsn(self, database: str, role: str) -> str:
        parts = urlsplit(database)
        host = parts.netloc.rpartition("@")[2]
        return f"postgresql://{role}:secret@{host}{parts.path}" + (
            f"?{parts.query}" if parts.query else ""
        )


@pytest.fixture
async def roles(conn: asyncpg.Connection) -> AsyncIterator[Roles]:
    """Four roles of this test's own."""
    mark = uuid.uuid4().hex[:8]
    made = Roles(*(f"fanout_{name}_{mark}" for name in Roles._fields))
    for role in made:
        await conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret' NOSUPERUSER")
    for role, grants in (
        (made.reader, READER),
        (made.runtime, RUNTIME),
        (made.submitter, SUBMITTER),
    ):
        await conn.execute(grants.format(role=role))
    yield made
    for role in made:
        await conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_reader_reads_the_views_and_writes_nothing(
    roles: Roles, database: str, conn: asyncpg.Connection
) -> None:
    """NikolayS/PgQue #96; graphile/worker #151, #25: a role that may watch sees every view, and is
    denied each write, each function, the table itself, and DDL."""
    await insert_batch(conn, "waiting", ["pending", "completed"])
    reader = await asyncpg.connect(roles.dsn(database, roles.reader))
    try:
        for view in ("batches", "children", "failures", "workers", "stuck"):
            await reader.fetch(f"SELECT * FROM fanout.{view}")
        assert await reader.fetchval("SELECT count(*) FROM fanout.children") == 2
        for sql in (
            "SELECT * FROM fanout.job",
            "UPDATE fanout.job SET status = 'cancelled'",
            "UPDATE fanout.children SET status = 'cancelled'",
            "DELETE FROM fanout.job",
            "TRUNCATE fanout.job",
            "INSERT INTO fanout.job (kind) VALUES ('leaf')",
            "SELECT fanout.submit('leaf')",
            "CREATE TABLE fanout.mine (n int)",
            "DROP VIEW fanout.batches",
            "ALTER TABLE fanout.job ADD COLUMN mine int",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await reader.execute(sql)
    finally:
        await reader.close()
    assert not await conn.fetchval(
        """SELECT bool_or(has_function_privilege($1, p.oid, 'EXECUTE')) FROM pg_proc p
             JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'fanout'""",
        roles.reader,
    )


async def test_a_stranger_has_nothing_and_public_may_run_nothing(
    roles: Roles, database: str, conn: asyncpg.Connection
) -> None:
    """NikolayS/PgQue #96, hardbyte/awa PR #115: PUBLIC has no EXECUTE on any function and no
    right to any table; no function runs as its owner; each pins its search_path."""
    stranger = await asyncpg.connect(roles.dsn(database, roles.stranger))
    try:
        for sql in ("SELECT * FROM fanout.batches", "SELECT fanout.submit('leaf')"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await stranger.execute(sql)
    finally:
        await stranger.close()
    functions = await conn.fetch(
        """SELECT p.proname, p.prosecdef, p.proconfig,
                  has_function_privilege('public', p.oid, 'EXECUTE') AS public
             FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
            WHERE n.nspname = 'fanout'"""
    )
    assert len(functions) >= 2
    for row in functions:
        assert not row["public"], f"PUBLIC may execute {row['proname']}"
        assert not row["prosecdef"], f"{row['proname']} runs as its owner"
        assert any(s.startswith("search_path=") for s in row["proconfig"] or ()), row["proname"]
    tables = await conn.fetch(
        """SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = 'fanout' AND c.relkind IN ('r', 'v', 'S')
              AND EXISTS (SELECT 1 FROM aclexplode(c.relacl) a WHERE a.grantee = 0)"""
    )
    assert tables == []


async def test_a_worker_needs_to_own_nothing(
    roles: Roles, database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """graphile/worker #151, #25: with the grants above and migrations left to the owner, an engine
    submits, works, sweeps and finishes; DDL, TRUNCATE and other schemas are denied to it."""
    await conn.execute("CREATE SCHEMA other; CREATE TABLE other.secret (n int)")
    dsn = roles.dsn(database, roles.runtime)
    async with engine_on(dsn, calls, migrate_on_start=False) as engine, engine.worker():
        handle = await engine.submit(
            "batch", {"n": 5, "mix": {"1": {"broken": True}, "2": {"flaky": 1}}}, key="k"
        )
        await handle.wait(15)
        assert await handle.retry() == 1
        await handle.wait(15)
        slow = await engine.submit("batch", {"n": 3, "child": {"seconds": 30}})
        await until_true(lambda: len(calls.starts) >= 12)
        assert await slow.cancel()
        await slow.wait(15)
    assert await counters(conn, handle.id) == ("completed", 5, 4, 1, 0)
    assert await counters(conn, slow.id) == ("cancelled", 3, 0, 0, 3)
    runtime = await asyncpg.connect(dsn)
    try:
        for sql in (
            "TRUNCATE fanout.job",
            "ALTER TABLE fanout.job ADD COLUMN mine int",
            "CREATE TABLE fanout.mine (n int)",
            "DROP FUNCTION fanout.submit",
            "SELECT * FROM other.secret",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await runtime.execute(sql)
    finally:
        await runtime.close()


async def test_a_submitter_can_only_submit(
    roles: Roles, database: str, conn: asyncpg.Connection
) -> None:
    """NikolayS/PgQue #96: the SQL function runs with the caller's own rights: a role that may
    submit can do that, and nothing to what is there; a look-alike table first on its search_path
    is not what the function writes to."""
    submitter = await asyncpg.connect(roles.dsn(database, roles.submitter))
    try:
        await submitter.execute("CREATE TEMP TABLE job (LIKE fanout.job)")
        await submitter.execute("SET search_path = pg_temp, fanout, public")
        job_id = await submitter.fetchval("SELECT fanout.submit('leaf', '{}', key => 'k')")
        assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE id = $1", job_id) == 1
        assert await submitter.fetchval("SELECT count(*) FROM pg_temp.job") == 0
        for sql in ("UPDATE fanout.job SET status = 'cancelled'", "DELETE FROM fanout.job"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await submitter.execute(sql)
    finally:
        await submitter.close()


def test_every_name_in_every_statement_has_its_schema() -> None:
    """hardbyte/awa PR #115: no statement depends on the search_path: each table and function of
    ours is written with its schema."""
    names = "job|kind|worker|installation|migration|batches|children|failures|workers|stuck"
    bare = re.compile(rf"\b(?:FROM|JOIN|INTO|UPDATE)\s+(?:{names})\b(?!\s*\()", re.IGNORECASE)
    texts = {**load_statements(), **{name: sql for _, name, sql in load_migrations()}}
    for name, sql in texts.items():
        code = re.sub(r"--.*|'[^']*'", "", sql)
        ctes = set(re.findall(r"\b(\w+) AS (?:MATERIALIZED )?\(", code))
        found = [hit for hit in bare.findall(code) if hit.split()[-1] not in ctes]
        assert found == [], name
