"""Everything that locks, at once, on the same few rows."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest

from fanout.errors import JobNotFound, Refused
from fanout.states import Status
from fanout.sweeper import Sweeper
from fanout.values import Interrupted, Retry
from tests.cases.lab import quick, settle
from tests.factories import BROKEN, DONE, ME, a_store, claim, insert_batch
from tests.machine.invariants import History, check


async def _hot_parents(database: str, conn: asyncpg.Connection, seconds: float) -> None:
    await History.install(conn)
    roots = [
        (await insert_batch(conn, Status.WAITING, [Status.PENDING] * 400, on_closed="report"))[0]
        for _ in range(3)
    ]
    for root in roots:  # below each, a batch of its own
        nested, _ = await insert_batch(conn, Status.WAITING, [Status.PENDING] * 50, parent=root)
        await conn.execute("UPDATE fanout.job SET total = total + 1 WHERE id = $1", root)
        assert nested
    before = await conn.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    stop = asyncio.Event()
    async with a_store(database, pool_size=24) as store:

        async def work() -> None:
            while not stop.is_set():
                claims = await claim(store, limit=random.randint(1, 20))
                ended = [
                    (c, BROKEN if random.random() < 0.1 else DONE)
                    for c in claims
                    if random.random() < 0.6
                ]
                gone = {c.id for c, _ in ended}
                rest = [c for c in claims if c.id not in gone]
                half = len(rest) // 2
                await store.finish(ended, ME)
                await store.retry([(c, Retry("t", "T", 0.0)) for c in rest[:half]], ME)
                await store.release([(c, Interrupted()) for c in rest[half:]], ME)
                await asyncio.sleep(0.001)

        async def sweep() -> None:
            sweeper = Sweeper(store, quick(lease=0.001, heartbeat=0.0003))
            while not stop.is_set():
                for root in random.sample(roots, len(roots)):
                    await sweeper.recount(root)
                await sweeper.sweep()
                await asyncio.sleep(0.005)

        async def steer() -> None:
            while not stop.is_set():
                await asyncio.sleep(random.uniform(0, 0.05))
                try:
                    await store.retry_failed(random.choice(roots))
                except (Refused, JobNotFound):
                    continue

        tasks = [asyncio.create_task(work()) for _ in range(8)]
        tasks += [asyncio.create_task(sweep()) for _ in range(2)]
        tasks += [asyncio.create_task(steer()) for _ in range(2)]
        await asyncio.sleep(seconds * 0.7)
        await store.doom(roots[0], Status.CANCELLED, "on request")
        await asyncio.sleep(seconds * 0.3)
        stop.set()
        await asyncio.gather(*tasks)
        await settle(conn)
        assert await check(conn, quiet=False) == []
        after = await conn.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        assert after == before
        assert await conn.fetchval("SELECT count(*) FROM public.test_history") > 500


async def test_everything_at_once_on_three_hot_parents_never_deadlocks(
    database: str, conn: asyncpg.Connection
) -> None:
    """janbjorge/pgqueuer #170, AcademySoftwareFoundation/OpenCue #988, laravel/framework #36478,
    yontrack/yontrack #1422, hail-is/hail PR #14379: finish, retry, release, sweep, recount,
    retry of failed ones and cancel, all at once, nested: locks are taken child first, then
    parent, by id: no deadlock at all, and counters equal a recount."""
    await _hot_parents(database, conn, 2.5)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_everything_at_once_for_half_a_minute(
    database: str, conn: asyncpg.Connection
) -> None:
    """janbjorge/pgqueuer #170, whole: 30 s."""
    await _hot_parents(database, conn, 30)
