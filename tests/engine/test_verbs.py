"""Verbs on a batch while it runs: pause, resume, priority, concurrency, add, deadline, cancel.

The second half holds one side in an open transaction and lets the other wait for it, both ways
round.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import asyncpg
import pytest

from fanout import Document, Engine, Job, JobHandle, JobNotFound, Refused, Status, UsageError
from fanout.errors import JobFailed
from fanout.store import Store
from fanout.sweeper import Sweeper
from fanout.values import Retry, Snapshot
from tests.engine.running import (
    assert_true_to_its_children,
    closed,
    counts,
    quick,
    running,
    statuses,
    until,
)
from tests.factories import (
    DONE,
    LEASE,
    LONG_AGO,
    ME,
    Held,
    a_store,
    add_children,
    claim,
    claim_of,
    counters_of,
    fan_out,
    held,
    insert_batch,
    insert_job,
    live_worker,
    row_of,
    status_of,
    until_blocked,
    whole_table,
)
from tests.machine.invariants import check

T = TypeVar("T")

PENDING, PROCESSING, WAITING = Status.PENDING, Status.PROCESSING, Status.WAITING
COMPLETED, FAILED, CANCELLED = Status.COMPLETED, Status.FAILED, Status.CANCELLED
PAST: Final = datetime.now(UTC) - timedelta(hours=3)
SOON: Final = datetime.now(UTC) + timedelta(hours=3)


@pytest.fixture(autouse=True)
async def sound(conn: asyncpg.Connection) -> AsyncIterator[None]:
    """Whatever a test does, the counters are what the children are when it is over."""
    yield
    assert await check(conn, quiet=False) == []
    await assert_true_to_its_children(conn)


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    """A store on the test's database."""
    async with a_store(database) as it:
        yield it


def gated(engine: Engine) -> asyncio.Event:
    """`batch` fans out `leaf`s by its payload; leaves wait for the gate."""
    gate = asyncio.Event()

    @engine.job
    async def leaf(job: Job[Any]) -> Any:
        await gate.wait()
        return job.document_key

    @engine.job(on_closed="report")
    async def batch(job: Job[Any]) -> None:
        await job.fan_out("leaf", [Document(f"{i:03}", i) for i in range(job.payload)])

    @engine.job
    async def report(job: Job[Any]) -> None:
        pass

    return gate


async def running_children(handle: JobHandle) -> int:
    """How many children run now."""
    return (await handle.progress()).processing


async def sweep(store: Store) -> Sweeper:
    """A round of mending by a sweeper that rescues nobody."""
    sweeper = Sweeper(store, quick())
    await sweeper.sweep()
    return sweeper


def a_handle(store: Store, job_id: int) -> JobHandle:
    """A handle of a program that has no handlers."""
    return JobHandle(job_id, store, None)  # type: ignore[arg-type]  # it never reads events


async def claimable(store: Store, kind: str = "leaf", priority: int = 5) -> list[int]:
    """The ids that a worker would get now; it has them then."""
    look = await store.claim([(kind, priority, LONG_AGO)], 1000, ME, LEASE)
    claims = look[0]
    return [one.id for one in claims]


# -- pause and resume -----------------------------------------------------------------------------


async def test_a_paused_batch_starts_nothing_more_and_goes_on_when_it_is_resumed(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """What ran goes on and counts; the rest waits, says why, and runs after the resume."""
    gate = gated(engine)
    async with running(engine, concurrency=2):
        handle = await engine.submit("batch", 6)
        await until(lambda: running_children(handle))
        await until(lambda: _status(handle, WAITING))

        assert await handle.pause() is True
        assert await handle.pause() is False
        ran = {key for key, status in (await statuses(handle)).items() if status is PROCESSING}
        gate.set()
        await until(lambda: _ended(handle, len(ran)))

        progress = await handle.progress()
        assert (progress.paused, progress.processing, progress.pending) == (True, 0, 6 - len(ran))
        assert "it is paused: nothing more of it starts until it is resumed" in progress.waits_for
        assert await conn.fetchval("SELECT count(*) FROM fanout.stuck") == 0
        other = await engine.submit("batch", 1)  # workers have nothing else to do, and do this
        await closed(other)
        assert (await handle.progress()).ended == len(ran)

        assert await handle.resume() is True
        assert await handle.resume() is False
        done = await closed(handle)
    assert (counts(done), done.outcome, done.paused) == ((6, 6, 0, 0), "completed", False)


async def _status(handle: JobHandle, status: Status) -> bool:
    return (await handle.progress()).status is status


async def _ended(handle: JobHandle, count: int) -> bool:
    return (await handle.progress()).ended == count


async def test_a_job_that_is_paused_before_it_begins_does_not_begin(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Also one that never has children."""
    gated(engine).set()
    async with running(engine):
        single = await engine.submit("leaf", 1, delay=0.2)
        batch = await engine.submit("batch", 3, delay=0.2)
        assert await single.pause()
        assert await batch.pause()
        await closed(await engine.submit("leaf", 2, delay=0.25))

        assert [(await h.job()).attempt for h in (single, batch)] == [0, 0]
        assert (await single.progress()).waits_for[0].startswith("it is paused")

        assert await single.resume()
        assert await batch.resume()
        assert counts(await closed(batch)) == (3, 3, 0, 0)
        await closed(single)


async def test_what_a_paused_batch_dispatches_is_paused(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The manager goes on with its work: its children wait with the rest, those of batches below it
    as well.
    """
    paused = asyncio.Event()

    @engine.job
    async def leaf(job: Job[Any]) -> None:
        pass

    @engine.job
    async def inner(job: Job[Any]) -> None:
        await paused.wait()
        await job.fan_out("leaf", [("x", None), ("y", None)])

    @engine.job
    async def outer(job: Job[Any]) -> None:
        await job.fan_out("inner", [("a", None)])
        await paused.wait()
        await job.fan_out("leaf", [("b", None)])

    async with running(engine):
        handle = await engine.submit(outer)
        await until(lambda: running_children(handle))
        await handle.pause()
        paused.set()
        await until(lambda: _status(handle, WAITING))
        await until(
            lambda: conn.fetchval(
                "SELECT count(*) = 3 FROM fanout.job WHERE paused AND kind = 'leaf'"
            )
        )
        await closed(await engine.submit("leaf"))
        assert (
            await conn.fetchval(
                "SELECT max(attempt) FROM fanout.job WHERE depth > 0 AND kind = 'leaf'"
            )
            == 0
        )

        await handle.resume()
        assert counts(await closed(handle)) == (2, 2, 0, 0)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE paused") == 0


async def test_pause_and_resume_reach_every_depth(store: Store, conn: asyncpg.Connection) -> None:
    """A batch in a batch, one of its managers between two runs."""
    root = await insert_job(conn, WAITING, kind="manager", total=2)
    waiting, low = await insert_batch(conn, WAITING, [PENDING, PENDING, COMPLETED], parent=root)
    between, lower = await insert_batch(conn, PENDING, [PENDING], parent=root)
    handle = a_handle(store, root)

    await handle.pause()
    assert await claimable(store) == []
    assert await claimable(store, "manager") == []

    await handle.resume()
    assert sorted(await claimable(store)) == [*low[:2], *lower]
    assert await claimable(store, "manager") == [between]
    assert await status_of(conn, waiting) is WAITING


async def test_children_of_many_chunks_are_paused_and_resumed(
    store: Store, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: none is left out between two chunks."""
    monkeypatch.setattr("fanout.steering.CHUNK", 3)
    root, children = await insert_batch(conn, WAITING, [PENDING] * 10)
    handle = a_handle(store, root)

    await handle.pause()
    assert await claimable(store) == []
    await handle.resume()
    assert sorted(await claimable(store)) == children


@pytest.mark.parametrize("verb", ["pause", "resume", "set_priority"])
async def test_a_child_cannot_be_steered_alone(
    verb: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The error names the whole that can."""
    root, [child] = await insert_batch(conn, WAITING, [PENDING])
    handle = a_handle(store, child)
    before = await whole_table(conn)

    with pytest.raises(Refused, match=f"job {root}$"):
        await _steer(handle, verb)

    assert await whole_table(conn) == before


@pytest.mark.parametrize("verb", ["pause", "resume", "set_priority", "set_concurrency", "add"])
@pytest.mark.parametrize("state", ["completed", "doomed", "not there"])
async def test_what_is_not_open_cannot_be_steered(
    verb: str, state: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Closed, or being ended: the error says so, and nothing is changed."""
    if state == "completed":
        job_id, _ = await insert_batch(conn, COMPLETED, [COMPLETED])
    elif state == "doomed":
        job_id, _ = await insert_batch(conn, WAITING, [PENDING], verdict="failed", reason="no luck")
    else:
        job_id = 2**40
    before = await whole_table(conn)

    error = JobNotFound if state == "not there" else Refused
    match = {"completed": "has closed", "doomed": "is being ended", "not there": "there is no job"}
    with pytest.raises(error, match=match[state]):
        await _steer(a_handle(store, job_id), verb)

    assert await whole_table(conn) == before


async def _steer(handle: JobHandle, verb: str) -> None:
    match verb:
        case "set_priority":
            await handle.set_priority(1)
        case "set_concurrency":
            await handle.set_concurrency(1)
        case "add":
            await handle.add("leaf", [("new", None)])
        case _:
            await getattr(handle, verb)()


async def test_a_paused_batch_is_not_given_up_however_long(
    store: Store, conn: asyncpg.Connection
) -> None:
    """And once it is resumed, the time that it was paused is not held against it."""
    root, _ = await insert_batch(
        conn, WAITING, [{"status": PENDING, "run_at": PAST}], updated_at=PAST
    )
    await live_worker(conn, ["leaf"])
    handle = a_handle(store, root)

    assert await store.give_up_candidates(10, 600) == [root]
    await handle.pause()
    await conn.execute("UPDATE fanout.job SET updated_at = $2 WHERE id = $1", root, PAST)
    assert await store.give_up_candidates(10, 600) == []
    assert await store.give_up(root, 600, "no sign of life") is False

    await handle.resume()
    assert await store.give_up_candidates(10, 600) == []
    assert await store.give_up(root, 600, "no sign of life") is False


async def test_a_paused_batch_can_be_cancelled(store: Store, conn: asyncpg.Connection) -> None:
    """All of it ends, and the sweeper leaves it alone after that."""
    root, _ = await insert_batch(conn, WAITING, [PENDING, PROCESSING, COMPLETED])
    handle = a_handle(store, root)
    await handle.pause()

    assert await handle.cancel() is True

    assert await status_of(conn, root) is CANCELLED
    assert await counters_of(conn, root) == (3, 1, 0, 2)
    before = await whole_table(conn)
    await sweep(store)
    assert await whole_table(conn) == before


async def test_what_a_crash_left_half_paused_a_sweep_pauses(
    store: Store, conn: asyncpg.Connection
) -> None:
    """The root says it, its children do not yet; at every depth."""
    root = await insert_job(conn, WAITING, kind="manager", total=2, paused=True)
    await insert_job(conn, PENDING, parent=root)
    await insert_batch(conn, PROCESSING, [PENDING, PENDING], parent=root)
    between, _ = await insert_batch(conn, PENDING, [PENDING], paused=True)

    await sweep(store)

    assert await claimable(store) == []
    assert await claimable(store, "manager") == []
    await a_handle(store, between).resume()
    assert len(await claimable(store)) == 1


async def test_what_a_crash_left_half_resumed_a_sweep_resumes(
    store: Store, conn: asyncpg.Connection
) -> None:
    """The root goes on, and some children are still paused; those of other batches stay."""
    _, [child] = await insert_batch(conn, WAITING, [{"status": PENDING, "paused": True}])
    top = await insert_job(conn, WAITING, kind="manager", total=1)
    _, low = await insert_batch(
        conn, WAITING, [{"status": PENDING, "paused": True}, PENDING], parent=top
    )
    await insert_batch(conn, WAITING, [{"status": PENDING, "paused": True}], paused=True)
    woken: list[str] = []

    await Sweeper(store, quick(), on_resumed=woken.append).sweep()

    assert sorted(await claimable(store)) == [child, *low]
    assert woken == ["leaf", "leaf"]
    assert await store.left_paused(10) == []


@pytest.mark.parametrize("how", ["retry", "release", "rescue"])
async def test_what_is_put_back_below_a_paused_root_is_paused(
    how: str, engine: Engine, store: Store, conn: asyncpg.Connection
) -> None:
    """A child that ran when the batch was paused does not begin again."""
    root, [child] = await insert_batch(conn, WAITING, [PROCESSING])
    mine = await claim_of(conn, child)
    await a_handle(store, root).pause()

    match how:
        case "retry":
            assert await store.retry([(mine, Retry("timeout", "TimeoutError", 0))], ME) == {child}
        case "release":
            assert await store.release([(mine, None)], ME) == {child}
        case _:
            await conn.execute(
                "UPDATE fanout.job SET lease_expires_at = $2 WHERE id = $1", child, PAST
            )
            await store.rescue(1, 10, 3, 0, 0)

    assert (await row_of(conn, child))["status"] == "pending"
    assert await claimable(store) == []
    assert await store.claim_alone(["leaf"], ME, LEASE) is None


# -- priority -------------------------------------------------------------------------------------


async def test_a_priority_reaches_children_that_wait_and_those_that_come(
    engine: Engine, store: Store, conn: asyncpg.Connection
) -> None:
    """At every depth, also what runs now and may come back; what has ended stays as it was."""
    root = await insert_job(conn, PROCESSING, kind="manager", total=4, completed=1)
    children = [await insert_job(conn, s, parent=root) for s in (PENDING, PROCESSING, COMPLETED)]
    nested, [low] = await insert_batch(conn, WAITING, [PENDING], parent=root)

    await a_handle(store, root).set_priority(1)

    rows = await conn.fetch("SELECT id, priority FROM fanout.job")
    assert {row["id"] for row in rows if row["priority"] == 1} == {
        root,
        nested,
        low,
        children[0],
        children[1],
    }
    await add_children(store, root, ["late"])
    assert sorted(await claimable(store, priority=1)) == sorted(
        [children[0], low, await conn.fetchval("SELECT max(id) FROM fanout.job")]
    )


async def test_a_batch_that_is_lifted_runs_before_one_that_came_first(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """What a person wants of it."""
    gate = gated(engine)
    order: list[Any] = []

    @engine.job
    async def note(job: Job[Any]) -> None:
        await gate.wait()
        order.append(job.payload)

    @engine.job
    async def notes(job: Job[Any]) -> None:
        await job.fan_out("note", [(f"{i:02}", f"{job.payload}") for i in range(3)])

    async with running(engine, concurrency=1):
        blocker = await engine.submit("leaf")
        await until(lambda: _status(blocker, PROCESSING))
        first, second = [await insert_notes(conn, name) for name in ("first", "second")]
        await engine.handle(second).set_priority(0)
        gate.set()
        await closed(engine.handle(first))
        await closed(engine.handle(second))
    assert order[0] == "second"


async def insert_notes(conn: asyncpg.Connection, name: str) -> int:
    """A sealed batch of three notes."""
    child = {"status": PENDING, "kind": "note", "payload": f'"{name}"'}
    batch, _ = await insert_batch(conn, WAITING, [child] * 3, kind="notes")
    return batch


@pytest.mark.parametrize("wrong", [-1, 10, True, "high", 2.0])
async def test_a_priority_that_is_none_is_refused(wrong: Any, store: Store) -> None:
    """Before anything is asked of the database."""
    with pytest.raises(UsageError, match="priority"):
        await a_handle(store, 1).set_priority(wrong)


# -- concurrency ----------------------------------------------------------------------------------


async def test_children_of_a_batch_with_a_concurrency_stand_among_those_that_are_limited(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Those that wait, those that run and may come back, those that come; a partition of a child's
    own stays. To clear it is one word on the batch.
    """
    root, _ = await insert_batch(
        conn, WAITING, [PENDING, PROCESSING, COMPLETED, {"status": PENDING, "partition": "acme"}]
    )
    handle = a_handle(store, root)

    await handle.set_concurrency(2)
    await add_children(store, root, ["late"])

    rows = await conn.fetch(
        "SELECT partition FROM fanout.job WHERE parent_id = $1 ORDER BY id", root
    )
    own = f"#{root}"
    assert [row["partition"] for row in rows] == [own, own, None, "acme", own]
    assert (await handle.job()).concurrency == 2

    await handle.set_concurrency(None)
    assert (await handle.job()).concurrency is None


async def test_what_is_being_put_back_keeps_to_the_concurrency(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Its row is passed over while it is locked, and looked at again."""
    root, children = await insert_batch(conn, WAITING, [PROCESSING, PROCESSING])
    claims = [await claim_of(conn, child) for child in children]
    async with held(database) as a:
        await a.store.release([(one, None) for one in claims], ME)
        task = asyncio.create_task(a_handle(store, root).set_concurrency(1))
        await asyncio.wait({task}, timeout=0.5)  # so long, it would have done without them
        await a.commit()
        await task

    assert [(await row_of(conn, child))["partition"] for child in children] == [f"#{root}"] * 2
    assert await claimable(store) == []


async def test_what_had_failed_before_keeps_to_the_concurrency_when_it_is_retried(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Also where the concurrency is given while they are being opened again."""
    before, _ = await insert_batch(conn, WAITING, [FAILED, FAILED, PENDING])
    during, _ = await insert_batch(conn, WAITING, [FAILED, FAILED, PENDING])
    await a_handle(store, before).set_concurrency(1)
    assert await store.retry_failed(before) == 2
    async with held(database) as a:
        await a_handle(a.store, during).set_concurrency(1)
        assert await behind(a, conn, store.retry_failed(during)) == 2

    rows = await conn.fetch("SELECT parent_id, partition FROM fanout.job WHERE depth = 1")
    assert [row["partition"] for row in rows] == [f"#{row['parent_id']}" for row in rows]
    assert await claimable(store) == []


@pytest.mark.parametrize("wrong", [0, -1, True, "two", 2.0, 2**31])
async def test_a_concurrency_that_is_none_is_refused(wrong: Any, store: Store) -> None:
    """Before anything is asked of the database."""
    with pytest.raises(UsageError, match="concurrency"):
        await a_handle(store, 1).set_concurrency(wrong)


# -- add ------------------------------------------------------------------------------------------


async def test_documents_are_added_to_an_open_batch(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """They run like the others; a key that is there is passed over, a gone one has failed."""
    gate = gated(engine)
    async with running(engine):
        handle = await engine.submit("batch", 2)
        await until(lambda: _status(handle, WAITING))

        done = await handle.add(
            "leaf", [Document("001", 0), Document("new", 1), Document("old", None, gone="deleted")]
        )
        assert (done.created, done.known) == (2, 1)
        again = await handle.add("leaf", [("new", 1)])
        assert (again.created, again.known) == (0, 1)
        nothing = await handle.add("leaf", [])
        assert (nothing.created, nothing.known) == (0, 0)
        assert counts(await handle.progress()) == (4, 0, 1, 0)

        gate.set()
        progress = await closed(handle)
        assert (counts(progress), progress.outcome) == ((4, 3, 1, 0), "completed with failures")
        assert [f.error async for f in handle.failures()] == ["deleted"]
        with pytest.raises(Refused, match="has closed"):
            await handle.add("leaf", [("later", 1)])


async def test_a_job_that_has_not_begun_takes_documents(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Its handler finds them there, dispatches the rest, and one close counts all."""
    gated(engine).set()
    async with engine:
        handle = await engine.submit("batch", 3)
        assert (await handle.add("leaf", [("000", 0), ("extra", 9)])).created == 2
        async with engine.worker():
            assert counts(await closed(handle)) == (4, 4, 0, 0)


async def test_a_job_that_runs_and_is_given_children_is_beaten_as_a_manager(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Its row is locked by every child that ends: a beat that passes over it is not enough."""
    gate = gated(engine)
    async with running(engine, concurrency=1) as worker:
        handle = await engine.submit("leaf")
        await until(lambda: _status(handle, PROCESSING))
        assert [held.fans_out for held in worker._held.values()] == [False]

        await handle.add("leaf", [("a", 1)])

        await until(lambda: [held.fans_out for held in worker._held.values()] == [True])
        gate.set()
        assert counts(await closed(handle)) == (1, 1, 0, 0)


async def test_more_documents_than_a_chunk_come_from_an_async_iterator(
    database: str, conn: asyncpg.Connection
) -> None:
    """In flat memory, a transaction a chunk."""
    engine = Engine(database, settings=quick(chunk_size=7))
    gated(engine)

    async def documents() -> AsyncIterator[tuple[str, Any]]:
        for i in range(20):
            yield f"{i:03}", i

    async with engine:
        handle = await engine.submit("batch", 0)
        assert (await handle.add("leaf", documents())).created == 20
        assert counts(await handle.progress()) == (20, 0, 0, 0)


async def test_a_document_that_cannot_be_stored_is_named_and_its_chunk_is_not_added(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """As in fan_out."""
    gated(engine)
    async with engine:
        handle = await engine.submit("batch", 0)
        with pytest.raises(UsageError, match="'big'"):
            await handle.add("leaf", [("small", 1), ("big", "x" * 2000)])
        with pytest.raises(UsageError, match="kind"):
            await handle.add("no.kind", [("a", 1)])
        assert counts(await handle.progress()) == (0, 0, 0, 0)


async def test_children_that_are_added_are_like_those_that_were_dispatched(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Whatever a child has from its batch, it has both ways."""
    columns: dict[str, Any] = {
        "tenant": "acme",
        "priority": 3,
        "partition": "p",
        "concurrency": 4,
        "paused": True,
    }
    manager = await insert_job(conn, PROCESSING, kind="manager", **columns)
    await conn.execute(
        """INSERT INTO fanout.kind (name, max_retries, timeout_seconds, on_closed)
           VALUES ('leaf', 7, 60, 'report')"""
    )
    documents: list[Any] = []
    for key, gone in (("a", None), ("gone", "deleted")):
        documents.append((key, "{}", gone))
    await _dispatched(store, conn, manager, "fan_out", documents)
    await _dispatched(store, conn, manager, "add", documents)

    rows = await conn.fetch("SELECT * FROM fanout.job WHERE parent_id = $1 ORDER BY id", manager)
    differ = {"id", "document_key", "run_at", "created_at", "updated_at", "finished_at"}
    ways: dict[str, list[Any]] = {"fan_out": [], "add": []}
    for row in rows:
        way, _, key = row["document_key"].partition(":")
        ways[way].append((key, {k: v for k, v in row.items() if k not in differ}))
    assert ways["fan_out"] == ways["add"]
    assert len(ways["add"]) == 2
    assert ways["add"][0][1]["max_retries"] == 7
    assert await counters_of(conn, manager) == (4, 0, 2, 0)


async def _dispatched(
    store: Store, conn: asyncpg.Connection, manager: int, way: str, documents: list[Any]
) -> None:
    keyed = [Snapshot(f"{way}:{key}", payload, gone) for key, payload, gone in documents]
    told: dict[str, Any] = {
        "kind": "leaf",
        "max_retries": None,
        "priority": None,
        "on_closed": None,
    }
    if way == "add":
        await store.add_children(manager, documents=keyed, **told)
    else:
        it = await claim_of(conn, manager)
        await store.fan_out(it, ME, LEASE, documents=keyed, **told)


def _document(key: str, payload: str, gone: str | None) -> Any:
    return Snapshot(key, payload, gone)


# -- deadline -------------------------------------------------------------------------------------


async def test_a_batch_past_its_deadline_ends_as_failed_with_what_has_not_ended(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """What had ended counts; its running children are told; the reason says when it was due."""
    gate = gated(engine)
    stopped: list[str] = []

    @engine.job
    async def stubborn(job: Job[Any]) -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            stopped.append(job.document_key or "")
            raise

    async with running(engine):
        handle = await engine.submit("batch", 2, deadline=timedelta(hours=1))
        await handle.add("stubborn", [("slow", None)])
        await until(lambda: _running_is(handle, 3))
        await conn.execute(
            "UPDATE fanout.job SET deadline = clock_timestamp() - interval '1 s' WHERE id = $1",
            handle.id,
        )
        progress = await closed(handle)
        await until(lambda: stopped == ["slow"])
    assert (counts(progress), progress.outcome) == ((3, 0, 0, 3), "failed")
    assert progress.reason is not None
    assert progress.reason.startswith("its deadline, 20")
    assert progress.reason.endswith(" UTC, has passed")


async def _running_is(handle: JobHandle, count: int) -> bool:
    return await running_children(handle) == count


async def test_a_single_job_has_a_deadline_too(engine: Engine, conn: asyncpg.Connection) -> None:
    """Pending or running; one that ends in time is not touched."""
    gate = gated(engine)
    async with running(engine):
        in_time = await engine.submit("report", None, deadline=3600)
        late = await engine.submit("leaf", 1, deadline=0.3)
        paused = await engine.submit("leaf", 2, delay=3600, deadline=0.3)
        await paused.pause()
        for handle in (late, paused):
            with pytest.raises(JobFailed, match="its deadline"):
                await handle.result(20)
        await in_time.result(20)
    gate.set()
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'failed'") == 2


async def test_what_is_retried_after_its_deadline_has_none(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A deadline is one of the first run: a new generation is not over before it began."""
    batch, _ = await insert_batch(conn, COMPLETED, [FAILED], deadline=PAST)
    single = await insert_job(conn, FAILED, deadline=PAST)
    ahead, _ = await insert_batch(conn, COMPLETED, [FAILED], deadline=SOON)

    assert await store.retry_failed(batch) == 1
    assert await store.retry_failed(ahead) == 1
    assert await store.retry_job(single) is True

    assert await store.late(10) == []
    assert (await row_of(conn, ahead))["deadline"] == SOON


# -- cancel ---------------------------------------------------------------------------------------


async def test_a_cancel_reaches_running_children_long_before_their_next_heartbeat(
    database: str, conn: asyncpg.Connection
) -> None:
    """A hint goes out after the commit; whoever holds a claim below the batch beats at once."""
    engine = Engine(database, settings=quick(lease=400, heartbeat=120))
    stopped: list[str | None] = []
    began = asyncio.Event()

    @engine.job
    async def endless(job: Job[Any]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(job.document_key)
            raise

    @engine.job
    async def batch(job: Job[Any]) -> None:
        await job.fan_out("endless", [("a", None), ("b", None)])

    async with running(engine) as worker:
        handle = await engine.submit(batch)
        single = await engine.submit(endless)
        await until(lambda: _running_is(handle, 2))
        await until(lambda: _status(single, PROCESSING))
        # The connection that listens came up, and the first beats are over.
        await until(lambda: worker.heartbeat.beats > 0)
        await until(lambda: _listens(conn))
        async with Engine(database) as elsewhere:
            await elsewhere.handle(handle.id).cancel()
            await elsewhere.handle(single.id).cancel()
            await until(lambda: len(stopped) == 3)  # the next heartbeat is some 100 s away
        assert set(stopped) == {None, "a", "b"}
    assert counts(await _progress_of(database, handle.id)) == (2, 0, 0, 2)


async def _listens(conn: asyncpg.Connection) -> bool:
    return bool(
        await conn.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND query ILIKE 'LISTEN%'"
        )
    )


async def _progress_of(dsn: str, job_id: int) -> Any:
    async with Engine(dsn) as engine:
        return await engine.handle(job_id).progress()


# -- two sessions at once -------------------------------------------------------------------------


async def behind(a: Held, watcher: asyncpg.Connection, rival: Coroutine[Any, Any, T]) -> T:
    """Start `rival`, see it wait for a lock of `a`, let `a` commit: what `rival` then got."""
    task = asyncio.create_task(rival)
    await until_blocked(watcher, task)
    await a.commit()
    return await task


async def test_a_claim_in_flight_comes_before_a_pause(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The pause does not wait for it: what is being claimed runs, the rest does not."""
    root, [first, second] = await insert_batch(conn, WAITING, [PENDING, PENDING])
    async with held(database) as a:
        [it] = await claim(a.store, limit=1)

        assert await a_handle(store, root).pause() is True
        await a.commit()

    assert it.id == first
    assert await claimable(store) == []
    assert [await status_of(conn, j) for j in (first, second)] == [PROCESSING, PENDING]


async def test_a_pause_in_flight_comes_before_a_claim(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A claim passes over what is being paused, and finds it paused afterwards."""
    root, _ = await insert_batch(conn, WAITING, [PENDING, PENDING], paused=True)
    async with held(database) as a:
        assert (await a.store.pause_chunk(root, root, 0, 10)).changed == 2

        assert await claimable(store) == []
        await a.commit()

    assert await claimable(store) == []


async def test_a_pause_waits_for_a_chunk_in_flight_and_pauses_it(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Whoever dispatched them holds the batch's row: they are there when the pause looks."""
    root, _ = await insert_batch(conn, PROCESSING, [PENDING])
    async with held(database) as a:
        await fan_out(a.store, await claim_of(conn, root), ["a", "b"])

        assert await behind(a, conn, a_handle(store, root).pause()) is True

    assert await claimable(store) == []


async def test_a_chunk_that_waits_for_a_pause_is_born_paused(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It had read the batch's row before, and is put right in its own transaction."""
    root, _ = await insert_batch(conn, PROCESSING, [COMPLETED])
    it = await claim_of(conn, root)
    async with held(database) as a:
        await a.store.pause(root)
        assert await behind(a, conn, fan_out(store, it, ["a", "b"])) == (2, 3)

    assert await claimable(store) == []


async def test_a_chunk_that_waits_for_a_resume_is_not_paused(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The other way round: nobody would resume it."""
    root, _ = await insert_batch(conn, PROCESSING, [COMPLETED], paused=True)
    it = await claim_of(conn, root)
    async with held(database) as a:
        await a.store.resume(root)
        assert await behind(a, conn, fan_out(store, it, ["a", "b"])) == (2, 3)

    assert len(await claimable(store)) == 2


async def _chunk(store: Store, job_id: int, it: Any, way: str) -> tuple[int, int]:
    """Two more children, without a priority of their own."""
    told: dict[str, Any] = {
        "documents": [Snapshot(key, "{}", None) for key in ("a", "b")],
        "kind": "leaf",
        "max_retries": None,
        "priority": None,
        "on_closed": None,
    }
    if way == "add":
        return await store.add_children(job_id, **told)
    return await store.fan_out(it, ME, LEASE, **told)


@pytest.mark.parametrize("way", ["fan_out", "add"])
@pytest.mark.parametrize("depth", [0, 1])
async def test_a_chunk_that_waits_for_a_concurrency_keeps_to_it(
    way: str, depth: int, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It had read the batch's row before, and nobody looks for its children later."""
    parent = await insert_job(conn, WAITING, kind="manager", total=1) if depth else None
    batch, _ = await insert_batch(conn, PROCESSING, [PENDING], parent=parent)
    it = await claim_of(conn, batch)
    async with held(database) as a:
        await a_handle(a.store, batch).set_concurrency(1)
        assert await behind(a, conn, _chunk(store, batch, it, way)) == (2, 3)

    rows = await conn.fetch("SELECT partition FROM fanout.job WHERE parent_id = $1", batch)
    assert {row["partition"] for row in rows} == {f"#{batch}"}
    assert await claimable(store) == []


@pytest.mark.parametrize("way", ["fan_out", "add"])
@pytest.mark.parametrize("depth", [0, 1])
async def test_a_chunk_that_waits_for_a_priority_has_it(
    way: str, depth: int, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """At every depth; what was said first of the root holds for what comes after it."""
    parent = await insert_job(conn, WAITING, kind="manager", total=1) if depth else None
    batch, _ = await insert_batch(conn, PROCESSING, [PENDING], parent=parent)
    it = await claim_of(conn, batch)
    async with held(database) as a:
        await a_handle(a.store, parent or batch).set_priority(1)
        assert await behind(a, conn, _chunk(store, batch, it, way)) == (2, 3)

    rows = await conn.fetch("SELECT priority FROM fanout.job WHERE parent_id = $1", batch)
    assert [row["priority"] for row in rows] == [1, 1, 1]


async def test_of_pause_and_resume_at_once_the_root_says_which(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A resume comes between a pause's word and its chunks: those do nothing any more."""
    root, children = await insert_batch(conn, WAITING, [PENDING] * 3)

    await store.pause(root)  # one session has said pause, and is about to look for children
    async with held(database) as a:
        await a.store.resume(root)
        await a.store.resume_chunk(root, root, 0, 10)
        chunk = await behind(a, conn, store.pause_chunk(root, root, 0, 10))
    assert chunk.changed == 0

    assert sorted(await claimable(store)) == children


async def test_a_pause_whose_chunk_is_in_flight_and_a_resume_that_waits_for_it(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The resume comes later, so all go on."""
    root, children = await insert_batch(conn, WAITING, [PENDING] * 3, paused=True)
    async with held(database) as a:
        assert (await a.store.pause_chunk(root, root, 0, 10)).changed == 3

        assert await behind(a, conn, a_handle(store, root).resume()) is True

    assert sorted(await claimable(store)) == children
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE paused") == 0


async def test_add_comes_first_and_the_last_child_does_not_close(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The finish waits for the batch's row and finds its total raised."""
    root, [child] = await insert_batch(conn, WAITING, [PROCESSING])
    async with held(database) as a:
        assert await add_children(a.store, root, ["new"]) == (1, 2)

        counted = await behind(a, conn, store.finish([(await claim_of(conn, child), DONE)], ME))

    assert counted.closed == ()
    assert await counters_of(conn, root) == (2, 1, 0, 0)
    assert await status_of(conn, root) is WAITING


async def test_the_last_child_comes_first_and_add_is_refused(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The add waits for the close, and inserts nothing."""
    root, [child] = await insert_batch(conn, WAITING, [PROCESSING])
    async with held(database) as a:
        await a.store.finish([(await claim_of(conn, child), DONE)], ME)

        with pytest.raises(Refused, match="has closed"):
            await behind(a, conn, add_children(store, root, ["new"]))

    assert await counters_of(conn, root) == (1, 1, 0, 0)
    assert await status_of(conn, root) is COMPLETED


async def test_a_cancel_in_flight_refuses_an_add(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """No child is born below a batch that is being ended."""
    root, _ = await insert_batch(conn, WAITING, [PENDING])
    async with held(database) as a:
        await a.store.doom(root, CANCELLED, "stop")

        with pytest.raises(Refused, match="is being ended"):
            await behind(a, conn, add_children(store, root, ["new"]))


async def test_two_adds_of_one_document_make_one_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The second waits, and finds it known."""
    root, _ = await insert_batch(conn, WAITING, [PENDING])
    async with held(database) as a:
        assert await add_children(a.store, root, ["new"]) == (1, 2)

        assert await behind(a, conn, add_children(store, root, ["new", "more"])) == (1, 3)


async def test_a_finish_comes_first_and_the_deadline_has_nothing_to_end(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The close was in time, as far as anybody can tell."""
    root, [child] = await insert_batch(conn, WAITING, [PROCESSING], deadline=PAST)
    async with held(database) as a:
        await a.store.finish([(await claim_of(conn, child), DONE)], ME)

        assert (await behind(a, conn, store.doom_late(root))).moved == ()

    assert await status_of(conn, root) is COMPLETED


async def test_the_deadline_comes_first_and_the_last_child_closes_as_failed(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The child is counted as what it is; the batch has its verdict."""
    root, [child] = await insert_batch(conn, WAITING, [PROCESSING], deadline=PAST)
    async with held(database) as a:
        await a.store.doom_late(root)

        await behind(a, conn, store.finish([(await claim_of(conn, child), DONE)], ME))

    assert await status_of(conn, root) is FAILED
    assert await counters_of(conn, root) == (1, 1, 0, 0)


async def test_two_sweepers_end_a_late_batch_once(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """One waits, and finds it done."""
    root, _ = await insert_batch(conn, WAITING, [PENDING], deadline=PAST)
    async with held(database) as a:
        assert [job.id for job in (await a.store.doom_late(root)).moved] == [root]

        assert (await behind(a, conn, store.doom_late(root))).moved == ()


async def test_a_claim_in_flight_takes_a_priority_with_it(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It is passed over, keeps the old one for this run, and its neighbours have the new one."""
    root, [first, second] = await insert_batch(conn, WAITING, [PENDING, PENDING])
    async with held(database) as a:
        await claim(a.store, limit=1)

        await a_handle(store, root).set_priority(2)
        await a.commit()

    assert [(await row_of(conn, j))["priority"] for j in (first, second)] == [5, 2]


async def test_of_two_priorities_at_once_the_roots_is_what_all_end_with(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The earlier one's chunk waits for the row, and gives what the row says by then."""
    root, children = await insert_batch(conn, WAITING, [PENDING, PENDING])
    await store.set_priority(root, 2)
    async with held(database) as a:
        await a.store.set_priority(root, 7)

        await behind(a, conn, store.set_priority_chunk(root, root, 0, 10))

    assert {(await row_of(conn, j))["priority"] for j in (root, *children)} == {7}
