"""Every await of the database is spoiled once, in every way: nothing stays locked, nothing is
counted twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import asyncpg
import pytest
from _pytest.mark import ParameterSet

from fanout import DatabaseUnavailable, Engine, Settings
from fanout.pool import Pool
from fanout.states import Status
from fanout.store import Store
from fanout.values import Claim, Completed, Interrupted, NewJob, Retry, Snapshot
from tests.cases.lab import (
    Calls,
    Fault,
    Wire,
    counters,
    engine_on,
    name_of,
    quick,
    settle,
    until_true,
)
from tests.factories import ME, claim, claim_of, insert_batch
from tests.machine.invariants import History, check

pytestmark = pytest.mark.usefixtures("swept")


@dataclass
class Scene:
    """A root with a nested batch whose last child runs, so that its end goes up two levels; and
    loose ends."""

    root: int
    nested: int
    last: Claim
    manager: Claim
    doomed: int
    key: str


async def a_scene(conn: asyncpg.Connection, n: int) -> Scene:
    root, _ = await insert_batch(
        conn, Status.PENDING, [Status.COMPLETED, Status.FAILED], on_closed="report"
    )
    nested, [last] = await insert_batch(
        conn, Status.WAITING, [Status.PROCESSING], parent=root, on_closed="report"
    )
    await conn.execute("UPDATE fanout.job SET total = 3, status = 'waiting' WHERE id = $1", root)
    manager, _ = await insert_batch(conn, Status.PROCESSING, [Status.PENDING], kind=f"manager{n}")
    doomed, _ = await insert_batch(conn, Status.PROCESSING, [Status.PENDING, Status.PROCESSING])
    return Scene(
        root, nested, await claim_of(conn, last), await claim_of(conn, manager), doomed, f"key-{n}"
    )


async def _finish(store: Store, scene: Scene) -> object:
    return await store.finish([(scene.last, Completed("1"))], ME)


async def _retry(store: Store, scene: Scene) -> object:
    return await store.retry([(scene.last, Retry("not yet", "TransientError", 0.0))], ME)


async def _release(store: Store, scene: Scene) -> object:
    return await store.release([(scene.last, Interrupted())], ME)


async def _fan_out(store: Store, scene: Scene) -> object:
    return await store.fan_out(
        scene.manager,
        ME,
        60,
        documents=[Snapshot(f"k{i}", "{}", "gone" if i == 3 else None) for i in range(5)],
        kind="leaf",
        max_retries=3,
        priority=5,
        on_closed=None,
    )


async def _claim(store: Store, scene: Scene) -> object:
    return await claim(store, ["leaf"], limit=2)


async def _submit(store: Store, scene: Scene) -> object:
    return await store.submit([NewJob("leaf", "{}", scene.key), NewJob("leaf", "{}")])


async def _doom(store: Store, scene: Scene) -> object:
    return await store.doom(scene.doomed, Status.CANCELLED, "on request")


async def _doom_chunk(store: Store, scene: Scene) -> object:
    await store.doom(scene.doomed, Status.CANCELLED, "on request")
    return await store.doom_chunk(scene.doomed, 10)


async def _rescue(store: Store, scene: Scene) -> object:
    return await store.rescue(2, 100, 0, 0, 0.0)


async def _recount(store: Store, scene: Scene) -> object:
    return await store.recount(scene.root)


async def _retry_failed(store: Store, scene: Scene) -> object:
    return await store.retry_failed(scene.root)


async def _checkpoint(store: Store, scene: Scene) -> object:
    await store.save_checkpoint(scene.manager, ME, json.dumps({"page": 3}))
    return None


OPERATIONS: dict[str, Callable[[Store, Scene], Awaitable[object]]] = {
    "claim": _claim,
    "submit": _submit,
    "fan_out": _fan_out,
    "checkpoint": _checkpoint,
    "finish": _finish,
    "retry": _retry,
    "release": _release,
    "doom": _doom,
    "doom_chunk": _doom_chunk,
    "rescue": _rescue,
    "recount": _recount,
    "retry_failed": _retry_failed,
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_cut_short_at_any_await_a_statement_keeps_no_lock_and_counts_once(
    name: str, database: str, conn: asyncpg.Connection
) -> None:
    """sqlalchemy/sqlalchemy #12099, MagicStack/asyncpg #537: cancelled, cut or timed out at each
    await point, before it is sent, while it is on its way, or after the server did it: no
    session is left in a transaction, no row locked, the pool hands out no connection that is
    busy, and doing it again leaves counters equal to a recount."""
    await History.install(conn)
    wire = Wire()
    with wire.laid():
        pool = Pool(database, Settings(pool_size=2, database_timeout=5), "spoiled")
        await pool.open()
    try:
        spoiled = 0
        for fault in Fault:
            at = 0
            while await spoil(conn, Store(pool), name, wire, fault, at):
                at += 1
            spoiled += at
    finally:
        await pool.close()
    assert spoiled >= len(Fault)


async def spoil(
    conn: asyncpg.Connection, store: Store, name: str, wire: Wire, fault: Fault, at: int
) -> bool:
    """Spoil one await of an operation, and do the operation again. False: it has no such await."""
    scene = await a_scene(conn, at)
    if name == "rescue":
        await conn.execute(
            "UPDATE fanout.job SET lease_expires_at = clock_timestamp() - interval '1 s' "
            "WHERE id = $1",
            scene.last.id,
        )
    if name == "recount":
        await conn.execute("UPDATE fanout.job SET failed = 0 WHERE id = $1", scene.root)
    wire.seen.clear()
    wire.plan = lambda number, _: fault if number == at else None
    task = asyncio.ensure_future(OPERATIONS[name](store, scene))
    await asyncio.wait([task])
    reached = len(wire.seen) > at
    wire.plan = lambda *_: None
    if reached and fault.cancels:
        assert task.cancelled(), (fault, at, task)
    elif reached:
        assert isinstance(task.exception(), DatabaseUnavailable), (fault, at, task)
    await settle(conn)
    again = asyncio.ensure_future(OPERATIONS[name](store, scene))
    await asyncio.wait([again])
    # It was done already, or is done now; nothing says "another operation is in progress".
    refused = again.exception()
    assert not isinstance(refused, DatabaseUnavailable | asyncpg.InterfaceError), refused
    assert await check(conn, quiet=False) == [], (fault, at, wire.seen)
    await conn.execute("TRUNCATE fanout.job; TRUNCATE public.test_history")
    return reached


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TIMEOUT_AFTER])
async def test_an_engine_gets_over_any_statement_of_its_own_that_is_cut(
    fault: Fault, database: str, conn: asyncpg.Connection
) -> None:
    """procrastinate-org/procrastinate #1513, dbos-inc/dbos-transact-py #716: each statement of
    the engine is cut once, in a batch of three with a retry, a failure and a follow-up: it ends
    with exact counters, closed once, no child failed by it, and no retry used up."""
    names = ["claim", "fan_out", "finish", "retry", "register_kinds", "wake", "BEGIN", "COMMIT"]
    said = await asyncio.gather(
        *(_one_statement_cut(database, f"w{n}", name, fault) for n, name in enumerate(names))
    )
    # No lost statement is anybody's death, either.
    well: object = ("completed", 3, 2, 1, {"00000": (0, 0), "00001": (1, 0), "00002": (1, 0)}, [])
    assert dict(zip(names, said, strict=True)) == dict.fromkeys(names, well)


async def _one_statement_cut(database: str, schema: str, name: str, fault: Fault) -> object:
    """An engine in a schema of its own, one statement of which is cut once: what became of a
    batch."""
    calls, wire, cut = Calls(), Wire(), asyncio.Event()

    def plan(_: int, query: str) -> Fault | None:
        if name_of(query, schema) != name or cut.is_set():
            return None
        cut.set()
        return fault

    async with engine_on(database, calls, schema_name=schema) as engine:
        assert engine._pool is not None
        await engine._pool.close()
        with wire.laid():  # only under this pool
            await engine._pool.open()
        mix = {"1": {"flaky": 1}, "2": {"broken": True}}
        handle = await engine.submit("batch", {"n": 3, "mix": mix})
        wire.plan = plan
        await _started(engine)
        progress = await handle.wait(20)
        await asyncio.wait_for(cut.wait(), 5)
        failures = {c.document_key: (c.failures, c.deaths) async for c in handle.children()}
        [report] = await engine.jobs(kind="report")
        await engine.handle(report.id).result(10)
    counts = (progress.total, progress.completed, progress.failed)
    return (str(progress.status), *counts, failures, calls.repeated)


async def _started(engine: Engine) -> None:
    """A worker, started again until it is up, as a pod would be."""
    while True:
        try:
            await engine.worker().start()
        except DatabaseUnavailable:
            continue
        return


def _rare(*sqlstates: str) -> list[ParameterSet]:
    return [pytest.param(sqlstate, marks=pytest.mark.chaos) for sqlstate in sqlstates]


@pytest.mark.parametrize(
    "sqlstate",
    [
        "40P01",
        "40001",
        "55P03",
        "57014",
        "57P01",
        "53100",
        *_rare("57P02", "57P03", "53300", "25P03", "08006", "53200", "58030", "XX000"),
    ],
)
async def test_errors_of_the_server_in_one_update_of_ten_fail_no_child(
    sqlstate: str, database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """janbjorge/pgqueuer #170, hail-is/hail PR #14379, patroni/patroni #2819 (53100, disk full):
    a statement in ten ends in this SQLSTATE: the whole transaction is run again, no child is
    failed by it, the counters are exact."""
    await History.install(conn)
    await conn.execute(
        f"""CREATE FUNCTION public.trouble() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF random() < 0.1 THEN
                    RAISE SQLSTATE '{sqlstate}' USING MESSAGE = 'injected'; END IF;
                RETURN NULL; END $$;
            CREATE TRIGGER trouble AFTER INSERT OR UPDATE ON fanout.job
                FOR EACH STATEMENT EXECUTE FUNCTION public.trouble()"""
    )
    async with engine_on(database, calls) as engine:
        while True:
            try:
                handle = await engine.submit(
                    "batch", {"n": 40, "mix": {"1": {"flaky": 1}, "2": {"broken": True}}}, key="k"
                )
                break
            except DatabaseUnavailable:
                continue
        async with engine.worker(concurrency=8), engine.worker(concurrency=8):
            await handle.wait(30)
    assert await counters(conn, handle.id) == ("completed", 40, 39, 1, 0)
    assert await conn.fetchval("SELECT sum(failures) FROM fanout.job") == 2
    assert calls.repeated == []
    assert await check(conn, quiet=False) == []


async def test_a_finish_whose_reply_was_lost_is_read_back_and_counted_once(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """patroni/patroni #1412, PR #1414: an unknown outcome is unknown: it is read back by (id,
    attempt, who ended it); a child whose finish was committed is not run again, and not counted
    again."""
    wire = Wire(
        lambda _, query: Fault.LOST_AFTER if name_of(query) == "finish" and lost() else None
    )
    left = iter(range(3))

    def lost() -> bool:
        return next(left, None) is not None

    with wire.laid():
        async with engine_on(database, calls) as engine, engine.worker() as worker:
            handle = await engine.submit("batch", {"n": 5})
            await handle.wait(20)
            assert next(left, None) is None, "three replies were lost"
            assert await counters(conn, handle.id) == ("completed", 5, 5, 0, 0)
            assert worker.finisher.lost == 0
            assert {tuple(calls.of(job_id)) for job_id, _ in calls.starts} == {(1,)}
    assert await check(conn, quiet=False) == []


async def test_a_finish_that_is_cut_in_the_middle_of_its_transaction_is_done_again_whole(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """graphile/worker #254: the connection dies inside the finish of a last attempt, after the
    child's end and before the commit: nothing of it stands, and the next flush counts it once."""
    nested = {"cuts": 0}

    def plan(_: int, query: str) -> Fault | None:
        if name_of(query) in {"count_up", "COMMIT"} and nested["cuts"] < 4 and nested.get("on"):
            nested["cuts"] += 1
            return Fault.LOST_BEFORE
        return None

    wire = Wire(plan)
    with wire.laid():
        async with engine_on(database, calls) as engine:

            @engine.job
            async def outer(job: object) -> None:
                await job.fan_out("batch", [("inner", {"n": 1, "child": {"flaky": 9}})])  # type: ignore[attr-defined]

            handle = await engine.submit("outer", None)
            async with engine.worker():
                await until_true(lambda: len(calls.starts) >= 4)
                nested["on"] = 1
                await handle.wait(20)
    assert await counters(conn, handle.id) == ("completed", 1, 1, 0, 0)
    inner = await conn.fetchval("SELECT id FROM fanout.job WHERE kind = 'batch'")
    assert await counters(conn, inner) == ("completed", 1, 0, 1, 0)
    assert nested["cuts"] == 4
    assert await check(conn, quiet=False) == []


def test_settings_of_these_cases_fit_together() -> None:
    """janbjorge/pgqueuer #430, #323: three heartbeats fit into a lease, here as everywhere."""
    settings = quick()
    assert settings.heartbeat * 3 <= settings.lease
