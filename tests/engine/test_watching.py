"""Progress, waiting, paging, and what a person asks at 3 a.m."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout import (
    Engine,
    Job,
    JobNotFound,
    PermanentError,
    Progress,
    Request,
    Status,
    UsageError,
)
from fanout.progress import percent_done, progress_from
from tests.engine.running import closed, counts, quick, running, until
from tests.factories import insert_batch, insert_job, live_worker


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_percentage_never_lies(ended: int, total: int) -> None:
    """Rounded down, 100 if and only if closed, never below 0, never falling as more end."""
    ended = min(ended, total)
    percent = percent_done(ended, total, closed=False)
    assert 0 <= percent <= 99
    assert percent * total <= ended * 100
    assert percent_done(ended, total, closed=True) == 100
    if ended < total:
        assert percent <= percent_done(ended + 1, total, closed=False)


def test_199_of_200_is_99_percent() -> None:
    """And nothing of nothing is nothing, until it is closed."""
    assert percent_done(199, 200, closed=False) == 99
    assert percent_done(200, 200, closed=False) == 99
    assert percent_done(0, 0, closed=False) == 0
    assert percent_done(0, 0, closed=True) == 100


NOW = datetime(2031, 1, 1, 12, tzinfo=UTC)


def a_row(**columns: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "kind": "batch",
        "status": "waiting",
        "verdict": None,
        "reason": None,
        "error": None,
        "generation": 1,
        "total": 100,
        "completed": 50,
        "failed": 0,
        "cancelled": 0,
        "created_at": NOW - timedelta(seconds=60),
        "claimed_at": NOW - timedelta(seconds=59),
        "finished_at": None,
        "now": NOW,
        "mark_at": NOW - timedelta(seconds=10),
        "mark_ended": 40,
        "last_mark_at": NOW - timedelta(seconds=25),
        "last_mark_ended": 25,
        "processing": 2,
        "nested": 0,
        "sampled": 48,
        "later": 0,
        "next_run_at": None,
        "suspects": 0,
        "unserved": None,
        "ahead": 0,
        "limits": None,
        "sums": None,
        "paused": False,
        **columns,
    }


def test_rate_and_eta_come_from_the_last_half_minute() -> None:
    """25 in 25 s is one a second; the ETA is a range around fifty seconds."""
    progress = progress_from(a_row())
    assert progress.rate_per_second == pytest.approx(1.0)
    assert progress.eta_seconds is not None
    least, most = progress.eta_seconds
    assert 25 < least < 50 < most < 150
    assert (progress.pending, progress.ended, progress.percent) == (48, 50, 50)
    assert progress.elapsed_seconds == 60


def test_a_rate_that_is_old_is_none() -> None:
    """Marks of two minutes ago say nothing about now; nothing that ended means no ETA."""
    old = NOW - timedelta(seconds=200)
    assert progress_from(a_row(mark_at=old, last_mark_at=old)).rate_per_second is None
    assert progress_from(a_row(mark_at=None, last_mark_at=None)).rate_per_second is None
    still = progress_from(a_row(mark_ended=50, last_mark_ended=50))
    assert (still.rate_per_second, still.eta_seconds) == (0, None)


def test_before_the_seal_nobody_knows_when_it_ends() -> None:
    """Documents are still coming in."""
    assert progress_from(a_row(status="processing")).eta_seconds is None


def test_a_closed_batch_has_the_rate_of_its_whole_run() -> None:
    """And nothing to wait for."""
    progress = progress_from(
        a_row(status="completed", completed=90, failed=10, finished_at=NOW, later=3)
    )
    assert progress.rate_per_second == pytest.approx(100 / 59)
    assert (progress.eta_seconds, progress.waits_for) == (None, ())
    assert (progress.percent, progress.outcome) == (100, "completed with failures")


COUNTS = st.integers(0, 10**6)


@given(
    st.builds(
        a_row,
        status=st.sampled_from([*Status]),
        total=COUNTS,
        completed=COUNTS,
        failed=st.integers(0, 100),
        mark_ended=COUNTS,
        last_mark_ended=COUNTS,
        processing=COUNTS,
        nested=st.integers(0, 50),
        finished_at=st.none() | st.just(NOW),
        mark_at=st.none() | st.floats(-1, 200).map(lambda s: NOW - timedelta(seconds=s)),
    )
)
def test_any_row_has_a_progress(row: dict[str, Any]) -> None:
    """No division by zero, no negative count."""
    progress = progress_from(row)
    assert progress.pending >= 0
    assert 0 <= progress.percent <= 100
    assert (progress.percent == 100) == progress.is_closed


async def says(engine: Engine, job_id: int) -> tuple[str, ...]:
    return (await engine.handle(job_id).progress()).waits_for


async def test_a_batch_says_why_it_waits(engine: Engine, conn: asyncpg.Connection) -> None:
    """No worker; backoff; behind another batch; to run alone; being ended. And nothing while all
    is well."""
    async with engine:
        batch, (child, other) = await insert_batch(conn, "waiting", ["pending", "pending"])
        assert await says(engine, batch) == ("no worker serves leaf",)
        await live_worker(conn, ["leaf"])
        assert await says(engine, batch) == ()

        later = datetime.now(UTC) + timedelta(hours=1)
        await conn.execute("UPDATE fanout.job SET run_at = $1 WHERE id = $2", later, child)
        [sentence] = await says(engine, batch)
        assert sentence == f"1 of 2 wait until {later:%H:%M:%S} UTC or later (backoff or run_at)"
        await conn.execute("UPDATE fanout.job SET deaths = 1 WHERE id = $1", other)
        assert "1 wait to run alone: a worker died while they ran" in await says(engine, batch)

        behind, _ = await insert_batch(conn, "waiting", ["pending"])
        assert await says(engine, behind) == ()
        await insert_batch(
            conn, "waiting", [{"status": "pending", "run_at": later - timedelta(hours=2)}]
        )
        assert await says(engine, behind) == ("behind 1 other batch of the same kind",)
        single = await insert_job(conn, run_at=later)
        assert (await says(engine, single))[0].startswith("it waits until")

        dying, _ = await insert_batch(
            conn, "waiting", ["processing"], verdict="cancelled", reason="on request"
        )
        assert "it is being ended as cancelled: on request" in await says(engine, dying)


async def test_progress_counts_what_is_there(engine: Engine, conn: asyncpg.Connection) -> None:
    """Running, waiting to run, ended; nested batches are neither."""
    async with engine:
        batch, children = await insert_batch(
            conn,
            "waiting",
            ["pending", "pending", "processing", "completed", "failed", "cancelled"],
        )
        progress = await engine.handle(batch).progress()
        assert counts(progress) == (6, 1, 1, 1)
        assert (progress.processing, progress.pending, progress.percent) == (1, 2, 50)
        assert not progress.is_closed
        [first, *_] = children
        with pytest.raises(JobNotFound):
            await engine.handle(first + 10**6).progress()


async def test_watching_never_goes_backwards(engine: Engine) -> None:
    """Ended and percent only grow, ended is at most total, and the last look is the close."""

    @engine.job
    async def leaf(job: Job[None]) -> None:
        await asyncio.sleep(0.002)

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, ((str(n), None) for n in range(200)))

    seen: list[Progress] = []
    async with running(engine):
        handle = await engine.submit(batch)
        async with asyncio.timeout(30):
            seen.extend([progress async for progress in handle.watch(interval=0.005)])
    assert [one.ended for one in seen] == sorted(one.ended for one in seen)
    assert all(one.ended <= one.total for one in seen)
    assert [one.is_closed for one in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].percent == 100
    assert seen[-1].rate_per_second is not None


async def test_waiting_has_an_end(engine: Engine) -> None:
    """TimeoutError, and the job goes on; a job that is none is not waited for."""
    async with engine:
        handle = await engine.submit("served_nowhere")
        with pytest.raises(TimeoutError):
            await handle.wait(0.05)
        with pytest.raises(TimeoutError):
            await handle.result(0.05)
        assert (await handle.job()).status is Status.PENDING
        with pytest.raises(JobNotFound):
            await engine.handle(10**9).wait(30)
        with pytest.raises(JobNotFound):
            await engine.handle(10**9).result(30)


async def test_who_waits_can_be_cancelled(engine: Engine) -> None:
    """And the engine's connections are as good as before."""
    async with engine:
        handle = await engine.submit("served_nowhere")
        waits = [asyncio.create_task(handle.wait()) for _ in range(20)]
        await asyncio.sleep(0.02)
        for wait in waits:
            wait.cancel()
        for wait in waits:
            with contextlib.suppress(asyncio.CancelledError):
                await wait
        assert (await handle.progress()).status is Status.PENDING


async def test_children_are_paged_however_many(engine: Engine) -> None:
    """1,203 of them, by document key: each once, with its snapshot and its result."""

    @engine.job
    async def leaf(job: Job[int]) -> int:
        if job.payload % 3 == 0:
            raise PermanentError(f"no {job.payload % 2}")
        return -job.payload

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, ((f"d{n:05}", n) for n in range(1203)))

    async with running(engine):
        handle = await engine.submit(batch)
        assert counts(await closed(handle)) == (1203, 802, 401, 0)
        children = [child async for child in handle.children()]
        assert [(c.document_key, c.payload) for c in children] == [
            (f"d{n:05}", n) for n in range(1203)
        ]
        failures = [child async for child in handle.failures()]
        assert [child.payload for child in failures] == list(range(0, 1203, 3))
        results = {key: result async for key, result in handle.results()}
        assert results == {f"d{n:05}": -n for n in range(1203) if n % 3}
        page = await handle.children_page(after_key="d00100", limit=2)
        assert [child.document_key for child in page] == ["d00101", "d00102"]
        assert await handle.children_page(after_key="d99999") == []
        assert await handle.children_page(status="pending") == []
        reasons = await handle.failure_reasons()
        assert [(r.error, r.error_type, r.count, r.example) for r in reasons] == [
            ("no 0", "PermanentError", 201, "d00000"),
            ("no 1", "PermanentError", 200, "d00003"),
        ]
        assert len(await handle.failure_reasons(limit=1)) == 1
        slowest = await handle.slowest(3)
        assert len(slowest) == 3
        assert [took for _, _, took in slowest] == sorted((t for _, _, t in slowest), reverse=True)
        assert children[1].took is not None
        assert children[1].took.total_seconds() >= 0


async def test_a_number_too_large_for_an_id_is_no_job(engine: Engine) -> None:
    """An address with too many digits is not found; it is no error of the server's."""
    async with engine:
        for number in (2**63, 2**70, -(2**63) - 1):
            with pytest.raises(JobNotFound):
                await engine.handle(number).job()


async def test_what_cannot_be_a_key_is_refused_when_reading_too(engine: Engine) -> None:
    """A NUL or a surrogate in a page's address is the asker's mistake, not the server's."""
    async with engine:
        handle = await engine.submit("a")
        for wrong in ("a\0", "\ud800"):
            with pytest.raises(UsageError, match="after_key"):
                await handle.children_page(after_key=wrong)
            with pytest.raises(UsageError, match="key"):
                await engine.find(wrong)


async def test_workers_are_listed(database: str, conn: asyncpg.Connection) -> None:
    """While they live, what they serve and how busy they are; lost ones say so."""
    engine = Engine(database, settings=quick())
    began, go_on = asyncio.Event(), asyncio.Event()

    @engine.job
    async def leaf(job: Job[None]) -> None:
        began.set()
        await go_on.wait()

    async with engine, engine.worker(name="one", concurrency=3), engine.worker(name="two"):
        await until(lambda: conn.fetchval("SELECT count(*) = 2 FROM fanout.worker"))
        await engine.submit(leaf)
        await began.wait()
        await until(lambda: conn.fetchval("SELECT sum(running) = 1 FROM fanout.worker"))
        one, two = await engine.workers()
        assert [(w.name, w.kinds, w.concurrency) for w in (one, two)] == [
            ("one", ("leaf",), 3),
            ("two", ("leaf",), 10),
        ]
        assert one.running + two.running == 1
        assert one.free + one.running == 3
        assert (one.state, one.beat_age_seconds < 3) == ("running", True)
        go_on.set()
        await live_worker(conn, ["other"])
        await conn.execute(
            "UPDATE fanout.worker SET last_beat_at = last_beat_at - interval '2 h'"
            " WHERE kinds = '{other}'"
        )
        assert [w.state for w in await engine.workers()] == ["running", "running", "lost"]


async def test_the_views_tell_the_same_in_sql(conn: asyncpg.Connection) -> None:
    """Batches, children, failures, workers, and what is stuck and why."""
    batch, children = await insert_batch(
        conn,
        "waiting",
        [
            "pending",
            "processing",
            {"status": "failed", "error": "corrupt", "error_type": "PermanentError"},
            *["completed"] * 197,
        ],
        idempotency_key="import",
    )
    single = await insert_job(conn, "failed", error="alone")
    row = await conn.fetchrow("SELECT * FROM fanout.batches")
    assert row is not None
    assert (row["id"], row["key"], row["outcome"]) == (batch, "import", "waiting")
    assert (row["total"], row["open"], row["percent"]) == (200, 2, 99)
    done, _ = await insert_batch(conn, "completed", ["failed", "completed"])
    empty = await insert_job(conn, "completed", on_closed="report")
    outcomes = await conn.fetch(
        "SELECT id, outcome, percent FROM fanout.batches WHERE id > $1", batch
    )
    assert {tuple(row) for row in outcomes} == {
        (done, "completed with failures", 100),
        (empty, "completed", 100),
    }
    assert await conn.fetchval("SELECT count(*) FROM fanout.children") == 202
    failed = await conn.fetch("SELECT id, error FROM fanout.failures ORDER BY id")
    assert [tuple(row) for row in failed][:2] == [(children[2], "corrupt"), (single, "alone")]

    stuck = await conn.fetch("SELECT id, why FROM fanout.stuck")
    assert [tuple(row) for row in stuck] == [(children[0], "no worker serves leaf")]
    await live_worker(conn, ["leaf"])
    worker = await conn.fetchrow("SELECT name, free, state FROM fanout.workers")
    assert tuple(worker or ()) == ("w", 10, "running")
    assert await conn.fetch("SELECT * FROM fanout.stuck") == []
    await conn.execute(
        "UPDATE fanout.job SET lease_expires_at = '2000-01-01' WHERE id = $1", children[1]
    )
    forgotten, _ = await insert_batch(conn, "waiting", ["completed"], total=2)
    stuck = await conn.fetch("SELECT id, why FROM fanout.stuck ORDER BY id")
    assert [tuple(row) for row in stuck] == [
        (children[1], "lease expired"),
        (forgotten, "no child is open, yet it has not closed"),
    ]


async def test_a_reader_needs_no_more_than_select(conn: asyncpg.Connection) -> None:
    """A role that may look at the views may neither write nor submit."""
    await conn.execute(
        "CREATE ROLE looker; GRANT USAGE ON SCHEMA fanout TO looker;"
        "GRANT SELECT ON fanout.batches, fanout.stuck TO looker; SET ROLE looker"
    )
    try:
        assert await conn.fetch("SELECT * FROM fanout.batches") == []
        assert await conn.fetch("SELECT * FROM fanout.stuck") == []
        for forbidden in ("SELECT * FROM fanout.job", "SELECT fanout.submit('a')"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await conn.execute(forbidden)
    finally:
        await conn.execute("RESET ROLE; DROP OWNED BY looker; DROP ROLE looker")


async def test_a_long_list_needs_no_handle_of_its_own(engine: Engine) -> None:
    """A handle is an id; it is not looked up before it is used."""
    async with engine:
        [handle] = await engine.submit_many([Request("a", 1)])
        assert repr(engine.handle(handle.id)) == f"JobHandle({handle.id})"
        assert (await engine.handle(handle.id).job()).payload == 1
