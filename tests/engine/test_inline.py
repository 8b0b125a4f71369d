"""`engine.run`: the same batch, run at once in this process or queued."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest

from fanout import (
    DatabaseUnavailable,
    Document,
    Engine,
    IdempotencyConflict,
    Job,
    JobHandle,
    PermanentError,
    Settings,
    Status,
    TransientError,
    UsageError,
)
from tests.engine.running import (
    PATIENCE,
    assert_true_to_its_children,
    closed,
    counts,
    quick,
    statuses,
    until,
)
from tests.factories import held, until_blocked


def sorts(engine: Engine) -> Any:
    """A handler that ends in every way there is."""

    @engine.job(max_retries=2, timeout=0.4)
    async def sort(job: Job[str]) -> str:
        job.log(f"sees {job.payload}")
        match job.payload:
            case "bad":
                raise PermanentError("not a PDF")
            case "flaky":
                if job.failures < 1:
                    raise TransientError("busy")
            case "down":
                raise ConnectionResetError("by peer")
            case "slow":
                await asyncio.sleep(30)
            case "wrong":
                raise ValueError("an unknown one")
            case _:
                pass
        return f"{job.payload} is fine"

    @engine.job
    async def report(job: Job[Any]) -> None: ...

    return sort


DOCUMENTS = [
    *(Document(word, word) for word in ("good", "bad", "flaky", "down", "slow", "wrong")),
    Document("lost", gone="it was deleted"),
]

COLUMNS = """document_key, kind, status, result::text, error, error_type, failures, deaths, attempt,
             max_retries, priority, depth, on_closed, payload::text, tenant, partition, verdict"""


async def what_there_is(conn: asyncpg.Connection, handle: JobHandle) -> dict[str, Any]:
    """Rows, counters, attempts, follow-ups and events of a batch, without ids and times."""
    parent = await conn.fetchrow(
        """SELECT kind, status, total, completed, failed, cancelled, generation, payload::text,
                  attempt, on_closed, priority, tenant, result::text, error, fail_after
             FROM fanout.job WHERE id = $1""",
        handle.id,
    )
    children = await conn.fetch(
        f"SELECT {COLUMNS} FROM fanout.job WHERE parent_id = $1 ORDER BY document_key", handle.id
    )
    follow_ups = await conn.fetch(
        """SELECT kind, tenant, priority, payload::jsonb - 'job_id' AS payload FROM fanout.job
            WHERE follows_id = $1 ORDER BY kind""",
        handle.id,
    )
    attempts = await conn.fetch(
        """SELECT j.document_key, a.attempt, a.outcome, a.error FROM fanout.attempt a
             JOIN fanout.job j ON j.id = a.job_id WHERE j.parent_id = $1 ORDER BY 1, 2""",
        handle.id,
    )
    keys = {row["id"]: row["document_key"] for row in await conn.fetch(
        "SELECT id, document_key FROM fanout.job WHERE parent_id = $1", handle.id)}  # fmt: skip
    events = sorted([
        json.dumps([one.type, keys.get(one.data.get("job")), one.data.get("message"),
                    one.data.get("attempt"), one.data.get("error_type")])
        async for one in handle.events()
    ])  # fmt: skip
    return {
        "parent": parent and dict(parent),
        "children": [dict(row) for row in children],
        "follow_ups": [dict(row) for row in follow_ups],
        "attempts": [dict(row) for row in attempts],
        "events": events,
    }


async def test_inline_and_queued_are_the_same(database: str, conn: asyncpg.Connection) -> None:
    """Same handler, rows, counters, attempts, results, events and follow-up, and a handle."""
    engine = Engine(database, settings=quick())
    sort = sorts(engine)
    options: dict[str, Any] = {
        "on_closed": "report", "priority": 3, "tenant": "acme", "fail_after": 50
    }  # fmt: skip
    async with engine:
        inline = await engine.run(sort, DOCUMENTS, **options)
        assert isinstance(inline, JobHandle)
        assert (await inline.progress()).is_closed, "it returns when the batch is closed"
        assert counts(await inline.progress()) == (7, 2, 5, 0)
        first = await what_there_is(conn, inline)

        queued = await engine.run(sort, iter(DOCUMENTS), inline_below=0, **options)
        assert (await queued.job()).status is Status.WAITING
        async with engine.worker():
            await closed(queued)
            second = await what_there_is(conn, queued)
    assert first == second
    assert len(first["follow_ups"]) == 1
    assert len(first["events"]) >= 10
    await assert_true_to_its_children(conn)


async def test_it_works_without_a_worker_and_serves_no_kind(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Nobody else takes part; the follow-up waits for a worker."""
    sort = sorts(engine)
    async with engine:
        handle = await engine.run(sort, [("a", "good")], on_closed="report", name="papers_run")
        assert await handle.result() is None
        assert (await handle.job()).kind == "papers_run"
        assert await statuses(handle) == {"a": Status.COMPLETED}
        [worker] = await engine.workers()
        assert worker.kinds == ()
        assert "inline" in worker.name
    assert await conn.fetchval("SELECT status FROM fanout.job WHERE kind = 'report'") == "pending"
    assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 0


@pytest.mark.parametrize("inline_below", [50, 0])
async def test_the_empty_batch_closes_at_once(
    inline_below: int, engine: Engine, conn: asyncpg.Connection
) -> None:
    """As completed, with its follow-up; and one whose documents are all gone, too."""
    sort = sorts(engine)
    async with engine:
        empty = await engine.run(sort, [], inline_below=inline_below, on_closed="report")
        gone = [Document("a", gone="deleted"), Document("b", gone="deleted")]
        lost = await engine.run(sort, gone, inline_below=inline_below)
        for handle, total in ((empty, 0), (lost, 2)):
            progress = await handle.wait(PATIENCE)
            assert progress.outcome in {"completed", "completed with failures"}
            assert (progress.percent, progress.total, progress.failed) == (100, total, total)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE kind = 'report'") == 1


@pytest.mark.parametrize("kind", ["list", "iterator", "async iterator"])
async def test_documents_come_from_anywhere(
    kind: str, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Fewer than `inline_below` are run, as many or more are queued, whole and sealed at once."""
    sort = sorts(engine)

    def some(n: int) -> Any:
        def plain() -> Iterator[tuple[str, str]]:
            yield from ((f"d{i:05}", "good") for i in range(n))

        async def other() -> AsyncIterator[tuple[str, str]]:
            for one in plain():
                yield one

        return {"list": list(plain()), "iterator": plain(), "async iterator": other()}[kind]

    async with engine:
        small = await engine.run(sort, some(4), inline_below=5)
        assert (await small.job()).status is Status.COMPLETED
        for n in (5, 2500):
            large = await engine.run(sort, some(n), inline_below=5)
            row = await large.job()
            assert (row.status, row.total) == (Status.WAITING, n)
            assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE parent_id = $1",
                                       large.id) == n  # fmt: skip


async def test_a_document_that_cannot_be_stored_makes_no_batch(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The last of thousands: it is named, and nothing was submitted."""
    sort = sorts(engine)
    async with engine:
        for wrong, field in (
            (("z", 7), "document 'z'"),
            (("z", "x" * 2000), "document 'z'"),
            ("z", "documents"),
        ):
            with pytest.raises(UsageError) as error:
                await engine.run(sort, [*((f"{n}", "good") for n in range(1200)), wrong])  # type: ignore[list-item]
            assert error.value.field == field
        with pytest.raises(UsageError, match="name: 'report' is a handler's"):
            await engine.run(sort, [], name="report")
        with pytest.raises(UsageError, match="inline_below"):
            await engine.run(sort, [], inline_below=-1)
        with pytest.raises(UsageError, match="fail_after"):
            await engine.run(sort, [], fail_after=0)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0


async def test_nobody_sees_half_a_batch(engine: Engine, conn: asyncpg.Connection) -> None:
    """Until the commit there is nothing, and a transaction that breaks leaves nothing."""
    sort = sorts(engine)
    async with engine:
        blocker = await asyncpg.connect(engine.dsn)
        try:
            await blocker.execute("BEGIN; LOCK TABLE fanout.attempt IN ACCESS EXCLUSIVE MODE")
            task = asyncio.create_task(
                engine.run(sort, ((f"{n}", "good") for n in range(3000)), inline_below=0)
            )
            await until(lambda: blocked(conn))
            assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0
            task.cancel()
            await asyncio.wait([task])
        finally:
            blocker.terminate()
        await until(lambda: nobody_blocked(conn))
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0


async def blocked(conn: asyncpg.Connection) -> bool:
    return bool(await conn.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock'"))  # fmt: skip


async def nobody_blocked(conn: asyncpg.Connection) -> bool:
    return not await blocked(conn)


async def test_a_key_is_the_same_batch(engine: Engine, conn: asyncpg.Connection) -> None:
    """Whoever runs it, at once and later, in any order, inline or queued: one batch, each child
    once; other content is a conflict."""
    seen: list[str] = []

    @engine.job
    async def note(job: Job[str]) -> None:
        seen.append(job.payload)
        await asyncio.sleep(0.05)

    documents = [(f"{n}", f"{n}") for n in range(8)]
    async with engine:
        handles = await asyncio.gather(
            *(engine.run(note, documents[n:] + documents[:n], key="k") for n in range(6))
        )
        assert len({handle.id for handle in handles}) == 1
        assert [handle.created for handle in handles].count(True) == 1
        assert (await handles[-1].progress()).is_closed, "each has waited"
        assert sorted(seen) == [f"{n}" for n in range(8)]
        again = await engine.run(note, documents, key="k", inline_below=0)
        assert (again.id, again.created) == (handles[0].id, False)
        with pytest.raises(IdempotencyConflict):
            await engine.run(note, documents[1:], key="k")
    assert len(seen) == 8


async def test_cancelled_it_lets_go_at_no_cost(engine: Engine, conn: asyncpg.Connection) -> None:
    """What ran and what waited is pending when the caller has its CancelledError, unharmed; the
    other batch of this process goes on; a worker does the rest."""
    started = asyncio.Event()
    may_end = asyncio.Event()

    @engine.job
    async def wait_for_it(job: Job[None]) -> None:
        started.set()
        await may_end.wait()

    async with engine:
        documents: list[tuple[str, Any]] = [(f"{n}", None) for n in range(20)]
        task = asyncio.create_task(engine.run(wait_for_it, documents))
        other = asyncio.create_task(engine.run(wait_for_it, [("other", None)]))
        await started.wait()
        await until(lambda: conn.fetchval("SELECT count(*) = 21 FROM fanout.job WHERE depth = 1"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rows = await conn.fetch(
            "SELECT status, failures, deaths, parent_id FROM fanout.job WHERE depth = 1"
        )
        assert sorted(row["status"] for row in rows) == ["pending"] * 20 + ["processing"]
        assert {(row["failures"], row["deaths"]) for row in rows} == {(0, 0)}
        may_end.set()
        assert counts(await (await other).progress()) == (1, 1, 0, 0)
        first = next(row["parent_id"] for row in rows if row["status"] == "pending")
        async with engine.worker():
            assert counts(await closed(engine.handle(first))) == (20, 20, 0, 0)
    await assert_true_to_its_children(conn)


async def test_a_crash_hands_the_rest_to_workers(database: str, conn: asyncpg.Connection) -> None:
    """The leases of a process that is gone run out, and rescue puts its children back; the same
    key then joins the batch and does the rest, without a worker too."""
    settings = quick(lease=0.9, heartbeat=0.2)
    crashing, second = (Engine(database, settings=settings) for _ in range(2))
    gate = asyncio.Event()

    @crashing.job(name="work")
    async def hang(job: Job[None]) -> None:
        await gate.wait()

    @second.job
    async def work(job: Job[None]) -> str:
        return "second"

    documents: list[tuple[str, Any]] = [(f"{n}", None) for n in range(3)]
    async with second:
        await crashing.start()
        task = asyncio.create_task(crashing.run(hang, documents, key="k"))
        await until(lambda: conn.fetchval(
            "SELECT count(*) = 3 FROM fanout.job WHERE status = 'processing'"))  # fmt: skip
        runner = crashing._inline
        assert runner is not None
        await runner.heartbeat.stop(5)  # as if it were frozen
        await runner.sweeper.stop()
        handle = await asyncio.wait_for(second.run(work, documents, key="k"), PATIENCE)
        assert counts(await handle.progress()) == (3, 3, 0, 0)
        assert {child.result async for child in handle.children()} == {"second"}
        assert await conn.fetchval("SELECT sum(deaths) FROM fanout.job") == 3
        gate.set()
        await task
        assert {child.result async for child in handle.children()} == {"second"}, "late is late"
        await crashing.stop()
    await assert_true_to_its_children(conn)


PROGRAM = """
import asyncio, sys
from fanout import Engine, Settings

engine = Engine(sys.argv[1], settings=Settings(lease=1.5, heartbeat=0.4))

@engine.job
async def work(job):
    if job.payload:
        print("runs", flush=True)
        await asyncio.sleep(600)
    return "first"

async def main():
    async with engine:
        await engine.run(work, [(f"{n}", n > 1) for n in range(4)], key="k", on_closed="report")

asyncio.run(main())
"""


async def test_a_killed_process_leaves_a_whole_batch_to_workers(
    database: str, conn: asyncpg.Connection
) -> None:
    """SIGKILL in the midst: what had ended stands, the rest is rescued and run elsewhere, each
    counted once."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, database, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        assert [await process.stdout.readline() for _ in range(2)] == [b"runs\n"] * 2
        await until(lambda: conn.fetchval("SELECT bool_or(completed = 2) FROM fanout.job"))
        process.kill()
        await process.wait()

    engine = Engine(database, settings=quick(lease=1.5, heartbeat=0.4))

    @engine.job
    async def work(job: Job[bool]) -> str:
        return "second"

    async with engine, engine.worker():
        handle = await engine.find("k")
        assert handle is not None
        assert counts(await closed(handle)) == (4, 4, 0, 0)
        results = [child.result async for child in handle.children()]
    assert results == ["first", "first", "second", "second"]
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE kind = 'report'") == 1
    await assert_true_to_its_children(conn)


async def test_a_stop_waits_for_a_batch_that_is_being_made(
    engine: Engine, database: str, conn: asyncpg.Connection
) -> None:
    """Its claims are known to nobody else: they are given back, and cost nothing."""

    @engine.job
    async def work(job: Job[None]) -> None: ...

    await engine.start()
    await engine.run(work, [("first", None)])
    async with held(database) as rival:
        await rival.connection.execute("LOCK TABLE fanout.limits IN ACCESS EXCLUSIVE MODE")
        task = asyncio.create_task(engine.run(work, [("a", None), ("b", None)]))
        await until_blocked(conn, task)
        stop = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.1)
        assert not stop.done()
        await rival.commit()
        await asyncio.wait_for(stop, PATIENCE)
    with pytest.raises(DatabaseUnavailable):
        await task
    rows = await conn.fetch(
        """SELECT status, failures, deaths, claim_token FROM fanout.job
            WHERE depth = 1 AND document_key <> 'first'"""
    )
    assert [tuple(row) for row in rows] == [("pending", 0, 0, None)] * 2


async def test_the_engine_stops_in_the_midst(engine: Engine, conn: asyncpg.Connection) -> None:
    """Running children have their grace, the rest is released, the caller is told."""
    sort_started = asyncio.Event()

    @engine.job
    async def work(job: Job[None]) -> None:
        sort_started.set()
        await asyncio.sleep(30)

    await engine.start()
    task = asyncio.create_task(engine.run(work, [("a", None), ("b", None)]))
    await sort_started.wait()
    await engine.stop()
    with pytest.raises(DatabaseUnavailable):
        await task
    rows = await conn.fetch("SELECT status, failures, deaths FROM fanout.job WHERE depth = 1")
    assert [tuple(row) for row in rows] == [("pending", 0, 0)] * 2


async def test_a_lost_answer_costs_nothing(
    engine: Engine, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was committed, and nobody here knows: its claims are put back, not rescued as if
    their worker had died; and the same key joins it."""
    seen: list[int] = []

    @engine.job
    async def work(job: Job[int]) -> None:
        seen.append(job.payload)

    documents = [(f"{n}", n) for n in range(5)]
    async with engine:
        await engine.run(work, [("first", -1)])
        runner = engine._inline
        assert runner is not None
        together = runner._store.together

        async def lost(body: Any) -> Any:
            await together(body)
            raise DatabaseUnavailable("the answer was lost")

        monkeypatch.setattr(runner._store, "together", lost)
        with pytest.raises(DatabaseUnavailable):
            await engine.run(work, documents, key="k")
        monkeypatch.undo()
        handle = await asyncio.wait_for(engine.run(work, documents, key="k"), PATIENCE)
        assert not handle.created
        assert counts(await handle.progress()) == (5, 5, 0, 0)
    assert sorted(seen) == [-1, 0, 1, 2, 3, 4]
    assert await conn.fetchval("SELECT sum(deaths) + sum(failures) FROM fanout.job") == 0


async def test_a_connection_that_breaks_leaves_nothing(
    engine: Engine, database: str, conn: asyncpg.Connection
) -> None:
    """The caller is told, and calls again."""
    sort = sorts(engine)
    async with engine:
        await engine.run(sort, [("first", "good")])
        async with held(database) as rival:
            await rival.connection.execute("LOCK TABLE fanout.limits IN ACCESS EXCLUSIVE MODE")
            task = asyncio.create_task(engine.run(sort, [("a", "good")], key="k"))
            await until_blocked(conn, task)
            await conn.execute(
                """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND wait_event_type = 'Lock'"""
            )
            with pytest.raises(DatabaseUnavailable):
                await task
            assert await engine.find("k") is None
            await rival.commit()
        handle = await engine.run(sort, [("a", "good")], key="k")
        assert handle.created
        assert counts(await handle.progress()) == (1, 1, 0, 0)


async def test_limits_hold(engine: Engine, conn: asyncpg.Connection) -> None:
    """Of the kind, of the batch, and those that handlers ask for; and it ends all the same."""
    running = most = 0

    async def work(job: Job[None]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    @engine.job(limit=2)
    async def limited(job: Job[None]) -> None:
        await work(job)

    @engine.job
    async def free(job: Job[None]) -> None:
        await work(job)

    @engine.job
    async def asks(job: Job[None]) -> None:
        async with job.limit("parser", 2):
            await work(job)

    documents: list[tuple[str, Any]] = [(f"{n}", None) for n in range(8)]
    await engine.start()
    async with engine.worker():  # declares the limits, and takes what it can, too
        for call in (
            engine.run(limited, documents),
            engine.run(free, documents, concurrency=2),
            engine.run(asks, documents),
        ):
            most = 0
            handle = await asyncio.wait_for(call, PATIENCE)
            assert counts(await handle.progress()) == (8, 8, 0, 0)
            assert most <= 2
    await engine.stop()


async def test_a_handler_that_comes_later_has_its_limit(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Registered after the first call: the database is told of it, and of its limit."""
    sort = sorts(engine)
    running = most = 0
    async with engine:
        await engine.run(sort, [("a", "good")])

        @engine.job(limit=1, max_retries=7)
        async def late(job: Job[None]) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1

        handle = await asyncio.wait_for(
            engine.run(late, [(f"{n}", None) for n in range(4)]), PATIENCE
        )
        assert counts(await handle.progress()) == (4, 4, 0, 0)
    assert most == 1
    assert await conn.fetchval("SELECT max_retries FROM fanout.kind WHERE name = 'late'") == 7


async def test_a_child_that_fans_out_is_run_whole(engine: Engine, conn: asyncpg.Connection) -> None:
    """Its children too, without a worker."""

    @engine.job
    async def page(job: Job[int]) -> int:
        return job.payload

    @engine.job
    async def book(job: Job[int]) -> None:
        await job.fan_out(page, ((f"{n}", n) for n in range(job.payload)))

    async with engine:
        handle = await asyncio.wait_for(engine.run(book, [("a", 3), ("b", 0), ("c", 2)]), PATIENCE)
        assert counts(await handle.progress()) == (3, 3, 0, 0)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE depth = 2") == 5
    await assert_true_to_its_children(conn)


async def test_a_plain_function_runs_too_and_the_threshold_is_a_setting_of_the_call(
    engine: Engine,
) -> None:
    """In a thread; twice as many documents as a process has slots."""

    @engine.job
    def work(job: Job[int]) -> int:
        time.sleep(0.01)
        return job.payload

    async with engine:
        handle = await engine.run(work, ((f"{n}", n) for n in range(100)), inline_below=101)
        assert [one async for one in handle.results()] == [
            (child.document_key, child.result) async for child in handle.children()
        ]
        assert counts(await handle.progress()) == (100, 100, 0, 0)


async def test_another_handlers_kind_is_queued(engine: Engine) -> None:
    """Where nobody here knows how to run it."""
    sorts(engine)
    async with engine:
        handle = await engine.run("served_elsewhere", [("a", {"n": 1})])
        assert (await handle.job()).status is Status.WAITING
        assert Settings().lease > 0


async def test_a_batch_that_fails_by_its_documents(engine: Engine) -> None:
    """The threshold is crossed before a child could run: what is open is cancelled, it closes."""
    sort = sorts(engine)
    documents = [*(Document(f"{n}", gone="deleted") for n in range(3)), Document("a", "good")]
    async with engine:
        for inline_below in (50, 0):
            handle = await engine.run(sort, documents, fail_after=2, inline_below=inline_below)
            if not inline_below:
                async with engine.worker():
                    await closed(handle)
            progress = await closed(handle)
            assert progress.outcome == "failed"
            assert progress.failed == 3
