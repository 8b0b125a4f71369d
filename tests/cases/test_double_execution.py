"""A job that is taken twice, or taken from somebody who is alive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from fanout import ConfigurationError, Engine, Job, Request, Settings
from fanout.embedded import EmbeddedServer
from fanout.heartbeat import Heartbeat
from fanout.held import Held
from fanout.states import Status
from fanout.store import Store
from fanout.sweeper import Sweeper
from fanout.values import Interrupted
from tests.cases.lab import Calls, counters, engine_on, quick, until, until_true
from tests.factories import (
    DONE,
    ME,
    OTHER,
    claim,
    claim_of,
    insert_batch,
    live_worker,
    row_of,
    status_of,
)
from tests.machine.invariants import check


class Halted(Sweeper):
    """A sweeper that stands still between what it reads and what it writes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, quick(lease=0.001, heartbeat=0.0003))
        self.read, self.go = asyncio.Event(), asyncio.Event()
        self.moved = -1
        depths = store.expired_depths

        async def halting() -> list[int]:
            found = await depths()
            self.read.set()
            await self.go.wait()
            return found

        store.expired_depths = halting  # type: ignore[method-assign]


@pytest.mark.parametrize("meanwhile", ["it finished", "it was given to another"])
async def test_the_sweeper_never_acts_on_what_it_read_before(
    store: Store, conn: asyncpg.Connection, meanwhile: str
) -> None:
    """riverqueue/river #1302 (fix PR #1373): a child that finished, or was released and claimed
    again, between the sweeper's look and its write is left alone: no row moves, and the batch is
    closed once."""
    batch, ids = await insert_batch(
        conn, Status.WAITING, [Status.PROCESSING] * 3, on_closed="report"
    )
    claims = [await claim_of(conn, job_id) for job_id in ids]
    await conn.execute(
        "UPDATE fanout.job SET lease_expires_at = clock_timestamp() - interval '1 s' WHERE id = $1",
        ids[0],
    )
    sweeper = Halted(store)
    rescue = asyncio.create_task(sweeper.rescue())
    await sweeper.read.wait()
    holder = ME
    if meanwhile == "it finished":
        await store.finish([(claims[0], DONE)], ME)
    else:
        await store.release([(claims[0], Interrupted())], ME)
        [claims[0]] = await claim(store, token=OTHER)
        holder = OTHER
    sweeper.go.set()
    assert await rescue == 0
    child = await row_of(conn, ids[0])
    if meanwhile == "it finished":
        assert (child["status"], child["attempt"], child["deaths"]) == ("completed", 1, 0)
        assert await counters(conn, batch) == ("waiting", 3, 1, 0, 0)
    else:
        assert (child["status"], child["attempt"], child["deaths"]) == ("processing", 2, 0)
        assert child["claim_token"] == OTHER
        await store.finish([(claims[0], DONE)], holder)
    await store.finish([(claims[1], DONE), (claims[2], DONE)], ME)
    assert await counters(conn, batch) == ("completed", 3, 3, 0, 0)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE follows_id = $1", batch) == 1


async def test_a_restarted_pod_of_the_same_name_keeps_nothing_of_the_dead_one_alive(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """procrastinate-org/procrastinate #1518, oban-bg/oban #862: the worker of that name beats for
    what it holds itself and for nothing else; the dead one's claim is swept, runs twice in all, and
    is counted once."""
    batch, [child] = await insert_batch(conn, Status.WAITING, [Status.PROCESSING])
    old = await claim_of(conn, child)
    await conn.execute(
        "UPDATE fanout.job SET lease_expires_at = clock_timestamp() + interval '0.7 s' "
        "WHERE id = $1",
        child,
    )
    vitals = SimpleNamespace(
        kinds=["leaf"], concurrency=1, running=0, has_free_slot=True, state="running"
    )
    # Even if it believed to hold it, its token is another one.
    held = {child: Held(old, time.monotonic())}
    lost: list[int] = []
    heartbeat = Heartbeat(
        database,
        quick(heartbeat=0.1),
        OTHER,
        "w-0",
        "0",
        vitals,
        held,
        on_lost=lambda claims: lost.extend(claim.id for claim in claims),
        on_silence=lambda: None,
        on_overdue=lambda _: False,
    )
    heartbeat.start()
    try:
        sweeper = Sweeper(store, quick(lease=0.001, heartbeat=0.0003))
        await until(
            conn, "SELECT lease_expires_at < clock_timestamp() FROM fanout.job WHERE id = $1", child
        )
        assert await sweeper.rescue() == 1
    finally:
        await heartbeat.stop(5)
    assert heartbeat.beats >= 3
    assert set(lost) == {child}
    again = await store.claim_alone(["leaf"], OTHER, 60)
    assert again is not None
    assert (again.id, again.attempt, again.deaths) == (child, 2, 1)
    assert (await store.finish([(old, DONE)], ME)).moved == ()
    await store.finish([(again, DONE)], OTHER)
    assert await counters(conn, batch) == ("completed", 1, 1, 0, 0)


async def test_whoever_loses_the_race_for_a_job_does_not_run_it(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """dbos-inc/dbos-transact-py #742: eight workers go for the same sixty jobs at once: one call
    each, no error counted, no backoff added."""
    async with engine_on(database, calls, pool_size=16) as engine:
        jobs = await engine.submit_many([Request("leaf", {"seconds": 0.02}) for _ in range(60)])
        workers = [engine.worker(concurrency=4) for _ in range(8)]
        await asyncio.gather(*(worker.start() for worker in workers))
        for job in jobs:
            await job.wait(20)
    assert sorted(calls.starts) == sorted((job.id, 1) for job in jobs)
    assert await conn.fetchval("SELECT sum(failures + deaths) FROM fanout.job") == 0


async def test_a_healthy_child_is_beaten_for_at_least_every_third_of_its_lease(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """janbjorge/pgqueuer #430, #323 (PRs #333, #368, #431); oban-bg/oban #1141: a child that runs
    five leases and sweeps long, and waits, is run once: the beat drives the lease, not the start,
    and no two renewals lie further apart than a third of the lease."""
    lease = 1.2
    async with (
        engine_on(database, calls, lease=lease, heartbeat=0.3, sweep_interval=0.2) as engine,
        engine.worker(),
        engine.worker(),
    ):
        handle = await engine.submit("leaf", {"seconds": 4})
        await until(conn, "SELECT status = 'processing' FROM fanout.job WHERE id = $1", handle.id)
        renewed: set[Any] = set()
        while not (await handle.progress()).is_closed:
            if row := await conn.fetchrow(
                "SELECT lease_expires_at AS at FROM fanout.job "
                "WHERE id = $1 AND lease_expires_at IS NOT NULL",
                handle.id,
            ):
                renewed.add(row["at"])
            await asyncio.sleep(0.02)
    assert calls.of(handle.id) == [1]
    beats = sorted(renewed)
    gaps = [(b - a).total_seconds() for a, b in itertools.pairwise(beats)]
    assert len(gaps) >= 8
    assert max(gaps) <= lease / 3 + 0.1  # the machine's own delay


def test_a_heartbeat_that_does_not_fit_three_times_into_the_lease_is_refused() -> None:
    """janbjorge/pgqueuer #430; hexpm/hexpm PR #1825: there is no configuration without a heartbeat,
    and none in which a lease is shorter than three of them: a healthy job is never rescued by time
    alone."""
    for heartbeat in (0.6, 5, 0, -1):
        with pytest.raises(ConfigurationError, match="heartbeat"):
            Settings(lease=1.5, heartbeat=heartbeat)
    Settings(lease=1.5, heartbeat=0.5)


async def test_user_code_that_blocks_the_event_loop_keeps_its_lease(
    database: str, conn: asyncpg.Connection
) -> None:
    """taskforcesh/bullmq #3183, #3056; OptimalBits/bull #308, #311: `time.sleep` for three
    leases in an async handler: the beat comes from a thread of its own, so it is run once."""
    calls, done = Calls(), threading.Event()

    def other_process() -> None:
        async def main() -> None:
            engine = Engine(database, settings=quick(lease=0.9))

            @engine.job
            async def blocks(job: Job[Any]) -> None:
                calls.starts.append((job.id, job.attempt))
                time.sleep(2.7)  # noqa: ASYNC251 -- that is the point

            async with engine, engine.worker():
                await until_true(done.is_set, 60)

        asyncio.run(main())

    thread = threading.Thread(target=other_process)
    async with engine_on(database, calls, lease=0.9) as engine:

        @engine.job
        async def blocks(job: Job[Any]) -> None:
            calls.starts.append((job.id, job.attempt))

        handle = await engine.submit(blocks)
        thread.start()
        try:
            await until(conn, "SELECT attempt = 1 FROM fanout.job WHERE id = $1", handle.id)
            async with engine.worker():
                await handle.wait(15)
        finally:
            done.set()
            await asyncio.to_thread(thread.join)
    assert calls.of(handle.id) == [1]
    assert await conn.fetchval("SELECT deaths FROM fanout.job WHERE id = $1", handle.id) == 0


async def test_if_a_lease_lapses_all_the_same_the_first_run_writes_nothing(
    database: str, conn: asyncpg.Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """taskforcesh/bullmq #3183: the beat stops while the handler runs on: the second run owns
    attempt 2, the first one's finish moves no row, success is counted once, and there is no storm
    of tracebacks."""
    async with engine_on(database, calls, lease=0.6, heartbeat=0.15, sweep_interval=0.1) as engine:
        handle = await engine.submit("batch", {"n": 1, "child": {"seconds": 2}})
        first = engine.worker(concurrency=2)
        await first.start()
        await until(conn, "SELECT status = 'processing' FROM fanout.job WHERE kind = 'leaf'")
        await first._claims.stop()
        await first.sweeper.stop()
        # As if the process had stood still: no beat, and nothing that tells it.
        thread = first.heartbeat._thread
        first.heartbeat._stopping = True
        first.heartbeat.beat_now()
        assert thread is not None
        await asyncio.to_thread(thread.join)
        async with engine.worker():
            await handle.wait(20)
            await until_true(lambda: first.is_idle)
        await first.stop()
        assert first.finisher.lost == 1
    leaf = await conn.fetchval("SELECT id FROM fanout.job WHERE kind = 'leaf'")
    assert calls.of(leaf) == [1, 2]
    assert await counters(conn, handle.id) == ("completed", 1, 1, 0, 0)
    assert await conn.fetchval("SELECT attempt FROM fanout.job WHERE id = $1", leaf) == 2
    assert [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR] == []
    assert await check(conn, quiet=False) == []


async def test_a_child_in_backoff_is_not_stale(store: Store, conn: asyncpg.Connection) -> None:
    """celery/celery #5935, #3270, #2599: a child whose next run lies ten leases ahead, untouched
    for a day, is neither rescued nor given up nor run early."""
    batch, [child] = await insert_batch(conn, Status.WAITING, [Status.PENDING])
    await conn.execute(
        """UPDATE fanout.job SET updated_at = clock_timestamp() - interval '1 day',
                  created_at = clock_timestamp() - interval '1 day',
                  claimed_at = clock_timestamp() - interval '1 day',
                  run_at = CASE WHEN id = $1 THEN clock_timestamp() + interval '5 min'
                                ELSE run_at END""",
        child,
    )
    await live_worker(conn, ["leaf"])
    before = await row_of(conn, child)
    sweeper = Sweeper(store, quick(lease=0.001, heartbeat=0.0003, give_up_after=0.1))
    await sweeper.sweep()
    await sweeper.rescue()
    await sweeper.give_up()
    assert await row_of(conn, child) == before
    assert await claim(store) == []
    assert await status_of(conn, batch) is Status.WAITING


async def test_ownership_outlives_a_restart_of_the_server(
    postgres: EmbeddedServer, calls: Calls
) -> None:
    """bensheldon/good_job #90: a server that goes down and comes back while a child runs takes no
    claim away: ownership is a row, the child runs once, and its finish goes through after the
    reconnect."""
    dsn = postgres.dsn()
    async with (
        engine_on(dsn, calls, lease=3, heartbeat=0.5) as engine,
        engine.worker(),
        engine.worker(),
    ):
        handle = await engine.submit("batch", {"n": 4, "child": {"seconds": 2.5}})
        await until_true(lambda: len(calls.starts) >= 5)
        await asyncio.to_thread(postgres.stop, "immediate")
        await asyncio.sleep(0.5)
        await asyncio.to_thread(postgres.start)
        progress = await handle.wait(20)
    assert (progress.completed, progress.failed) == (4, 0)
    assert {attempt for _, attempt in calls.starts} == {1}


async def test_a_timed_out_call_that_does_not_stop_is_not_run_beside_itself(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """hatchet-dev/hatchet #1022: a handler that ignores its timeout for a while: the second attempt
    starts only after the first was ended or let go, the log carries both attempts, the result of
    the first is dropped, and success is counted once."""
    running: set[int] = set()
    side_by_side: list[tuple[int, int]] = []
    async with engine_on(database, calls, timeout_grace=3) as engine:

        @engine.job(timeout=0.3, max_retries=3)
        async def deaf(job: Job[Any]) -> int:
            calls.starts.append((job.id, job.attempt))
            side_by_side.extend((other, job.attempt) for other in running)
            running.add(job.attempt)
            end = time.monotonic() + (1.2 if job.attempt == 1 else 0)
            while time.monotonic() < end:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
            running.discard(job.attempt)
            return job.attempt

        async with engine.worker(), engine.worker():
            handle = await engine.submit(deaf)
            assert await handle.result(20) == 2
    assert calls.of(handle.id) == [1, 2]
    assert side_by_side == []
    row = await row_of(conn, handle.id)
    assert (row["attempt"], row["failures"], row["deaths"]) == (2, 1, 0)


async def test_a_claim_names_its_worker_for_good(store: Store, conn: asyncpg.Connection) -> None:
    """procrastinate-org/procrastinate #1518: a claim token is a process's own, made at its start:
    the same attempt number under another token moves nothing."""
    _, [child] = await insert_batch(conn, Status.WAITING, [Status.PROCESSING])
    mine = await claim_of(conn, child)
    stranger = uuid.uuid4()
    assert (await store.finish([(mine, DONE)], stranger)).moved == ()
    assert await store.release([(mine, Interrupted())], stranger) == set()
    assert await status_of(conn, child) is Status.PROCESSING
