"""Rows in any state, claims on them, and a store that acts in a transaction the test holds open."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar, cast

import asyncpg

from fanout import pool
from fanout.pool import Connection, Pool
from fanout.settings import Settings
from fanout.states import TERMINAL, Status
from fanout.store import Store
from fanout.values import Claim, Completed, Counted, Failed, NewJob, Snapshot

T = TypeVar("T")

ME: Final = uuid.UUID(int=1)
OTHER: Final = uuid.UUID(int=2)
LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""A floor below every job: a full look."""
LEASE: Final = 60.0
GONE: Final = 0.0
"""A lease that has run out by the time the next statement begins."""
DONE: Final = Completed('{"pages": 1}')
BROKEN: Final = Failed("not a PDF", "PermanentError")


@contextlib.asynccontextmanager
async def a_store(dsn: str, *, pool_size: int = 6, name: str = "test") -> AsyncIterator[Store]:
    """A store with connections of its own, set up as the engine's are."""
    connections = Pool(dsn, Settings(pool_size=pool_size, database_timeout=20), name)
    await connections.open()
    try:
        yield Store(connections)
    finally:
        await connections.close()


class _OneTransaction:
    """A pool that is one connection in one transaction: nothing on it is committed by itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetch(self, sql: str, *arguments: object) -> Sequence[Any]:
        rows: Sequence[Any] = await self._connection.fetch(sql, *arguments)
        return rows

    async def transaction(self, body: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._connection.transaction():
            return await body(self._connection)


class Held:
    """An open transaction: `store` acts in it, others wait for its locks until `commit`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.store = Store(cast("Pool", _OneTransaction(connection)))
        self._transaction = connection.transaction()

    async def begin(self) -> None:
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    async def lock(self, job_id: int) -> None:
        await self.connection.execute(
            "SELECT 1 FROM fanout.job WHERE id = $1 FOR NO KEY UPDATE", job_id
        )


@contextlib.asynccontextmanager
async def held(dsn: str) -> AsyncIterator[Held]:
    """A transaction that stays open until the test commits it; left without, it is rolled back."""
    connection = await pool.connect(dsn, Settings(database_timeout=20), "held")
    try:
        it = Held(connection)
        await it.begin()
        yield it
    finally:
        connection.terminate()


async def until_blocked(
    watcher: asyncpg.Connection, task: asyncio.Task[Any], *, count: int = 1
) -> None:
    """Wait until `count` backends of this database wait for a lock; fail if `task` ends instead."""
    assert not watcher.is_in_transaction(), "pg_stat_activity is cached inside a transaction"
    async with asyncio.timeout(20):
        while await watcher.fetchval(BLOCKED) < count:
            if task.done():
                task.result()
                raise AssertionError("it was not blocked: the rival holds no lock that it needs")
            await asyncio.sleep(0.002)


BLOCKED: Final = """
SELECT count(*) FROM pg_stat_activity
  WHERE datname = current_database() AND wait_event_type = 'Lock'
   AND cardinality(pg_blocking_pids(pid)) > 0"""


async def insert_job(
    conn: asyncpg.Connection,
    status: Status | str = Status.PENDING,
    *,
    parent: int | None = None,
    **columns: Any,
) -> int:
    """One job row as it stands, whole: what `status` asks for is filled in. Counts on nobody."""
    status = Status(status)
    values: dict[str, Any] = {"kind": "leaf", "status": str(status)}
    if status is Status.PROCESSING:
        values |= {"claim_token": ME, "attempt": 1, "lease_expires_at": _in(LEASE)}
        values |= {"claimed_at": _in(0)}
    if status in TERMINAL:
        values |= {"finished_at": _in(0)}
    if parent is not None:
        up = await conn.fetchrow(
            "SELECT COALESCE(root_id, id) AS root, depth FROM fanout.job WHERE id = $1", parent
        )
        assert up is not None
        values |= {"parent_id": parent, "root_id": up["root"], "depth": up["depth"] + 1}
        values |= {"document_key": f"d{uuid.uuid4().hex[:8]}"}
    values |= columns
    names, places = ", ".join(values), ", ".join(f"${n}" for n in range(1, len(values) + 1))
    job_id: int = await conn.fetchval(
        f"INSERT INTO fanout.job ({names}) VALUES ({places}) RETURNING id", *values.values()
    )
    return job_id


async def insert_batch(
    conn: asyncpg.Connection,
    status: Status | str,
    children: Sequence[Status | str | Mapping[str, Any]],
    *,
    parent: int | None = None,
    **columns: Any,
) -> tuple[int, list[int]]:
    """A manager and its children, counters right. A child is a status, or columns with one."""
    rows = [dict(c) if isinstance(c, Mapping) else {"status": c} for c in children]
    states = [Status(row["status"]) for row in rows]
    counters = {
        "total": len(states),
        **{str(s): states.count(s) for s in (Status.COMPLETED, Status.FAILED, Status.CANCELLED)},
    }
    manager = await insert_job(
        conn, status, parent=parent, **{"kind": "manager", **counters, **columns}
    )
    return manager, [await insert_job(conn, parent=manager, **row) for row in rows]


def _in(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def claim_of(conn: asyncpg.Connection, job_id: int, *, attempt: int | None = None) -> Claim:
    """The claim on `job_id` as its holder has it; `attempt` for another one than the row's."""
    row = await conn.fetchrow(
        """SELECT id, attempt, kind, depth, parent_id, root_id, document_key, deaths, failures,
                  max_retries, total, priority, run_at, payload::text, checkpoint::text
             FROM fanout.job WHERE id = $1""",
        job_id,
    )
    assert row is not None
    return Claim(*{**row, "attempt": row["attempt"] if attempt is None else attempt}.values())


async def claim(
    store: Store,
    kinds: Sequence[str] = ("leaf",),
    *,
    limit: int = 100,
    token: uuid.UUID = ME,
    lease: float = LEASE,
) -> list[Claim]:
    """Claim at most `limit` due jobs of `kinds`."""
    wanted = [(kind, 5, LONG_AGO) for kind in kinds]
    return (await store.claim(wanted, limit, token, lease)).claims


async def submit(store: Store, kind: str = "manager", **options: Any) -> int:
    """Submit one job; its id."""
    (submitted,) = await store.submit([NewJob(kind, "{}", **options)])
    return submitted.id


async def fan_out(
    store: Store,
    manager: Claim,
    keys: Sequence[str],
    *,
    token: uuid.UUID = ME,
    kind: str = "leaf",
    gone: frozenset[str] = frozenset(),
    lease: float = LEASE,
    max_retries: int = 3,
    on_closed: str | None = None,
    on_counted: Callable[[Counted], None] = lambda _: None,
) -> tuple[int, int]:
    """One chunk of children of `manager`; those in `gone` are born failed."""
    return await store.fan_out(
        manager,
        token,
        lease,
        documents=[Snapshot(key, "{}", "it is gone" if key in gone else None) for key in keys],
        kind=kind,
        max_retries=max_retries,
        priority=5,
        on_closed=on_closed,
        on_counted=on_counted,
    )


async def add_children(
    store: Store, job_id: int, keys: Sequence[str], *, gone: frozenset[str] = frozenset()
) -> tuple[int, int]:
    """One chunk of leaves for an open batch, from outside; those in `gone` are born failed."""
    return await store.add_children(
        job_id,
        documents=[Snapshot(key, "{}", "it is gone" if key in gone else None) for key in keys],
        kind="leaf",
        max_retries=1,
        priority=None,
        on_closed=None,
    )


async def row_of(conn: asyncpg.Connection, job_id: int) -> asyncpg.Record:
    """The job's row."""
    row = await conn.fetchrow("SELECT * FROM fanout.job WHERE id = $1", job_id)
    assert row is not None
    return row


async def status_of(conn: asyncpg.Connection, job_id: int) -> Status:
    """The job's status."""
    return Status((await row_of(conn, job_id))["status"])


async def counters_of(conn: asyncpg.Connection, job_id: int) -> tuple[int, int, int, int]:
    """The job's total, completed, failed and cancelled children."""
    row = await row_of(conn, job_id)
    return row["total"], row["completed"], row["failed"], row["cancelled"]


async def follow_ups_of(conn: asyncpg.Connection, job_id: int) -> list[int]:
    """The generations of the job that have a follow-up, ascending."""
    rows = await conn.fetch(
        "SELECT follows_generation FROM fanout.job WHERE follows_id = $1 ORDER BY 1", job_id
    )
    return [row[0] for row in rows]


async def whole_table(conn: asyncpg.Connection) -> dict[int, str]:
    """Every row of the table by id, as text and with its xmin: equal means nobody wrote it."""
    rows = await conn.fetch("SELECT j.id, j.xmin::text || ' ' || j::text FROM fanout.job j")
    return {row[0]: row[1] for row in rows}


async def live_worker(conn: asyncpg.Connection, kinds: Sequence[str]) -> uuid.UUID:
    """A worker that serves `kinds` and has had a free slot for an hour."""
    worker_id = uuid.uuid4()
    await conn.execute(
        """INSERT INTO fanout.worker
               (id, name, host, pid, version, kinds, concurrency, lease, free_since)
           VALUES ($1, 'w', 'here', 1, '0', $2, 10, '1 h', clock_timestamp() - interval '1 h')""",
        worker_id,
        list(kinds),
    )
    return worker_id


__all__ = [
    "BROKEN",
    "DONE",
    "GONE",
    "LEASE",
    "LONG_AGO",
    "ME",
    "OTHER",
    "Held",
    "a_store",
    "add_children",
    "claim",
    "claim_of",
    "counters_of",
    "fan_out",
    "follow_ups_of",
    "held",
    "insert_batch",
    "insert_job",
    "live_worker",
    "row_of",
    "status_of",
    "submit",
    "until_blocked",
    "whole_table",
]
