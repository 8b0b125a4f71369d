"""The schema under many pods, and under somebody's ALTER."""

from __future__ import annotations

import asyncio
import sys
import time

import asyncpg
import pytest

from fanout.migrate import expected_version, migrate
from fanout.statements import load_migrations
from tests.cases.lab import ROOT, Calls, counters, engine_on, quick, until, until_true
from tests.machine.invariants import check


async def _ten_pods(dsn: str, rounds: int) -> None:
    conn = await asyncpg.connect(dsn)
    try:
        for n in range(rounds):
            schema = f"boot{n}"
            reports = await asyncio.gather(*(migrate(dsn, schema=schema) for _ in range(10)))
            assert [r.after for r in reports] == [expected_version()] * 10
            assert sum(r.before == 0 for r in reports) == 1, "one did it, nine found it done"
            rows = await conn.fetch(f"SELECT version FROM {schema}.migration ORDER BY version")
            landed = [version for version, _, _ in load_migrations()]
            assert [row["version"] for row in rows] == landed
            again = await migrate(dsn, schema=schema)
            assert (again.before, again.after) == (expected_version(), expected_version())
        left = await conn.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        assert left == 0
    finally:
        await conn.close()


async def test_ten_pods_that_start_on_an_empty_database_make_one_schema(
    empty_database: str,
) -> None:
    """graphile/worker #496, microsoft/duroxide #10, decocms/studio PR #6435 (DBOS): ten at once:
    all ready, each version recorded once, a second start does nothing, no lock is left."""
    await _ten_pods(empty_database, 3)


@pytest.mark.chaos
async def test_ten_pods_that_start_on_an_empty_database_twenty_times(empty_database: str) -> None:
    """graphile/worker #496, whole: 20 rounds."""
    await _ten_pods(empty_database, 20)


async def test_a_pod_that_is_killed_in_mid_migration_leaves_nothing_half_done(
    empty_database: str,
) -> None:
    """decocms/studio PR #6435 (DBOS): kill -9 in the middle of a migration: there is either no
    schema or a whole one, and the next pod starts."""
    conn = await asyncpg.connect(empty_database)
    try:
        # Stopped in the middle: what it makes is being made by somebody else.
        blocker = await asyncpg.connect(empty_database)
        transaction = blocker.transaction()
        await transaction.start()
        await blocker.execute("CREATE SCHEMA fanout; CREATE VIEW fanout.stuck AS SELECT 1 AS one")
        code = "import asyncio, sys, fanout; asyncio.run(fanout.migrate(sys.argv[1]))"
        pod = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, empty_database, cwd=ROOT
        )
        await until(
            conn,
            "SELECT count(*) = 1 FROM pg_stat_activity "
            "WHERE application_name = 'fanout migrate' AND wait_event_type = 'Lock'",
        )
        pod.kill()
        await pod.wait()
        await transaction.rollback()
        await blocker.close()
        report = await migrate(empty_database, settings=quick())
        assert (report.before, report.after) == (0, expected_version())
        landed = await conn.fetchval("SELECT count(*) FROM fanout.migration")
        assert landed == len(load_migrations())
    finally:
        await conn.close()


async def test_a_live_alter_and_a_rebuilt_index_fail_no_child(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """MagicStack/asyncpg #458, proliferate-ai/proliferate PR #702: under load the table gets a
    column, loses it again, has a column's type changed and its indexes rebuilt: plans that
    became invalid are run again as whole transactions; no child fails and no retry is used up."""
    async with engine_on(database, calls) as engine:
        handle = await engine.submit("batch", {"n": 600, "child": {"seconds": 0.02}})
        async with engine.worker(concurrency=10), engine.worker(concurrency=10):
            done = asyncio.ensure_future(handle.wait(60))
            await until_true(lambda: len(calls.starts) > 20)
            rounds = 0
            began = time.monotonic()
            while not done.done() and time.monotonic() - began < 20:
                for sql in (
                    "ALTER TABLE fanout.job ADD COLUMN later text",
                    "REINDEX INDEX CONCURRENTLY fanout.job_pending",
                    "ALTER TABLE fanout.job ALTER COLUMN checkpoint TYPE jsonb",
                    "REINDEX INDEX CONCURRENTLY fanout.job_pkey",
                    "ALTER TABLE fanout.job DROP COLUMN later",
                    "ALTER TABLE fanout.job ALTER COLUMN checkpoint TYPE json",
                ):
                    await conn.execute(sql)
                rounds += 1
            await done
    assert rounds >= 1
    assert await counters(conn, handle.id) == ("completed", 600, 600, 0, 0)
    assert await conn.fetchval("SELECT sum(failures + deaths) FROM fanout.job") == 0
    assert calls.repeated == []
    assert await check(conn, quiet=False) == []
