"""A cancel at every point of a job's life, and loops that must not be collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from fanout.states import Status
from fanout.store import Store
from fanout.sweeper import Sweeper
from fanout.values import Interrupted, Retry
from tests.cases.lab import Calls, counters, engine_on, quick, until_true
from tests.factories import DONE, ME, a_store, claim, claim_of, insert_batch, row_of
from tests.machine.invariants import History, check


async def _claims(store: Store, batch: int, child: int, conn: asyncpg.Connection) -> object:
    return await claim(store)


async def _finishes(store: Store, batch: int, child: int, conn: asyncpg.Connection) -> object:
    return await store.finish([(await claim_of(conn, child), DONE)], ME)


async def _retries(store: Store, batch: int, child: int, conn: asyncpg.Connection) -> object:
    return await store.retry([(await claim_of(conn, child), Retry("t", "T", 0.0))], ME)


async def _releases(store: Store, batch: int, child: int, conn: asyncpg.Connection) -> object:
    return await store.release([(await claim_of(conn, child), Interrupted())], ME)


async def _sweeps(store: Store, batch: int, child: int, conn: asyncpg.Connection) -> object:
    await conn.execute(
        "UPDATE fanout.job SET lease_expires_at = clock_timestamp() - interval '1 s' "
        "WHERE id = $1 AND status = 'processing'",
        child,
    )
    return await Sweeper(store, quick(lease=0.001, heartbeat=0.0003)).rescue()


STEPS: dict[str, Callable[[Store, int, int, asyncpg.Connection], Awaitable[object]]] = {
    "claim": _claims,
    "finish of the last child": _finishes,
    "retry": _retries,
    "release": _releases,
    "sweep": _sweeps,
}


async def _cancels(store: Store, batch: int, conn: asyncpg.Connection, after: float) -> None:
    await asyncio.sleep(after)
    await store.doom(batch, Status.CANCELLED, "on request")
    sweeper = Sweeper(store, quick())
    async with asyncio.timeout(5):
        while (await row_of(conn, batch))["finished_at"] is None:
            await sweeper.end_children(batch)


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancel_beside_any_step_ends_in_one_state(
    step: str, database: str, conn: asyncpg.Connection
) -> None:
    """riverqueue/river PR #141, discussion #1603; grantcarthew/node-rethinkdb-job-queue #82: a
    cancel at the same moment as each step, forty times over: one terminal state a job,
    everything counted, one close, and nothing can be claimed or written afterwards."""
    await History.install(conn)
    async with a_store(database, pool_size=8) as store, a_store(database) as other:
        for n in range(40):
            batch, [child, done] = await insert_batch(
                conn, Status.WAITING, [Status.PROCESSING, Status.COMPLETED], on_closed="report"
            )
            if step == "claim":
                await store.release([(await claim_of(conn, child), Interrupted())], ME)
            late = await claim_of(conn, child)

            beside = await asyncpg.connect(database)
            await asyncio.gather(
                _cancels(store, batch, conn, n % 8 * 0.0004),
                STEPS[step](other, batch, child, beside),
            )
            await beside.close()
            row = await row_of(conn, batch)
            assert row["completed"] + row["failed"] + row["cancelled"] == row["total"] == 2
            assert row["status"] in ("cancelled", "completed")
            assert (await store.finish([(late, DONE)], ME)).moved == ()
            assert await claim(store) == []
            assert (await row_of(conn, child))["status"] in ("cancelled", "completed")
            await conn.execute("UPDATE fanout.job SET kind = 'old' WHERE kind = 'report'")
            assert done
    assert await check(conn, quiet=False) == []


async def test_a_cancel_tells_what_runs_and_drops_what_it_returns(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """grantcarthew/node-rethinkdb-job-queue #82: children that run while their batch is
    cancelled are told with the next heartbeat, end as cancelled, and are not run again."""
    async with engine_on(database, calls) as engine, engine.worker(concurrency=3) as worker:
        handle = await engine.submit("batch", {"n": 6, "child": {"seconds": 30}})
        await until_true(lambda: len(calls.starts) == 4)
        assert await handle.cancel()
        progress = await handle.wait(10)
        assert (progress.total, progress.cancelled, progress.completed) == (6, 6, 0)
        await until_true(lambda: worker.running == 0 and len(calls.starts) == 5)
        assert not await handle.cancel()
    # The manager, three that ran, and the report.
    assert len([s for s in calls.starts if s[1] == 1]) == 5
    assert calls.ends == []
    assert await counters(conn, handle.id) == ("cancelled", 6, 0, 0, 6)
    assert await check(conn, quiet=False) == []


@contextlib.asynccontextmanager
async def _collecting() -> AsyncIterator[None]:
    """A full collection every 10 ms, of what is made from now on: what hundreds of tests have left
    in this process would make each of them a second long."""

    async def collect() -> None:
        while True:
            gc.collect()
            await asyncio.sleep(0.01)

    gc.collect()
    gc.freeze()
    collector = asyncio.create_task(collect())
    try:
        yield
    finally:
        collector.cancel()
        await asyncio.wait([collector])
        gc.unfreeze()


async def _under_collection(database: str, calls: Calls, rounds: int) -> None:
    async with engine_on(database, calls) as engine, engine.worker() as worker, _collecting():
        loops = [
            weakref.ref(task)
            for task in (
                worker._claims._task,
                worker.sweeper.sweeps._task,
                worker.sweeper.give_ups._task,
                worker.listener._task,
                worker.finisher._task,
            )
            if task is not None
        ]
        assert len(loops) == 5
        for _ in range(rounds):
            beats = worker.heartbeat.beats
            handle = await engine.submit("batch", {"n": 20, "child": {"seconds": 0.05}})
            assert (await handle.wait(20)).completed == 20
            await until_true(lambda: worker.heartbeat.beats > beats)  # noqa: B023
        for loop in loops:
            task = loop()
            assert task is not None
            assert not task.done()


async def test_loops_survive_the_garbage_collector(database: str, calls: Calls) -> None:
    """google/adk-python #3174, ikalchev/HAP-python PR #460, python/cpython #117379: a collection
    every 10 ms: claims, sweeper, listener, finisher and heartbeat live, and every wake-up task
    is kept until it has run."""
    await _under_collection(database, calls, 1)


@pytest.mark.chaos
@pytest.mark.timeout(200)
async def test_loops_survive_a_minute_of_the_garbage_collector(database: str, calls: Calls) -> None:
    """python/cpython #117379, whole: about 60 s."""
    await _under_collection(database, calls, 60)


async def test_a_loop_whose_step_crashes_is_logged_and_goes_on(
    database: str, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """google/adk-python #3174: a step that raises anything at all is one line in the log, and
    the next step."""
    async with engine_on(database, calls) as engine:
        worker = engine.worker()
        sweep = worker.sweeper._store.expired_depths
        raised = 0

        async def raising() -> list[int]:
            nonlocal raised
            raised += 1
            if raised < 4:
                raise ZeroDivisionError("a bug")
            return await sweep()

        engine.store.expired_depths = raising  # type: ignore[method-assign]
        async with worker:
            await until_true(lambda: raised >= 5)
            assert worker.sweeper.sweeps.is_running
    assert len([r for r in caplog.records if "a bug" in r.getMessage()]) == 1
