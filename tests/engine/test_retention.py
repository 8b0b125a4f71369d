"""Closed jobs go after their retention, in small steps, and nothing that is open or young."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import asyncpg
import pytest

from fanout import Refused, Settings, Status
from fanout import retention as module
from fanout.retention import Retention
from fanout.states import OPEN, TERMINAL
from fanout.store import Store
from tests.engine.running import until
from tests.factories import a_store, held, insert_batch, insert_job, row_of, until_blocked

OLD = datetime.now(UTC) - timedelta(days=8)
PAST: dict[str, Any] = {"created_at": OLD, "finished_at": OLD}
DONE = {"status": Status.COMPLETED, **PAST}
BAD = {"status": Status.FAILED, "error": "no", **PAST}


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    async with a_store(database) as store:
        yield store


@pytest.fixture
def retention(store: Store) -> Retention:
    """With the default: seven days."""
    return Retention(store, Settings())


async def ids(conn: asyncpg.Connection) -> set[int]:
    return {row["id"] for row in await conn.fetch("SELECT id FROM fanout.job")}


async def some_are_gone(conn: asyncpg.Connection) -> bool:
    return len(await ids(conn)) < 5001


async def an_event(conn: asyncpg.Connection, stream: int, number: int = 1) -> None:
    await conn.execute(
        """INSERT INTO fanout.stream (stream_id, last_number) VALUES ($1, 100000)
           ON CONFLICT DO NOTHING""",
        stream,
    )
    await conn.execute(
        """INSERT INTO fanout.event_batch (stream_id, first_number, count, writer, batch, body)
           VALUES ($1, $2, 1, gen_random_uuid(), 1, '{}')""",
        stream,
        number,
    )


async def test_what_hangs_on_a_job_goes_with_it(
    retention: Retention, conn: asyncpg.Connection
) -> None:
    """Children of children, attempts, events and the stream's head; the key is free again."""
    root, [child, _] = await insert_batch(
        conn, Status.COMPLETED, [DONE | {"total": 1, "completed": 1}, BAD], idempotency_key="k",
        **PAST
    )  # fmt: skip
    grandchild = await insert_job(conn, parent=child, **DONE)
    await conn.execute(
        """INSERT INTO fanout.attempt (job_id, attempt, outcome)
           VALUES ($1, 1, 'lost'), ($2, 1, 'retry')""",
        grandchild,
        root,
    )
    await an_event(conn, root)

    assert await retention.prune() == 1

    assert await ids(conn) == set()
    for table in ("attempt", "stream", "event_batch"):
        assert await conn.fetchval(f"SELECT count(*) FROM fanout.{table}") == 0
    assert await conn.fetchval("SELECT fanout.submit('again', key => 'k')") not in {root, None}


@pytest.mark.parametrize("status", sorted(TERMINAL))
async def test_single_jobs_go_many_at_once(
    status: Status, retention: Retention, conn: asyncpg.Connection
) -> None:
    """However they ended; one with many events goes too."""
    made = [await insert_job(conn, status, **PAST) for _ in range(5)]
    for number in range(1, 151):
        await an_event(conn, made[0], number)
    await an_event(conn, made[1])
    assert await retention.prune() == 5
    assert await ids(conn) == set()
    assert await conn.fetchval("SELECT count(*) FROM fanout.event_batch") == 0


async def test_what_is_young_or_open_stays(retention: Retention, conn: asyncpg.Connection) -> None:
    """A batch is as old as its end; nothing below one that is open goes, however old it is."""
    young = await insert_job(conn, Status.COMPLETED, created_at=OLD)
    stay = {young}
    for status in sorted(OPEN):
        stay.add(await insert_job(conn, status, created_at=OLD, total=int(status == "waiting")))
    for status in (Status.PENDING, Status.PROCESSING):
        root, children = await insert_batch(
            conn, Status.WAITING, [DONE, BAD, status], created_at=OLD
        )
        stay |= {root, *children}

    assert await retention.prune() == 0
    assert await ids(conn) == stay


async def test_zero_keeps_jobs_for_ever(store: Store) -> None:
    """The loop does not even begin."""
    retention = Retention(store, Settings(job_retention=0))
    retention.start()
    assert not retention.looks.is_running
    await retention.stop()


async def test_a_job_stays_while_its_follow_up_is_open(
    retention: Retention, conn: asyncpg.Connection
) -> None:
    """It may ask for the results; of a child's follow-up the same is true."""
    single = await insert_job(conn, **DONE)
    batch, [child, other] = await insert_batch(conn, Status.COMPLETED, [DONE, DONE], **PAST)
    first = await insert_job(conn, follows_id=single, follows_generation=1, created_at=OLD)
    second = await insert_job(conn, follows_id=child, follows_generation=1, created_at=OLD)

    assert await retention.prune() == 0
    assert await ids(conn) == {single, batch, child, first, second}, other

    await conn.execute(
        "UPDATE fanout.job SET status = 'completed', finished_at = now() WHERE id = ANY ($1)",
        [first, second],
    )
    assert await retention.prune() == 2
    assert await ids(conn) == {first, second}


async def test_thousands_go_step_by_step_and_any_worker_goes_on(
    store: Store, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies in the midst leaves a root that cannot be opened, and whoever comes finishes;
    also three at once."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0)
    root, _ = await insert_batch(conn, Status.COMPLETED, [], total=5000, failed=5000, **PAST)
    await conn.execute(
        """INSERT INTO fanout.job
                  (kind, parent_id, root_id, depth, document_key, status, finished_at)
           SELECT 'leaf', $1, $1, 1, 'd' || n, 'failed', now() FROM generate_series(1, 5000) n""",
        root,
    )
    first = Retention(store, Settings())
    task = asyncio.create_task(first.prune())
    await until(partial(some_are_gone, conn))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert root in await ids(conn)
    with pytest.raises(Refused, match="retention has passed"):
        await store.retry_failed(root)

    await asyncio.gather(*(Retention(store, Settings()).prune() for _ in range(3)))
    assert await ids(conn) == set()


async def test_a_retry_that_comes_first_saves_its_batch(
    retention: Retention, database: str, conn: asyncpg.Connection
) -> None:
    """While a retry holds the batch's row, it is passed over, not waited for."""
    root, children = await insert_batch(conn, Status.COMPLETED, [DONE, BAD], **PAST)
    async with held(database) as rival:
        assert await rival.store.retry_failed(root) == 1
        assert await asyncio.wait_for(retention.prune(), 20) == 0
        await rival.commit()
    assert await retention.prune() == 0
    assert await ids(conn) == {root, *children}
    assert (await row_of(conn, root))["status"] == "waiting"


async def test_a_retry_that_comes_second_is_refused_whole(
    store: Store, database: str, conn: asyncpg.Connection
) -> None:
    """It has opened the children when it meets the mark: nothing of it stands."""
    root, [_, failed] = await insert_batch(conn, Status.COMPLETED, [DONE, BAD], **PAST)
    async with held(database) as rival:
        assert await rival.store.rows("mark_pruned", root, timedelta(days=7))
        retry = asyncio.create_task(store.retry_failed(root))
        await until_blocked(conn, retry)
        await rival.commit()
        with pytest.raises(Refused, match="retention has passed"):
            await retry
    assert (await row_of(conn, failed))["status"] == "failed"
    assert (await row_of(conn, root))["status"] == "completed"


@pytest.mark.parametrize("status", sorted(Status))
async def test_no_statement_deletes_what_is_not_marked(
    status: Status, store: Store, conn: asyncpg.Connection
) -> None:
    """Whatever a caller believes: the mark is made on closed old roots only, and the rest needs
    the mark."""
    total = int(status in {Status.WAITING, *TERMINAL})
    ended = PAST if status in TERMINAL else {"created_at": OLD}
    root, [child] = await insert_batch(
        conn,
        status,
        [DONE if status in TERMINAL else Status.PENDING],
        **{**ended, "total": total or 1},
    )
    await an_event(conn, root)
    before = await ids(conn)

    assert (await store.rows("prune_children", root, root, "", 10))[0]["gone"] == 0
    assert (await store.rows("prune_stream", root, 10))[0]["gone"] == 0
    assert await store.rows("prune_root", root) == []
    assert await store.rows("prune_singles", [root, child], timedelta(days=7)) == []
    assert await ids(conn) == before
    marked = await store.rows("mark_pruned", root, timedelta(days=7))
    assert bool(marked) == (status in TERMINAL)
    assert await store.rows("mark_pruned", child, timedelta(days=7)) == []
    assert await store.rows("prune_root", root) == [], "its children are there"
