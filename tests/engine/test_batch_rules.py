"""What a batch is told, through the engine: it fails in time, adds up, keeps attempts, closes."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from fanout import Document, Engine, Job, PermanentError, Status, TransientError, UsageError
from tests.engine.running import (
    PATIENCE,
    assert_true_to_its_children,
    closed,
    counts,
    quick,
    running,
    until,
)


@pytest.fixture
def engine(database: str) -> Engine:
    return Engine(database, settings=quick())


def _documents(count: int) -> list[Document]:
    return [Document(f"d{n:03}", n) for n in range(count)]


async def test_a_batch_in_which_too_many_fail_is_ended_at_once(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """No sweep is waited for: what runs is told to stop, what waits never runs."""
    stopped = asyncio.Event()
    running_one = asyncio.Event()

    @engine.job
    async def child(job: Job[int]) -> None:
        if job.payload == 0:
            running_one.set()
            try:
                await asyncio.sleep(PATIENCE)
            finally:
                stopped.set()
        await running_one.wait()
        raise PermanentError("not a PDF")

    @engine.job(fail_after=3)
    async def batch(job: Job[Any]) -> None:
        await job.fan_out(child, _documents(200))

    async with running(engine, concurrency=2):
        progress = await closed(await engine.submit(batch))
        await asyncio.wait_for(stopped.wait(), PATIENCE)

    assert progress.status is Status.FAILED
    assert progress.reason is not None
    assert "children failed, fail_after is 3" in progress.reason
    assert progress.failed >= 3
    assert progress.cancelled > 0
    await assert_true_to_its_children(conn)


async def test_a_manager_that_still_dispatches_is_stopped(engine: Engine) -> None:
    """Its next chunk is refused, its handler ends, and the batch closes with what it had."""
    dispatched = 0

    @engine.job
    async def child(_job: Job[int]) -> None:
        raise PermanentError("no")

    @engine.job(fail_after=1)
    async def batch(job: Job[Any]) -> None:
        nonlocal dispatched
        while True:
            await job.fan_out(child, [Document(f"d{dispatched}", 0)])
            dispatched += 1

    async with running(engine) as worker:
        progress = await closed(await engine.submit(batch))
        await until(lambda: worker.is_idle)

    assert progress.status is Status.FAILED
    assert progress.total == dispatched


async def test_sums_of_all_attempts_reach_the_batch(engine: Engine) -> None:
    """Added in async handlers and in threads, before a failure and after it, exact to a tenth."""

    @engine.job(max_retries=2)
    async def child(job: Job[int]) -> None:
        job.add(cost=0.1, calls=1)
        job.add(cost=Decimal("0.2"))
        if job.failures < 1:
            raise TransientError("again")

    @engine.job
    def threaded(job: Job[int]) -> None:
        job.add(cost=0.1)
        raise PermanentError("paid, and yet failed")

    @engine.job
    async def batch(job: Job[Any]) -> None:
        job.add(pages=7)
        await job.fan_out(child, _documents(5))
        await job.fan_out(threaded, [("t", 0)])

    async with running(engine):
        handle = await engine.submit(batch)
        progress = await closed(handle)
        first, *_ = [child async for child in handle.children()]

    assert progress.sums == {"calls": 10, "cost": 3.1, "pages": 7}
    assert first.sums == {"calls": 2, "cost": 0.6}


@pytest.mark.parametrize(
    ("amounts", "field"),
    [
        ({"cost": float("nan")}, "add"),
        ({"cost": "1"}, "add"),
        ({"cost": True}, "add"),
        ({"cost": 1e16}, "add"),
        ({"two words": 1}, "add"),
        ({"n" * 64: 1}, "add"),
        ({f"n{i}": 1 for i in range(17)}, "add"),
    ],
)
async def test_what_cannot_be_added_is_refused_whole(
    amounts: dict[str, Any], field: str, engine: Engine
) -> None:
    """A clear error names it; what stood beside it was not added either."""
    seen: list[UsageError] = []

    @engine.job
    async def child(job: Job[Any]) -> None:
        job.add(kept=1)
        with pytest.raises(UsageError) as refused:
            job.add(**{"kept": 1, **amounts})
        seen.append(refused.value)

    async with running(engine):
        progress = await closed(await engine.submit(child))

    assert progress.status is Status.COMPLETED
    assert progress.sums == {"kept": 1}
    assert seen[0].field == field


async def test_a_budget_stops_a_batch_in_the_middle(engine: Engine) -> None:
    """The children that ended are kept, with their results; the rest was never run."""

    @engine.job
    async def child(job: Job[int]) -> int:
        job.add(cost=1)
        return job.payload

    @engine.job
    async def batch(job: Job[Any]) -> None:
        await job.fan_out(child, _documents(300))

    async with running(engine, concurrency=1):
        handle = await engine.submit(batch, budget={"cost": 10})
        progress = await closed(handle)

    assert progress.status is Status.FAILED
    assert progress.reason is not None
    assert progress.reason.endswith("its budget is 10")
    assert progress.completed >= 10
    assert progress.sums == {"cost": progress.completed}


async def test_a_timeline_of_a_job_that_was_tried_twice(engine: Engine) -> None:
    """With why the first one ended, and that the second one was good."""

    @engine.job
    async def once(job: Job[Any]) -> None:
        if job.attempt == 1:
            raise TransientError("busy")

    async with running(engine) as worker:
        handle = await engine.submit(once)
        assert await handle.attempts() == []
        await closed(handle)
        first, second = await handle.attempts()

    assert (first.attempt, first.outcome, first.error) == (1, "retry", "busy")
    assert (second.attempt, second.outcome, second.worker_id) == (2, "completed", worker.token)
    assert first.ended_at is not None
    assert second.started_at is not None
    assert first.ended_at <= second.started_at


async def test_wait_closes_what_a_sweep_would_only_close_later(database: str) -> None:
    """Level 2 with a sweep that never comes: whoever waits asks for the count."""
    engine = Engine(database, settings=quick(sweep_interval=600, give_up_interval=600))

    @engine.job
    async def child(job: Job[int]) -> None:
        job.add(n=1)
        if job.payload == 0:
            raise PermanentError("no")

    @engine.job
    async def report(_job: Job[Any]) -> None:
        return

    @engine.job(closing="aggregate", on_closed="report")
    async def batch(job: Job[Any]) -> None:
        await job.fan_out(child, _documents(50))

    async with running(engine):
        handle = await engine.submit(batch)
        progress = await closed(handle)

        assert counts(progress) == (50, 49, 1, 0)
        assert progress.sums == {"n": 50}
        tree = await engine.jobs(kind="report")
        await closed(engine.handle(tree[0].id))


async def test_a_cancelled_batch_of_level_2_is_closed_when_cancel_returns(database: str) -> None:
    """Nobody has to wait for the sweep for it."""
    engine = Engine(database, settings=quick(sweep_interval=600, give_up_interval=600))

    @engine.job
    async def child(_job: Job[int]) -> None:
        await asyncio.sleep(PATIENCE)

    @engine.job(closing="aggregate")
    async def batch(job: Job[Any]) -> None:
        await job.fan_out(child, _documents(20))

    async with running(engine, concurrency=3):
        handle = await engine.submit(batch)
        await until(lambda: _is_sealed(handle))

        await handle.cancel()

        progress = await handle.progress()
    assert (progress.status, progress.cancelled) == (Status.CANCELLED, 20)


async def _is_sealed(handle: Any) -> bool:
    return (await handle.progress()).status is Status.WAITING
