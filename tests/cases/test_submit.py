"""Submitting in storms, and in halves."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest

from fanout import DatabaseUnavailable, IdempotencyConflict, Request
from tests.cases.lab import Fault, Wire, engine_on, name_of, until
from tests.machine.invariants import check


async def test_a_storm_of_submits_whose_winner_rolls_back_makes_one_job(
    database: str, conn: asyncpg.Connection
) -> None:
    """oban-bg/oban #1093, #1087, #1505: 200 submits of one key while the first to insert it
    rolls back: exactly one job; every id that anybody was given exists; the same key with other
    content is a conflict, and changes nothing."""
    async with engine_on(database, pool_size=20) as engine:
        first = await asyncpg.connect(database)
        transaction = first.transaction()
        await transaction.start()
        lost = await engine.submit("batch", {"n": 3}, key="import-1", connection=first)

        async def one() -> int:
            await asyncio.sleep(random.uniform(0, 0.05))
            return (await engine.submit("batch", {"n": 3}, key="import-1")).id

        storm = [asyncio.create_task(one()) for _ in range(200)]
        await until(
            conn, "SELECT count(*) > 5 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        )
        await transaction.rollback()
        await first.close()
        ids = set(await asyncio.gather(*storm))
        assert len(ids) == 1
        assert lost.id not in ids
        rows = await conn.fetch("SELECT id FROM fanout.job")
        assert {row["id"] for row in rows} == ids
        with pytest.raises(IdempotencyConflict) as conflict:
            await engine.submit("batch", {"n": 4}, key="import-1")
        assert conflict.value.job_id in ids
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1


async def test_two_storms_with_the_same_keys_in_opposite_order_do_not_deadlock(
    database: str, conn: asyncpg.Connection
) -> None:
    """oban-bg/oban #1087: many callers submit the same ten keys, each in an order of its own, in
    one round trip: ten jobs, each caller has all ten ids in the order asked, and no deadlock."""
    keys = [f"k{n}" for n in range(10)]
    before = await conn.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    async with engine_on(database, pool_size=12) as engine:

        async def one() -> dict[str, int]:
            mine = random.sample(keys, len(keys))
            jobs = await engine.submit_many([Request("leaf", {"k": key}, key=key) for key in mine])
            return dict(zip(mine, (job.id for job in jobs), strict=True))

        answers = await asyncio.gather(*(one() for _ in range(40)))
    assert all(answer == answers[0] for answer in answers)
    rows = await conn.fetch("SELECT idempotency_key, id FROM fanout.job")
    assert {row[0]: row[1] for row in rows} == answers[0]
    assert (
        await conn.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        == before
    )


@pytest.mark.parametrize("word", ["BEGIN", "submit", "COMMIT"])
@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER])
async def test_a_submit_that_was_cut_anywhere_is_simply_sent_again(
    word: str, fault: Fault, database: str, conn: asyncpg.Connection
) -> None:
    """procrastinate-org/procrastinate #1495: the key and the job are one row in one transaction:
    cut anywhere, before or after the server did it, doing it again makes exactly one job."""
    cut: list[str] = []

    def plan(_: int, query: str) -> Fault | None:
        if name_of(query) == word and not cut:
            cut.append(query)
            return fault
        return None

    wire = Wire()
    with wire.laid():
        async with engine_on(database) as engine:
            wire.plan = plan
            with pytest.raises(DatabaseUnavailable):
                await engine.submit("batch", {"n": 2}, key="tick-2026-11-29")
            handle = await engine.submit("batch", {"n": 2}, key="tick-2026-11-29")
            assert [row["id"] for row in await conn.fetch("SELECT id FROM fanout.job")] == [
                handle.id
            ]
    assert cut
    assert await check(conn, quiet=False) == []


async def test_a_tick_and_its_job_live_and_die_together(
    database: str, conn: asyncpg.Connection
) -> None:
    """procrastinate-org/procrastinate #1495: a scheduler that records its period on its own
    connection and submits in the same transaction: killed between the two nothing is recorded;
    done again there is one record and one job."""
    await conn.execute("CREATE TABLE public.tick (period text PRIMARY KEY)")
    async with engine_on(database) as engine:

        async def tick(*, crash: bool) -> None:
            mine = await asyncpg.connect(database)
            try:
                async with mine.transaction():
                    await mine.execute("INSERT INTO public.tick VALUES ('10:00')")
                    await engine.submit("leaf", key="tick 10:00", connection=mine)
                    if crash:
                        mine.terminate()
            finally:
                await mine.close()

        with pytest.raises((asyncpg.InterfaceError, asyncpg.PostgresError)):
            await tick(crash=True)
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0
        assert await conn.fetchval("SELECT count(*) FROM public.tick") == 0
        await tick(crash=False)
        with pytest.raises(asyncpg.UniqueViolationError):
            await tick(crash=False)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1
    assert await conn.fetchval("SELECT count(*) FROM public.tick") == 1


async def test_a_conflict_leaves_the_callers_transaction_usable(
    database: str, conn: asyncpg.Connection
) -> None:
    """oban-bg/oban #1505: a refused submit within somebody's transaction takes back what it did and
    nothing else."""
    await conn.execute("CREATE TABLE public.mine (n int)")
    async with engine_on(database) as engine:
        await engine.submit("leaf", {"n": 1}, key="k")
        async with conn.transaction():
            await conn.execute("INSERT INTO public.mine VALUES (1)")
            with pytest.raises(IdempotencyConflict):
                await engine.submit("leaf", {"n": 2}, key="k", connection=conn)
            await conn.execute("INSERT INTO public.mine VALUES (2)")
    assert await conn.fetchval("SELECT count(*) FROM public.mine") == 2
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1
