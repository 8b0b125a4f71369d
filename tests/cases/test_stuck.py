"""Jobs that stay where they are because whoever should move them died, or looked elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from fanout import Engine, Job
from fanout.embedded import EmbeddedServer
from fanout.pool import Pool
from fanout.states import Status
from fanout.store import Store
from fanout.sweeper import PAGE, Sweeper
from tests.cases.lab import Calls, Pod, counters, engine_on, quick, until, until_true
from tests.factories import (
    DONE,
    GONE,
    ME,
    claim,
    held,
    insert_batch,
    insert_job,
    row_of,
    submit,
)
from tests.factories import fan_out as fan_out_chunk
from tests.machine.invariants import check


def sweeper_of(store: Store, **changes: Any) -> Sweeper:
    """A sweeper that has been in contact for a lease."""
    return Sweeper(store, quick(**{"lease": 0.001, "heartbeat": 0.0003, **changes}))


async def expire(conn: asyncpg.Connection, where: str = "true") -> None:
    await conn.execute(
        "UPDATE fanout.job SET lease_expires_at = clock_timestamp() - interval '1 s' "
        f"WHERE status = 'processing' AND {where}"
    )


async def test_a_restart_of_the_server_in_mid_sweep_strands_nothing(
    postgres: EmbeddedServer, calls: Calls
) -> None:
    """dbos-inc/dbos-transact-py #716: 250 stale children, the server stopped hard in the middle of
    the sweep and started again: all 250 end, none stays with a dead owner, and the sweeper is the
    same task as before."""
    dsn = postgres.dsn()
    async with engine_on(dsn, calls, lease=1, heartbeat=0.2, sweep_interval=0.2) as engine:
        conn = await asyncpg.connect(dsn)
        batch, _ = await insert_batch(conn, Status.WAITING, [Status.PROCESSING] * 250)
        await expire(conn)
        await conn.close()
        worker = engine.worker(concurrency=50)
        rescue = engine.store.rescue
        reached = asyncio.Event()

        async def halting(*arguments: Any) -> Any:
            if not reached.is_set():
                reached.set()
                await asyncio.sleep(0.2)
            return await rescue(*arguments)

        engine.store.rescue = halting  # type: ignore[method-assign, assignment]
        async with worker:
            sweeper = worker.sweeper.sweeps._task
            await asyncio.wait_for(reached.wait(), 10)
            await asyncio.to_thread(postgres.stop, "immediate")
            await asyncio.to_thread(postgres.start)
            progress = await engine.handle(batch).wait(30)
            assert worker.sweeper.sweeps._task is sweeper
            assert worker.sweeper.sweeps.is_running
    assert (progress.total, progress.completed) == (250, 250)


async def test_a_manager_that_crashes_at_any_chunk_dispatches_each_document_once(
    store: Store, conn: asyncpg.Connection
) -> None:
    """celery/celery #1700: a manager of 200 documents in chunks of 20 dies after chunk k, for
    every k from 0 to 10: its next run makes the rest, none twice, and the batch closes once at
    200."""
    chunks = [[f"{i:03}" for i in range(n, n + 20)] for n in range(0, 200, 20)]
    for k in range(11):
        batch = await submit(store, on_closed="report")
        [first] = await claim(store, ["manager"], lease=GONE)
        for chunk in chunks[:k]:
            await fan_out_chunk(store, first, chunk, lease=GONE)
        assert await sweeper_of(store).rescue() == 1
        again = await store.claim_alone(["manager"], ME, 60)
        assert again is not None
        total = 0
        for n, chunk in enumerate(chunks):
            born, total = await fan_out_chunk(store, again, chunk)
            assert born == (0 if n < k else 20)
        assert total == 200
        await store.finish([(again, DONE)], ME)
        while claims := await claim(store):
            await store.finish([(one, DONE) for one in claims], ME)
        assert await counters(conn, batch) == ("completed", 200, 200, 0, 0)
        await conn.execute("UPDATE fanout.job SET kind = 'old' WHERE kind = 'report'")
    assert await check(conn, quiet=False) == []


async def test_a_page_of_locked_rows_does_not_hide_those_behind_it(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """riverqueue/river PR #1318: a full page of stale rows that somebody has locked, and one more
    behind it: that one is rescued in the first sweep, and the others as soon as they are free."""
    _, ids = await insert_batch(conn, Status.WAITING, [Status.PROCESSING] * (PAGE + 1))
    await expire(conn)
    async with held(database) as other:
        for job_id in ids[:PAGE]:
            await other.lock(job_id)
        assert await sweeper_of(store).rescue() == 1
        assert (await row_of(conn, ids[-1]))["status"] == "pending"
        await other.rollback()
    assert await sweeper_of(store).rescue() == PAGE


async def test_one_row_that_cannot_be_swept_does_not_keep_the_others(
    store: Store, conn: asyncpg.Connection
) -> None:
    """riverqueue/river #1258 (5,133 rows, up to 91 days): of 300 stale rows one makes every
    write to it raise: the other 299 are swept, the sweeper lives, and the view of stuck work
    names the one that is left."""
    _, ids = await insert_batch(conn, Status.WAITING, [Status.PROCESSING] * 300)
    await expire(conn)
    await conn.execute(
        f"""CREATE FUNCTION public.bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.id = {ids[150]} THEN RAISE EXCEPTION 'this row is bad'; END IF;
                RETURN NEW; END $$;
            CREATE TRIGGER bad BEFORE UPDATE ON fanout.job
                FOR EACH ROW EXECUTE FUNCTION public.bad()"""
    )
    sweeper = sweeper_of(store)
    sweeper.sweeps.start()
    try:
        await until(
            conn, "SELECT count(*) = 299 FROM fanout.job WHERE status = 'pending'", seconds=5
        )
        assert sweeper.sweeps.is_running
    finally:
        await sweeper.stop()
    [stuck] = await conn.fetch("SELECT id FROM fanout.stuck WHERE why = 'lease expired'")
    assert stuck["id"] == ids[150]


async def test_one_batch_that_cannot_be_mended_does_not_keep_the_others(
    store: Store, conn: asyncpg.Connection
) -> None:
    """riverqueue/river #1258, for batches: of twenty with wrong counters one makes every write
    to it raise: the other nineteen are mended and closed in the same sweep."""
    batches = [
        (await insert_batch(conn, Status.PENDING, [Status.COMPLETED] * 2))[0] for _ in range(20)
    ]
    await conn.execute(
        f"""UPDATE fanout.job SET completed = 1, status = 'waiting' WHERE kind = 'manager';
            CREATE FUNCTION public.bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.id = {batches[7]} THEN RAISE EXCEPTION 'this row is bad'; END IF;
                RETURN NEW; END $$;
            CREATE TRIGGER bad BEFORE UPDATE ON fanout.job
                FOR EACH ROW EXECUTE FUNCTION public.bad()"""
    )
    await sweeper_of(store).sweep()
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'waiting'") == 1


async def test_a_worker_that_dies_in_its_last_attempt_leaves_no_job_for_ever(
    store: Store, conn: asyncpg.Connection
) -> None:
    """graphile/worker #254: a job without a retry left, whose worker is gone: it is never locked
    for good: it runs once more, alone, and if that keeps killing its worker, it is failed with a
    reason, counted in the same transaction, and its batch closes, once."""
    batch, [child] = await insert_batch(
        conn,
        Status.WAITING,
        [{"status": Status.PROCESSING, "max_retries": 3, "failures": 3}],
        on_closed="report",
    )
    sweeper = sweeper_of(store, max_deaths=2)
    for deaths in (1, 2):
        await expire(conn)
        assert await sweeper.rescue() == 1
        assert (await row_of(conn, child))["deaths"] == deaths
        assert await store.claim_alone(["leaf"], ME, 60) is not None
    await expire(conn)
    assert await sweeper.rescue() == 1
    row = await row_of(conn, child)
    assert (row["status"], row["error_type"]) == ("failed", "Poison")
    assert "died" in row["error"]
    assert await counters(conn, batch) == ("completed", 1, 0, 1, 0)
    assert await sweeper.rescue() == 0
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE follows_id = $1", batch) == 1


async def test_a_child_that_outgrows_the_memory_costs_its_neighbours_nothing(
    pods: Callable[..., Pod], database: str, conn: asyncpg.Connection
) -> None:
    """python-arq/arq #343: a child takes memory until there is none: where Python can still say
    so it is a failure like another, retried and then counted, and its neighbours and its process
    go on."""
    await pods(POD_MEMORY=str(1 << 30)).up()
    async with engine_on(database) as engine:
        handle = await engine.submit(
            "batch", {"n": 6, "child": {"seconds": 0.1}, "mix": {"2": {"grow": True}}}
        )
        await handle.wait(30)
    assert await counters(conn, handle.id) == ("completed", 6, 5, 1, 0)
    bad = await conn.fetchrow("SELECT * FROM fanout.job WHERE status = 'failed'")
    assert bad is not None
    assert (bad["document_key"], bad["error_type"], bad["failures"]) == ("00002", "MemoryError", 3)
    assert await conn.fetchval("SELECT sum(deaths) FROM fanout.job") == 0


async def test_a_child_that_is_killed_for_its_memory_ends_as_poison(
    pods: Callable[..., Pod], database: str, conn: asyncpg.Connection
) -> None:
    """python-arq/arq #343: where the process is killed instead, as Kubernetes does (exit 137): the
    killer runs again alone and fails after `max_deaths` of those, so its workers are restarted no
    more often than that; the others go on within lease and sweep, and pay nothing."""
    environment = {"FANOUT_MAX_DEATHS": "1", "FANOUT_LEASE": "1", "FANOUT_CONCURRENCY": "6"}
    live = [await pods(**environment).up() for _ in range(2)]
    restarts = 0
    async with engine_on(database) as engine:
        handle = await engine.submit(
            "batch", {"n": 6, "child": {"seconds": 0.3}, "mix": {"2": {"exit": 137}}}
        )
        done = asyncio.ensure_future(handle.wait(60))
        while not done.done():
            for n, pod in enumerate(live):
                if pod.popen.poll() is not None:
                    restarts += 1
                    live[n] = pods(**environment)
            await asyncio.wait([done], timeout=0.05)
        await done
    assert await counters(conn, handle.id) == ("completed", 6, 5, 1, 0)
    bad = await conn.fetchrow("SELECT * FROM fanout.job WHERE status = 'failed'")
    assert bad is not None
    assert (bad["document_key"], bad["error_type"], bad["deaths"]) == ("00002", "Poison", 2)
    assert restarts <= 2
    assert await conn.fetchval("SELECT max(deaths) FROM fanout.job WHERE status = 'completed'") <= 1


async def test_a_stale_row_does_not_block_the_slot_it_needs(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """janbjorge/pgqueuer #475, PR #474: a process with one slot, and a claim of a process that was
    killed: the stale row takes no slot of anybody, and is taken over within lease and sweep."""
    job_id = await insert_job(conn, Status.PROCESSING, kind="leaf")
    await expire(conn)
    async with engine_on(database, calls, lease=0.9) as engine, engine.worker(concurrency=1):
        assert await engine.handle(job_id).result(5) == {"attempt": 2}


async def test_an_idle_system_asks_little(database: str) -> None:
    """celery/celery #1700, contribsys/faktory #41, bensheldon/good_job #296: a worker with nothing
    to do, and default intervals, sends fewer than five statements a second in all, and at most one
    claim a second."""
    await _idle(database, 4.0)


@pytest.mark.chaos
async def test_an_idle_system_asks_little_for_a_minute(database: str) -> None:
    """contribsys/faktory #41, whole: 60 s."""
    await _idle(database, 60.0)


async def _idle(database: str, seconds: float) -> None:
    asked: list[str] = []
    fetch = Pool.fetch

    async def counting(self: Pool, sql: str, *arguments: object) -> list[Any]:
        asked.append(sql)
        return await fetch(self, sql, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "fetch", counting)
        engine = Engine(database)

        @engine.job
        async def leaf(job: Job[Any]) -> None:
            await asyncio.sleep(0)

        async with engine, engine.worker() as worker:
            await engine.submit(leaf)
            await until_true(lambda: worker.executed == 1)
            await asyncio.sleep(1.2)
            asked.clear()
            await asyncio.sleep(seconds)
            claims = [sql for sql in asked if "claimed AS (" in sql]
            everything = len(asked)
    assert len(claims) <= seconds / 0.9 + 1
    assert everything < 5 * seconds


async def test_a_job_whose_kind_nobody_serves_is_named_and_not_given_up(
    store: Store, conn: asyncpg.Connection
) -> None:
    """taskforcesh/bullmq #2644 (three of 15 never started, without a line): what does not start is
    explained: by the view of stuck work and in the batch's own progress."""
    batch, _ = await insert_batch(conn, Status.WAITING, [Status.PENDING] * 3)
    await conn.execute("UPDATE fanout.job SET updated_at = clock_timestamp() - interval '9 h'")
    await sweeper_of(store, give_up_after=1).give_up()
    assert await counters(conn, batch) == ("waiting", 3, 0, 0, 0)
    assert "no worker serves leaf" in (await store.progress(batch)).waits_for
    assert [row["why"] for row in await store.stuck(10)] == ["no worker serves leaf"]
