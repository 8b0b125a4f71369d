"""What a reader gets, whatever happened, whichever cursor it brings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
from fanout_streaming import PROGRESS_ONLY, Relay, parse_cursors
from fanout_streaming.frames import entry
from fanout_streaming.topic import Topic

from fanout import Engine, JobNotFound, UsageError
from fanout.event_store import StreamHead
from fanout.events import Event, event_text
from fanout.publisher import Publisher, channel_of
from fanout.statements import load_statements
from tests.engine.pooler import pooled
from tests.engine.running import until
from tests.factories import insert_batch, insert_job
from tests.streaming.harness import (
    Standby,
    Stream,
    a_stream,
    engine_on,
    head_of,
    listening,
    ndjson,
    quick,
    reading,
    slow,
    staged,
)
from tests.streaming.test_events import HOSTILE, a_claim


@pytest.fixture
async def stream(engine: Engine, conn: asyncpg.Connection) -> Stream:
    return await a_stream(engine, conn)


WATCHED = """SELECT stream_id FROM fanout.stream_watch
              WHERE expires_at > clock_timestamp() AND stream_id = ANY($1)"""
OLD = "UPDATE fanout.event_batch SET at = at - interval '2 h' WHERE stream_id = $1"


async def close_job(conn: asyncpg.Connection, stream: Stream, status: str = "completed") -> None:
    await conn.execute(
        """UPDATE fanout.job SET status = $2, finished_at = clock_timestamp(), claim_token = NULL,
                  lease_expires_at = NULL WHERE id = $1""",
        stream.id,
        status,
    )


async def test_replay_then_live_with_hello_first(relay: Relay, stream: Stream) -> None:
    """First how to come back and where one is, then what was, then what comes."""
    await stream.say(30)
    async with reading(relay, {stream.id: None}) as reader:
        await reader.has(30)
        await listening(relay)
        before = relay.catch_ups
        await stream.say(30)
        await reader.has(60)
        assert reader.logged == list(range(1, 61))
        assert relay.catch_ups == before, "the hint carried the events"
        hello = reader.messages[0]
        assert (hello.name, hello.id) == ("hello", "1.0")
        assert 2000 <= (reader.browser.retry or 0) <= 5000
    assert relay.stats()["readers"] == 0


async def test_hostile_text_reaches_a_browser_as_one_event_each(
    relay: Relay, stream: Stream
) -> None:
    """From the handler's words through table and NOTIFY to a parser of the standard."""
    lines = [
        event_text("log", a_claim(), text, level="info", n=n) for n, text in enumerate(HOSTILE)
    ]
    async with reading(relay, {stream.id: None}) as live:
        await listening(relay)
        for line in lines:
            await stream.store(line)
        await live.has(len(lines))
        async with reading(relay, {stream.id: None}) as late:
            await late.has(len(lines))
            assert [m for m in live.messages if m.name == "log"] == late.named("log")
        assert live.logged == list(range(len(lines)))


@pytest.mark.parametrize(
    "cursor",
    [
        "abc",
        "-1",
        "1.-1",
        "0.5",
        str(2**63),
        f"1.{2**70}",
        "9" * 10_000,
        "1.5\0",
        "\0",
        "1.5\n",
        "1.5 ",
        " 1.5",
        "1.5.5",
        "1,5",
        "\u0661.\u0665",
        "1:1.5",
        "7.3",
        f"{10**8}.{10**17}",
        "1.999999",
    ],
)
async def test_a_bad_cursor_is_bounded_and_never_an_error(
    still: Relay, stream: Stream, cursor: str
) -> None:
    """Garbage, other generations, numbers that never were: the newest events, marked; never all."""
    for _ in range(8):
        await stream.say(200, hint=False)
    async with reading(still, {stream.id: cursor}) as reader:
        hello = (await reader.got("hello")).data["streams"][0]
        assert hello["last"] - hello["after"] <= 1000
        await reader.has(hello["last"] - hello["after"])
        assert hello["gap"] or reader.named("reset")


async def test_cursors_of_several_streams_are_read_as_far_as_they_are_any() -> None:
    """What is none is left out, in any length."""
    assert parse_cursors("7:1.5_8:x_9_:1.2_-1:1.2_10:1.0") == {7: (1, 5), 10: (1, 0)}
    assert parse_cursors("7:1.5_" * 1000) == {}
    assert parse_cursors("") == {}


async def test_a_new_generation_resets_its_readers(
    engine: Engine, conn: asyncpg.Connection, relay: Relay, stream: Stream
) -> None:
    """A fail-over lost events that were seen: readers are told, and go on in the new numbers."""
    for _ in range(10):
        await stream.say(1)
    async with reading(relay, {stream.id: None}) as reader:
        await reader.has(10)
        await conn.execute(
            "DELETE FROM fanout.event_batch WHERE stream_id = $1 AND first_number > 4", stream.id
        )
        await conn.execute(
            "UPDATE fanout.stream SET last_number = 4 WHERE stream_id = $1", stream.id
        )
        reset = await reader.got("reset")
        assert reset.data["reason"] == "generation"
        assert reset.data["seen"] == "1.10"
        await stream.say(1)
        await reader.until(lambda: reader.browser.last_id == "2.5")
        assert reader.logged == [*range(1, 11), 1, 2, 3, 4, 11]
        async with reading(relay, {stream.id: "1.10"}) as back:
            assert (await back.got("reset")).data["seen"] == "1.10"


async def test_numbers_that_were_given_out_twice_are_noticed_when_nobody_looked(
    relay: Relay, engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """A fail-over lost events, and the stream is longer than before by the time anybody looks: the
    reader is told, and then gets what stands there now.
    """
    await stream.say(4)
    standby = await Standby.of(conn, stream)
    async with reading(relay, {stream.id: None}) as reader:
        await stream.say(6)
        await reader.has(10)
        async with conn.transaction():
            await standby.promote()
            await say_there(conn, stream, 20)
        reset = await reader.got("reset")
        assert reset.data == {
            "job": stream.id,
            "reason": "generation",
            "seen": "1.10",
            "from": "2.1",
        }
        await reader.until(lambda: reader.browser.last_id == "2.24")
        assert reader.logged == [*range(1, 11), *range(1, 5), *range(11, 31)]
    async with reading(relay, {stream.id: "1.10"}) as back:
        assert (await back.got("reset")).data["reason"] == "generation"


async def test_a_hint_that_joins_on_to_other_events_than_were_seen_is_not_taken(
    still: Relay, conn: asyncpg.Connection, stream: Stream
) -> None:
    """It has the next number, but what was seen before it was lost: the table tells."""
    await stream.say(2)
    standby = await Standby.of(conn, stream)
    async with reading(still, {stream.id: None}) as reader:
        await stream.say(2, hint=False)
        still._catch_up(still._topics[stream.id])
        await reader.has(4)
        await standby.promote()
        await stream.say(2, hint=False)
        done = await stream.say(1, hint=False)
        assert done.first_number == 5
        still._on_hint(stream.hint_of(done)[0])
        assert (await reader.got("reset")).data["seen"] == "1.4"


async def test_a_program_that_follows_is_told_as_well(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """`handle.events` without a relay; a cursor that never was is no fail-over."""
    await stream.say(2)
    standby = await Standby.of(conn, stream)
    await stream.say(2)
    events = engine.handle(stream.id).events()
    seen = [await anext(events) for _ in range(4)]
    async with conn.transaction():
        await standby.promote()
        await say_there(conn, stream, 9)
    told = await anext(events)
    assert (told.type, told.data["seen"], told.data["from"]) == ("reset", seen[-1].id, "2.1")
    again = [await anext(events) for _ in range(11)]
    assert [event.id for event in again] == [f"2.{n}" for n in range(1, 12)]
    stranger = engine.handle(stream.id).events("2.999")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(stranger)
    assert (await head_of(conn, stream))["generation"] == 2


async def say_there(conn: asyncpg.Connection, stream: Stream, number: int) -> None:
    """Append on this very connection, a batch an event."""
    append = load_statements()["append"]
    for n in range(number):
        line = stream.lines(1)
        await conn.fetch(append, [stream.id], [1], [line], [n], uuid.uuid4(), [], [], [])


async def test_a_fail_over_under_a_live_publisher_loses_no_line(
    engine: Engine, relay: Relay, conn: asyncpg.Connection, stream: Stream
) -> None:
    """The tail is lost again and again, others write in its place: after its last reset a reader
    has all that was ever said, and the table has it too.
    """
    publisher = Publisher(engine.events, uuid.uuid4(), engine.settings)
    publisher.start()
    said = 0
    async with reading(relay, {stream.id: None}) as reader:
        for n in range(4):
            standby = await Standby.of(conn, stream)
            for _ in range(30):
                said += 1
                publisher.publish(stream.id, b'{"type":"log","n":%d}' % (1000 + said), None)
                await asyncio.sleep(0.001)
            await until(lambda: not publisher._buffers)
            await reader.until(lambda: reader.named("log")[-1].data["n"] == 1000 + said)  # noqa: B023
            before = publisher.sent_again
            async with conn.transaction():
                await standby.promote()
                if n % 2:
                    await say_there(conn, stream, 40)
            publisher._check_at = 0.0
            publisher._wake.set()
            await until(lambda: publisher.sent_again > before)  # noqa: B023
            await until(lambda: not publisher._buffers)
        await publisher.stop()
        head = await head_of(conn, stream)
        last = f"{head['generation']}.{head['last_number']}"
        await reader.until(lambda: reader.browser.last_id == last)
        at = max(i for i, m in enumerate(reader.messages) if m.name == "reset")
        got = [m.data["n"] for m in reader.messages[at:] if m.name == "log"]
        assert sorted(n for n in got if n > 1000) == list(range(1001, 1001 + said))
        numbers = [m.number for m in reader.messages[at:] if m.name == "log"]
        assert numbers == list(range(1, head["last_number"] + 1))


async def test_a_cursor_below_what_is_kept_is_reset(
    engine: Engine, conn: asyncpg.Connection, relay: Relay, stream: Stream
) -> None:
    """Past retention: told from where on events are left, never a silent gap."""
    await stream.say(10)
    await conn.execute(OLD, stream.id)
    await stream.say(5)
    await engine.events.prune(3600, 10)
    async with reading(relay, {stream.id: "1.4"}) as reader:
        assert (await reader.got("reset")).data == {
            "job": stream.id,
            "reason": "pruned",
            "seen": "1.4",
            "from": "1.11",
        }
        await reader.has(5)
    lines = await relay.subscribe({stream.id: "1.4"}, format="ndjson")
    first = json.loads((await anext(lines.chunks())).splitlines()[0])
    assert first["type"] == "reset"
    await lines.close()
    program = await relay.subscribe({stream.id: "1.4"})
    assert (await anext(program.events())).type == "reset"
    await program.close()


async def test_pruned_under_a_readers_feet(
    engine: Engine, conn: asyncpg.Connection, still: Relay, stream: Stream
) -> None:
    """What a slow reader was about to read is gone: it is told, and goes on behind the hole."""
    await stream.say(10)
    await conn.execute(OLD, stream.id)
    await stream.say(5)
    subscription = await still.subscribe({stream.id: "1.2"})
    await engine.events.prune(3600, 10)
    seen = [event async for event in _first(subscription.events(), 6)]
    assert [event.type for event in seen] == ["reset"] + ["log"] * 5
    assert seen[1].id == "1.11"
    await subscription.close()


async def _first(events: AsyncIterator[Event], number: int) -> AsyncIterator[Event]:
    async for event in events:
        yield event
        number -= 1
        if not number:
            return


async def test_a_slow_reader_falls_out_of_the_ring_and_reads_the_table(
    relay: Relay, stream: Stream, engine: Engine
) -> None:
    """Memory is bounded by the ring, not by the slowest."""
    await stream.say(1)
    slow_one = await relay.subscribe({stream.id: None}, progress=False)
    chunks = slow_one.chunks()
    await anext(chunks)
    async with reading(relay, {stream.id: None}) as quick_one:
        for _ in range(8):
            await stream.say(200, text="x" * 900)
        await quick_one.has(1601)
        assert (relay.stats()["ring_bytes"] or 0) <= 1 << 20
        read = b""
        async with asyncio.timeout(20):
            while read.count(b"event: log") < 1601:
                chunk = await anext(chunks)
                assert len(chunk) < 80 << 10
                read += chunk
        numbers = [int(n) for n in re.findall(rb"^id: 1\.(\d+)$", read, re.MULTILINE)]
        assert numbers == list(range(1, 1602))
    await slow_one.close()


async def test_the_budget_of_a_process_takes_from_rings_that_nobody_uses(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Rings are given up, events are not: who needs them reads the table."""
    async with Relay(engine, slow(ring_budget=1 << 20)) as relay:
        streams = [await a_stream(engine, conn) for _ in range(4)]
        for stream in streams:
            async with reading(relay, {stream.id: None}) as reader:
                await stream.say(200, text="x" * 1500, hint=False)
                relay._catch_up(relay._topics[stream.id])
                await reader.has(200)
            assert (relay.stats()["ring_bytes"] or 0) <= 1 << 20
        async with reading(relay, {streams[0].id: "1.150"}) as reader:
            await reader.has(50)


async def test_readers_that_leave_before_the_first_byte_leave_nothing(
    relay: Relay, stream: Stream
) -> None:
    """A place is given back although its iteration never began (R69)."""
    for _ in range(100):
        subscription = await relay.subscribe({stream.id: None})
        await subscription.close()
        await subscription.close()
    assert relay.stats()["readers"] == 0
    assert not relay._topics[stream.id].readers
    assert relay._topics[stream.id].wants_progress == 0


async def test_garbage_from_psql_is_counted_and_ignored(
    relay: Relay, stream: Stream, conn: asyncpg.Connection, engine: Engine
) -> None:
    """Any role may NOTIFY: nothing it says ends a stream, goes to readers, or moves a number."""
    done = await stream.say(3)
    said = f'{{"v":1,"s":{stream.id}'
    garbage = [
        "",
        "nonsense",
        "[1,2,3]",
        '"x"',
        "null",
        "9" * 7000,
        '{"v":1}',
        '{"v":1,"s":"a","g":1,"f":1,"n":1}',
        "[" * 7000,
        said + f',"g":1,"f":4,"n":2,"m":1,"p":{done.mark}' + ',"b":[\n{"x":[1\n,\n2]},{"y":1}\n]}',
    ]
    ranges = [
        said + ',"g":1,"f":1000000,"n":10}',
        said + ',"g":1,"f":4611686018427387000,"n":10000}',
        said + ',"g":999,"f":1,"n":1}',
        said + ',"g":1,"f":4,"n":1,"l":"late"}',
    ]
    async with reading(relay, {stream.id: None}) as reader:
        await listening(relay)
        for payload in (*garbage, *ranges):
            await conn.execute("SELECT pg_notify($1, $2)", channel_of(engine.settings), payload)
        await until(lambda: relay.garbage >= len(garbage))
        await stream.say(2)
        await reader.has(5)
        await until(lambda: relay.stats()["lag"] == 0)
        assert reader.logged == [1, 2, 3, 4, 5]
        assert not reader.named("reset")
        assert relay.garbage == len(garbage)


async def test_a_flood_of_false_hints_costs_few_looks(still: Relay, stream: Stream) -> None:
    """Each may be true, so each is looked for; not each by itself."""
    async with reading(still, {stream.id: None}):
        for n in range(2000):
            still._on_hint(f'{{"v":1,"s":{stream.id},"g":1,"f":{100 + n},"n":1}}')
            if n % 20 == 0:
                await asyncio.sleep(0.001)
        await until(lambda: not still._catching_up)
        assert still.catch_ups < 30


async def test_text_that_did_not_come_by_this_engine_is_not_shown_if_inline_is_off(
    database: str, conn: asyncpg.Connection
) -> None:
    """Where strangers share the database, hints say where to look, never what to show."""
    async with engine_on(database, inline_events=False) as engine, Relay(engine, quick()) as relay:
        stream = await a_stream(engine, conn)
        async with reading(relay, {stream.id: None}) as reader:
            await listening(relay)
            (forged,) = stream.envelope(1, 1, text="forged")
            await engine.events.notify(channel_of(engine.settings), [forged])
            await until(lambda: relay.hints)
            await stream.say(1)
            await reader.has(1)
            assert len(reader.logged) == 1
            assert "text" not in reader.named("log")[0].data


async def test_a_forged_event_is_not_shown_or_taken_back(
    relay: Relay, stream: Stream, conn: asyncpg.Connection
) -> None:
    """At the right number, but it does not join on to what stands there: only the table counts. Who
    has listened can make one that does: then the next look at the table resets its readers.
    """
    done = await stream.say(1)
    async with reading(relay, {stream.id: None}) as reader:
        await listening(relay)
        await reader.has(1)
        for marks in ((None, None), (None, 1), (7, 8)):
            (forged,) = stream.envelope(2, 1, text="forged", marks=marks)
            await conn.execute("SELECT pg_notify('fanout_sse', $1)", forged)
        await stream.say(1, text="true")
        await reader.has(2)
        assert reader.named("log")[1].data["text"] == "true"
        done = await stream.say(1)
        (forged,) = stream.envelope(4, 1, text="forged", marks=(done.mark, 1))
        await conn.execute("SELECT pg_notify('fanout_sse', $1)", forged)
        await reader.got("reset")
        await stream.say(1)
        await reader.until(lambda: reader.browser.last_id == "2.4")


async def test_unknown_jobs_and_children_have_no_stream(
    relay: Relay, conn: asyncpg.Connection
) -> None:
    """And leave no trace."""
    _, (child,) = await insert_batch(conn, "waiting", ["pending"])
    for job_id in (987_654, child):
        with pytest.raises(JobNotFound):
            await relay.subscribe({job_id: None})
    with pytest.raises(UsageError):
        await relay.subscribe({})
    with pytest.raises(UsageError):
        await relay.subscribe(dict.fromkeys(range(1, 34)))
    assert relay.stats()["topics"] == 0
    assert not relay._opening


async def test_a_child_of_a_batch_can_be_read_alone(
    engine: Engine, relay: Relay, conn: asyncpg.Connection
) -> None:
    """Its lines, and the end of the stream; the other children's are passed over, however many."""
    root, (one, two) = await insert_batch(conn, "waiting", ["processing", "processing"])
    stream = Stream(engine, root)
    await engine.events.open_streams([root])
    for n in range(6):
        await stream.say(200, job=(one, two)[n == 5], text="x" * 500)
    async with reading(relay, {root: None}, only_jobs={root: two}) as reader:
        await reader.has(200)
        await conn.execute(
            "UPDATE fanout.job SET status = 'completed', finished_at = now(), completed = 2 "
            "WHERE id = $1",
            root,
        )
        await reader.over()
        assert {m.data["job"] for m in reader.named("log")} == {two}


async def test_a_finished_job_is_finished_at_start_for_who_has_seen_all(
    engine: Engine, relay: Relay, conn: asyncpg.Connection
) -> None:
    """HTTP's 204; who has not gets the rest, the last progress, the end, in this order."""
    stream = await a_stream(engine, conn, "completed")
    await stream.say(3)
    await engine.events.end_streams([(stream.id, 900)], stream.writer)
    seen = await relay.subscribe({stream.id: "1.4"})
    assert seen.finished_at_start
    await seen.close()
    for cursor in (None, "1.1", "x"):
        async with reading(relay, {stream.id: cursor}) as reader:
            assert not reader.subscription.finished_at_start
            await reader.over()
            names = [message.name for message in reader.messages]
            assert names[-1] == "end"
            assert reader.named("progress")[-1].data["percent"] == 100
            assert names.index("progress") < names.index("end")


async def test_an_empty_batch_is_at_a_hundred_percent_and_ends(
    relay: Relay, conn: asyncpg.Connection
) -> None:
    """N = 0: no division by zero, and an end that nobody else has written."""
    job_id = await insert_job(conn, "completed", total=0)
    async with reading(relay, {job_id: None}) as reader:
        await reader.over()
        assert reader.named("progress")[-1].data["percent"] == 100
        assert reader.messages[-1].name == "end"
        assert reader.messages[-1].data["total"] == 0


async def test_the_end_comes_also_if_who_closed_the_job_died(
    engine: Engine, relay: Relay, conn: asyncpg.Connection, stream: Stream
) -> None:
    """The backstop: once, to all readers, also to those who want no progress."""
    await stream.say(2)
    async with reading(relay, {stream.id: None}, progress=False) as reader:
        await reader.has(2)
        await close_job(conn, stream)
        await reader.over()
        assert [m.name for m in reader.messages] == ["hello", "log", "log", "end"]
    async with reading(relay, {stream.id: None}) as late:
        await late.over()
        assert len(late.named("end")) == 1


async def test_a_job_that_is_retried_ends_again(
    engine: Engine, relay: Relay, conn: asyncpg.Connection
) -> None:
    """A replay passes its first end under another name, for a client leaves at an end."""
    stream = await a_stream(engine, conn, "failed")
    await stream.say(2)
    await engine.events.end_streams([(stream.id, 900)], stream.writer)
    async with reading(relay, {stream.id: None}) as first:
        await first.over()
    assert await engine.store.retry_job(stream.id)
    async with (
        reading(relay, {stream.id: None}) as fresh,
        reading(relay, {stream.id: first.browser.last_id}) as back,
    ):
        await fresh.got("reopened")
        await stream.say(2)
        await close_job(conn, stream)
        await fresh.over()
        await back.over()
        assert [m.name for m in fresh.named("log", "end", "reopened")] == [
            *("log", "log", "reopened"),
            *("log", "log", "end"),
        ]
        assert [m.name for m in back.named("log", "end", "reopened")] == ["log", "log", "end"]
    lines = await ndjson(await relay.subscribe({stream.id: None}, format="ndjson"))
    assert [line["type"] for line in lines] == ["log", "log", "reopened", "log", "log", "end"]
    events = await relay.subscribe({stream.id: None})
    assert [event.type async for event in events.events()][2] == "reopened"
    await events.close()


async def test_progress_never_goes_back_and_comes_from_committed_counters(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Over reconnects between two processes, one of which has an old reading in memory."""
    root, _ = await insert_batch(conn, "waiting", ["pending"])
    await conn.execute("UPDATE fanout.job SET total = 50 WHERE id = $1", root)
    async with (
        Relay(engine, quick(progress_interval=0.01)) as one,
        Relay(engine, quick(progress_interval=0.3)) as two,
    ):
        seen: list[int] = []
        done = 0

        async def count() -> None:
            nonlocal done
            while done < 49:
                done += 1
                await conn.execute("UPDATE fanout.job SET completed = $2 WHERE id = $1", root, done)
                await asyncio.sleep(0.01)

        counting = asyncio.create_task(count())
        relays = [one, two]
        while not counting.done():
            async with reading(relays[0], {root: None}) as reader:
                await reader.got("progress")
            seen += [message.data["completed"] for message in reader.named("progress")]
            assert all(message.data["percent"] < 100 for message in reader.named("progress"))
            relays.reverse()
        await counting
        assert seen == sorted(seen)
        assert len(set(seen)) > 3
        assert seen[-1] <= 49


async def test_progress_is_told_when_it_changed_and_to_each_newcomer(
    engine: Engine, relay: Relay, conn: asyncpg.Connection
) -> None:
    """A batch that stands still says so once."""
    root, _ = await insert_batch(conn, "waiting", ["pending", "completed"])
    async with reading(relay, {root: None}) as first:
        await first.got("progress")
        rounds = relay._round
        await until(lambda: relay._round > rounds + 5)
        async with reading(relay, {root: None}) as second:
            await second.got("progress")
        assert len(first.named("progress")) <= 2
        assert first.named("progress")[0].data["percent"] == 50


async def test_many_streams_over_one_reader_have_one_cursor(
    engine: Engine, relay: Relay, conn: asyncpg.Connection
) -> None:
    """Thirty-two at most; what was seen of each is in the id of every event."""
    streams = [await a_stream(engine, conn) for _ in range(32)]
    async with reading(relay, dict.fromkeys(s.id for s in streams)) as reader:
        await asyncio.gather(*(stream.say(5) for stream in streams))
        await reader.has(160)
        cursors = parse_cursors(reader.browser.last_id)
        assert {stream.id for stream in streams} == set(cursors)
        assert len(reader.browser.last_id) <= 2048
    half = len(reader.named("log")) // 2
    seen = reader.named("log")[:half]
    wanted = {s: str(c) for s, c in parse_cursors(seen[-1].id).items()}
    async with reading(relay, {s.id: wanted[s.id] for s in streams}) as back:
        await back.has(160 - half)
        both = [(m.data["stream"], m.data["n"]) for m in (*seen, *back.named("log"))]
        assert len(both) == len(set(both)) == 160
    for stream in streams:
        await close_job(conn, stream)
    async with reading(relay, dict.fromkeys(s.id for s in streams)) as last:
        await last.over()
        assert len(last.named("end")) == 32


async def test_a_list_gets_progress_and_ends_alone(
    engine: Engine, relay: Relay, conn: asyncpg.Connection
) -> None:
    """No log line goes to who wants none, and workers do not publish for their sake."""
    quiet, loud = await a_stream(engine, conn), await a_stream(engine, conn)
    await quiet.say(3)
    wanted = {quiet.id: PROGRESS_ONLY, loud.id: None}
    async with reading(relay, wanted) as reader:
        await quiet.say(3)
        await loud.say(2)
        await reader.has(2)
        await reader.until(lambda: {m.data["id"] for m in reader.named("progress")} == set(wanted))
        watched = await conn.fetch(WATCHED, list(wanted))
        await close_job(conn, quiet)
        await close_job(conn, loud)
        await reader.over()
    assert {m.data["stream"] for m in reader.named("log")} == {loud.id}
    assert {m.data["stream"] for m in reader.named("end")} == set(wanted)
    assert [row["stream_id"] for row in watched] == [loud.id]
    again = await relay.subscribe({quiet.id: PROGRESS_ONLY})
    assert again.finished_at_start
    await again.close()


async def test_heartbeats_carry_the_cursor_and_data(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """A block with an id and no data moves no cursor in two of three browsers."""
    async with (
        Relay(engine, quick(heartbeat=0.05)) as relay,
        reading(relay, {stream.id: None}) as reader,
    ):
        await stream.say(2)
        await reader.has(2)
        await reader.until(lambda: [m for m in reader.named("hb") if m.id == "1.2"])


async def test_drained_readers_say_goodbye_and_new_ones_as_well(
    relay: Relay, stream: Stream
) -> None:
    """Come back later, not all at once."""
    async with reading(relay, {stream.id: None}) as reader:
        await reader.got("hello")
        relay.drain()
        await reader.over()
        assert reader.messages[-1].name == "bye"
        assert 500 <= (reader.browser.retry or 0) <= 5000
    async with reading(relay, {stream.id: None}) as late:
        await late.over()
        assert late.messages[-1].name == "bye"
    lines = await ndjson(await relay.subscribe({stream.id: None}, format="ndjson"))
    assert lines == [{"type": "bye"}]
    program = await relay.subscribe({stream.id: None})
    assert [event async for event in program.events()] == []


async def test_an_old_reader_is_asked_to_connect_again(engine: Engine, stream: Stream) -> None:
    """Its stream just ends, and its browser comes back with its cursor."""
    async with (
        Relay(engine, quick(max_age=0.05)) as relay,
        reading(relay, {stream.id: None}) as reader,
    ):
        await reader.over()
        assert not reader.named("end", "bye")


async def test_no_session_of_ours_has_a_transaction_open_while_it_listens(
    relay: Relay, stream: Stream, conn: asyncpg.Connection
) -> None:
    """One would stop the clean-up of every notification of the server (R52)."""
    async with reading(relay, {stream.id: None}) as reader:
        await listening(relay)
        await stream.say(20)
        await reader.has(20)
        async with asyncio.timeout(20):
            while rows := await conn.fetch(
                """SELECT state, xact_start FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name LIKE 'fanout%'
                      AND (xact_start IS NOT NULL OR state <> 'idle')"""
            ):
                assert not [row for row in rows if "in transaction" in (row["state"] or "")]
                await asyncio.sleep(0.01)


async def test_nobody_looks_nobody_listens(engine: Engine, stream: Stream) -> None:
    """LISTEN begins with the first reader, and ends with the last topic."""
    async with Relay(engine, quick(linger=0)) as relay:
        assert not relay.stats()["listening"]
        async with reading(relay, {stream.id: None}):
            await listening(relay)
        await until(lambda: relay._listener is None)


async def test_a_listener_that_is_killed_comes_back_and_catches_up(
    relay: Relay, stream: Stream, conn: asyncpg.Connection
) -> None:
    """What was said while it was deaf is read from the table."""
    async with reading(relay, {stream.id: None}) as reader:
        await listening(relay)
        for _ in range(3):
            await listening(relay)
            before = relay.stats()["reconnects"]
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'fanout relay' AND datname = current_database()"
            )
            await stream.say(10)
            await until(lambda: relay.stats()["reconnects"] != before)  # noqa: B023
        await reader.has(30)
        await listening(relay)
        assert reader.logged == list(range(1, 31))


async def test_a_listener_that_is_deaf_is_found_out(
    relay: Relay, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that LISTENs and gets nothing is replaced: an echo of its own did not come."""
    monkeypatch.setattr("fanout_streaming.listener.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("fanout_streaming.listener.ECHO_SECONDS", 0.2)
    async with reading(relay, {stream.id: None}) as reader:
        await listening(relay)
        listener = relay._listener
        assert listener is not None
        monkeypatch.setattr(listener, "_echoed", asyncio.Event())
        monkeypatch.setattr(listener._echoed, "set", lambda: None)
        await until(lambda: listener.reconnects >= 1)
        await stream.say(3)
        await reader.has(3)


async def test_a_busy_pool_costs_no_listener(
    engine: Engine, relay: Relay, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections of the pool are taken for a while: LISTEN has its own (R46)."""
    monkeypatch.setattr("fanout_streaming.listener.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("fanout_streaming.listener.ECHO_SECONDS", 0.5)
    async with reading(relay, {stream.id: None}) as reader:
        await listening(relay)
        pool = engine.events._pool
        async with pool.acquire(), pool.acquire(), pool.acquire(), pool.acquire():
            assert relay._listener is not None
            before = relay._listener._echo
            await until(lambda: relay._listener and relay._listener._echo != before)
            await asyncio.sleep(0.7)
        assert relay.stats()["reconnects"] == 0
        await stream.say(1)
        await reader.has(1)


async def test_it_works_slower_where_listen_does_not(
    server_dsn: str, database: str, conn: asyncpg.Connection
) -> None:
    """Behind a transaction pooler the relay looks at the table: none is lost, none is doubled."""
    async with (
        pooled(database) as (dsn, _),
        engine_on(dsn, transaction_pooler=True, migrate_on_start=False) as engine,
        Relay(engine, quick()) as relay,
    ):
        stream = await a_stream(engine, conn)
        async with reading(relay, {stream.id: None}) as reader:
            for _ in range(10):
                await stream.say(20)
            await reader.has(200)
            assert reader.logged == list(range(1, 201))
            assert not relay.stats()["listening"]
            await close_job(conn, stream)
            await reader.over()


async def test_one_event_is_read_whole(relay: Relay, stream: Stream) -> None:
    """The full text of a line that was cut; None for what never was."""
    await stream.store(
        b"\n".join([event_text("log", a_claim(), "é" * 9000, level="info"), stream.lines(1)]), 2
    )
    whole = await relay.event(stream.id, 1)
    assert whole is not None
    assert whole["message"] == "é" * 9000
    assert (await relay.event(stream.id, 2) or {})["n"] == 1
    for number in (0, -1, 3, 2**60):
        assert await relay.event(stream.id, number) is None


async def test_a_ring_is_cut_at_its_beginning_and_joins_once() -> None:
    """Readers that are equally far share the very same bytes."""
    topic = Topic(StreamHead(1, 1, 1, 0, closed=False))
    for number in range(1, 5001):
        topic.append(entry(number, 1, b'{"type":"log","message":"%s"}' % (b"x" * 200)))
    assert topic.ring_bytes <= 512 << 10
    assert topic.ring_first > 3000
    assert topic.after(10) is None
    first = topic.joined(topic.ring_first - 1)
    assert first is topic.joined(topic.ring_first - 1)
    assert [one.number for one in topic.after(4990) or ()] == list(range(4991, 5001))
    assert topic.after(5000) == []


def test_staged_is_the_real_store(engine: Engine) -> None:
    """The harness puts nothing between the relay and the statements but a place to act."""
    assert staged(engine).calls == []
