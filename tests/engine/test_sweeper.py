"""One round of the sweeper at a time, by hand: it mends, and gives up only what has no excuse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from fanout import Status
from fanout.settings import Settings
from fanout.store import Store
from fanout.sweeper import Sweeper
from fanout.values import Counted
from tests.engine.running import assert_true_to_its_children, quick
from tests.factories import (
    OTHER,
    a_store,
    counters_of,
    follow_ups_of,
    insert_batch,
    insert_job,
    live_worker,
    row_of,
    status_of,
)

LONG_AGO = datetime.now(UTC) - timedelta(hours=5)
AFTER = 3600.0
STALE: dict[str, Any] = {"updated_at": LONG_AGO}
DUE: dict[str, Any] = {"status": "pending", "run_at": LONG_AGO}


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    async with a_store(database) as it:
        yield it


def a_sweeper(store: Store, **values: Any) -> tuple[Sweeper, list[Counted]]:
    """A sweeper that has been in contact for longer than its lease, and what it counted."""
    seen: list[Counted] = []
    settings: Settings = quick(**{"lease": 0.3, "give_up_after": AFTER, **values})
    sweeper = Sweeper(store, settings, on_counted=seen.append)
    sweeper._contact_since = float("-inf")
    return sweeper, seen


async def a_free_worker(conn: asyncpg.Connection) -> None:
    """One that could have run leaves for hours."""
    await live_worker(conn, ["leaf"])
    await conn.execute("UPDATE fanout.worker SET free_since = $1", LONG_AGO)


@pytest.mark.parametrize(
    "wrong",
    [
        {"completed": 0},
        {"total": 4, "completed": 2, "failed": 1},
        {"total": 9},
        {"total": 5, "failed": 3},
    ],
    ids=repr,
)
async def test_counters_that_drifted_are_mended_and_told(
    store: Store, conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture, wrong: dict[str, int]
) -> None:
    """Before anything is given up; the log has the job, for it should never be needed."""
    await a_free_worker(conn)
    manager, _ = await insert_batch(conn, "waiting", ["completed", "failed", DUE], **STALE, **wrong)
    sweeper, _ = a_sweeper(store)
    await sweeper.give_up()
    assert await counters_of(conn, manager) == (3, 1, 1, 0)
    assert await status_of(conn, manager) is Status.WAITING
    assert sweeper.drifts == 1
    assert f"counters of job {manager} disagreed" in caplog.text
    assert [record.__dict__["job_id"] for record in caplog.records] == [manager]
    await sweeper.give_up()
    assert sweeper.drifts == 1


async def test_a_batch_that_should_have_closed_is_closed(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Its counters were wrong: mended, it is complete, and its follow-up is enqueued once."""
    manager, _ = await insert_batch(
        conn, "waiting", ["completed", "failed"], completed=0, on_closed="report"
    )
    top, [middle] = await insert_batch(conn, "waiting", [{"status": "waiting", "total": 1}])
    await insert_job(conn, "completed", parent=middle)
    sweeper, seen = a_sweeper(store)
    await sweeper.sweep()
    assert await status_of(conn, manager) is Status.COMPLETED
    assert await follow_ups_of(conn, manager) == [1]
    assert await status_of(conn, top) is Status.COMPLETED
    assert {kind for counted in seen for kind in counted.follow_ups} == {"report"}
    await sweeper.sweep()
    assert await follow_ups_of(conn, manager) == [1]
    await assert_true_to_its_children(conn)


async def test_expired_leases_are_rescued_at_every_depth(
    store: Store, conn: asyncpg.Connection
) -> None:
    """More than a page of them; live ones are left alone; a death is written down."""
    gone: dict[str, Any] = {
        "status": "processing",
        "lease_expires_at": LONG_AGO,
        "claim_token": OTHER,
    }
    root = await insert_job(conn, **gone)
    manager, children = await insert_batch(
        conn, "waiting", [{**gone, "attempt": 1, "kind": "leaf"}] * 205 + ["processing"]
    )
    sweeper, _ = a_sweeper(store)
    assert await sweeper.rescue() == 206
    assert await status_of(conn, root) is Status.PENDING
    assert await status_of(conn, children[-1]) is Status.PROCESSING
    rows = await conn.fetch(
        "SELECT DISTINCT status, deaths, failures FROM fanout.job WHERE id = ANY ($1)",
        children[:-1],
    )
    assert [tuple(row) for row in rows] == [("pending", 1, 0)]
    assert await counters_of(conn, manager) == (206, 0, 0, 0)
    assert await sweeper.rescue() == 0


async def test_who_had_no_contact_declares_nobody_dead(
    store: Store, conn: asyncpg.Connection
) -> None:
    """An outage is nobody's death: one lease of unbroken contact comes first."""
    job = await insert_job(conn, "processing", lease_expires_at=LONG_AGO)
    sweeper, _ = a_sweeper(store)
    sweeper.lost_contact()
    await sweeper.sweep()
    assert await status_of(conn, job) is Status.PROCESSING
    sweeper._contact_since = float("-inf")
    await sweeper.sweep()
    assert await status_of(conn, job) is Status.PENDING


async def test_what_keeps_killing_its_worker_is_poison(
    store: Store, conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """After `max_deaths` while alone it fails, and is counted; its batch closes by it."""
    manager, [child] = await insert_batch(
        conn,
        "waiting",
        [{"status": "processing", "lease_expires_at": LONG_AGO, "deaths": 2}],
    )
    sweeper, _ = a_sweeper(store, max_deaths=2)
    await sweeper.sweep()
    row = await row_of(conn, child)
    assert (row["status"], row["error_type"]) == ("failed", "Poison")
    assert "died each time it ran alone, 2 times" in row["error"]
    assert await status_of(conn, manager) is Status.COMPLETED
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_batch_without_a_sign_of_life_is_given_up(
    store: Store, conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """A live worker that serves its kind was free all the time, and nothing happened: it closes as
    failed, says why, and what was open is cancelled."""
    await a_free_worker(conn)
    manager, children = await insert_batch(
        conn, "waiting", ["completed", DUE, DUE], on_closed="report", **STALE
    )
    sweeper, _ = a_sweeper(store)
    await sweeper.give_up()
    row = await row_of(conn, manager)
    assert (row["status"], row["completed"], row["cancelled"]) == ("failed", 1, 2)
    assert row["reason"] == (
        "closed by the sweeper: no sign of life for 1 h while a worker had free slots"
    )
    assert (await row_of(conn, children[1]))["reason"] == "its batch ended"
    assert await follow_ups_of(conn, manager) == [1]
    assert sweeper.given_up == 1
    assert row["reason"] in caplog.text
    await assert_true_to_its_children(conn)


SOON = datetime.now(UTC) + timedelta(hours=1)
FREE = {"free_since": LONG_AGO}
EXCUSES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = {
    # worker's columns (None: there is none), batch's columns, the open child's columns
    "no worker": (None, STALE, DUE),
    "a worker of another kind": ({**FREE, "kinds": ["other"]}, STALE, DUE),
    "a busy worker": ({"free_since": None}, STALE, DUE),
    "a worker free only lately": ({"free_since": datetime.now(UTC)}, STALE, DUE),
    "a lost worker": ({**FREE, "last_beat_at": LONG_AGO}, STALE, DUE),
    "backoff or run_at in the future": (FREE, STALE, {**DUE, "run_at": SOON}),
    "due only lately": (FREE, STALE, {**DUE, "run_at": datetime.now(UTC)}),
    "claimed lately and released": (FREE, STALE, {**DUE, "claimed_at": datetime.now(UTC)}),
    "a child that runs": (FREE, STALE, {"status": "processing", "claimed_at": LONG_AGO}),
    "a batch within the batch": (FREE, STALE, {"status": "waiting", "total": 1}),
    "progress lately": (FREE, {"updated_at": datetime.now(UTC)}, DUE),
    "being ended already": (FREE, {**STALE, "verdict": "cancelled"}, DUE),
}


@pytest.mark.parametrize("name", EXCUSES)
async def test_a_batch_with_an_excuse_is_not_given_up(
    store: Store, conn: asyncpg.Connection, name: str
) -> None:
    """500 healthy papers behind a limit are not stuck."""
    worker, batch, child = EXCUSES[name]
    if worker is not None:
        worker_id = await live_worker(conn, worker.get("kinds", ["leaf"]))
        for column in ("free_since", "last_beat_at"):
            if column in worker:
                await conn.execute(
                    f"UPDATE fanout.worker SET {column} = $1 WHERE id = $2",
                    worker[column],
                    worker_id,
                )
    manager, _ = await insert_batch(conn, "waiting", ["completed", child], **batch)
    before = await row_of(conn, manager)
    sweeper, _ = a_sweeper(store)
    await sweeper.give_up()
    assert sweeper.given_up == 0
    assert await row_of(conn, manager) == before


async def test_ending_a_doomed_batch_goes_on_where_a_crash_stopped_it(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Chunk by chunk, through every level, until the last one closes it."""
    doomed, children = await insert_batch(
        conn,
        "waiting",
        ["cancelled", *["pending"] * 7, "processing", {"status": "waiting", "total": 3}],
        verdict="failed",
        reason="the manager failed",
    )
    for _ in range(3):
        await insert_job(conn, parent=children[-1])
    sweeper, _ = a_sweeper(store, doom_chunk=2)
    await sweeper.sweep()
    row = await row_of(conn, doomed)
    assert (row["status"], row["cancelled"], row["reason"]) == ("failed", 10, "the manager failed")
    assert await status_of(conn, children[-1]) is Status.CANCELLED
    assert await counters_of(conn, children[-1]) == (3, 0, 0, 3)
    await assert_true_to_its_children(conn)


async def test_one_bad_row_does_not_hide_the_rest(
    store: Store,
    conn: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be swept is logged; the others are swept, over more than a page."""
    ids = [(await insert_batch(conn, "waiting", ["completed"], total=2))[0] for _ in range(103)]
    recount = store.recount

    async def fails_for_one(job_id: int) -> Counted:
        if job_id == ids[1]:
            raise ValueError("a row that nobody expected")
        return await recount(job_id)

    monkeypatch.setattr(store, "recount", fails_for_one)
    sweeper, _ = a_sweeper(store)
    with caplog.at_level(logging.ERROR):
        await sweeper.sweep()
    statuses = [await status_of(conn, job_id) for job_id in ids]
    assert statuses.count(Status.COMPLETED) == 102
    assert statuses[1] is Status.WAITING
    assert f"sweeping job {ids[1]} failed" in caplog.text


async def test_sweepers_of_all_pods_at_once_do_each_thing_once(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Rescue, close and end, by six of them."""
    gone: dict[str, Any] = {"status": "processing", "lease_expires_at": LONG_AGO}
    manager, _ = await insert_batch(conn, "waiting", [gone] * 50)
    closing, _ = await insert_batch(conn, "waiting", ["completed"], total=2, on_closed="report")
    doomed, _ = await insert_batch(
        conn, "waiting", ["pending"] * 50, verdict="cancelled", on_closed="report"
    )
    sweepers = [a_sweeper(store, doom_chunk=7)[0] for _ in range(6)]
    await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    assert sum(sweeper.rescued for sweeper in sweepers) == 50
    assert sum(sweeper.drifts for sweeper in sweepers) == 1
    assert await counters_of(conn, manager) == (50, 0, 0, 0)
    assert await counters_of(conn, doomed) == (50, 0, 0, 50)
    assert await follow_ups_of(conn, closing) == [1]
    assert await follow_ups_of(conn, doomed) == [1]
    await assert_true_to_its_children(conn)


async def test_workers_that_were_lost_are_forgotten_after_a_day(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Not before: a person may ask what became of it."""
    for hours in (1, 23, 25):
        worker = await live_worker(conn, ["leaf"])
        await conn.execute(
            "UPDATE fanout.worker SET last_beat_at = last_beat_at - make_interval(hours => $1)"
            " WHERE id = $2",
            hours,
            worker,
        )
    sweeper, _ = a_sweeper(store)
    await sweeper.give_up()
    assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 2
