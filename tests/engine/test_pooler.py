"""The engine behind a transaction pooler: everything works, only wake-ups are polled for."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from fanout import Closed, Engine, Job, PermanentError, TransientError, migrate
from tests.engine.pooler import pooled
from tests.engine.running import (
    assert_true_to_its_children,
    closed,
    counts,
    quick,
    running,
    until,
)


async def test_everything_works_through_a_transaction_pooler(
    empty_database: str,
) -> None:
    """Migrate, submit with a key, fan out, retry, fail, checkpoint, heartbeat, follow up, cancel,
    retry what failed, sweep."""
    async with pooled(empty_database) as (dsn, pooler):
        engine = Engine(dsn, settings=quick(transaction_pooler=True, pool_size=3))
        seen: list[Closed] = []
        mended: set[str] = set()

        @engine.job
        async def leaf(job: Job[int]) -> int:
            await job.save_checkpoint(job.payload)
            if job.payload == 0 and job.failures == 0:
                raise TransientError("again")
            if job.payload == 1 and not mended:
                raise PermanentError("no")
            return job.payload

        @engine.job
        async def report(job: Job[Closed]) -> None:
            seen.append(job.payload)

        @engine.job(on_closed=report)
        async def batch(job: Job[int]) -> None:
            await job.fan_out(leaf, ((str(n), n) for n in range(job.payload)))

        @engine.job
        async def endless(job: Job[None]) -> None:
            await asyncio.Event().wait()

        async with running(engine) as worker:
            handle = await engine.submit(batch, 100, key="once")
            assert (await engine.submit(batch, 100, key="once")).id == handle.id
            assert counts(await closed(handle)) == (100, 99, 1, 0)
            mended.add("yes")
            assert await handle.retry() == 1
            assert counts(await closed(handle)) == (100, 100, 0, 0)
            await until(lambda: len(seen) == 2)
            long = await engine.submit(endless)
            await until(lambda: worker.running == 1)
            beats = worker.heartbeat.beats
            await until(lambda: worker.heartbeat.beats > beats + 2)
            assert await long.cancel()
            await until(lambda: worker.running == 0)
            await engine.sweeper().sweep()
            await engine.sweeper().give_up()
            assert len(await engine.workers()) == 1
            assert worker.heartbeat.beats > 3
        assert pooler.transactions > 30
    conn = await asyncpg.connect(empty_database)
    await assert_true_to_its_children(conn)
    await conn.close()


async def test_a_callers_connection_may_come_through_a_pooler_too(database: str) -> None:
    """Within its transaction it is one server connection's."""
    await migrate(database)
    async with pooled(database) as (dsn, _):
        conn = await asyncpg.connect(dsn, statement_cache_size=0)
        async with Engine(dsn, settings=quick(transaction_pooler=True)) as engine:
            async with conn.transaction():
                handle = await engine.submit("a", {"n": 1}, key="k", connection=conn)
                assert await engine.find("k") is None
            found = await engine.find("k")
            assert found is not None
            assert found.id == handle.id
        await conn.close()


async def test_this_pooler_forgets_what_a_session_keeps(database: str) -> None:
    """Else the tests above would show nothing."""
    async with pooled(database) as (dsn, _):
        conn = await asyncpg.connect(dsn)
        try:
            prepared = await conn.prepare("SELECT 1")
            await prepared.fetch()  # the same server connection, for there was no Sync in between
            with pytest.raises(asyncpg.InvalidSQLStatementNameError):
                await prepared.fetch()
        finally:
            await conn.close()
