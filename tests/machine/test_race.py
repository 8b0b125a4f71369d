"""Everything at once, at random: leases of nothing, zombies, sweepers, cancels, retries, pauses,
more documents, deadlines.

The invariants are asked in mid-race and after the drain; a call log outside the database knows
which claims were given out. FANOUT_RACE_SEED repeats the choices of a race, though not its timing.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Final

import asyncpg
import pytest

from fanout.errors import LostClaim, Refused
from fanout.settings import Settings
from fanout.statements import load_statements
from fanout.states import Status
from fanout.steering import pause_below, resume_below, spread_priority
from fanout.store import Store
from fanout.sweeper import Sweeper
from fanout.values import Claim, Completed, Failed, Retry
from tests.factories import (
    BROKEN,
    DONE,
    LEASE,
    ME,
    a_store,
    add_children,
    claim,
    fan_out,
    insert_batch,
    submit,
)
from tests.machine.invariants import History, Violation, check

MANAGER, LEAF, REPORT = "manager", "leaf", "report"
KINDS: Final = (MANAGER, LEAF, REPORT)
MAX_DEATHS: Final = 3
DEEPEST: Final = 2


class CallLog:
    """Which claims were given out and which results were taken, where no statement can reach it."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}
        self.holder: dict[tuple[int, int], uuid.UUID] = {}
        self.wrong: list[str] = []

    def gave(self, claims: list[Claim], token: uuid.UUID) -> None:
        for it in claims:
            if self.holder.setdefault((it.id, it.attempt), token) != token:
                self.wrong.append(f"job {it.id}: attempt {it.attempt} was given to two workers")
            self.newest[it.id] = max(it.attempt, self.newest.get(it.id, 0))

    def before(self, claims: list[Claim]) -> dict[int, int]:
        """The newest attempts that were out before a write of `claims` was sent."""
        return {it.id: self.newest[it.id] for it in claims}

    def took(self, what: str, claims: list[Claim], ids: set[int], before: dict[int, int]) -> None:
        """The write took `ids`: each must have come from a claim that nobody had followed."""
        attempts = collections.defaultdict(set)
        for it in claims:
            attempts[it.id].add(it.attempt)
        self.wrong += [
            f"job {i}: {what} by attempt {max(attempts[i])}, {before[i]} was out already"
            for i in ids
            if before[i] not in attempts[i]
        ]


class Race:
    """One database, many coroutines, one random source."""

    def __init__(self, store: Store, conn: asyncpg.Connection, seed: int, roots: int) -> None:
        self.store = store
        self.conn = conn
        self.random = random.Random(seed)
        self.roots = roots
        self.log = CallLog()
        self.did: collections.Counter[str] = collections.Counter()
        self.sweeper = Sweeper(store, Settings())
        self.violations: list[Violation] = []
        self.chaos = True
        self.stop = False

    async def run(self, seconds: float, *, workers: int) -> None:
        """Race for `seconds`, then let all of it drain."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self.until_stopped(Worker(self).step, 0))
            for step, pause in (
                (self.sweep, 0.03),
                (self.sweep, 0.03),
                (self.cancel, 0.15),
                (self.retry, 0.1),
                (self.submit, 0.05),
                (self.hold, 0.15),
                (self.add, 0.05),
                (self.be_late, 1.5),
                (self.look, 0.7),
            ):
                group.create_task(self.until_stopped(step, pause))
            await asyncio.sleep(seconds)
            self.chaos = False
            await self.drained()
            self.stop = True

    async def drained(self) -> None:
        """Wait until nothing is open; what is left when that takes too long is told."""
        deadline = time.monotonic() + 40
        while await self.store.queue():
            assert time.monotonic() < deadline, await self.what_is_left()
            await asyncio.sleep(0.1)

    async def what_is_left(self) -> str:
        rows = await self.store._pool.fetch(
            """SELECT id, parent_id, kind, status, verdict, attempt, deaths,
                      total, completed, failed, cancelled, run_at - clock_timestamp() AS due_in,
                      lease_expires_at - clock_timestamp() AS lease_left
                 FROM fanout.job WHERE status IN ('pending', 'processing', 'waiting') LIMIT 20"""
        )
        return "\n".join(["it does not drain", *(str(dict(row)) for row in rows)])

    async def until_stopped(self, step: Callable[[], Awaitable[None]], pause: float) -> None:
        while not self.stop:
            await step()
            await asyncio.sleep(self.random.random() * pause)

    async def pick(self, where: str) -> int | None:
        """A job at random."""
        rows = await self.store._pool.fetch(
            f"SELECT id FROM fanout.job WHERE {where} ORDER BY random() LIMIT 1"
        )
        return rows[0]["id"] if rows else None

    async def submit(self) -> None:
        if not self.chaos:
            return
        rows = await self.store._pool.fetch(
            """SELECT count(*) AS n FROM fanout.job
                WHERE parent_id IS NULL AND kind = 'manager'
                  AND status IN ('pending', 'processing', 'waiting')"""
        )
        for _ in range(self.roots - rows[0]["n"]):
            tenant = self.random.choice(["", "acme"])
            await submit(self.store, MANAGER, on_closed=REPORT, max_retries=2, tenant=tenant)

    async def sweep(self) -> None:
        for depth in await self.store.expired_depths():
            limit = self.random.choice([5, 100])
            self.did["rescued"] += len(
                (await self.store.rescue(depth, limit, MAX_DEATHS, 0, 0)).moved
            )
        for job_id in await self.store.doomed(30):
            limit = self.random.choice([3, 50])
            self.did["ended"] += len((await self.store.doom_chunk(job_id, limit)).moved)
        for _ in range(3):
            picked = await self.pick("kind = 'manager' AND status IN ('waiting', 'processing')")
            # Nothing drifts in a race: a recount that mends has overwritten something.
            if picked and (mended := await self.store.recount(picked)).moved:
                self.violations.append(Violation("a recount mended", picked, str(mended)))
            self.did["recounted"] += picked is not None
        if self.chaos and self.random.random() < 0.1:
            for job_id in await self.store.give_up_candidates(2, 0.3):
                self.did["given up"] += await self.store.give_up(job_id, 0.3, "no sign of life")

    async def cancel(self) -> None:
        if not self.chaos:
            return
        an_open_one = "status IN ('pending', 'processing', 'waiting')"
        if job_id := await self.pick(f"{an_open_one} AND (kind = 'manager' OR random() < 0.1)"):
            await self.store.doom(job_id, Status.CANCELLED, "somebody said so")
            self.did["cancelled"] += 1
            for _ in range(self.random.randint(0, 4)):
                await self.store.doom_chunk(job_id, self.random.choice([2, 30]))

    async def retry(self) -> None:
        if not self.chaos:
            return
        if job_id := await self.pick("failed > 0 AND status IN ('completed', 'waiting')"):
            try:
                self.did["retried"] += await self.store.retry_failed(job_id)
            except Refused:
                self.did["retries refused"] += 1
        if job_id := await self.pick("status = 'failed' AND parent_id IS NULL AND total = 0"):
            self.did["single jobs retried"] += await self.store.retry_job(job_id)

    async def hold(self) -> None:
        """Somebody pauses or lifts a batch; somebody else lets it go on, or a sweep has to."""
        a_root = "parent_id IS NULL AND kind = 'manager' AND status IN ('waiting', 'processing')"
        if self.chaos and (root := await self.pick(f"{a_root} AND NOT paused AND random() < 0.2")):
            self.did["paused"] += await self.store.pause(root)
            if self.random.random() < 0.7:
                await pause_below(self.store, root)
            if self.random.random() < 0.3:
                await self.store.set_priority(root, 5)
                await spread_priority(self.store, root)
        for _ in range(1 if self.chaos else 10):
            if (root := await self.pick("parent_id IS NULL AND paused")) is None:
                break
            self.did["resumed"] += await self.store.resume(root) is not None
            if not self.chaos or self.random.random() < 0.7:
                await resume_below(self.store, root)
        await self.sweeper.converge_pauses()

    async def add(self) -> None:
        if not self.chaos:
            return
        an_open_one = "kind = 'manager' AND status IN ('pending', 'processing', 'waiting')"
        if job_id := await self.pick(an_open_one):
            keys = [f"d{n:02}" for n in self.random.sample(range(40), 8)]
            gone = frozenset(key for key in keys if self.random.random() < 0.1)
            try:
                self.did["added"] += (await add_children(self.store, job_id, keys, gone=gone))[0]
            except Refused:
                self.did["adds refused"] += 1

    async def be_late(self) -> None:
        if self.chaos and (job_id := await self.pick("kind = 'manager' AND finished_at IS NULL")):
            await self.store._pool.fetch(
                "UPDATE fanout.job SET deadline = clock_timestamp() WHERE id = $1", job_id
            )
        for job_id in await self.store.late(10):
            self.did["late"] += len((await self.store.doom_late(job_id)).moved)

    async def look(self) -> None:
        self.violations += await check(self.conn, quiet=False)
        self.did["looked"] += 1


class Worker:
    """One worker process, badly behaved: it forgets, oversleeps, writes for claims long lost."""

    def __init__(self, race: Race) -> None:
        self.race = race
        self.random = race.random
        self.store = race.store
        self.token = uuid.UUID(int=race.random.getrandbits(128))
        self.held: dict[int, Claim] = {}
        self.stale: list[Claim] = []

    async def step(self) -> None:
        if not self.race.chaos:
            await self.work()
            return
        if not self.held:
            await self.claim()
        step = self.random.choices(
            [
                *(self.claim, self.finish, self.dispatch, self.put_back, self.beat),
                *(self.abandon, self.release_orphans),
            ],
            [28, 34, 10, 8, 12, 8, 2],
        )[0]
        await step()

    @property
    def lease(self) -> float:
        # At the end too it is short: a step that began before may still forget what it claims.
        return self.random.choice([0, 0, 0.02, 0.3, 2]) if self.race.chaos else 4

    async def claim(self) -> None:
        kinds = self.random.sample(KINDS, len(KINDS))
        limit = self.random.choice([1, 3, 60])
        claims = await claim(self.store, kinds, limit=limit, token=self.token, lease=self.lease)
        alone = await self.store.claim_alone(kinds, self.token, self.lease)
        claims += [alone] if alone is not None else []
        self.race.log.gave(claims, self.token)
        # A job of its own that it had lost and claimed again: it still writes for the old claim.
        self.stale += [self.held[it.id] for it in claims if it.id in self.held]
        self.held |= {it.id: it for it in claims}
        self.race.did["claimed"] += len(claims)

    async def work(self) -> None:
        """As it should be: claim, dispatch no more, finish."""
        await self.claim()
        await self.flush(list(self.held.values()))
        self.held.clear()

    async def finish(self) -> None:
        flush = self.some()
        if self.stale and self.random.random() < 0.5:
            flush += self.random.sample(self.stale, min(len(self.stale), 20))
        for it in flush:
            if it.kind == MANAGER and it.total == 0 and self.random.random() < 0.8:
                await self.fan_out(it)
        for it in flush:
            self.held.pop(it.id, None)
        await self.flush(flush)
        self.stale = [it for it in self.stale if self.random.random() < 0.9] + flush[:3]

    async def flush(self, claims: list[Claim]) -> None:
        claims = list(dict.fromkeys(claims))
        ended: list[tuple[Claim, Completed | Failed]] = [
            (it, DONE if self.random.random() < 0.85 else BROKEN) for it in claims
        ]
        before = self.race.log.before(claims)
        counted = await self.store.finish(ended, self.token)
        self.race.log.took("ended", claims, {job.id for job in counted.moved}, before)
        self.race.did["finished"] += len(counted.moved)
        self.race.did["lost"] += len(claims) - len(counted.moved)
        self.race.did["closed by a child"] += len(counted.closed)

    async def dispatch(self) -> None:
        for it in [it for it in self.held.values() if it.kind == MANAGER]:
            await self.fan_out(it)

    async def fan_out(self, it: Claim) -> None:
        keys = sorted(
            {f"d{self.random.randrange(40):02}" for _ in range(self.random.randint(1, 20))}
        )
        gone = frozenset(key for key in keys if self.random.random() < 0.05)
        kind = LEAF
        if it.depth < DEEPEST and self.random.random() < 0.2:
            keys, gone, kind = keys[:3], frozenset(), MANAGER
        before = self.race.log.before([it])
        try:
            await fan_out(
                self.store,
                it,
                keys,
                token=self.token,
                kind=kind,
                gone=gone,
                lease=self.lease,
                on_closed=REPORT if kind == MANAGER else None,
            )
        except LostClaim:
            self.race.did["dispatch lost"] += 1
        else:
            self.race.log.took("dispatched", [it], {it.id}, before)
            self.race.did["dispatched"] += 1

    async def put_back(self) -> None:
        claims = self.some()
        if self.stale and self.random.random() < 0.5:
            claims += [it for it in self.stale[:5] if it.id not in self.held]
        before = self.race.log.before(claims)
        if self.random.random() < 0.5:
            back = await self.store.release([(it, None) for it in claims], self.token)
        else:
            delay = self.random.random() * 0.05
            retry = Retry("timeout", "TimeoutError", delay)
            back = await self.store.retry([(it, retry) for it in claims], self.token)
        self.race.log.took("put back", claims, back, before)
        self.race.did["put back"] += len(back)
        for it in claims:
            self.held.pop(it.id, None)

    async def beat(self) -> None:
        statements = load_statements()
        lease = timedelta(seconds=self.lease)
        leaves = [it for it in self.held.values() if it.kind != MANAGER]
        for it in [it for it in self.held.values() if it.kind == MANAGER]:
            before = self.race.log.before([it])
            sql = statements["heartbeat_manager"]
            if await self.store._pool.fetch(sql, it.id, it.attempt, self.token, lease):
                self.race.log.took("beat", [it], {it.id}, before)
            else:
                self.stale.append(self.held.pop(it.id))
        ids, attempts = [it.id for it in leaves], [it.attempt for it in leaves]
        sql = statements["heartbeat"]
        rows = await self.store._pool.fetch(sql, ids, attempts, self.token, lease)
        for row in (row for row in rows if row["lost"]):
            self.stale.append(self.held.pop(row["id"]))
            self.race.did["beats lost"] += 1

    async def abandon(self) -> None:
        self.stale += list(self.held.values())
        self.held.clear()

    async def release_orphans(self) -> None:
        back = await self.store.release_orphans(self.token, self.held)
        assert not back & set(self.held)
        self.race.did["orphans released"] += len(back)

    def some(self) -> list[Claim]:
        held = list(self.held.values())
        return self.random.sample(held, self.random.randint(1, len(held))) if held else []


async def a_race(
    database: str, conn: asyncpg.Connection, *, seconds: float, roots: int, seed: int | None = None
) -> None:
    """Run one and judge it."""
    seed = int(os.environ.get("FANOUT_RACE_SEED", seed or time.time_ns() % 1_000_000))
    # A deadlock is to be seen in a fraction of the race, not after a second.
    name = await conn.fetchval("SELECT current_database()")
    await conn.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '100ms'")
    await History.install(conn)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(a_store(database, pool_size=20))
        race = Race(store, conn, seed, roots)
        print(f"\nseed {seed}")
        await race.run(seconds, workers=14)
    moves = await conn.fetchval("SELECT count(*) FROM public.test_history")
    print(f"{moves} moves", dict(race.did))

    assert race.violations == []
    assert race.log.wrong == []
    assert await check(conn, quiet=True) == []
    assert await deadlocks(conn) == 0
    assert race.did["finished"] > 50, "that was no race"


async def deadlocks(conn: asyncpg.Connection) -> int:
    """How many deadlocks this database has had; its backends have told once they are gone."""
    deadline = time.monotonic() + 10
    while await conn.fetchval(
        """SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()"""
    ):
        assert time.monotonic() < deadline, "backends that do not go"
        await asyncio.sleep(0.01)
    count: int = await conn.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    return count


@pytest.mark.timeout(90)
async def test_a_race_over_many_batches(database: str, conn: asyncpg.Connection) -> None:
    """Thirty batches, each little contended: every order of calls comes up somewhere."""
    await a_race(database, conn, seconds=6, roots=30)


@pytest.mark.timeout(90)
async def test_a_race_over_three_hot_batches(database: str, conn: asyncpg.Connection) -> None:
    """Everybody meets on three rows: no deadlock, and not one count is lost."""
    await a_race(database, conn, seconds=6, roots=3)


async def test_a_chunk_is_never_larger_than_asked_while_leases_are_renewed(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A row that was beaten after the statement's snapshot makes it judge again, not run again."""
    beat = load_statements()["heartbeat_manager"]
    lease = timedelta(seconds=LEASE)
    for _ in range(15):
        await conn.execute("DELETE FROM fanout.job")
        manager, children = await insert_batch(conn, Status.WAITING, [Status.PROCESSING] * 200)
        await store.doom(manager, Status.CANCELLED, "somebody said so")
        ended = asyncio.Event()

        async def renew(ids: list[int], ended: asyncio.Event) -> None:
            while not ended.is_set():
                for job_id in ids:
                    await store._pool.fetch(beat, job_id, 1, ME, lease)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(renew(children[:50], ended))
            closed = False
            while not closed:
                chunk = await store.doom_chunk(manager, 20)
                assert len(chunk.moved) <= 20
                closed = bool(chunk.closed)
            ended.set()
        assert await check(conn, quiet=True) == []


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 6))
async def test_a_long_race(seed: int, database: str, conn: asyncpg.Connection) -> None:
    """The same for a minute, from several seeds."""
    await a_race(database, conn, seconds=60, roots=100 if seed % 2 else 5, seed=seed)
