"""The statements of streams: numbers without a gap, in the order of commits, each batch once."""

from __future__ import annotations

import asyncio
import random
import uuid
from itertools import count
from typing import Any

import asyncpg
import pytest

from fanout import Engine
from fanout.event_store import EventStore, NewBatch
from tests.factories import held, insert_job, until_blocked
from tests.streaming.harness import Standby, Stream, a_stream, engine_on, head_of

ME = uuid.UUID(int=1)


def a_batch(
    stream: int, batch: int = 1, lines: int = 1, *claims: tuple[int, int], text: str = "x"
) -> NewBatch:
    body = b"\n".join(b'{"type":"log","message":"%s"}' % text.encode() for _ in range(lines))
    return NewBatch(stream, lines, body, batch, frozenset(claims))


@pytest.fixture
async def stream(engine: Engine, conn: asyncpg.Connection) -> Stream:
    return await a_stream(engine, conn)


async def rows_of(conn: asyncpg.Connection, stream: Stream) -> list[tuple[int, int]]:
    rows = await conn.fetch(
        "SELECT first_number, count FROM fanout.event_batch WHERE stream_id = $1 ORDER BY 1",
        stream.id,
    )
    return [tuple(row) for row in rows]


async def test_many_writers_leave_no_gap_and_never_deadlock(
    database: str, conn: asyncpg.Connection
) -> None:
    """Twelve writers append to four streams each, in any order, over two engines: numbers have no
    hole and no double, nobody is a deadlock's victim.
    """
    async with engine_on(database) as one, engine_on(database) as two:
        streams = [await a_stream(one, conn) for _ in range(4)]
        before = await conn.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )

        async def write(events: EventStore) -> None:
            writer, batches = uuid.uuid4(), count(1)
            for _ in range(12):
                chosen = random.sample(streams, 4)
                await events.append(
                    [a_batch(s.id, next(batches), random.randint(1, 3)) for s in chosen], writer
                )

        await asyncio.gather(*(write(random.choice((one, two)).events) for _ in range(12)))
        for stream in streams:
            following = 1
            for first, number in await rows_of(conn, stream):
                assert first == following
                following = first + number
            assert (await head_of(conn, stream))["last_number"] == following - 1
        after = await conn.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        assert after == before


async def test_a_number_is_never_seen_before_a_lower_one(
    database: str, conn: asyncpg.Connection, engine: Engine, stream: Stream
) -> None:
    """A writer whose commit is slow holds the next one back, so who resumes after n misses nothing
    below it (R68).
    """
    async with held(database) as slow:
        await EventStore(slow.store._pool).append([a_batch(stream.id, 1)], ME)
        second = asyncio.create_task(engine.events.append([a_batch(stream.id, 2)], uuid.uuid4()))
        await until_blocked(conn, second)
        assert await engine.events.replay(stream.id, 1, 100) == []
        await slow.commit()
        (done,) = await second
    assert done.first_number == 2
    batches = await engine.events.replay(stream.id, 1, 100)
    assert [batch.first_number for batch in batches] == [1, 2]


async def test_a_batch_that_is_sent_again_is_written_once(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """The answer was lost: the second answer is the first one, whatever was appended meanwhile."""
    (first,) = await engine.events.append([a_batch(stream.id, 7, 3)], ME)
    await engine.events.append([a_batch(stream.id, 1, 2)], uuid.uuid4())
    (again,) = await engine.events.append([a_batch(stream.id, 7, 3)], ME)
    assert again == first
    assert await rows_of(conn, stream) == [(1, 3), (4, 2)]


async def test_a_batch_that_is_sent_again_after_the_end_is_found(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Written, and then the stream ended: that is not refused, it was in time."""
    stream = await a_stream(engine, conn, "completed")
    (first,) = await engine.events.append([a_batch(stream.id, 7)], ME)
    await engine.events.end_streams([(stream.id, 8)], ME)
    assert await engine.events.append([a_batch(stream.id, 7)], ME) == [first]
    assert await engine.events.append([a_batch(stream.id, 9)], ME) == []


async def test_a_first_try_that_commits_while_the_second_waits(
    database: str, conn: asyncpg.Connection, engine: Engine, stream: Stream
) -> None:
    """The first statement was given up by the client, not by the server, and holds the head."""
    other = await a_stream(engine, conn)
    async with held(database) as first:
        await EventStore(first.store._pool).append([a_batch(stream.id, 5)], ME)
        again = asyncio.create_task(
            engine.events.append([a_batch(stream.id, 5), a_batch(other.id, 6)], ME)
        )
        await until_blocked(conn, again)
        await first.commit()
        done = {one.stream_id: one.first_number for one in await again}
    assert done == {stream.id: 1, other.id: 1}
    assert await rows_of(conn, stream) == [(1, 1)]


async def test_lines_of_a_claim_that_was_given_away_are_marked(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """A zombie's lines are kept, and say so; those of the job's holder do not."""
    zombie = await insert_job(conn, "processing", parent=stream.id, attempt=2)
    holder = await insert_job(conn, "processing", parent=stream.id, attempt=1)
    (done,) = await engine.events.append([a_batch(stream.id, 1, 2, (zombie, 1), (holder, 1))], ME)
    assert done.late == {zombie}
    (batch,) = await engine.events.replay(stream.id, 1, 9)
    assert batch.late == {zombie}


async def test_nothing_follows_the_end(engine: Engine, conn: asyncpg.Connection) -> None:
    """One end, by whoever was first, and no line after it."""
    stream = await a_stream(engine, conn, "completed", total=3, completed=2, failed=1)
    await stream.say(1)
    ends = await asyncio.gather(
        *(engine.events.end_streams([(stream.id, n)], uuid.uuid4()) for n in range(1, 6))
    )
    (done,) = [one for many in ends for one in many]
    assert done.first_number == 2
    assert b'"outcome" : "completed with failures"' in done.body
    assert await engine.events.append([a_batch(stream.id, 99)], ME) == []
    assert (await head_of(conn, stream))["closed"]


async def test_a_stream_does_not_end_beside_an_open_job(
    database: str, conn: asyncpg.Connection, engine: Engine
) -> None:
    """The end waits for whoever opens the job again, and then finds it open; it comes once more
    when the job has ended again.
    """
    stream = await a_stream(engine, conn, "failed")
    async with held(database) as retry:
        await retry.store.retry_job(stream.id)
        ending = asyncio.create_task(engine.events.end_streams([(stream.id, 1)], ME))
        await until_blocked(conn, ending)
        await retry.commit()
        assert await ending == []
    await stream.say(1)
    await conn.execute(
        """UPDATE fanout.job SET status = 'completed', finished_at = clock_timestamp()
            WHERE id = $1""",
        stream.id,
    )
    (done,) = await engine.events.end_streams([(stream.id, 2)], ME)
    assert done.first_number == 2


async def test_a_job_opened_again_goes_on_in_its_stream(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A retried job's lines come after the end it had."""
    stream = await a_stream(engine, conn, "failed")
    await engine.events.end_streams([(stream.id, 1)], ME)
    assert await engine.store.retry_job(stream.id)
    assert (await stream.say(1)).first_number == 2


async def test_no_job_without_a_stream_is_locked_for_its_end(
    database: str, conn: asyncpg.Connection, engine: Engine
) -> None:
    """Most jobs are never watched and say nothing: their end costs no write on their row."""
    job_id = await insert_job(conn, "completed")
    async with held(database) as other:
        await other.connection.execute("SELECT 1 FROM fanout.job WHERE id = $1 FOR UPDATE", job_id)
        assert await engine.events.end_streams([(job_id, 1)], ME) == []


@pytest.fixture(autouse=True)
async def nothing_else(conn: asyncpg.Connection) -> None:
    await conn.execute("TRUNCATE fanout.event_batch")


async def prune(engine: Engine, limit: int = 100) -> int:
    return await engine.events.prune(3600, limit)


async def test_pruning_takes_the_oldest_and_moves_the_head(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """In small steps; the head says from where on events are left, and never more than that."""
    for _ in range(5):
        await stream.say(10)
    await conn.execute(
        "UPDATE fanout.event_batch SET at = at - interval '2 h' WHERE first_number <= 21"
    )
    assert await prune(engine, 2) == 2
    assert (await head_of(conn, stream))["first_number"] == 21
    assert await prune(engine) == 1
    assert (await head_of(conn, stream))["first_number"] == 31
    assert await prune(engine) == 0
    await conn.execute("UPDATE fanout.event_batch SET at = at - interval '2 h'")
    assert await prune(engine) == 2
    head = await head_of(conn, stream)
    assert (head["first_number"], head["last_number"]) == (51, 50)
    assert (await stream.say(1)).first_number == 51


async def test_pruners_do_not_meet_in_each_others_rows(
    database: str,
    conn: asyncpg.Connection,
    engine: Engine,
    stream: Stream,
) -> None:
    """Every worker prunes: each takes rows of its own, the head ends right whoever commits last."""
    for _ in range(6):
        await stream.say(5)
    await conn.execute("UPDATE fanout.event_batch SET at = at - interval '2 h'")
    async with held(database) as other:
        assert await EventStore(other.store._pool).prune(3600, 3) == 3
        second = asyncio.create_task(engine.events.prune(3600, 3))
        await until_blocked(conn, second)  # for the head, not for rows
        await other.commit()
        assert await second == 3
    assert (await head_of(conn, stream))["first_number"] == 31


async def test_a_page_of_the_table_is_bounded_by_bytes_and_by_rows(
    engine: Engine, stream: Stream
) -> None:
    """Large batches come one by one, small ones many at once; one at least."""
    for _ in range(10):
        await stream.say(1)
    big = b'{"type":"log","message":"%s"}' % (b"x" * 100_000)
    for _ in range(3):
        await stream.store(big)
    assert len(await engine.events.replay(stream.id, 1, 100, 64 << 10)) == 11
    assert len(await engine.events.replay(stream.id, 11, 100, 1)) == 1
    assert len(await engine.events.replay(stream.id, 5, 7)) == 3
    for _ in range(5):
        await asyncio.gather(*(stream.say(1, hint=False) for _ in range(100)))
    assert len(await engine.events.replay(stream.id, 14, 10_000)) == 500


async def test_a_generation_is_renewed_once(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """Several processes find the same loss: one of them says so, beyond all that watchers saw."""
    answers = await asyncio.gather(
        *(engine.events.renew_generation(stream.id, 3) for _ in range(5))
    )
    assert sorted(answers, key=lambda one: one or 0) == [None] * 4 + [4]


async def test_a_hint_that_waits_for_a_lock_is_given_up(
    engine: Engine, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NOTIFY is asked for once: behind another session's commit it would hold up every line."""
    tries: list[Any] = []

    async def refused(self: Any, *arguments: Any, **named: Any) -> None:
        tries.append(arguments)
        raise asyncpg.LockNotAvailableError

    monkeypatch.setattr("fanout.pool.Connection.fetch", refused)
    with pytest.raises(asyncpg.LockNotAvailableError):
        await engine.events.notify("fanout_sse", ["{}"])
    assert len(tries) == 1


async def test_a_hint_waits_a_quarter_of_a_second_at_most(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The statement bounds its own wait for the lock that NOTIFY takes at commit."""
    async with engine.events._pool.acquire() as connection:
        sql = engine.events._sql["notify"]
        async with connection.transaction():
            await connection.fetch(sql, "fanout_sse", ["{}"])
            assert await connection.fetchval("SHOW lock_timeout") == "250ms"
        assert await connection.fetchval("SHOW lock_timeout") == "0"


async def test_a_mark_says_all_that_came_before(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """The same batches in the same order make the same mark, another one in between does not."""
    me, other = uuid.uuid4(), uuid.uuid4()

    async def told(*batches: tuple[uuid.UUID, int]) -> list[int | None]:
        marks: list[int | None] = []
        for writer, batch in batches:
            (done,) = await engine.events.append([a_batch(stream.id, batch)], writer)
            assert done.mark_before == (marks[-1] if marks else 0)
            marks.append(done.mark)
        assert (await head_of(conn, stream))["mark"] == marks[-1]
        return marks

    empty = await Standby.of(conn, stream)
    marks = await told((me, 1), (me, 2), (other, 1))
    assert len(set(marks)) == 3
    (again,) = await engine.events.append([a_batch(stream.id, 2)], me)
    assert (again.mark_before, again.mark) == (marks[0], marks[1]), "found, with its own marks"
    await empty.promote()
    assert await told((me, 1), (me, 2), (other, 1)) == marks
    await empty.promote()
    assert (await told((me, 1), (other, 1), (me, 2)))[1:] != marks[1:]


@pytest.mark.parametrize(
    ("number", "place", "is_lost"),
    [(0, None, False), (2, 0, False), (3, 0, False), (4, 1, False), (4, 0, True), (6, 1, True)],
)
async def test_a_head_says_whether_what_was_seen_is_lost(
    engine: Engine, stream: Stream, number: int, place: int | None, is_lost: bool
) -> None:
    """By the mark of the batch that holds the last number that was seen, wherever in it."""
    marks = []
    for batch, lines in enumerate((3, 2), 1):
        (done,) = await engine.events.append([a_batch(stream.id, batch, lines)], stream.writer)
        marks.append(done.mark)
    seen = {stream.id: (number, 0 if place is None else marks[place])}
    assert (await engine.events.heads([stream.id], seen))[stream.id].is_lost is is_lost
    assert not (await engine.events.heads([stream.id]))[stream.id].is_lost


async def test_what_was_pruned_or_never_had_a_mark_is_not_lost(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """Nobody can tell, and a reset would cost every watcher a replay."""
    for batch in (1, 2, 3):
        await engine.events.append([a_batch(stream.id, batch)], ME)
    await conn.execute(
        """UPDATE fanout.event_batch SET mark = CASE first_number WHEN 1 THEN mark END,
                  at = at - CASE first_number WHEN 1 THEN interval '2 h' ELSE interval '0' END
            WHERE stream_id = $1""",
        stream.id,
    )
    await engine.events.prune(3600, 10)
    for number in (1, 2, 3):
        heads = await engine.events.heads([stream.id], {stream.id: (number, 12345)})
        assert not heads[stream.id].is_lost
