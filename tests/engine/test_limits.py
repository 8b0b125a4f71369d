"""Limits: of a kind, of a partition, of a batch, of a named resource; held by the database, fair,
changed while running, and never leaked.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from fanout import (
    Document,
    Engine,
    Job,
    JobHandle,
    LostClaim,
    Request,
    Settings,
    Status,
    UsageError,
    pool,
)
from fanout.statements import load_statements
from fanout.store import Store
from fanout.values import SlotKey
from tests import factories
from tests.engine.running import PATIENCE, closed, quick, running, until
from tests.factories import LEASE, LONG_AGO, ME, OTHER, a_store, held, insert_job

WANTED = [("leaf", priority, LONG_AGO) for priority in range(10)]


async def limit(conn: asyncpg.Connection, name: str, bounds: str) -> None:
    """As `fanout limit set` would."""
    await conn.execute(
        """INSERT INTO fanout.limits (name, operator) VALUES ($1, $2)
           ON CONFLICT (name) DO UPDATE SET operator = excluded.operator""",
        name,
        bounds,
    )


async def claim_limited(store: Store, most: int = 100, **options: Any) -> list[int]:
    options = {"free": most, **options}
    look = await store.claim_limited(WANTED, most, options.pop("token", ME), LEASE, **options)
    return [claim.id for claim in look.claims]


class Inside:
    """How many are within a block at once, and the most there ever were."""

    def __init__(self) -> None:
        self.now = self.most = self.entered = 0

    def __enter__(self) -> None:
        self.now += 1
        self.entered += 1
        self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        self.now -= 1


# -- of a kind -------------------------------------------------------------------------------------


async def test_a_kind_runs_as_many_at_once_as_its_limit_over_all_workers(database: str) -> None:
    """Two workers with ten slots each, a limit of three: three at once, and all of them run."""
    engine = Engine(database, settings=quick())
    inside = Inside()

    @engine.job(limit=3)
    async def scarce(_job: Job[Any]) -> None:
        with inside:
            await asyncio.sleep(0.02)

    @engine.job
    async def batch(job: Job[Any]) -> None:
        await job.fan_out(scarce, [(f"{n}", n) for n in range(30)])

    async with running(engine), engine.worker():
        progress = await closed(await engine.submit(batch))
        assert progress.completed == 30
        assert inside.most == 3
        [row] = await engine.limits.list()
        assert (row.name, row.concurrency, row.set_by) == ("kind:scarce", 3, "code")


async def test_a_limit_holds_for_every_claim_after_it_is_set(database: str) -> None:
    """Set while a flood runs: no claim that begins after it goes beyond; lifted, all slots run."""
    engine = Engine(database, settings=quick())
    inside, go_on = Inside(), asyncio.Event()

    @engine.job
    async def leaf(_job: Job[Any]) -> None:
        with inside:
            await go_on.wait()

    async with running(engine, concurrency=8):
        for _ in range(20):
            await engine.submit(leaf)
        await until(lambda: inside.now == 8)
        await engine.limits.set("kind:leaf", concurrency=2)
        go_on.set()
        go_on.clear()
        inside.most = 0
        await until(lambda: inside.entered == 10)
        assert inside.most == 2
        # Lowered, it takes no slot away; raised, more begin.
        await engine.limits.set("kind:leaf", concurrency=1)
        assert inside.now == 2
        await engine.limits.set("kind:leaf", concurrency=5)
        await until(lambda: inside.now == 5)
        assert inside.most == 5
        assert await engine.limits.reset("kind:leaf")
        await until(lambda: inside.now == 8)
        assert await engine.limits.list() == []
        go_on.set()
        await until(lambda: inside.now == 0)


async def test_what_an_operator_sets_wins_until_it_is_reset(database: str) -> None:
    """Field by field: a program that starts again does not undo it; a reset does."""
    engine = Engine(database, settings=quick())

    @engine.job(limit=10, limit_per_partition=2)
    async def leaf(_job: Job[Any]) -> None: ...

    async with running(engine):
        row = await engine.limits.set("kind:leaf", concurrency=4)
        assert (row.concurrency, row.per_partition, row.set_by) == (4, 2, "operator")
    async with running(engine):
        row = await engine.limits.set("kind:leaf", per_partition=None)
        assert (row.concurrency, row.per_partition) == (4, None)
        assert await engine.limits.reset("kind:leaf")
        [row] = await engine.limits.list()
        assert (row.concurrency, row.per_partition, row.set_by) == (10, 2, "code")
        assert not await engine.limits.reset("kind:leaf")

    other = Engine(database, settings=quick())
    other.job(name="leaf")(leaf.function)
    async with running(other):
        assert await other.limits.list() == []


async def test_two_claims_of_one_limit_wait_for_each_other(
    database: str, conn: asyncpg.Connection
) -> None:
    """The second waits for the first one's commit and counts what it claimed."""
    await limit(conn, "kind:leaf", '{"concurrency": 3}')
    ids = [await insert_job(conn) for _ in range(6)]
    async with a_store(database) as store, held(database) as rival:
        first = await claim_limited(rival.store, 2)
        second = asyncio.create_task(claim_limited(store, 2, token=OTHER))
        await factories.until_blocked(conn, second)
        await rival.commit()
        assert (first, await second) == (ids[:2], ids[2:3])
        assert await claim_limited(store) == []


async def test_a_job_that_must_run_alone_stands_under_the_limit_too(
    database: str, conn: asyncpg.Connection
) -> None:
    """It is told of, and claimed, only when there is room; so no worker drains in vain."""
    await limit(conn, "kind:leaf", '{"concurrency": 1}')
    running_id = await insert_job(conn, Status.PROCESSING)
    suspect = await insert_job(conn, deaths=1)
    async with a_store(database) as store:
        look = await store.claim(WANTED, 10, ME, LEASE)
        assert look.suspect_age is None
        assert await store.claim_alone(["leaf"], ME, LEASE) is None
        await store.release([(await factories.claim_of(conn, running_id), None)], ME)
        look = await store.claim(WANTED, 10, ME, LEASE)
        assert (look.suspect_age is not None, look.limited) == (True, frozenset({"leaf"}))
        claim = await store.claim_alone(["leaf"], ME, LEASE)
        assert claim is not None
        assert claim.id == suspect
        assert await claim_limited(store) == []


async def test_partitions_take_turns_whatever_waits_in_them(
    database: str, conn: asyncpg.Connection
) -> None:
    """A thousand of one customer came first: of the next ten slots another one has its five."""
    await limit(conn, "kind:leaf", '{"concurrency": 10}')
    await conn.execute(
        """INSERT INTO fanout.job (kind, partition, priority)
           SELECT 'leaf', 'large', 0 FROM generate_series(1, 1000)"""
    )
    small = [await insert_job(conn, partition="small", priority=9) for _ in range(7)]
    none = [await insert_job(conn) for _ in range(3)]
    async with a_store(database) as store:
        assert set(await claim_limited(store, 3)) & set(small) == {small[0]}
        claimed = await claim_limited(store)
        assert len(claimed) == 7
        of = Counter("small" if i in small else "none" if i in none else "large" for i in claimed)
        assert of == {"small": 2, "none": 2, "large": 3}


async def test_a_partition_has_a_limit_of_its_own(database: str, conn: asyncpg.Connection) -> None:
    """Two of each at most, and of the kind five."""
    await limit(conn, "kind:leaf", '{"concurrency": 5, "per_partition": 2}')
    for partition in ("a", "b", "c"):
        for _ in range(4):
            await insert_job(conn, partition=partition)
    async with a_store(database) as store:
        assert len(await claim_limited(store)) == 5
        rows = await conn.fetch(
            "SELECT count(*) FROM fanout.job WHERE status = 'processing' GROUP BY partition"
        )
        assert sorted(row[0] for row in rows) == [1, 2, 2]
        await limit(conn, "kind:leaf", '{"concurrency": 50, "per_partition": 2}')
        assert len(await claim_limited(store)) == 1


async def test_a_batch_has_a_limit_of_its_own_and_blocks_nobody_behind_it(
    database: str, conn: asyncpg.Connection
) -> None:
    """Three children of it at once, also where its partition is another's too."""
    batch, _ = await factories.insert_batch(
        conn,
        Status.WAITING,
        [{"status": Status.PENDING, "kind": "leaf", "partition": "acme"} for _ in range(30)],
        concurrency=3,
    )
    behind = [await insert_job(conn, partition="acme") for _ in range(2)]
    async with a_store(database) as store:
        look = await store.claim(WANTED, 10, ME, LEASE)
        assert (look.claims, look.limited) == ([], frozenset({"leaf"}))
        claimed = await claim_limited(store, 10)
        assert len(set(claimed) - set(behind)) == 3
        assert set(await claim_limited(store, 10)) | set(claimed) >= set(behind)
        assert await claim_limited(store, 10) == []
        count = "SELECT count(*) FROM fanout.job WHERE status = 'processing' AND parent_id = $1"
        assert await conn.fetchval(count, batch) == 3


async def test_what_a_full_kind_has_in_a_batch_holds_up_no_other_kind(
    database: str, conn: asyncpg.Connection
) -> None:
    """The batch's one place is not kept for the first child, that may not begin."""
    _, [_, second] = await factories.insert_batch(
        conn,
        Status.WAITING,
        [{"status": Status.PENDING, "kind": k, "partition": "acme"} for k in ("stopped", "leaf")],
        concurrency=1,
    )
    await limit(conn, "kind:stopped", '{"concurrency": 0}')
    wanted = [(kind, 5, LONG_AGO) for kind in ("stopped", "leaf")]
    async with a_store(database) as store:
        look = await store.claim_limited(wanted, 10, ME, LEASE, free=10)
        assert [claim.id for claim in look.claims] == [second]


async def test_all_that_is_retried_keeps_to_the_limit_of_its_batch(
    database: str, conn: asyncpg.Connection
) -> None:
    """Given while they had failed; also those behind a batch that was opened again before them."""
    batch, [first, nested, last] = await factories.insert_batch(
        conn,
        Status.WAITING,
        [Status.FAILED, {"status": Status.WAITING, "kind": "manager", "total": 1}, Status.FAILED],
        concurrency=1,
    )
    await insert_job(conn, parent=nested)
    async with a_store(database) as store:
        assert await store.retry_failed(batch) == 2
        assert not await store.has_outside_concurrency(batch)
        assert len(await claim_limited(store)) == 1
        look = await store.claim(WANTED, 10, ME, LEASE)
        assert not {first, last} & {claim.id for claim in look.claims}


async def test_a_full_batch_is_walked_only_so_far(
    database: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait for it, and for others' sake all of them now and then: a worker runs what
    stands behind.
    """
    full, _ = await factories.insert_batch(
        conn, Status.WAITING, [{"status": Status.PROCESSING, "partition": "acme"}], concurrency=1
    )
    await conn.execute(
        """INSERT INTO fanout.job (kind, parent_id, root_id, depth, document_key, partition)
           SELECT 'leaf', $1::bigint, $1, 1, n, 'acme' FROM generate_series(1, 3000) n""",
        full,
    )
    await conn.execute("UPDATE fanout.job SET total = 3001 WHERE id = $1", full)
    behind = await insert_job(conn, partition="acme")
    await conn.execute("ANALYZE fanout.job")
    async with held(database) as a:
        sql = f"EXPLAIN (ANALYZE, FORMAT JSON) {load_statements()['claim_limited']}"
        wanted = (["leaf"] * 10, list(range(10)), [LONG_AGO] * 10)
        minute = timedelta(seconds=60)
        arguments: tuple[object, ...] = (*wanted, 10, ME, minute, ["leaf"], [0], [""], [], 10, 0)
        [plan] = json.loads(await a.connection.fetchval(sql, *arguments, minute, 100))
        for scan in _scans(plan["Plan"]):
            seen = scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0)
            assert seen * scan["Actual Loops"] <= 500, scan
    engine = Engine(database, settings=quick())
    monkeypatch.setattr("fanout.worker.LIMITED_DEPTH", 100)

    @engine.job
    async def leaf(job: Job[Any]) -> None:
        pass

    async with running(engine):
        await closed(engine.handle(behind))
        later = await insert_job(conn, partition="acme")
        await closed(engine.handle(later))
        done = "SELECT count(*) FROM fanout.job WHERE parent_id = $1 AND status = 'completed'"
        assert await conn.fetchval(done, full) == 0


async def test_more_partitions_than_one_look_walks_are_all_served(
    database: str, conn: asyncpg.Connection
) -> None:
    """The next walk begins where the last one ended."""
    await conn.execute(
        """INSERT INTO fanout.job (kind, partition)
           SELECT 'leaf', 'p' || n FROM generate_series(1, 700) n"""
    )
    behind: dict[str, str] = {}
    served = 0
    async with a_store(database) as store:
        for _ in range(6):
            look = await store.claim_limited(WANTED, 500, ME, LEASE, free=500, behind=behind)
            served += len(look.claims)
            behind = {"leaf": look.behind.get("leaf", "")}
    assert served == 700


async def test_partitions_of_a_kind_without_a_limit_share_a_worker(database: str) -> None:
    """Ten of one are done while two hundred of another, that came first, have hardly begun."""
    engine = Engine(database, settings=quick(prefetch=0))
    order: list[str] = []

    @engine.job
    async def leaf(job: Job[str]) -> None:
        order.append(job.payload)

    async with engine:
        many = [Request(leaf, "large", partition="large") for _ in range(200)]
        few = [Request(leaf, "small", partition="small") for _ in range(10)]
        await engine.submit_many(many + few)
        async with engine.worker(concurrency=4):
            await until(lambda: len(order) == 210)
    assert len(order) - order[::-1].index("small") < 60


async def test_what_was_paused_meanwhile_is_not_claimed(
    database: str, conn: asyncpg.Connection
) -> None:
    """Between the look and the lock: the row is asked again."""
    await limit(conn, "kind:leaf", '{"concurrency": 5}')
    first, second = [await insert_job(conn) for _ in range(2)]
    async with a_store(database) as store, held(database) as rival:
        await rival.lock(first)
        await rival.connection.execute("UPDATE fanout.job SET paused = true WHERE id = $1", first)
        assert await claim_limited(store) == [second]
        await rival.commit()
        assert await claim_limited(store) == []


# -- ageing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_limited", [False, True])
async def test_the_lowest_priority_is_served_under_a_flood_of_the_highest(
    database: str, conn: asyncpg.Connection, is_limited: bool
) -> None:
    """Due for longer than its priority times the ageing time: one in ten claims is for it."""
    if is_limited:
        await limit(conn, "kind:leaf", '{"concurrency": 1}')
    engine = Engine(database, settings=quick(ageing=0.05))
    done = asyncio.Event()

    @engine.job
    async def leaf(job: Job[str]) -> None:
        if job.payload == "last":
            done.set()
        elif not done.is_set():
            await engine.submit(leaf, "flood", priority=0)
            await asyncio.sleep(0.01)

    async with running(engine, concurrency=1):
        for _ in range(20):
            await engine.submit(leaf, "flood", priority=0)
        await engine.submit(leaf, "last", priority=9)
        async with asyncio.timeout(30):
            await done.wait()


async def test_without_ageing_the_best_priority_comes_first(
    database: str, conn: asyncpg.Connection
) -> None:
    """What has not waited long enough waits."""
    last = await insert_job(conn, priority=9)
    first = [await insert_job(conn, priority=0) for _ in range(3)]
    async with a_store(database) as store:
        look = await store.claim(WANTED, 2, ME, LEASE, aged=1, ageing_seconds=60)
        assert [claim.id for claim in look.claims] == first[:2]
        look = await store.claim(WANTED, 1, ME, LEASE, aged=1, ageing_seconds=0)
        assert [claim.id for claim in look.claims] == [last]


# -- named limits ----------------------------------------------------------------------------------


async def test_a_named_limit_holds_over_kinds_and_workers(database: str) -> None:
    """Two kinds, two workers, one parser that takes two at a time."""
    engine = Engine(database, settings=quick())
    inside = Inside()

    @engine.job
    async def one(job: Job[Any]) -> None:
        async with job.limit("parser", 2):
            with inside:
                await asyncio.sleep(0.01)

    @engine.job
    async def other(job: Job[Any]) -> None:
        async with job.limit("parser"):
            with inside:
                await asyncio.sleep(0.01)

    async with running(engine), engine.worker():
        first = await engine.submit(one)  # says how many
        await closed(first)
        handles = [await engine.submit(one if n % 2 else other) for n in range(30)]
        for handle in handles:
            await closed(handle)
        assert inside.most == 2
        await until(lambda: _nobody(engine))


async def _nobody(engine: Engine) -> bool:
    rows = await engine.store._pool.fetch("SELECT 1 FROM fanout.slot")
    return not rows


async def test_the_timeout_does_not_run_while_a_job_waits(database: str) -> None:
    """A hundred seconds of waiting move its end by as much; with the slot, the clock runs on."""
    engine = Engine(database, settings=quick())
    have, let_go = asyncio.Event(), asyncio.Event()
    left: list[float] = []

    @engine.job
    async def holder(job: Job[Any]) -> None:
        async with job.limit("parser", 1):
            have.set()
            await let_go.wait()

    @engine.job(timeout=60)
    async def waiter(job: Job[Any]) -> None:
        async with job.limit("parser"):
            deadline = worker._held[job.id].deadline
            assert deadline is not None
            left.append(deadline - time.monotonic())

    async with running(engine) as worker:
        first = await engine.submit(holder)
        await have.wait()
        second = await engine.submit(waiter)
        await until(lambda: len(worker.slots) == 1)
        [waits] = [one for one in worker._held.values() if one.waits]
        assert (waits.deadline, waits.let_go_at) == (math.inf, math.inf)
        await until(lambda: _waits(second))  # it has asked
        progress = await second.progress()
        assert progress.status is Status.PROCESSING
        assert progress.waits_for == ("waiting for parser (1 of 1 in use)",)
        waits.waits_since -= 100
        let_go.set()
        await closed(first)
        assert (await closed(second)).status is Status.COMPLETED
    assert 100 < left[0] <= 60 + 100 + PATIENCE


async def _waits(handle: JobHandle) -> bool:
    return bool((await handle.progress()).waits_for)


async def test_a_slot_of_a_claim_that_is_gone_is_given_to_the_next(
    database: str, conn: asyncpg.Connection
) -> None:
    """A holder whose lease was rescued, and a waiter that died before its turn."""
    await limit(conn, "parser", '{"concurrency": 1}')
    jobs = [await insert_job(conn, Status.PROCESSING) for _ in range(3)]
    keys = [SlotKey("parser", job_id, 1, 0) for job_id in jobs]
    async with a_store(database) as store:
        settled = await store.settle_slots(ME, asked=[(key, 1) for key in keys])
        assert settled.granted == {keys[0]}
        assert settled.waiting == set(keys[1:])
        for job_id in jobs[:2]:
            await store.release([(await factories.claim_of(conn, job_id), None)], ME)
        settled = await store.settle_slots(ME, asked=[(keys[2], 1)])
        assert settled.granted == {keys[2]}
        # Who has lost the claim gets nothing, though it asks.
        settled = await store.settle_slots(ME, asked=[(keys[1], 1)])
        assert keys[1] not in settled.granted | settled.waiting


async def test_grants_wait_for_each_other(database: str, conn: asyncpg.Connection) -> None:
    """Two who ask at once: the second waits for the first one's commit, and counts it."""
    await limit(conn, "parser", '{"concurrency": 1}')
    mine, theirs = [
        SlotKey("parser", await insert_job(conn, Status.PROCESSING, claim_token=token), 1, 0)
        for token in (ME, OTHER)
    ]
    async with a_store(database) as store, held(database) as rival:
        assert (await rival.store.settle_slots(ME, asked=[(mine, 1)])).granted == {mine}
        second = asyncio.create_task(store.settle_slots(OTHER, asked=[(theirs, 1)]))
        await factories.until_blocked(conn, second)
        await rival.commit()
        settled = await second
        assert not settled.granted
        assert settled.waiting == {theirs}
        # Left by the one, it is given to the other, who is to be told.
        assert (await store.settle_slots(ME, left=[mine])).others == {OTHER}
        assert (await store.settle_slots(OTHER, asked=[(theirs, 1)])).granted == {theirs}


async def test_nothing_is_given_of_a_limit_that_is_made_while_it_is_asked_for(
    database: str, conn: asyncpg.Connection
) -> None:
    """It had no row to lock, as after a reset; whoever has the row's lock gives the only slot."""
    mine, theirs = [
        SlotKey("parser", await insert_job(conn, Status.PROCESSING, claim_token=token), 1, 0)
        for token in (ME, OTHER)
    ]
    async with a_store(database) as store, held(database) as gap, held(database) as rival:
        await gap.connection.execute(
            """INSERT INTO fanout.slot (limit_name, job_id, attempt, number, claim_token, weight)
               VALUES ('parser', $1, 1, 0, $2, 1)""",
            mine.job_id,
            ME,
        )
        first = asyncio.create_task(store.settle_slots(ME, asked=[(mine, 1)]))
        await factories.until_blocked(conn, first)  # it has found no limit, and asks
        await limit(conn, "parser", '{"concurrency": 1}')
        settled = await rival.store.settle_slots(OTHER, asked=[(theirs, 1)])
        assert settled.granted == {theirs}
        await gap.rollback()
        settled = await first
        assert not settled.granted
        assert settled.missing == {"parser"}
        await rival.commit()
        assert (await store.settle_slots(ME, asked=[(mine, 1)])).waiting == {mine}


async def test_turns_are_between_partitions_and_within_one_by_age(
    database: str, conn: asyncpg.Connection
) -> None:
    """Twenty of one wait first; of the next four slots the other one has two."""
    await limit(conn, "parser", '{"concurrency": 4}')
    large = [await insert_job(conn, Status.PROCESSING, partition="large") for _ in range(20)]
    small = [await insert_job(conn, Status.PROCESSING, partition="small") for _ in range(5)]
    asked = [(SlotKey("parser", i, 1, 0), 1.0) for i in large + small]
    async with a_store(database) as store:
        granted = {key.job_id for key in (await store.settle_slots(ME, asked=asked)).granted}
        assert granted == {*large[:2], *small[:2]}
        await limit(conn, "parser", '{"concurrency": 7, "per_partition": 3}')
        granted = {key.job_id for key in (await store.settle_slots(ME, asked=asked)).granted}
        assert granted == {*large[:3], *small[:3]}


async def test_a_lowered_limit_takes_no_slot_away(database: str, conn: asyncpg.Connection) -> None:
    """It gives none until enough have left."""
    await limit(conn, "parser", '{"concurrency": 3}')
    jobs = [await insert_job(conn, Status.PROCESSING) for _ in range(5)]
    keys = [SlotKey("parser", i, 1, 0) for i in jobs]
    async with a_store(database) as store:
        first = (await store.settle_slots(ME, asked=[(key, 1) for key in keys])).granted
        assert first == set(keys[:3])
        await limit(conn, "parser", '{"concurrency": 1}')
        settled = await store.settle_slots(ME, left=keys[:2], asked=[(keys[3], 1)])
        assert settled.granted == {keys[2]}
        assert (await store.settle_slots(ME, left=[keys[2]])).granted == {keys[3]}


async def test_a_cancelled_or_stopped_waiter_leaves_nothing_behind(
    database: str, conn: asyncpg.Connection
) -> None:
    """A batch that is cancelled, then a worker that stops: no slot stays, the job is released."""
    engine = Engine(database, settings=quick(stop_grace=0.2))
    await limit(conn, "parser", '{"concurrency": 0}')
    began = 0

    @engine.job
    async def waiter(job: Job[Any]) -> None:
        nonlocal began
        began += 1
        async with job.limit("parser"):
            raise AssertionError

    @engine.job
    def thread(job: Job[Any]) -> None:
        nonlocal began
        began += 1
        with job.limit("parser"):
            raise AssertionError

    async with engine:
        async with engine.worker() as worker:
            handles = [await engine.submit(waiter), await engine.submit(thread)]
            await until(lambda: began == 2 and len(worker.slots) == 2)
            await handles[0].cancel()
            await until(lambda: len(worker.slots) == 1)
        assert await conn.fetchval("SELECT count(*) FROM fanout.slot") == 0
        row = await factories.row_of(conn, handles[1].id)
        assert (row["status"], row["failures"], row["deaths"]) == ("pending", 0, 0)


async def test_many_who_wait_hold_no_connection_and_ask_together(
    database: str, conn: asyncpg.Connection
) -> None:
    """Sixty waiters over a pool of two: other jobs run beside them, and they ask as one."""
    engine = Engine(database, settings=quick(pool_size=2, poll_interval=1))
    await limit(conn, "parser", '{"concurrency": 0}')

    @engine.job
    async def waiter(job: Job[Any]) -> None:
        async with job.limit("parser"):
            pass

    @engine.job
    async def other(_job: Job[Any]) -> str:
        return "ran"

    async with running(engine, concurrency=70) as worker:
        handles = await engine.submit_many([Request(waiter) for _ in range(60)])
        await until(lambda: len(worker.slots) == 60)
        assert await (await engine.submit(other)).result() == "ran"
        in_transaction = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in trans%'"
        await until(lambda: _is_zero(conn, in_transaction))
        rounds = worker.slots.rounds
        await engine.limits.set("parser", concurrency=60)
        for handle in handles:
            assert (await closed(handle)).status is Status.COMPLETED
        assert rounds < 60


async def _is_zero(conn: asyncpg.Connection, sql: str) -> bool:
    return not await conn.fetchval(sql)


async def test_threads_wait_for_slots_too(database: str) -> None:
    """`with job.limit(…)` in a plain function."""
    engine = Engine(database, settings=quick())
    inside = Inside()

    @engine.job
    def leaf(job: Job[Any]) -> None:
        with job.limit("parser", 1), inside:
            time.sleep(0.01)

    async with running(engine, concurrency=5):
        for handle in [await engine.submit(leaf) for _ in range(10)]:
            assert (await closed(handle)).status is Status.COMPLETED
    assert inside.most == 1


async def test_a_run_that_outlived_its_claim_gets_no_slot(database: str) -> None:
    """Though the same process has claimed the job again."""
    engine = Engine(database, settings=quick())

    @engine.job
    async def leaf(job: Job[Any]) -> str:
        stale = Job(job._claim._replace(attempt=job.attempt - 1), None, job._runtime)
        with pytest.raises(LostClaim):
            stale.limit("parser", 1)
        return "told"

    async with running(engine):
        assert await (await engine.submit(leaf)).result() == "told"


async def test_one_job_may_use_several_but_not_one_within_another(database: str) -> None:
    """Side by side they count; nested, the job would wait for itself, and is told so."""
    engine = Engine(database, settings=quick())
    inside = Inside()

    @engine.job
    async def side_by_side(job: Job[Any]) -> None:
        async def call() -> None:
            async with job.limit("llm", 2):
                with inside:
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(call() for _ in range(6)))

    @engine.job
    async def nested(job: Job[Any]) -> str:
        async with job.limit("parser", 1), job.limit("llm"):
            pass
        async with job.limit("parser"):
            with pytest.raises(UsageError, match="within its own block"):
                async with job.limit("parser"):
                    pass
        return "told"

    async with running(engine):
        assert (await closed(await engine.submit(side_by_side))).status is Status.COMPLETED
        assert inside.most == 2
        assert await (await engine.submit(nested)).result() == "told"


async def test_two_that_wait_for_each_other_are_parted(database: str) -> None:
    """Who holds one slot waits no longer than its timeout for another: then it is tried again."""
    engine = Engine(database, settings=quick())
    both = asyncio.Barrier(2)

    @engine.job(timeout=1, max_retries=50)
    async def crossed(job: Job[list[str]]) -> None:
        first, second = job.payload
        async with job.limit(first, 1):
            if not job.failures:
                await both.wait()
            async with job.limit(second, 1):
                pass

    async with running(engine):
        handles = [await engine.submit(crossed, p) for p in (["a", "b"], ["b", "a"])]
        for handle in handles:
            assert (await closed(handle)).status is Status.COMPLETED


# -- rates -----------------------------------------------------------------------------------------


async def test_no_window_has_more_than_the_burst_and_the_rate(
    database: str, conn: asyncpg.Connection
) -> None:
    """Asked for as fast as can be: in every stretch of time no more than burst + rate × time."""
    await limit(conn, "llm", '{"requests_per_minute": 6000, "burst": 0.05}')  # 100/s, 5 at once
    jobs = [await insert_job(conn, Status.PROCESSING) for _ in range(60)]
    asked = [(SlotKey("llm", i, 1, 0), 1.0) for i in jobs]
    async with a_store(database) as store:
        async with asyncio.timeout(30):
            while len((await store.settle_slots(ME, asked=asked)).granted) < len(jobs):
                pass
    rows = await conn.fetch(
        "SELECT extract(epoch FROM granted_at)::float8 FROM fanout.slot ORDER BY granted_at"
    )
    times = [row[0] for row in rows]
    for n, begin in enumerate(times):
        for more, end in enumerate(times[n:]):
            assert more + 1 <= 5 + 100 * (end - begin) + 1e-3
    assert times[4] - times[0] < 0.001  # the burst came at once


async def test_weights_are_counted_and_corrected(database: str, conn: asyncpg.Connection) -> None:
    """A heavy use holds up the next; what it turns out to have weighed holds up more, or less."""
    await limit(conn, "llm", '{"weight_per_minute": 60000}')  # 1,000 a second
    jobs = [await insert_job(conn, Status.PROCESSING) for _ in range(3)]
    first, second, third = (SlotKey("llm", i, 1, 0) for i in jobs)
    async with a_store(database) as store:
        settled = await store.settle_slots(ME, asked=[(first, 100_000), (second, 500)])
        assert settled.granted == {first}
        assert settled.wait_seconds == pytest.approx(99.5, abs=5)
        settled = await store.settle_slots(ME, asked=[(second, 500)], corrected={"llm": 100_000})
        assert settled.wait_seconds == pytest.approx(199.5, abs=10)
        settled = await store.settle_slots(
            ME, asked=[(second, 500), (third, 400)], corrected={"llm": -199_900}
        )
        assert settled.granted >= {first, second}


async def test_a_handler_corrects_what_it_weighed(database: str) -> None:
    """`slot.correct(…)` moves the time at which the next one may come."""
    engine = Engine(database, settings=quick())

    @engine.job
    async def leaf(job: Job[Any]) -> None:
        async with job.limit("llm", weight_per_minute=60_000, weight=1000) as slot:
            slot.correct(100_000)

    async with running(engine):
        await closed(await engine.submit(leaf))
        second = await engine.submit(leaf)

        async def waits() -> bool:
            row = await engine.limits.get("llm")
            return row is not None and row.waiting == 1

        await until(waits)
        [said] = (await second.progress()).waits_for
        assert said.startswith("waiting for llm (next in about ")
        row = await engine.limits.get("llm")
        assert row is not None
        assert row.next_seconds is not None
        assert row.next_seconds > 50


# -- what a person gives and sees ------------------------------------------------------------------


async def test_what_cannot_be_a_limit_is_told_with_its_remedy(database: str) -> None:
    """The field, what was wrong, and what is right."""
    async with Engine(database, settings=quick()) as engine:
        wrong: dict[str, dict[str, Any]] = {
            "no good": {"concurrency": 1},
            "parser": {},
            "llm": {"requests_per_minute": 0},
            "kind:leaf": {"requests_per_minute": 3},
            "p": {"concurrency": -1},
            "q": {"concurrency": 1.5},
            "r": {"speed": 1},
        }
        for name, bounds in wrong.items():
            with pytest.raises(UsageError):
                await engine.limits.set(name, **bounds)
        with pytest.raises(UsageError):
            engine.job(limit=-1)(lambda _job: None)
        assert await engine.limits.list() == []


async def test_a_batch_says_which_limit_it_waits_for(
    database: str, conn: asyncpg.Connection
) -> None:
    """Of its kind, of its partition, and its own."""
    batch, _ = await factories.insert_batch(
        conn,
        Status.WAITING,
        [{"status": s, "kind": "leaf"} for s in (Status.PROCESSING, Status.PENDING)],
    )
    await factories.live_worker(conn, ["leaf"])
    async with a_store(database) as store:
        assert (await store.progress(batch)).waits_for == ()
        await limit(conn, "kind:leaf", '{"concurrency": 1}')
        assert (await store.progress(batch)).waits_for == ("waiting for leaf (1 of 1 in use)",)
        await limit(conn, "kind:leaf", '{"concurrency": 2, "per_partition": 1}')
        await conn.execute("UPDATE fanout.job SET partition = 'acme' WHERE parent_id = $1", batch)
        assert (await store.progress(batch)).waits_for == (
            "waiting for leaf (1 of 1 of acme in use)",
        )
        await conn.execute("UPDATE fanout.job SET concurrency = 1 WHERE id = $1", batch)
        await conn.execute("DELETE FROM fanout.limits WHERE kind IS NOT NULL")
        assert (await store.progress(batch)).waits_for == (
            "waiting for its own limit (1 of 1 in use)",
        )


async def test_a_batch_behind_a_full_limit_is_not_given_up(
    database: str, conn: asyncpg.Connection
) -> None:
    """For hours somebody else had all the slots, and a worker free ones: that is no death."""
    batch, [child] = await factories.insert_batch(
        conn, Status.WAITING, [{"status": Status.PENDING, "kind": "leaf"}]
    )
    await factories.live_worker(conn, ["leaf"])
    await insert_job(conn, Status.PROCESSING)
    await conn.execute(
        "UPDATE fanout.job SET updated_at = updated_at - interval '1 h', "
        "run_at = run_at - interval '1 h', created_at = created_at - interval '1 h'"
    )
    async with a_store(database) as store:
        assert await store.give_up_candidates(10, 600) == [batch]
        await limit(conn, "kind:leaf", '{"concurrency": 1}')
        assert await store.give_up_candidates(10, 600) == []
        await conn.execute("UPDATE fanout.job SET partition = 'acme' WHERE kind = 'leaf'")
        await limit(conn, "kind:leaf", '{"per_partition": 1}')
        assert await store.give_up_candidates(10, 600) == []
        await limit(conn, "kind:leaf", '{"concurrency": 2}')
        assert await store.give_up_candidates(10, 600) == [batch]
        assert child


async def test_documents_may_have_partitions_of_their_own(database: str) -> None:
    """Handed over with the document, it is the child's share of a limit."""
    engine = Engine(database, settings=quick())

    @engine.job
    async def leaf(_job: Job[Any]) -> None: ...

    @engine.job
    async def batch(job: Job[Any]) -> None:
        await job.fan_out(leaf, [Document("a", 1, partition="acme"), Document("b", 2)])

    async with running(engine):
        assert (await closed(await engine.submit(batch))).completed == 2


# -- what is random, and what it costs -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_and_goes_no_slot_is_idle_and_none_too_many(
    seed: int, database: str, conn: asyncpg.Connection
) -> None:
    """Jobs ask, leave, lose their claims, and the limit changes, at random: each time as many have
    slots as may, unless nobody waits; and never one more than before if it is full.
    """
    chance = random.Random(seed)
    most, per_partition = 3, 2
    await limit(conn, "parser", f'{{"concurrency": {most}, "per_partition": {per_partition}}}')
    inside: dict[SlotKey, str] = {}
    waiting: dict[SlotKey, str] = {}
    async with a_store(database) as store:
        for _ in range(60):
            left: list[SlotKey] = []
            match chance.choice(["ask", "ask", "leave", "lose", "change"]):
                case "ask":
                    partition = chance.choice("abc")
                    job_id = await insert_job(conn, Status.PROCESSING, partition=partition)
                    waiting[SlotKey("parser", job_id, 1, 0)] = partition
                case "leave" if inside:
                    left = [chance.choice(list(inside))]
                    del inside[left[0]]
                case "lose" if inside or waiting:
                    key = chance.choice([*inside, *waiting])
                    await store.release([(await factories.claim_of(conn, key.job_id), None)], ME)
                    inside.pop(key, None)
                    waiting.pop(key, None)
                case "change":
                    most, per_partition = chance.randint(0, 5), chance.randint(1, 3)
                    bounds = f'{{"concurrency": {most}, "per_partition": {per_partition}}}'
                    await limit(conn, "parser", bounds)
                case _:
                    pass
            settled = await store.settle_slots(
                ME, asked=[(key, 1) for key in waiting] or [], left=left, corrected={"parser": 0}
            )
            given = {key: partition for key, partition in waiting.items() if key in settled.granted}
            assert len(given) <= max(0, most - len(inside))
            inside |= given
            waiting = {key: p for key, p in waiting.items() if key not in given}
            assert set(settled.granted) == set(inside)
            assert set(settled.waiting) == set(waiting)
            of = Counter(inside.values())
            assert all(of[p] <= per_partition or p not in given.values() for p in of)
            room = [p for p in waiting.values() if of[p] < per_partition]
            assert not room or len(inside) >= most


async def test_claims_walk_indexes_however_many_have_ended(
    database: str, conn: asyncpg.Connection
) -> None:
    """No statement here reads the table: the plan names indexes, and few rows."""
    await conn.execute(
        """INSERT INTO fanout.job (kind, status, finished_at)
           SELECT 'leaf', 'completed', clock_timestamp() FROM generate_series(1, 5000)"""
    )
    await conn.execute(
        """INSERT INTO fanout.job (kind, partition)
           SELECT 'leaf', 'p' || n % 20 FROM generate_series(1, 2000) n"""
    )
    await conn.execute("INSERT INTO fanout.job (kind) SELECT 'leaf' FROM generate_series(1, 2000)")
    await limit(conn, "kind:leaf", '{"concurrency": 7}')
    await conn.execute("ANALYZE fanout.job")
    session = await pool.connect(database, Settings(database_timeout=20), "plans")
    try:
        wanted = (["leaf"] * 10, list(range(10)), [LONG_AGO] * 10)
        lease, minute = timedelta(seconds=LEASE), timedelta(seconds=60)
        calls: dict[str, tuple[object, ...]] = {
            "claim": (*wanted, 10, ME, lease, [10] * 10, 1, minute, True),
            "claim_limited": (
                *(*wanted, 10, ME, lease),
                *(["leaf"], [0], [""], ["leaf"], 10, 1, minute, 100),
            ),
        }
        for name, arguments in calls.items():
            sql = f"EXPLAIN (ANALYZE, FORMAT JSON) {load_statements()[name]}"
            [plan] = json.loads(await session.fetchval(sql, *arguments))
            scans = list(_scans(plan["Plan"]))
            assert scans
            for scan in scans:
                assert "Index" in scan["Node Type"] or "Bitmap" in scan["Node Type"], scan
                assert scan["Actual Rows"] * scan["Actual Loops"] <= 500, scan
        assert (
            await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'processing'") == 7
        )
    finally:
        session.terminate()


def _scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The nodes that read the table of jobs."""
    if plan.get("Relation Name") == "job" and plan["Node Type"] != "ModifyTable":
        yield plan
    for inner in plan.get("Plans", ()):
        yield from _scans(inner)
