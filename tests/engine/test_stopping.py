"""Timeouts, cancels, shutdown, and failed children that are run again."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import asyncpg
import pytest

from fanout import (
    Closed,
    Engine,
    Job,
    JobFailed,
    JobHandle,
    JobNotFound,
    PermanentError,
    Refused,
    Status,
)
from tests.engine.running import (
    assert_true_to_its_children,
    closed,
    counts,
    quick,
    running,
    statuses,
    until,
)


async def test_a_handler_that_takes_too_long_is_stopped(engine: Engine) -> None:
    """It is a transient failure that says how long it had."""

    @engine.job(timeout=0.05, max_retries=1)
    async def slow(job: Job[None]) -> None:
        await asyncio.Event().wait()

    async with running(engine):
        handle = await engine.submit(slow)
        with pytest.raises(JobFailed, match=r"timed out after 0\.05 s"):
            await handle.result(30)
        job = await handle.job()
        assert (job.attempt, job.error_type) == (2, "TimeoutError")


async def test_a_handler_that_swallows_its_cancellation_has_timed_out_all_the_same(
    engine: Engine,
) -> None:
    """What it returns too late does not count, within the grace that it has to stop."""

    @engine.job(timeout=0.05, max_retries=0)
    async def stubborn(job: Job[None]) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
        return "late"

    async with running(engine) as worker:
        handle = await engine.submit(stubborn)
        assert (await closed(handle)).status is Status.FAILED
        assert (await handle.job()).result is None
        assert not worker.failed.is_set()


async def test_a_thread_is_asked_to_stop(engine: Engine) -> None:
    """It cannot be interrupted: it sees `cancel_requested`, and has timed out all the same."""

    @engine.job(timeout=0.05, max_retries=0)
    def polite(job: Job[None]) -> str:
        while not job.cancel_requested:
            time.sleep(0.005)
        return "late"

    async with running(engine) as worker:
        handle = await engine.submit(polite)
        with pytest.raises(JobFailed, match="timed out"):
            await handle.result(30)
        assert not worker.failed.is_set()


async def test_a_thread_that_never_ends_loses_its_lease_and_its_process(
    database: str, conn: asyncpg.Connection
) -> None:
    """After timeout and grace nothing renews it; the worker claims nothing more and asks to be
    started again; the job runs elsewhere."""
    freed = threading.Event()
    runs: list[int] = []
    engine = Engine(
        database, settings=quick(lease=0.6, heartbeat=0.1, timeout_grace=0.1, sweep_interval=0.1)
    )

    @engine.job(timeout=0.05)
    def hangs(job: Job[None]) -> str:
        runs.append(job.attempt)
        if job.attempt == 1:
            freed.wait(30)
        return "elsewhere"

    try:
        async with engine:
            worker = engine.worker(name="hung")
            await worker.start()
            handle = await engine.submit(hangs)
            async with asyncio.timeout(30):
                await worker.failed.wait()
            async with engine.worker(name="other"):
                assert await handle.result(30) == "elsewhere"
            job = await handle.job()
            assert (job.attempt, job.deaths, job.failures) == (2, 1, 0)
            freed.set()
    finally:
        freed.set()
    assert runs == [1, 2]
    assert (await conn.fetchrow("SELECT * FROM fanout.job"))["attempt"] == 2  # type: ignore[index]


async def test_waiting_in_the_queue_is_not_running(database: str) -> None:
    """A timeout counts from the handler's first step: twenty jobs that wait for one slot do not
    time out."""
    engine = Engine(database, settings=quick(prefetch=0))

    @engine.job(timeout=0.5)
    async def short(job: Job[None]) -> None:
        await asyncio.sleep(0.04)

    async with running(engine, concurrency=1):
        handles = [await engine.submit(short) for _ in range(20)]
        for handle in handles:
            await handle.result(30)
            assert (await handle.job()).failures == 0


async def test_a_cancelled_batch_ends_what_runs_and_what_waits(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """At once in the database; handlers get CancelledError with their next heartbeat; what has
    ended stays as it is; the follow-up is told, once."""
    began = asyncio.Event()
    started: list[str] = []
    told: list[str] = []
    seen: list[Closed] = []

    @engine.job
    async def leaf(job: Job[int]) -> None:
        if job.payload == 0:
            return
        if job.payload == 1:
            raise PermanentError("no")
        started.append(job.document_key or "")
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append(job.document_key or "")
            raise

    @engine.job
    async def report(job: Job[Closed]) -> None:
        seen.append(job.payload)

    @engine.job(on_closed=report)
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, ((f"d{n}", n) for n in range(8)))

    async with running(engine, concurrency=3):
        handle = await engine.submit(batch)
        await began.wait()
        await until(lambda: has(handle, completed=1, failed=1))
        began_at = time.monotonic()
        assert await handle.cancel("the user closed the page")
        progress = await closed(handle)
        assert (progress.status, counts(progress)) == (Status.CANCELLED, (8, 1, 1, 6))
        assert progress.reason == "the user closed the page"
        assert not await handle.cancel()
        await until(lambda: sorted(told) == sorted(started))
        assert time.monotonic() - began_at < 10
        [row] = await engine.jobs(kind="report")
        await closed(engine.handle(row.id))
    assert [(one.outcome, one.total, one.cancelled) for one in seen] == [(Status.CANCELLED, 8, 6)]
    await assert_true_to_its_children(conn)


async def has(handle: JobHandle, **fields: int) -> bool:
    progress = await handle.progress()
    return all(getattr(progress, name) == count for name, count in fields.items())


async def test_a_cancel_reaches_every_level(engine: Engine, conn: asyncpg.Connection) -> None:
    """A batch of batches, more children than a chunk, none of them served."""

    @engine.job
    async def folder(job: Job[None]) -> None:
        await job.fan_out("served_nowhere", ((f"l{n}", None) for n in range(300)))

    @engine.job
    async def library(job: Job[None]) -> None:
        await job.fan_out(folder, ((f"f{n}", None) for n in range(3)))

    async with running(engine):
        handle = await engine.submit(library)
        await until(lambda: dispatched(conn, 904))
        await until(lambda: has(handle, processing=0))
        assert await handle.cancel()
        progress = await closed(handle)
        assert (progress.status, counts(progress)) == (Status.CANCELLED, (3, 0, 0, 3))
        async for folder_ in handle.children():
            below = await closed(engine.handle(folder_.id))
            assert counts(below) == (300, 0, 0, 300)
    await assert_true_to_its_children(conn)


async def dispatched(conn: asyncpg.Connection, count: int) -> bool:
    return bool(await conn.fetchval("SELECT count(*) = $1 FROM fanout.job", count))


async def test_a_job_that_was_not_begun_is_cancelled_too(engine: Engine) -> None:
    """And one that never was is not found."""
    async with engine:
        handle = await engine.submit("served_nowhere")
        assert await handle.cancel("a\0\ud800" + "x" * 5000)
        progress = await closed(handle)
        assert progress.status is Status.CANCELLED
        assert progress.reason is not None
        assert progress.reason.startswith("a\u2400\ufffdxxx")
        assert not await handle.cancel()
        with pytest.raises(JobFailed, match="cancelled"):
            await handle.result()
        with pytest.raises(JobNotFound) as caught:
            await engine.handle(10**9).cancel()
        assert caught.value.job_id == 10**9


async def test_a_child_can_be_cancelled_alone(engine: Engine) -> None:
    """It is counted, and the batch closes by it if it was the last."""

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out("served_nowhere", [("a", None), ("b", None)])

    async with running(engine):
        handle = await engine.submit(batch)
        await until(lambda: has(handle, total=2, pending=2))
        children = [child async for child in handle.children()]
        for child in children:
            await engine.handle(child.id).cancel("not this one")
        progress = await closed(handle)
        assert (progress.outcome, counts(progress)) == ("completed", (2, 0, 0, 2))
        page = await handle.children_page(status="cancelled")
        assert {child.reason for child in page} == {"not this one"}


class Library:
    """A batch of six, of which those in `broken` fail, each with the error it is given."""

    def __init__(self, engine: Engine) -> None:
        self.broken = {"b": "corrupt", "d": "locked", "f": "corrupt"}
        self.closes: list[Closed] = []
        self.runs: list[tuple[str, int, int]] = []

        @engine.job
        async def leaf(job: Job[None]) -> str:
            assert job.document_key is not None
            self.runs.append((job.document_key, job.attempt, job.failures))
            if job.document_key in self.broken:
                raise PermanentError(self.broken[job.document_key])
            return job.document_key.upper()

        @engine.job
        async def report(job: Job[Closed]) -> None:
            self.closes.append(job.payload)

        @engine.job(on_closed=report)
        async def batch(job: Job[None]) -> None:
            await job.fan_out(leaf, ((key, None) for key in "abcdef"))

        self.batch = batch


async def test_all_that_failed_can_be_run_again(engine: Engine, conn: asyncpg.Connection) -> None:
    """Under a new generation, with a fresh budget and a second follow-up; what is done stays."""
    library = Library(engine)
    async with running(engine):
        handle = await engine.submit(library.batch)
        assert counts(await closed(handle)) == (6, 3, 3, 0)
        library.broken.clear()
        assert await handle.retry() == 3
        progress = await closed(handle)
        assert (counts(progress), progress.generation) == ((6, 6, 0, 0), 2)
        assert progress.outcome == "completed"
        await until(lambda: len(library.closes) == 2)
    assert [(one.generation, one.failed) for one in library.closes] == [(1, 3), (2, 0)]
    assert sorted(library.runs)[1:3] == [("b", 1, 0), ("b", 2, 0)]
    assert len(library.runs) == 9
    await assert_true_to_its_children(conn)


async def test_some_that_failed_can_be_run_again(engine: Engine) -> None:
    """By key, or by the exact error."""
    library = Library(engine)
    async with running(engine):
        handle = await engine.submit(library.batch)
        await closed(handle)
        library.broken.clear()
        assert await handle.retry(keys=["d", "a", "nonesuch"]) == 1
        assert counts(await closed(handle)) == (6, 4, 2, 0)
        assert await handle.retry(error="corrupt") == 2
        progress = await closed(handle)
        assert (counts(progress), progress.generation) == ((6, 6, 0, 0), 3)


async def test_a_retry_that_fails_again_counts_again(engine: Engine) -> None:
    """Back to the same counters."""
    library = Library(engine)
    async with running(engine):
        handle = await engine.submit(library.batch)
        await closed(handle)
        assert await handle.retry(keys=["b"]) == 1
        assert counts(await closed(handle)) == (6, 3, 3, 0)
        reasons = await handle.failure_reasons()
        assert [(reason.error, reason.count, reason.example) for reason in reasons] == [
            ("corrupt", 2, "b"),
            ("locked", 1, "d"),
        ]


async def test_a_retry_opens_all_that_had_closed_above_it(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A leaf two levels down: its folder and the library are open again, and close again."""
    broken = {"l1"}

    @engine.job
    async def leaf(job: Job[None]) -> None:
        if job.document_key in broken:
            raise PermanentError("no")

    @engine.job(on_closed="report")
    async def folder(job: Job[None]) -> None:
        await job.fan_out(leaf, ((f"l{n}", None) for n in range(3)))

    @engine.job(on_closed="report")
    async def library(job: Job[None]) -> None:
        await job.fan_out(folder, [("f0", None), ("f1", None)])

    async with running(engine):
        handle = await engine.submit(library)
        await closed(handle)
        first, second = [engine.handle(child.id) async for child in handle.children()]
        broken.clear()
        assert await first.retry() == 1
        progress = await closed(handle)
        assert (counts(progress), progress.generation) == ((2, 2, 0, 0), 2)
        assert (counts(await first.progress()), (await first.job()).generation) == ((3, 3, 0, 0), 2)
        assert (counts(await second.progress()), (await second.job()).generation) == (
            (3, 2, 1, 0),
            1,
        )
        assert len(await engine.jobs(kind="report")) == 5
    await assert_true_to_its_children(conn)


async def test_a_failed_single_job_can_be_run_again(engine: Engine) -> None:
    """Once: it is not failed then."""
    fails = [True]

    @engine.job
    async def leaf(job: Job[None]) -> str:
        if fails:
            raise PermanentError("no")
        return "done"

    async with running(engine):
        handle = await engine.submit(leaf)
        await closed(handle)
        fails.clear()
        assert await handle.retry() == 1
        assert await handle.result(30) == "done"
        assert (await handle.job()).generation == 2
        with pytest.raises(Refused, match="it is completed"):
            await handle.retry()


async def test_what_cannot_be_retried_is_refused_and_left_alone(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Nothing failed; cancelled; failed as a whole; a child by itself; none at all."""
    library = Library(engine)

    @engine.job
    async def doomed(job: Job[None]) -> None:
        await job.fan_out("leaf", [("a", None), ("b", None)])
        raise PermanentError("the library has burnt down")

    async with running(engine):
        whole = await engine.submit(library.batch)
        await closed(whole)
        [child, *_] = [one async for one in whole.failures()]
        good = await engine.submit("leaf_of_nobody")
        await good.cancel()
        failed = await engine.submit(doomed)
        await closed(failed)
        library.broken.clear()
        before = await table(conn)
        refused: list[tuple[JobHandle, dict[str, Any], str]] = [
            (whole, {"keys": ["a"]}, "no failed child"),
            (whole, {"keys": []}, "no failed child"),
            (whole, {"error": "another error"}, "no failed child"),
            (engine.handle(child.id), {}, rf"batch, job {whole.id}, with keys=\['b'\]"),
            (good, {}, "it is cancelled"),
            (failed, {}, "no failed child|failed as a whole"),
        ]
        for handle, options, why in refused:
            with pytest.raises(Refused, match=why) as caught:
                await handle.retry(**options)
            assert caught.value.job_id == handle.id
        with pytest.raises(JobNotFound):
            await engine.handle(10**9).retry()
        assert await table(conn) == before
        assert await statuses(failed)


async def table(conn: asyncpg.Connection) -> list[str]:
    rows = await conn.fetch("SELECT j::text FROM fanout.job j ORDER BY id")
    return [row[0] for row in rows]


async def test_a_stop_lets_what_runs_end(engine: Engine) -> None:
    """Within the grace it is completed; nothing more is claimed."""
    began, go_on = asyncio.Event(), asyncio.Event()

    @engine.job
    async def leaf(job: Job[int]) -> int:
        began.set()
        await go_on.wait()
        return job.payload

    async with engine:
        worker = engine.worker(concurrency=1)
        await worker.start()
        first, second = await engine.submit(leaf, 1), await engine.submit(leaf, 2)
        await began.wait()
        stopping = asyncio.create_task(worker.stop(30))
        await until(partial(is_state, worker, "stopping"))
        go_on.set()
        await stopping
        assert await first.result() == 1
        job = await second.job()
        assert (job.status, job.failures, job.deaths) == (Status.PENDING, 0, 0)


def is_state(worker: Any, state: str) -> bool:
    return bool(worker.state == state)


async def test_a_stop_releases_what_does_not_end(engine: Engine) -> None:
    """At no cost, and another worker takes it; a handler's own clean-up runs."""
    cleaned: list[int] = []
    began = asyncio.Event()

    @engine.job
    async def leaf(job: Job[None]) -> str:
        if job.attempt == 1:
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                cleaned.append(job.attempt)
        return "elsewhere"

    async with engine:
        worker = engine.worker()
        await worker.start()
        handle = await engine.submit(leaf)
        await began.wait()
        await worker.stop(0.01)
        assert cleaned == [1]
        assert (await handle.job()).status is Status.PENDING
        async with engine.worker():
            assert await handle.result(30) == "elsewhere"
        job = await handle.job()
        assert (job.attempt, job.failures, job.deaths) == (2, 0, 0)
