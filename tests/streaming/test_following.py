"""`handle.events`: a job's events without a relay, and the ways lines come into its stream."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import asyncpg
import pytest

from fanout import DatabaseUnavailable, Document, Engine, Event, Job, JobNotFound, UsageError
from fanout.joblogs import JobLogHandler, to_job_stream
from tests.engine.running import closed, quick, running, until
from tests.factories import insert_batch, insert_job
from tests.streaming.harness import PATIENCE, Staged, Stream, a_stream, staged


@pytest.fixture
def bare(database: str) -> Engine:
    """An engine that is not started: the test registers its handlers first."""
    return Engine(database, settings=quick())


async def all_of(engine: Engine, job_id: int, after: str | None = None) -> list[Event]:
    async with asyncio.timeout(PATIENCE):
        return [event async for event in engine.handle(job_id).events(after)]


async def test_replay_live_and_end(engine: Engine, conn: asyncpg.Connection) -> None:
    """What was, what comes, and the end, which nobody else writes; then the loop is over."""
    stream = await a_stream(engine, conn)
    await stream.say(300)
    got: list[Event] = []

    async def read() -> None:
        async for event in engine.handle(stream.id).events("1.100"):
            got.append(event)  # noqa: PERF401 - looked at while it grows

    reading = asyncio.create_task(read())
    await until(lambda: len(got) == 200)
    await stream.say(5)
    await until(lambda: len(got) == 205)
    assert await conn.fetchval(
        "SELECT expires_at > now() FROM fanout.stream_watch WHERE stream_id = $1", stream.id
    ), "workers flush at once what somebody reads"
    await conn.execute(
        "UPDATE fanout.job SET status = 'completed', finished_at = now(), claim_token = NULL, "
        "lease_expires_at = NULL WHERE id = $1",
        stream.id,
    )
    async with asyncio.timeout(PATIENCE):
        await reading
    assert [event.id for event in got] == [f"1.{n}" for n in range(101, 307)]
    assert [event.type for event in got[-2:]] == ["log", "end"]
    assert got[0].data["n"] == 101


async def test_a_retried_job_passes_its_first_end(engine: Engine, conn: asyncpg.Connection) -> None:
    """And ends at its last one."""
    stream = await a_stream(engine, conn, "failed")
    await engine.events.end_streams([(stream.id, 901)], stream.writer)
    assert [event.type for event in await all_of(engine, stream.id)] == ["end"]
    assert await engine.store.retry_job(stream.id)
    await stream.say(1)
    await conn.execute(
        "UPDATE fanout.job SET status = 'failed', finished_at = now() WHERE id = $1", stream.id
    )
    await engine.events.end_streams([(stream.id, 902)], stream.writer)
    types = [event.type for event in await all_of(engine, stream.id)]
    assert types == ["reopened", "log", "end"]


async def test_a_child_hears_of_itself(engine: Engine, conn: asyncpg.Connection) -> None:
    """Its own lines, and its batch's end."""
    root, (one, two) = await insert_batch(conn, "completed", ["completed", "completed"])
    stream = Stream(engine, root)
    await engine.events.open_streams([root])
    await stream.say(3, job=one)
    await stream.say(2, job=two)
    await engine.events.end_streams([(root, 900)], stream.writer)
    events = await all_of(engine, two)
    assert [event.type for event in events] == ["log", "log", "end"]
    assert {event.data["job"] for event in events[:2]} == {two}


async def test_lost_events_are_said(engine: Engine, conn: asyncpg.Connection) -> None:
    """Pruned, or of another generation: a reset in their place."""
    stream = await a_stream(engine, conn, "completed")
    await stream.say(5)
    await conn.execute(
        "UPDATE fanout.event_batch SET at = at - interval '2 h' WHERE stream_id = $1", stream.id
    )
    await stream.say(5)
    await engine.events.end_streams([(stream.id, 900)], stream.writer)
    await engine.events.prune(3600, 10)
    for after, reason in (("1.2", "pruned"), ("9.2", "generation")):
        events = await all_of(engine, stream.id, after)
        assert [event.type for event in events] == ["reset", *["log"] * 5, "end"]
        assert events[0].data["reason"] == reason
        assert events[0].data["from"] == "1.6"
    assert [event.type for event in await all_of(engine, stream.id, "1.999")] == []


async def test_bad_cursors_and_unknown_jobs_are_errors_for_a_program(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A program that passes garbage has a bug: it is told."""
    job_id = await insert_job(conn, "completed")
    for after in ("", "abc", "1", "1.-1", f"1.{2**70}"):
        with pytest.raises(UsageError):
            await all_of(engine, job_id, after)
    with pytest.raises(JobNotFound):
        await all_of(engine, 987_654_321)


async def test_outages_are_waited_out_and_the_end_of_the_engine_is_not(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """As `watch` does."""
    stream = await a_stream(engine, conn)
    await stream.say(1)

    async def away() -> None:
        raise DatabaseUnavailable("away")

    staged(engine).after["heads"] = away
    events = engine.handle(stream.id).events()
    assert (await anext(events)).type == "log"
    await engine.stop()
    with pytest.raises(DatabaseUnavailable):
        await anext(events)


async def test_lines_of_handlers_logging_and_structlog_come_in_order(bare: Engine) -> None:
    """job.log, Python's logging and a structlog processor, in async handlers and in threads; what
    is said outside of a job goes nowhere.
    """
    log = logging.getLogger("papers.test")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    handler = JobLogHandler()
    log.addHandler(handler)
    log.warning("outside of a job")
    assert to_job_stream(None, "info", {"event": "outside"}) == {"event": "outside"}

    @bare.job
    async def streaming_speaks(job: Job[None]) -> None:
        job.log("one", page=1)
        log.info("two %d", 2)
        to_job_stream(None, "warn", {"event": "three", "user": "me", "message": "m", "self": 1})
        try:
            int("bad")
        except ValueError:
            log.exception("four")
        logging.getLogger("fanout.test").warning("the engine's own lines do not come twice")
        log.info("%d", "not a number")

    @bare.job
    def streaming_in_thread(job: Job[None]) -> None:
        job.log("from a thread")
        log.error("and by logging")

    raising, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        async with running(bare):
            one = await bare.submit(streaming_speaks)
            two = await bare.submit(streaming_in_thread)
            spoken = await all_of(bare, one.id)
            threaded = await all_of(bare, two.id)
    finally:
        logging.raiseExceptions = raising
        log.removeHandler(handler)
    told = [(event.data["level"], event.data["message"].splitlines()[0]) for event in spoken[:-1]]
    assert told[:4] == [
        ("info", "one"),
        ("info", "two 2"),
        ("warning", "three"),
        ("error", "four"),
    ]
    assert len(told) == 4
    assert "ValueError: invalid" in spoken[3].data["message"]
    assert spoken[0].data["fields"] == {"page": 1}
    assert spoken[2].data["fields"] == {"user": "me", "message_": "m", "self_": 1}
    assert [event.data.get("message") for event in threaded] == [
        "from a thread",
        "and by logging",
        None,
    ]
    assert [spoken[-1].type, threaded[-1].type] == ["end", "end"]


async def test_a_batch_tells_of_failures_and_retries(bare: Engine) -> None:
    """Each after its commit, with the reason, in the stream of the batch."""

    @bare.job(max_retries=1)
    async def streaming_child(job: Job[int]) -> None:
        job.progress(job.payload, 10, "pages")
        if job.payload == 1:
            raise RuntimeError("flaky")

    @bare.job
    async def streaming_batch(job: Job[None]) -> None:
        await job.fan_out(streaming_child, [Document(f"d{n}", n) for n in range(3)])

    async with running(bare):
        handle = await bare.submit(streaming_batch)
        events = await all_of(bare, handle.id)
        progress = await closed(handle)
    assert progress.failed == 1
    kinds = [event.type for event in events]
    assert kinds.count("retry") == 1
    assert kinds.count("failed") == 1
    assert kinds.index("retry") < kinds.index("failed") < kinds.index("end") == len(kinds) - 1
    failed = next(event for event in events if event.type == "failed")
    assert failed.data["key"] == "d1"
    assert failed.data["message"] == "flaky"
    assert events[-1].data["outcome"] == "completed with failures"
    assert {event.data["key"] for event in events if event.type == "progress"} == {"d0", "d1", "d2"}


async def test_workers_prune_what_is_beyond_its_retention(
    bare: Engine, conn: asyncpg.Connection
) -> None:
    """In steps, by any worker, without being asked."""

    @bare.job
    async def streaming_nothing(job: Job[None]) -> None: ...

    async with bare:
        stream = await a_stream(bare, conn)
        for _ in range(3):
            await stream.say(1)
        await conn.execute(
            "UPDATE fanout.event_batch SET at = at - interval '8 d' WHERE stream_id = $1", stream.id
        )
        async with bare.worker():

            async def gone() -> Any:
                return await conn.fetchval(
                    "SELECT count(*) = 0 FROM fanout.event_batch WHERE stream_id = $1", stream.id
                )

            await until(gone)


def test_the_harness_is_not_in_the_way(engine: Engine) -> None:
    """These tests run on the real statements."""
    assert isinstance(engine.events, Staged)
