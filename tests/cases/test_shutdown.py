"""Deploys: nothing is claimed after the signal, nothing is left behind, nothing costs a retry."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

import asyncpg
import pytest

from tests.cases.lab import Calls, Pod, Proxy, counters, engine_on, until, until_true
from tests.machine.invariants import check


async def test_a_draining_pod_claims_nothing_that_its_successor_freed(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """dbos-inc/dbos-transact-py #804: pod A drains, with a grace, while pod B of the same name
    starts and there is more to do: A claims nothing after the signal, B takes everything over,
    also what A released at the end of its grace, without a one-off recovery at its start."""
    async with engine_on(database, calls, stop_grace=1) as engine:
        handle = await engine.submit("batch", {"n": 12, "child": {"seconds": 0.4}})
        a = engine.worker(concurrency=5, name="pod")
        await a.start()
        await until(conn, "SELECT count(*) >= 4 FROM fanout.job WHERE status = 'processing'")
        await conn.execute(
            """UPDATE fanout.job SET payload = '{"seconds": 8}'
                WHERE status = 'pending' AND document_key = '00011'"""
        )
        draining = asyncio.create_task(a.stop())
        await asyncio.sleep(0)
        executed = a.executed + a.running
        async with engine.worker(concurrency=3, name="pod") as b:
            await draining
            assert a.executed <= executed
            assert a.running == 0
            await until(conn, "SELECT count(*) = 11 FROM fanout.job WHERE finished_at IS NOT NULL")
            await conn.execute("UPDATE fanout.job SET payload = '{}' WHERE document_key = '00011'")
            await b.stop(0)
        async with engine.worker(name="pod"):
            await handle.wait(10)
    assert await counters(conn, handle.id) == ("completed", 12, 12, 0, 0)
    assert await conn.fetchval("SELECT sum(failures + deaths) FROM fanout.job") == 0


async def test_ten_deploys_during_one_child_use_up_no_retry(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """python-arq/arq #267: ten rolling restarts during one child with no retry at all: it is run
    eleven times, its budget is untouched, and it completes. The fence and the budget are two
    numbers."""
    async with engine_on(database, calls, stop_grace=0.01) as engine:
        handle = await engine.submit("leaf", {"seconds": 30}, max_retries=0)
        for attempt in range(1, 11):
            async with engine.worker():
                await until(
                    conn,
                    "SELECT status = 'processing' AND attempt = $2 FROM fanout.job WHERE id = $1",
                    handle.id,
                    attempt,
                )
                await until_true(lambda: calls.of(handle.id)[-1:] == [attempt])  # noqa: B023
        await conn.execute("UPDATE fanout.job SET payload = '{}'")
        async with engine.worker():
            assert await handle.result(10) == {"attempt": 11}
    row = await handle_row(conn, handle.id)
    assert (row["attempt"], row["failures"], row["deaths"]) == (11, 0, 0)


async def handle_row(conn: asyncpg.Connection, job_id: int) -> asyncpg.Record:
    row = await conn.fetchrow("SELECT * FROM fanout.job WHERE id = $1", job_id)
    assert row is not None
    return row


async def test_what_does_not_end_within_the_grace_is_released(
    pods: Callable[..., Pod], database: str, conn: asyncpg.Connection
) -> None:
    """timgit/pg-boss #102; graphile/worker #526, PR #353: three children of a minute, a grace of
    0.7 s, SIGTERM: nothing more is claimed, at the end of the grace all three are pending and owned
    by nobody, and the process exits with 0 right after."""
    pod = await pods(FANOUT_STOP_GRACE="0.7", FANOUT_CONCURRENCY="3").up()
    async with engine_on(database) as engine:
        handle = await engine.submit("batch", {"n": 6, "child": {"seconds": 60}})
        await until(
            conn,
            "SELECT count(*) = 3 FROM fanout.job WHERE status = 'processing' AND kind = 'leaf'",
        )
        claimed = await conn.fetchval("SELECT sum(attempt) FROM fanout.job")
        told = time.monotonic()
        pod.popen.send_signal(signal.SIGTERM)
        assert await pod.ended(8) == 0
    assert time.monotonic() - told < 3.5
    assert await conn.fetchval("SELECT sum(attempt) FROM fanout.job") == claimed
    assert (
        await conn.fetchval(
            "SELECT count(*) FROM fanout.job WHERE kind = 'leaf' AND status = 'pending' "
            "AND claim_token IS NULL"
        )
        == 6
    )
    assert await counters(conn, handle.id) == ("waiting", 6, 0, 0, 0)


async def test_a_child_that_ends_during_the_stop_is_counted(
    database: str, conn: asyncpg.Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """graphile/worker PR #223: children that end 0.2 s after the signal are written and counted
    before the pool closes; no line says that the pool is closed."""
    caplog.set_level(logging.DEBUG)
    async with engine_on(database, calls) as engine:
        handle = await engine.submit("batch", {"n": 8, "child": {"seconds": 0.4}})
        worker = engine.worker(concurrency=8)
        await worker.start()
        await until_true(lambda: len(calls.starts) == 9)
    # Leaving the engine stops its workers, and then disconnects.
    assert await counters(conn, handle.id) == ("completed", 8, 8, 0, 0)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == []
    assert await check(conn, quiet=False) == []


async def test_a_worker_stopped_with_the_database_away_ends_in_time(
    database: str, calls: Calls
) -> None:
    """procrastinate-org/procrastinate #1513, PR #1596: stopping while the database does not answer
    ends within the grace and the database's timeout, and needs no kill."""
    async with (
        Proxy(database) as proxy,
        engine_on(proxy.dsn, calls, database_timeout=0.7) as engine,
    ):
        await engine.submit("batch", {"n": 4, "child": {"seconds": 0.3}})
        worker = engine.worker()
        await worker.start()
        await until_true(lambda: len(calls.starts) == 5)
        proxy.stall()
        began = time.monotonic()
        await worker.stop(0.5)
        await engine.stop()
        assert time.monotonic() - began < 0.5 + 6 * 0.7 + 1.5
