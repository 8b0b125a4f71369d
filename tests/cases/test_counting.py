"""Counters that drift, batches that close early, twice or never."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from fanout import Document, Job, Refused
from fanout.states import Status
from fanout.store import Store
from fanout.values import Claim, Completed, Failed
from tests.cases.lab import Calls, counters, engine_on, until
from tests.factories import (
    BROKEN,
    DONE,
    ME,
    a_store,
    claim_of,
    insert_batch,
    row_of,
)
from tests.machine.invariants import History, check


async def closes(conn: asyncpg.Connection, job_id: int) -> int:
    """How many follow-ups the closes of a batch enqueued."""
    n: int = await conn.fetchval("SELECT count(*) FROM fanout.job WHERE follows_id = $1", job_id)
    return n


async def test_retries_and_a_stolen_lease_move_no_counter_twice(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """celery/celery #1401, celery/django-celery-results PR #397: five children, two of them retried
    twice, one run a second time after its lease was given away: 5 completed, closed once, after the
    last child; the log shows 5 + 4 + 1 calls."""
    await History.install(conn)
    mix = {"1": {"flaky": 2}, "3": {"flaky": 2}, "4": {"seconds": 1.5}}
    async with engine_on(database, calls, lease=0.9) as engine:
        handle = await engine.submit("batch", {"n": 5, "mix": mix})
        async with engine.worker(), engine.worker():
            stolen = await until(
                conn,
                "SELECT id FROM fanout.job WHERE document_key = '00004' AND status = 'processing'",
            )
            await conn.execute(
                """WITH kept AS (
                       INSERT INTO fanout.attempt (job_id, attempt, outcome)
                       SELECT id, attempt, 'lost' FROM fanout.job WHERE id = $1)
                   UPDATE fanout.job SET status = 'pending', claim_token = NULL,
                          lease_expires_at = NULL, deaths = deaths + 1 WHERE id = $1""",
                stolen,
            )
            await handle.wait(20)
    assert await counters(conn, handle.id) == ("completed", 5, 5, 0, 0)
    assert await closes(conn, handle.id) == 1
    parent = await row_of(conn, handle.id)
    last = await conn.fetchval(
        "SELECT max(finished_at) FROM fanout.job WHERE parent_id = $1", handle.id
    )
    assert parent["finished_at"] >= last
    leaves = await conn.fetch("SELECT id FROM fanout.job WHERE kind = 'leaf'")
    assert sum(len(calls.of(leaf["id"])) for leaf in leaves) == 10
    assert calls.repeated == []
    assert await check(conn, quiet=False) == []


@pytest.mark.parametrize("how", ["list", "iterator", "filtered", "no fan_out at all"])
async def test_the_empty_batch_closes_itself(
    database: str, conn: asyncpg.Connection, how: str
) -> None:
    """celery/celery #4333, #2107: nothing to do is done: completed, 0 of 0, 100 %, one
    follow-up, no division by zero and no NaN, also where a filter left nothing."""
    async with engine_on(database) as engine:

        @engine.job(on_closed="report")
        async def empty(job: Job[Any]) -> None:
            async def none() -> AsyncIterator[Document]:
                for key in list[str]():
                    yield Document(key)

            match how:
                case "list":
                    await job.fan_out("leaf", [])
                case "iterator":
                    await job.fan_out("leaf", none())
                case "filtered":
                    await job.fan_out("leaf", (Document(k) for k in ("a", "b") if k > "z"))
                case _:
                    pass

        async with engine.worker():
            handle = await engine.submit(empty)
            progress = await handle.wait(10)
            await until(
                conn, "SELECT status = 'completed' FROM fanout.job WHERE follows_id = $1", handle.id
            )
    assert (progress.total, progress.completed, progress.failed, progress.percent) == (0, 0, 0, 100)
    assert progress.outcome == "completed"
    assert progress.rate_per_second is None or math.isfinite(progress.rate_per_second)
    assert await counters(conn, handle.id) == ("completed", 0, 0, 0, 0)
    assert await closes(conn, handle.id) == 1
    assert await conn.fetchval("SELECT percent FROM fanout.batches WHERE id = $1", handle.id) == 100


async def _end(
    store: Store, one: Claim, outcome: Completed | Failed, barrier: asyncio.Barrier
) -> int:
    await barrier.wait()
    return len((await store.finish([(one, outcome)], ME)).closed)


async def _at_the_barrier(database: str, conn: asyncpg.Connection, repeats: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(a_store(database, pool_size=2, name=f"w{n}"))
            for n in range(50)
        ]
        for _ in range(repeats):
            batch, ids = await insert_batch(
                conn, Status.WAITING, [Status.PROCESSING] * 50, on_closed="report"
            )
            claims = [await claim_of(conn, job_id) for job_id in ids]
            barrier = asyncio.Barrier(50)

            closers = await asyncio.gather(
                *(
                    _end(store, one, BROKEN if n % 7 == 3 else DONE, barrier)
                    for n, (store, one) in enumerate(zip(stores, claims, strict=True))
                )
            )
            assert sum(closers) == 1, "exactly one child learns that it was the one"
            assert await counters(conn, batch) == ("completed", 50, 43, 7, 0)
            assert await closes(conn, batch) == 1
    assert await check(conn, quiet=False) == []


async def test_of_fifty_children_that_end_at_the_same_instant_one_closes(
    database: str, conn: asyncpg.Connection
) -> None:
    """bensheldon/good_job #832: 50 workers meet at a barrier just before the finish: one close, by
    exactly one of them, and the counters are exact."""
    await _at_the_barrier(database, conn, 4)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_of_fifty_children_that_end_at_the_same_instant_one_closes_200_times(
    database: str, conn: asyncpg.Connection
) -> None:
    """bensheldon/good_job #832, whole: 200 of 200."""
    await _at_the_barrier(database, conn, 200)


async def test_children_that_are_faster_than_their_manager_do_not_close_the_batch(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """bensheldon/good_job PR #712, breamware/sidekiq-batch PR #69, seomoz/plines #44: 100
    children in chunks of 10 with a pause between them, each ended before the next chunk: the
    batch is open until it is sealed, and closes once, at 100."""
    seen: set[tuple[str, int, int]] = set()
    async with engine_on(database, calls, chunk_size=10) as engine:

        @engine.job(on_closed="report")
        async def slow(job: Job[Any]) -> None:
            async def documents() -> AsyncIterator[Document]:
                for n in range(100):
                    if n % 10 == 0 and n:
                        await until(
                            conn,
                            "SELECT completed = total FROM fanout.job WHERE id = $1 AND total = $2",
                            job.id,
                            n,
                        )
                        seen.add((await counters(conn, job.id))[:3])
                    yield Document(f"{n:03}")

            await job.fan_out("leaf", documents())

        async with engine.worker():
            handle = await engine.submit(slow)
            progress = await handle.wait(30)
    assert seen == {("processing", n, n) for n in range(10, 100, 10)}
    assert (progress.total, progress.completed) == (100, 100)
    assert await closes(conn, handle.id) == 1


async def test_a_failed_child_of_a_closed_batch_is_retried_as_a_new_generation(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """bensheldon/good_job #1450 and #822: retrying what failed opens the batch again: failed - 1,
    one more follow-up, of generation 2, when it closes; never more ended than there are. What has
    no failed child, or was cancelled, is refused, and nothing changes."""
    async with engine_on(database, calls) as engine:
        async with engine.worker() as worker:
            handle = await engine.submit("batch", {"n": 4, "mix": {"2": {"broken": True}}})
            await handle.wait(10)
            assert await counters(conn, handle.id) == ("completed", 4, 3, 1, 0)
            await worker.stop()
        await conn.execute("UPDATE fanout.job SET payload = '{}' WHERE document_key = '00002'")
        assert await handle.retry() == 1
        assert await counters(conn, handle.id) == ("waiting", 4, 3, 0, 0)
        async with engine.worker():
            await handle.wait(10)
            assert await counters(conn, handle.id) == ("completed", 4, 4, 0, 0)
            before = await row_of(conn, handle.id)
            with pytest.raises(Refused):
                await handle.retry()
            assert await row_of(conn, handle.id) == before
    generations = await conn.fetch(
        "SELECT follows_generation, payload->>'failed' FROM fanout.job "
        "WHERE follows_id = $1 ORDER BY 1",
        handle.id,
    )
    assert [tuple(row) for row in generations] == [(1, "1"), (2, "0")]
    assert await check(conn, quiet=False) == []


@pytest.mark.parametrize("failing", [1, 10, 20])
async def test_failed_children_release_their_batch(
    failing: int, database: str, conn: asyncpg.Connection
) -> None:
    """taskforcesh/bullmq #3362, #3122: 1, 10 or 20 of 20 children fail for good, the last to end
    among them: the batch closes once, with as many failures."""
    async with a_store(database) as store:
        batch, ids = await insert_batch(
            conn, Status.WAITING, [Status.PROCESSING] * 20, on_closed="report"
        )
        for n, job_id in enumerate(ids):
            outcome: Completed | Failed = BROKEN if n >= 20 - failing else DONE
            await store.finish([(await claim_of(conn, job_id), outcome)], ME)
    assert await counters(conn, batch) == ("completed", 20, 20 - failing, failing, 0)
    assert await closes(conn, batch) == 1


async def test_progress_is_what_was_committed_also_where_a_finish_is_rolled_back(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """tolgee/tolgee-platform #3635 (256 of 252): every third finish is rolled back after it has
    counted: no reading of the progress goes back or beyond the total, and the last one equals
    it."""
    await conn.execute(
        """CREATE SEQUENCE public.finishes; CREATE FUNCTION public.spoil() RETURNS trigger
        LANGUAGE plpgsql AS $$ BEGIN IF NEW.completed > OLD.completed AND
        nextval('public.finishes') % 3 = 0 THEN RAISE SQLSTATE '40001' USING MESSAGE = 'rolled
        back after it was counted'; END IF; RETURN NULL; END $$; CREATE CONSTRAINT TRIGGER spoil
        AFTER UPDATE ON fanout.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION
        public.spoil()"""
    )
    async with engine_on(database, calls) as engine:
        handle = await engine.submit("batch", {"n": 60, "child": {"seconds": 0.01}})
        async with engine.worker(concurrency=3), engine.worker(concurrency=3):
            readings = [progress async for progress in handle.watch(0.005)]
    ended = [progress.ended for progress in readings]
    assert ended == sorted(ended)
    assert all(progress.ended <= progress.total for progress in readings)
    assert all((progress.percent == 100) == progress.is_closed for progress in readings)
    assert ended[-1] == readings[-1].total == 60
    assert await conn.fetchval("SELECT last_value FROM public.finishes") > 3
    assert await check(conn, quiet=False) == []


async def test_many_small_batches_under_broken_connections_all_close(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """taskforcesh/bullmq #2644, scaled: 100 batches of 15 while connections of the engine are
    terminated: no batch is left open, no child pending, nothing is called twice in an attempt."""
    await _batches_in_a_storm(database, conn, calls, batches=100, pause=0.15)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_two_thousand_batches_under_broken_connections_all_close(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """taskforcesh/bullmq #2644, whole: 2,000 x 15."""
    await _batches_in_a_storm(database, conn, calls, batches=2000, pause=1.0)


async def _batches_in_a_storm(
    database: str, conn: asyncpg.Connection, calls: Calls, *, batches: int, pause: float
) -> None:
    await History.install(conn)

    async def storm() -> None:
        while True:
            await asyncio.sleep(pause)
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'fanout engine%' "
                "AND datname = current_database() ORDER BY random() LIMIT 2"
            )

    async with engine_on(database, calls) as engine:
        jobs = [
            await engine.submit(
                "batch", {"n": 15, "mix": {"3": {"flaky": 1}, "7": {"broken": True}}}
            )
            for _ in range(batches)
        ]
        weather = asyncio.create_task(storm())
        try:
            async with engine.worker(concurrency=20), engine.worker(concurrency=20):
                for handle in jobs:
                    await handle.wait(600)
        finally:
            weather.cancel()
            await asyncio.wait([weather])
    rows = await conn.fetch(
        "SELECT status, total, completed, failed, count(*) FROM fanout.job "
        "WHERE kind = 'batch' GROUP BY 1, 2, 3, 4"
    )
    assert [tuple(row) for row in rows] == [("completed", 15, 14, 1, batches)]
    assert calls.repeated == []
    # A connection that broke is nobody's fault: only what the handlers raised was counted.
    assert await conn.fetchval("SELECT sum(failures) FROM fanout.job") == 2 * batches
    assert await check(conn, quiet=False) == []
