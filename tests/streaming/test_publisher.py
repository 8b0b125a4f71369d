"""The publisher: it never fails, blocks or slows a job, and says what it lost."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import asyncpg
import pytest

from fanout import DatabaseUnavailable, Engine
from fanout import publisher as module
from fanout.event_store import Appended, EventStore, NewBatch
from fanout.publisher import Publisher
from tests.engine.running import until
from tests.factories import insert_job
from tests.streaming.harness import Standby, Stream, a_stream, head_of, staged


class Faulty(EventStore):
    """A store that can be told to fail; `when(batches)` says whether it does, and how."""

    def __init__(self, store: EventStore) -> None:
        self._pool, self._sql = store._pool, store._sql
        self.when: Callable[[Sequence[NewBatch]], Exception | None] = lambda _: None
        self.loses_answers = False
        self.appends: list[list[NewBatch]] = []
        self.hints: list[str] = []

    async def append(self, batches: Sequence[NewBatch], writer: uuid.UUID) -> list[Appended]:
        self.appends.append(list(batches))
        if (error := self.when(batches)) is not None:
            raise error
        answer = await super().append(batches, writer)
        if self.loses_answers:
            self.loses_answers = False
            raise DatabaseUnavailable("the answer is lost")
        return answer

    async def notify(self, channel: str, payloads: Sequence[str]) -> None:
        self.hints += payloads
        await super().notify(channel, payloads)


@pytest.fixture
def store(engine: Engine) -> Faulty:
    return Faulty(engine.events)


@pytest.fixture
async def publisher(engine: Engine, store: Faulty) -> AsyncIterator[Publisher]:
    publisher = Publisher(store, uuid.uuid4(), engine.settings)
    publisher.start()
    yield publisher
    await publisher.stop()


@pytest.fixture
async def stream(engine: Engine, conn: asyncpg.Connection) -> Stream:
    return await a_stream(engine, conn)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for what takes a second in earnest."""
    monkeypatch.setattr(module, "UNWATCHED_FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(module, "UNWATCHED_END_SECONDS", 0.2)
    monkeypatch.setattr(module, "_backoff", lambda tries: 0.01)


def line(text: str, kind: str = "log", **more: Any) -> bytes:
    return json.dumps({"type": kind, "message": text, **more}).encode()


async def stored(engine: Engine, stream: Stream) -> list[Any]:
    """All events of a stream."""
    return [
        json.loads(text)
        for batch in await engine.events.replay(stream.id, 1, 10**6, 10**9)
        for text in batch.body.split(b"\n")
    ]


async def flushed(publisher: Publisher) -> None:
    await until(lambda: not publisher._buffers)


async def test_lines_are_stored_in_order_and_hinted_where_somebody_looks(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """The rows first, then the hint, which carries them."""
    await engine.events.watch([stream.id], 60)
    for n in range(450):
        publisher.publish(stream.id, line(str(n)), (stream.id, 1))
    await flushed(publisher)
    assert [event["message"] for event in await stored(engine, stream)] == [
        str(n) for n in range(450)
    ]
    assert [batch.count for (batch,) in store.appends] == [200, 200, 50]
    await until(lambda: store.hints)


async def test_nobody_looks_no_notify(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """A stream that nobody watches is stored, seldom, and never announced; from the flush on that
    finds a watcher, it is.
    """
    publisher.publish(stream.id, line("first"), None)
    await flushed(publisher)
    assert publisher._known[stream.id].watched_since is None
    for n in range(20):
        publisher.publish(stream.id, line(str(n)), None)
        await asyncio.sleep(0.005)
    await flushed(publisher)
    assert len(store.appends) <= 4
    assert store.hints == []
    await engine.events.watch([stream.id], 60)
    publisher.publish(stream.id, line("seen"), None)
    await until(lambda: store.hints)
    assert publisher._known[stream.id].watched_since is not None


async def test_the_first_line_after_a_silence_goes_at_once(
    engine: Engine,
    stream: Stream,
    publisher: Publisher,
    store: Faulty,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever time lines gather for; those that follow it at once gather for that time."""
    monkeypatch.setattr(module, "WATCHED_FLUSH_SECONDS", 3600)
    await engine.events.watch([stream.id], 60)
    publisher._flushed_at = time.monotonic() - 3601
    publisher.publish(stream.id, line("first"), None)
    await flushed(publisher)
    publisher.publish(stream.id, line("second"), None)
    assert publisher._buffers[stream.id].due_at > time.monotonic() + 3000
    publisher.publish(stream.id, line("third"), None)
    assert publisher._buffers[stream.id].due_at > time.monotonic(), "it waits with the one before"
    publisher.end([stream.id])
    await flushed(publisher)
    assert [batch.count for (batch,) in store.appends] == [1, 2]


async def test_a_full_buffer_loses_the_oldest_and_says_how_many(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """While the database is away a job's lines fill 1 MiB; lifecycle and progress stay."""
    store.when = lambda _: DatabaseUnavailable("away")
    publisher.publish(stream.id, line("x", "failed"), None, lifecycle=True)
    publisher.publish(stream.id, line("y", "progress"), None, latest_of=stream.id)
    started = time.perf_counter()
    for n in range(5000):
        publisher.publish(stream.id, line(f"{n} " + "z" * 500), None)
    assert time.perf_counter() - started < 2
    assert publisher._buffers[stream.id].size < 1.2 * module.MAX_STREAM_BYTES
    store.when = lambda _: None
    await flushed(publisher)
    events = await stored(engine, stream)
    lost = sum(event["count"] for event in events if event["type"] == "dropped")
    logs = [int(event["message"].split()[0]) for event in events if event["type"] == "log"]
    assert lost + len(logs) == 5000
    assert publisher.dropped == lost > 0
    assert logs == sorted(logs)
    assert logs[-1] == 4999
    assert len([event for event in events if event["type"] in {"failed", "progress"}]) == 2


async def test_the_buffer_of_a_process_is_bounded_at_the_cost_of_the_loudest(
    engine: Engine, conn: asyncpg.Connection, publisher: Publisher, store: Faulty
) -> None:
    """Twenty loud streams and a quiet one: the quiet one's only line is not what goes."""
    store.when = lambda _: DatabaseUnavailable("away")
    quiet = await a_stream(engine, conn)
    publisher.publish(quiet.id, line("quiet"), None)
    loud = [await insert_job(conn, "processing") for _ in range(20)]
    for stream_id in loud:
        for _ in range(900):
            publisher.publish(stream_id, line("z" * 1000), None)
    assert publisher._loose <= module.MAX_BUFFER_BYTES
    store.when = lambda _: None
    await flushed(publisher)
    assert publisher._loose == 0
    assert [event["message"] for event in await stored(engine, quiet)] == ["quiet"]


async def test_the_latest_progress_of_a_job_takes_the_place_of_the_one_before(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """A handler that says its progress a thousand times a second costs one event a flush."""
    for n in range(1000):
        publisher.publish(stream.id, line("", "progress", done=n), (stream.id, 1), latest_of=1)
        publisher.publish(stream.id, line("", "progress", done=-n), (stream.id, 1), latest_of=2)
    await flushed(publisher)
    assert [event["done"] for event in await stored(engine, stream)] == [999, -999]
    publisher.publish(stream.id, line("", "progress", done=5), (stream.id, 1), latest_of=1)
    await flushed(publisher)
    assert len(await stored(engine, stream)) == 3


async def test_two_attempts_of_a_job_never_share_a_batch(
    engine: Engine, conn: asyncpg.Connection, stream: Stream, publisher: Publisher
) -> None:
    """A zombie of this very process: its lines are marked late, those of the new attempt not."""
    job_id = await insert_job(conn, "processing", parent=stream.id, attempt=2)
    for n in range(6):
        publisher.publish(stream.id, line(str(n), job=job_id), (job_id, 1 + n % 2))
    await flushed(publisher)
    late = [bool(batch.late) for batch in await engine.events.replay(stream.id, 1, 100)]
    assert late == [True, False] * 3


async def test_a_batch_whose_answer_was_lost_is_written_once(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """It is sent again as it was, whatever has been said meanwhile, and hinted."""
    await engine.events.watch([stream.id], 60)
    store.loses_answers = True
    publisher.publish(stream.id, line("one"), None)
    await until(lambda: store.appends)
    publisher.publish(stream.id, line("two"), None)
    await flushed(publisher)
    assert [event["message"] for event in await stored(engine, stream)] == ["one", "two"]
    assert store.appends[0] == store.appends[1]
    assert publisher.dropped == 0
    await until(lambda: "one" in store.hints[0])


async def test_a_database_that_is_away_costs_no_line_that_fits(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty, caplog: Any
) -> None:
    """They wait; one line of warning for the whole outage."""
    store.when = lambda _: DatabaseUnavailable("away")
    with caplog.at_level(logging.WARNING, "fanout.publisher"):
        for n in range(50):
            publisher.publish(stream.id, line(str(n)), None)
            await asyncio.sleep(0.002)
        await until(lambda: len(store.appends) > 5)
    assert len(caplog.records) == 1
    store.when = lambda _: None
    await flushed(publisher)
    assert len(await stored(engine, stream)) == 50


async def test_one_batch_that_is_refused_takes_no_other_along(
    engine: Engine, conn: asyncpg.Connection, publisher: Publisher, store: Faulty, caplog: Any
) -> None:
    """After a few tries each goes alone, the refused one is given up, with one line in the log."""
    good, bad = await a_stream(engine, conn), await a_stream(engine, conn)

    def refuses(batches: Sequence[NewBatch]) -> Exception | None:
        ids = {batch.stream_id for batch in batches}
        return asyncpg.DataError("no") if bad.id in ids else None

    store.when = refuses
    with caplog.at_level(logging.ERROR, "fanout.publisher"):
        publisher.publish(bad.id, line("bad"), None)
        publisher.publish(good.id, line("good"), None)
        await flushed(publisher)
    assert [event["message"] for event in await stored(engine, good)] == ["good"]
    assert publisher.dropped == 1
    assert len(caplog.records) == 1
    publisher.publish(good.id, line("still here"), None)
    await flushed(publisher)


async def test_hints_that_cannot_be_sent_are_counted_and_forgotten(
    engine: Engine, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """The table is the truth; who watches looks at the heads."""
    await engine.events.watch([stream.id], 60)

    async def full(channel: str, payloads: Sequence[str]) -> None:
        raise asyncpg.ProgramLimitExceededError("too many notifications in the NOTIFY queue")

    store.notify = full  # type: ignore[method-assign]
    publisher.publish(stream.id, line("one"), None)
    await until(lambda: publisher.hints_dropped == 1)
    await flushed(publisher)
    assert len(await stored(engine, stream)) == 1


async def test_the_end_comes_after_the_last_lines(
    engine: Engine, conn: asyncpg.Connection, publisher: Publisher
) -> None:
    """What was said before the job closed is never cut off by its end, what is said after is."""
    stream = await a_stream(engine, conn, "completed")
    for n in range(300):
        publisher.publish(stream.id, line(str(n)), None)
    publisher.end([stream.id])
    publisher.publish(stream.id, line("failed", "failed"), None, lifecycle=True)
    await until(lambda: not any(publisher._ending))
    events = await stored(engine, stream)
    assert len(events) == 302
    assert [event["type"] for event in events[-2:]] == ["failed", "end"]
    publisher.publish(stream.id, line("zombie"), None)
    await flushed(publisher)
    assert publisher.dropped == 1
    assert len(await stored(engine, stream)) == 302


async def test_lines_that_another_process_still_holds_come_before_the_end(
    engine: Engine, conn: asyncpg.Connection, publisher: Publisher, store: Faulty
) -> None:
    """Nobody looked, so the other one flushes seldom: the end waits that long."""
    stream = await a_stream(engine, conn, "completed")
    other = Publisher(store, uuid.uuid4(), engine.settings)
    other.start()
    other.publish(stream.id, line("a"), None)
    await flushed(other)
    other.publish(stream.id, line("b"), None)
    publisher.end([stream.id])
    await until(lambda: not any(publisher._ending))
    await other.stop()
    assert [event["type"] for event in await stored(engine, stream)] == ["log", "log", "end"]


async def test_a_handler_that_never_stops_talking_does_not_put_off_the_end(
    engine: Engine,
    conn: asyncpg.Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zombie's lines are worth waiting for, but not for ever."""
    monkeypatch.setattr(module, "LONGEST_END_SECONDS", 0.2)
    stream = await a_stream(engine, conn, "completed")
    publisher.end([stream.id])
    async with asyncio.timeout(20):
        while any(publisher._ending):
            publisher.publish(stream.id, line("x"), None)
            await asyncio.sleep(0)
    assert (await stored(engine, stream))[-1]["type"] == "end"


async def test_an_end_that_is_refused_is_left_to_the_watchers(
    engine: Engine, publisher: Publisher, store: Faulty, stream: Stream
) -> None:
    """And tried no second time: a loop of refusals would cost more than it is worth."""
    calls: list[Any] = []

    async def refused(batches: Any, writer: Any) -> list[Appended]:
        calls.append(batches)
        raise asyncpg.InsufficientPrivilegeError("no")

    store.end_streams = refused  # type: ignore[method-assign]
    publisher.end([stream.id])
    await until(lambda: not any(publisher._ending))
    publisher.publish(stream.id, line("x"), None)
    await flushed(publisher)
    assert len(calls) == 1


async def test_stop_sends_what_is_left_and_is_done_in_time(
    engine: Engine, stream: Stream, store: Faulty
) -> None:
    """With the database there, everything; without it, within the seconds it was given."""
    publisher = Publisher(store, uuid.uuid4(), engine.settings)
    publisher.start()
    for n in range(1000):
        publisher.publish(stream.id, line(str(n)), None)
    await publisher.stop()
    await publisher.stop()
    assert len(await stored(engine, stream)) == 1000
    publisher.start()
    store.when = lambda _: DatabaseUnavailable("away")
    publisher.publish(stream.id, line("lost"), None)
    started = time.monotonic()
    await publisher.stop(0.3)
    assert time.monotonic() - started < 5


async def test_many_streams_cost_few_statements(
    engine: Engine, conn: asyncpg.Connection, publisher: Publisher, store: Faulty
) -> None:
    """A flush takes what is due of many streams into one commit."""
    streams = [await insert_job(conn, "processing") for _ in range(100)]
    for stream_id in streams:
        publisher.publish(stream_id, line("x"), None)
    await flushed(publisher)
    assert len(store.appends) <= 4
    assert staged(engine).calls == []


# -- fail-over -------------------------------------------------------------------------------------


async def said(publisher: Publisher, stream: Stream, *texts: str) -> None:
    """Say lines, a batch each."""
    for text in texts:
        publisher.publish(stream.id, line(text), None)
        publisher.end([stream.id])  # at once
        publisher._ending[0].clear()
        publisher._ending[1].clear()
        await flushed(publisher)


async def messages(engine: Engine, stream: Stream) -> list[str]:
    return [event["message"] for event in await stored(engine, stream)]


def look(publisher: Publisher) -> None:
    """It is time to look whether what was stored is still there."""
    publisher._check_at = 0.0
    publisher._wake.set()


async def test_what_a_fail_over_lost_is_sent_again(
    engine: Engine, conn: asyncpg.Connection, stream: Stream, publisher: Publisher
) -> None:
    """In its order, under its numbers: to who watches nothing has happened."""
    await said(publisher, stream, "a", "b")
    standby = await Standby.of(conn, stream)
    await said(publisher, stream, "c", "d", "e")
    before = dict(await head_of(conn, stream))
    await standby.promote()
    look(publisher)
    await until(lambda: publisher.sent_again == 3)
    await flushed(publisher)
    after = dict(await head_of(conn, stream))
    assert await messages(engine, stream) == list("abcde")
    assert after | {"updated_at": 0} == before | {"updated_at": 0}


async def test_what_was_lost_comes_under_a_new_generation_if_others_stand_in_its_place(
    engine: Engine, conn: asyncpg.Connection, stream: Stream, publisher: Publisher
) -> None:
    """Numbers were given out twice: whoever has seen the first ones is told. Once."""
    await said(publisher, stream, "a")
    standby = await Standby.of(conn, stream)
    await said(publisher, stream, "b", "c")
    await standby.promote()
    await stream.say(5)
    look(publisher)
    await until(lambda: publisher.sent_again == 2)
    await flushed(publisher)
    assert sorted(filter(None, [e.get("message") for e in await stored(engine, stream)])) == [
        *"abc"
    ]
    assert (await head_of(conn, stream))["generation"] == 2


async def test_a_new_generation_whose_answer_was_lost_is_made_all_the_same(
    engine: Engine, conn: asyncpg.Connection, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """The batch was stored again, and then the database was away: it is looked at once more."""
    standby = await Standby.of(conn, stream)
    await said(publisher, stream, "a", "b")
    await standby.promote()
    await stream.say(5)
    renew, calls = store.renew_generation, 0

    async def fails_first(stream_id: int, generation: int) -> int | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise DatabaseUnavailable("away")
        return await renew(stream_id, generation)

    store.renew_generation = fails_first  # type: ignore[method-assign]
    look(publisher)
    await until(lambda: publisher.sent_again == 2)
    await flushed(publisher)
    assert (await head_of(conn, stream))["generation"] == 2
    assert [event.get("message") for event in await stored(engine, stream)][5:] == ["a", "b"]


async def test_lost_lines_come_before_those_that_an_outage_held_up(
    engine: Engine, conn: asyncpg.Connection, stream: Stream, publisher: Publisher, store: Faulty
) -> None:
    """After an outage the first thing to know is whether it was a fail-over."""
    standby = await Standby.of(conn, stream)
    await said(publisher, stream, "a", "b")
    publisher._check_at = time.monotonic() + 3600
    store.when = lambda _: DatabaseUnavailable("away")
    publisher.publish(stream.id, line("c"), None)
    await until(lambda: len(store.appends) > 3)
    await standby.promote()
    store.when = lambda _: None
    await flushed(publisher)
    assert await messages(engine, stream) == [*"abc"]
    assert (await head_of(conn, stream))["generation"] == 1


async def test_a_head_that_was_lost_is_made_again(
    engine: Engine, conn: asyncpg.Connection, stream: Stream, publisher: Publisher
) -> None:
    """The standby had the job, and nothing of its stream yet."""
    await said(publisher, stream, "a", "b")
    await conn.execute("DELETE FROM fanout.event_batch WHERE stream_id = $1", stream.id)
    await conn.execute("DELETE FROM fanout.stream WHERE stream_id = $1", stream.id)
    look(publisher)
    await until(lambda: publisher.sent_again == 2)
    assert await messages(engine, stream) == ["a", "b"]


@pytest.mark.parametrize("gone", ["pruned", "deleted", "there"])
async def test_what_was_not_lost_is_not_sent_again(
    engine: Engine, conn: asyncpg.Connection, publisher: Publisher, store: Faulty, gone: str
) -> None:
    """Pruned by a short retention, or deleted with its job: that is no fail-over."""
    stream = await a_stream(engine, conn)
    await said(publisher, stream, "a", "b")
    number = len(store.appends)
    if gone == "pruned":
        await engine.events.prune(0, 1000)
    if gone == "deleted":
        for table, column in (("event_batch", "stream_id"), ("stream", "stream_id"), ("job", "id")):
            await conn.execute(f"DELETE FROM fanout.{table} WHERE {column} = $1", stream.id)
    publisher._check_at = 0.0
    await publisher._look_for_kept()
    assert publisher._check_at > 0
    assert not publisher._buffers
    assert len(store.appends) == number


async def test_what_is_kept_is_bounded(
    engine: Engine, stream: Stream, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes at once, in time with the next look; without anything kept nobody looks."""
    monkeypatch.setattr(module, "KEPT_BYTES", 3000)
    await said(publisher, stream, *(str(n) * 1000 for n in range(8)))
    assert publisher._kept_bytes <= 3000
    assert len(publisher._kept) <= 3
    monkeypatch.setattr(module, "KEPT_SECONDS", 0)
    publisher._check_at = 0.0
    await publisher._look_for_kept()
    assert publisher._kept_bytes == len(publisher._kept) == 0
