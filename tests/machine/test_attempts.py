"""Attempts that ended otherwise than well are kept, each once, by the statement that ended them."""

from __future__ import annotations

import asyncpg

from fanout.states import Status
from fanout.store import Store
from fanout.values import Interrupted, Retry
from tests.factories import (
    BROKEN,
    DONE,
    ME,
    OTHER,
    claim,
    claim_of,
    fan_out,
    insert_batch,
    insert_job,
    submit,
)
from tests.machine.invariants import History, check

PROCESSING, PENDING, WAITING = Status.PROCESSING, Status.PENDING, Status.WAITING


async def outcomes(store: Store, job_id: int) -> list[tuple[int, str]]:
    return [(it.attempt, it.outcome) for it in await store.attempts(job_id)]


async def test_a_good_first_attempt_writes_nothing(store: Store, conn: asyncpg.Connection) -> None:
    """And is shown all the same, from the job's own row."""
    batch, _ = await insert_batch(conn, WAITING, [PENDING])
    (child,) = await claim(store)
    assert await outcomes(store, child.id) == [(1, "running")]

    await store.finish([(child, DONE)], ME)

    assert await conn.fetchval("SELECT count(*) FROM fanout.attempt") == 0
    (only,) = await store.attempts(child.id)
    assert (only.attempt, only.outcome, only.worker_id) == (1, "completed", ME)
    assert only.took is not None
    assert only.took.total_seconds() >= 0
    assert await store.attempts(batch) == []


async def test_a_timeline_has_every_attempt(
    store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """Retried, released, an orphan, lost, failed for good, and run again by hand."""
    batch, _ = await insert_batch(conn, WAITING, [PENDING])
    (c,) = await claim(store)
    await store.retry([(c, Retry("timed out", "TimeoutError", 0))], ME)
    (c,) = await claim(store)
    await store.release([(c, Interrupted())], ME)
    (c,) = await claim(store)
    await store.release_orphans(ME, [])
    (c,) = await claim(store, token=OTHER, lease=0)
    await store.rescue(1, 10, 3, 0, 0)
    again = await store.claim_alone(["leaf"], ME, 60)
    assert again is not None
    await store.finish([(again, BROKEN)], ME)
    assert await outcomes(store, c.id) == [
        (1, "retry"),
        (2, "released"),
        (3, "released"),
        (4, "lost"),
        (5, "failed"),
    ]
    assert await check(conn, quiet=False) == []

    await store.retry_failed(batch)
    (c,) = await claim(store)

    timeline = await store.attempts(c.id)
    assert [it.outcome for it in timeline][-2:] == ["failed", "running"]
    assert (timeline[0].error, timeline[0].error_type) == ("timed out", "TimeoutError")
    assert timeline[3].worker_id == OTHER
    assert (timeline[4].error, timeline[4].error_type) == (BROKEN.error, BROKEN.error_type)
    assert all(it.started_at is not None for it in timeline)
    assert [it.ended_at is None for it in timeline] == [False] * 5 + [True]


async def test_a_cancel_ends_the_attempts_that_run(
    store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """The manager's by doom, its child's by the chunk; what only waited has no attempt."""
    batch = await submit(store)
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, ["a", "b"])
    (running,) = await claim(store, limit=1)

    await store.doom(batch, Status.CANCELLED, "enough")
    await store.doom_chunk(batch, 10)

    assert await outcomes(store, batch) == [(1, "cancelled")]
    assert (await store.attempts(batch))[0].error == "enough"
    assert await outcomes(store, running.id) == [(1, "cancelled")]
    assert await conn.fetchval("SELECT count(*) FROM fanout.attempt") == 2
    assert await check(conn, quiet=True) == []


async def test_a_manager_that_a_limit_stopped_has_its_attempt(
    store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """The child's failure ends it, in the same statement, with the reason."""
    batch, (child,) = await insert_batch(conn, PROCESSING, [PROCESSING], fail_after=1)

    await store.finish([(await claim_of(conn, child), BROKEN)], ME)

    (only,) = await store.attempts(batch)
    assert (only.outcome, only.error) == ("cancelled", "1 child failed, fail_after is 1")
    assert await check(conn, quiet=False) == []


async def test_a_managers_good_run_ends_when_it_ends(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Its row's end is that of its last child, so its run is kept, while and after it waits."""
    batch = await submit(store)
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, ["a"])
    await store.finish([(manager, DONE)], ME)
    (sealed,) = await store.attempts(batch)
    await store.finish([(c, DONE) for c in await claim(store)], ME)

    (closed,) = await store.attempts(batch)

    assert (closed.outcome, closed.ended_at) == ("completed", sealed.ended_at)
    job = await store.job(batch)
    assert closed.ended_at is not None
    assert job.finished_at is not None
    assert closed.ended_at < job.finished_at


async def test_a_lost_claim_keeps_nothing_twice(store: Store, conn: asyncpg.Connection) -> None:
    """Whatever the zombie says when it wakes."""
    job = await insert_job(conn)
    (zombie,) = await claim(store, lease=0)
    await store.rescue(0, 10, 3, 0, 0)

    await store.finish([(zombie, BROKEN)], ME)
    await store.retry([(zombie, Retry("x", "E", 0))], ME)
    await store.release([(zombie, Interrupted())], ME)

    assert await outcomes(store, job) == [(1, "lost")]
