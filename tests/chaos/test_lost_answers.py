"""Between a statement and its answer: what a worker does when it learns late, twice, or never what
was committed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from fanout import DatabaseUnavailable, Engine, Job
from fanout.finisher import Finisher
from fanout.pool import Pool
from fanout.store import Store
from fanout.values import Claim, Completed, Counted
from tests.chaos.app import SETTINGS
from tests.chaos.harness import settings_of, until
from tests.factories import LONG_AGO
from tests.machine.invariants import check


@pytest.fixture
async def engine(database: str) -> AsyncIterator[Engine]:
    """An engine with a handler for each need, and no worker."""
    engine = Engine(database, settings=settings_of(SETTINGS, lease=3, concurrency=4))

    @engine.job
    async def quick(job: Job[Any]) -> None: ...

    @engine.job
    async def slow(job: Job[Any]) -> None:
        await asyncio.sleep(job.payload or 600)

    @engine.job
    async def holds(job: Job[Any]) -> None:
        await job.fan_out("slow", [("one", 600)])
        await asyncio.sleep(600)

    @engine.job
    async def dispatches(job: Job[Any]) -> int:
        return (await job.fan_out("quick", ((f"{n}", None) for n in range(500)))).known

    @engine.job
    async def pays(job: Job[Any]) -> Any:
        await job.save_checkpoint({"paid": job.attempt})
        return job.checkpoint

    @engine.job
    async def severed(job: Job[Any]) -> None:
        raise DatabaseUnavailable("gone")

    async with engine:
        yield engine


async def submit(engine: Engine, kind: str, n: int = 1, payload: Any = None) -> list[int]:
    return [(await engine.submit(kind, payload)).id for _ in range(n)]


async def at_rest(conn: asyncpg.Connection) -> None:
    assert await check(conn, quiet=True) == []


async def deaths(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("SELECT sum(deaths)::int FROM fanout.job"))


def delayed(monkeypatch: pytest.MonkeyPatch, method: str, after: Callable[[int], Any]) -> None:
    """Let a statement of the store commit, then do something before its answer is seen; `after`
    gets the count.
    """
    real = getattr(Store, method)
    calls = 0

    async def wrapped(self: Store, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        answer = await real(self, *arguments, **options)
        calls += 1
        await after(calls)
        return answer

    monkeypatch.setattr(Store, method, wrapped)


async def test_a_claim_in_flight_when_the_worker_stops_goes_back(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim commits, then the worker is told to stop before it has the answer: no handler
    begins, nothing dies.
    """
    await submit(engine, "quick", 3)
    committed = asyncio.Event()

    async def pause(_: int) -> None:
        committed.set()
        await asyncio.sleep(0.3)

    delayed(monkeypatch, "claim", pause)
    worker = engine.worker()
    await worker.start()
    await committed.wait()
    await worker.stop()
    assert worker.executed == 0
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'pending'") == 3
    assert await deaths(conn) == 0


@pytest.mark.parametrize("method", ["claim", "claim_alone"])
async def test_a_claim_whose_answer_was_lost_is_no_death(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The claim commits and its answer is lost: the worker finds what it holds without knowing, and
    gives it back.
    """
    await submit(engine, "quick", 3)
    if method == "claim_alone":
        await conn.execute("UPDATE fanout.job SET deaths = 1")
    before = await deaths(conn)

    async def lose(calls: int) -> None:
        if calls == 1:
            raise DatabaseUnavailable("the answer was lost")

    delayed(monkeypatch, method, lose)
    async with engine.worker():
        await until(
            conn, "SELECT count(*) = 3 FROM fanout.job WHERE status = 'completed'", seconds=2.5
        )
    assert await deaths(conn) == before
    await at_rest(conn)


async def test_a_claim_that_is_lost_before_its_task_ran_gives_its_slot_back(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A task that is cancelled before its first step runs nothing at all, not even a `finally`."""
    await submit(engine, "slow", 2)
    worker = engine.worker()
    claims = await worker._claim_unlimited({"slow": 2}, 0, full_look=False)
    worker._accept(claims)
    worker._on_lost([claims[0]])
    await asyncio.sleep(0.05)
    assert worker.running == 1
    worker.finisher.start()
    await worker._interrupt()
    await worker.finisher.drain(1)
    await worker.finisher.stop()
    assert worker.running == 0
    assert worker.is_idle


async def test_jobs_are_released_that_are_interrupted_before_their_tasks_ran(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The same at a shutdown: they go back at once and at no cost."""
    await submit(engine, "slow", 2)
    worker = engine.worker()
    claims = await worker._claim_unlimited({"slow": 2}, 0, full_look=False)
    worker.finisher.start()
    worker._accept(claims)
    await worker._interrupt()
    await asyncio.sleep(0)
    await worker.finisher.drain(1)
    await worker.finisher.stop()
    assert worker.is_idle
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'pending'") == 2


async def test_a_worker_that_could_not_start_can_be_started_again(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails leaves nothing half started, and the next one does all of it."""
    worker = engine.worker()

    async def refuse(*_: object) -> None:
        raise DatabaseUnavailable("down")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "register_kinds", refuse)
        with pytest.raises(DatabaseUnavailable):
            await worker.start()
    await submit(engine, "quick")
    async with worker:
        await until(conn, "SELECT status = 'completed' FROM fanout.job", seconds=5)


async def test_a_worker_stopped_while_it_starts_is_stopped(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop` during `start`: no loop is left running behind its back."""
    delayed(monkeypatch, "register_kinds", lambda _: asyncio.sleep(0.2))
    worker = engine.worker()
    starting = asyncio.create_task(worker.start())
    await asyncio.sleep(0.1)
    await worker.stop()
    await starting
    await submit(engine, "quick")
    await asyncio.sleep(0.6)
    assert await conn.fetchval("SELECT status FROM fanout.job") == "pending"
    assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 0


async def test_every_stop_returns_when_it_is_stopped(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A second `stop`, and the engine's, wait for the first: else the pool is closed under what it
    still writes.
    """
    handle = await engine.submit("slow", 0.5)
    worker = engine.worker()
    await worker.start()
    await until(conn, "SELECT status = 'processing' FROM fanout.job")
    first = asyncio.create_task(worker.stop())
    await asyncio.sleep(0.05)
    await engine.stop()
    assert first.done()
    await first
    assert (
        await conn.fetchval("SELECT status FROM fanout.job WHERE id = $1", handle.id) == "completed"
    )


async def test_one_locked_manager_does_not_cost_another_its_lease(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Somebody holds the row of one manager for longer than a lease: the worker's other jobs are
    renewed all the same.
    """
    await submit(engine, "holds", 3)
    async with engine.worker() as worker:
        await until(conn, "SELECT count(*) = 3 FROM fanout.job WHERE kind = 'holds' AND total = 1")
        locked = await conn.fetchval("SELECT min(id) FROM fanout.job")
        async with conn.transaction():
            await conn.execute("SELECT 1 FROM fanout.job WHERE id = $1 FOR UPDATE", locked)
            await asyncio.sleep(4)
            assert (
                await conn.fetch(
                    "SELECT id FROM fanout.job WHERE status = 'processing' AND id <> $1 "
                    "AND lease_expires_at < clock_timestamp() + interval '1 s'",
                    locked,
                )
                == []
            )
        await worker.kill()


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.DeadlockDetectedError("again and again"),
        asyncpg.LockNotAvailableError("a role with a lock_timeout"),
        asyncpg.InternalClientError("got result for unknown protocol state 3"),
        asyncpg.InsufficientPrivilegeError("somebody is at the grants"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_trouble_of_the_engine_fails_no_child(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A finish that fails for a while, not for its data: its jobs complete once it works again."""
    await submit(engine, "quick", 5)
    real, until_when = Store.finish, time.monotonic() + 1.0

    async def troubled(self: Store, *arguments: Any) -> Any:
        if time.monotonic() < until_when:
            raise error
        return await real(self, *arguments)

    monkeypatch.setattr(Store, "finish", troubled)
    async with engine.worker():
        await until(conn, "SELECT count(*) = 5 FROM fanout.job WHERE finished_at IS NOT NULL")
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'completed'") == 5
    assert await deaths(conn) == 0


async def test_a_handler_that_has_no_database_is_not_run_in_a_circle(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Infrastructure costs no retry, and must not cost a processor either."""
    await submit(engine, "severed")
    async with engine.worker():
        await until(conn, "SELECT attempt > 0 FROM fanout.job")
        await asyncio.sleep(1)
        assert await conn.fetchval("SELECT attempt FROM fanout.job") < 10
        assert await conn.fetchval("SELECT failures FROM fanout.job") == 0


async def test_a_lock_that_somebody_holds_does_not_gather_backends(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A finish that times out behind a lock ends on the server too, instead of waiting there with
    all that follow.
    """
    [job_id] = await submit(engine, "slow", 1, 0.3)
    async with engine.worker():
        await until(conn, "SELECT status = 'processing' FROM fanout.job")
        async with conn.transaction():
            await conn.execute("SELECT 1 FROM fanout.job WHERE id = $1 FOR UPDATE", job_id)
            await asyncio.sleep(7)  # three and more times database_timeout
            other = await asyncpg.connect(engine.dsn)
            waiting = await other.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock'"
            )
            await other.close()
        await until(conn, "SELECT status = 'completed' FROM fanout.job")
    assert waiting <= 1


@pytest.mark.parametrize("committed", [True, False])
async def test_a_manager_goes_on_where_a_connection_broke(
    engine: Engine,
    conn: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
) -> None:
    """A chunk whose answer was lost, or that was never made, is sent again: no reason to fetch all
    documents anew.
    """
    real, calls = Store.fan_out, 0

    async def broken(self: Store, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and not committed:
            raise DatabaseUnavailable("cut before")
        answer = await real(self, *arguments, **options)
        if calls == 3:
            raise DatabaseUnavailable("cut after")
        return answer

    monkeypatch.setattr(Store, "fan_out", broken)
    handle = await engine.submit("dispatches")
    async with engine.worker():
        progress = await handle.wait(10)
    assert (progress.total, progress.completed) == (500, 500)
    assert (await handle.job()).attempt == 1
    await at_rest(conn)


async def test_a_checkpoint_is_kept_across_a_broken_connection(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was paid for is not paid for again because the connection broke while it was written
    down.
    """

    async def lose(calls: int) -> None:
        if calls == 1:
            raise DatabaseUnavailable("the answer was lost")

    delayed(monkeypatch, "save_checkpoint", lose)
    handle = await engine.submit("pays")
    async with engine.worker():
        assert await handle.result(10) == {"paid": 1}


async def test_an_outage_longer_than_a_lease_ends_the_run_but_costs_no_retry(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler does not wait for the database until its timeout: that would be its failure."""
    real, until_when = Store.save_checkpoint, time.monotonic() + 4.0

    async def troubled(self: Store, *arguments: Any) -> Any:
        if time.monotonic() < until_when:
            raise DatabaseUnavailable("down")
        return await real(self, *arguments)

    monkeypatch.setattr(Store, "save_checkpoint", troubled)
    handle = await engine.submit("pays")
    async with engine.worker():
        await handle.result(10)
    row = await handle.job()
    assert (row.failures, row.deaths) == (0, 0)
    assert row.attempt > 1


async def test_a_flush_is_bounded_in_bytes() -> None:
    """A thousand large results that waited for the database do not go as one statement that times
    out again and again.
    """
    flushed: list[int] = []

    class Slow:
        async def finish(self, ended: list[Any], token: object) -> Counted:
            flushed.append(sum(len(outcome.result) for _, outcome in ended))
            return Counted()

    finisher = Finisher(
        Slow(),  # type: ignore[arg-type]
        uuid.uuid4(),
        500,
        on_written=lambda _: None,
        on_counted=lambda _: None,
        on_failed=lambda *_: None,
    )
    result = Completed("x" * (1 << 20))  # one string, a hundred times
    claim = Claim(0, 1, "quick", 0, None, None, None, 0, 0, 3, 0, 5, LONG_AGO, "null", None)
    for n in range(100):
        finisher.add(claim._replace(id=n), result)
    finisher.start()
    assert await finisher.drain(10)
    await finisher.stop()
    assert sum(flushed) == 100 << 20
    assert max(flushed) <= 16 << 20


async def test_a_transaction_that_its_process_forgets_is_ended_by_the_server(
    database: str, conn: asyncpg.Connection
) -> None:
    """A loop that is blocked, or a process that is frozen, between two statements of a transaction
    holds its locks for a database timeout, not for a minute in which no pod can count.
    """
    settings = settings_of(SETTINGS, database_timeout=1)
    pool = Pool(database, settings)
    await pool.open()
    locked = asyncio.Event()

    async def body(connection: Any) -> None:
        await connection.execute("SELECT 1 FROM fanout.installation FOR UPDATE")
        locked.set()
        await asyncio.sleep(2.5)
        await connection.execute("SELECT 1")

    forgetful = asyncio.create_task(pool.transaction(body))
    await locked.wait()
    began = time.monotonic()
    await conn.execute("SELECT 1 FROM fanout.installation FOR UPDATE")
    assert time.monotonic() - began < 2
    with pytest.raises(DatabaseUnavailable):
        await forgetful
    await pool.close()
