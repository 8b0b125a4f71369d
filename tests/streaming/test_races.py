"""Two coroutines at one await: each test builds the interleaving that loses, doubles or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from fanout_streaming import Relay

from fanout import DatabaseUnavailable, Engine
from tests.engine.running import until
from tests.streaming.harness import (
    Stream,
    a_stream,
    listening,
    quick,
    reading,
    slow,
    staged,
)


@pytest.fixture
async def stream(engine: Engine, conn: asyncpg.Connection) -> Stream:
    return await a_stream(engine, conn)


async def generation_of(conn: asyncpg.Connection, stream: Stream) -> int:
    generation: int = await conn.fetchval(
        "SELECT generation FROM fanout.stream WHERE stream_id = $1", stream.id
    )
    return generation


async def test_a_head_read_before_a_hint_came_is_no_fail_over(
    engine: Engine, conn: asyncpg.Connection, still: Relay, stream: Stream
) -> None:
    """A head that is older than the hints that came meanwhile does not look like lost events."""
    await stream.say(3)
    async with reading(still, {stream.id: None}) as reader:
        await reader.has(3)
        topic = still._topics[stream.id]

        async def a_hint_comes() -> None:
            done = await stream.say(1, hint=False)
            still._on_hint(stream.hint_of(done)[0])

        staged(engine).after["heads"] = a_hint_comes
        still._catch_up(topic)
        await until(lambda: stream.id not in still._catching_up)
        await reader.has(4)
        assert not reader.named("reset")
        assert await generation_of(conn, stream) == 1


async def test_a_sweep_read_before_a_hint_came_is_no_fail_over(
    engine: Engine, conn: asyncpg.Connection, still: Relay, stream: Stream
) -> None:
    """The same for the look at all heads, which also does not count it as healed."""
    await stream.say(3)
    async with reading(still, {stream.id: None}) as reader:
        await reader.has(3)

        async def a_hint_comes() -> None:
            done = await stream.say(1, hint=False)
            still._on_hint(stream.hint_of(done)[0])

        staged(engine).after["heads"] = a_hint_comes
        await still._compare(listening=True)
        await until(lambda: stream.id not in still._catching_up)
        assert still.healed == 0
        assert still.catch_ups == 0
        assert await generation_of(conn, stream) == 1


async def test_a_hint_during_a_catch_up_is_looked_for_afterwards(
    engine: Engine, still: Relay, stream: Stream
) -> None:
    """What is announced after the last look at the head is not left to the sweep."""
    async with reading(still, {stream.id: None}) as reader:

        async def more_is_said() -> None:
            done = await stream.say(5, hint=False)
            still._on_hint(stream.envelope(done.first_number, 5, inline=False)[0])

        staged(engine).after["heads"] = more_is_said
        still._catch_up(still._topics[stream.id])
        await reader.has(5)


async def test_a_hint_while_a_topic_is_made_is_not_lost(
    engine: Engine, still: Relay, stream: Stream
) -> None:
    """Between the reading of the head and its arrival here a hint finds no topic yet."""

    async def a_hint_comes() -> None:
        done = await stream.say(2, hint=False)
        still._on_hint(stream.hint_of(done, 2)[0])

    staged(engine).after["heads"] = a_hint_comes
    async with reading(still, {stream.id: None}) as reader:
        await reader.has(2)


async def test_an_end_that_came_by_hint_is_not_taken_back_by_an_older_head(
    engine: Engine, conn: asyncpg.Connection, still: Relay
) -> None:
    """A reader at the end leaves at once, whatever head was being read meanwhile."""
    stream = await a_stream(engine, conn, "completed")
    await stream.say(1)
    async with reading(still, {stream.id: None}) as reader:
        await reader.has(1)

        async def the_end_comes() -> None:
            (done,) = await engine.events.end_streams([(stream.id, 900)], stream.writer)
            from fanout.events import envelopes  # noqa: PLC0415

            (payload,) = envelopes(
                stream.id,
                1,
                done.first_number,
                1,
                done.body,
                closed=True,
                marks=(done.mark_before, done.mark),
            )
            still._on_hint(payload)

        staged(engine).after["heads"] = the_end_comes
        still._catch_up(still._topics[stream.id])
        await reader.over()
        assert len(reader.named("end")) == 1


async def test_a_cursor_ahead_of_this_process_is_caught_up_not_clamped(
    still: Relay, stream: Stream
) -> None:
    """A reader who comes from a process that is further gets no event twice."""
    await stream.say(5)
    async with reading(still, {stream.id: None}) as first:
        await first.has(5)
        await stream.say(5, hint=False)
        async with reading(still, {stream.id: "1.8"}) as second:
            await second.has(2)
            assert second.logged == [9, 10]
            assert second.named("hello")[0].data["streams"][0]["gap"] is False


async def test_a_job_opened_again_is_not_over_for_who_comes_now(
    engine: Engine, conn: asyncpg.Connection, still: Relay
) -> None:
    """A stream that ended in memory, and goes on in the table, is no 204: that stops a browser for
    good.
    """
    stream = await a_stream(engine, conn, "failed")
    await stream.say(1)
    await engine.events.end_streams([(stream.id, 900)], stream.writer)
    async with reading(still, {stream.id: None}) as reader:
        await reader.over()
        assert await engine.store.retry_job(stream.id)
        again = await still.subscribe({stream.id: "1.2"})
        assert not again.finished_at_start
        await again.close()


async def test_a_topic_is_not_taken_away_from_a_reader_who_is_about_to_join(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A sweep between two of a reader's streams leaves the first one alone."""
    one, two = await a_stream(engine, conn), await a_stream(engine, conn)
    async with Relay(engine, slow(linger=0)) as relay:
        await (await relay.subscribe({one.id: None})).close()

        async def a_sweep() -> None:
            await relay._sweep()

        staged(engine).after["heads"] = a_sweep
        async with reading(relay, {one.id: None, two.id: None}) as reader:
            await one.say(1, hint=False)
            relay._catch_up(relay._topics[one.id])
            await reader.has(1)


async def test_a_topic_without_readers_goes_and_takes_its_bytes_along(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The ring is freed, also when a catch-up is under way, and LISTEN ends with the last topic."""
    stream = await a_stream(engine, conn)
    await stream.say(200)
    async with Relay(engine, slow(linger=0)) as relay:
        async with reading(relay, {stream.id: None}) as reader:
            await stream.say(200, hint=False)
            relay._catch_up(relay._topics[stream.id])
            await reader.has(400)
        assert relay.stats()["ring_bytes"]
        await until(lambda: not relay._catching_up)
        await relay._sweep()
        stats = relay.stats()
        assert (stats["topics"], stats["ring_bytes"], stats["readers"]) == (0, 0, 0)
        assert relay._listener is None


async def test_a_reader_that_comes_while_listening_ends_is_listened_for(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The last topic went, its LISTEN is being ended, and a new one is opened meanwhile."""
    stream = await a_stream(engine, conn)
    async with Relay(engine, slow(linger=0)) as relay:
        async with reading(relay, {stream.id: None}):
            await listening(relay)
        assert relay._listener is not None
        stop = relay._listener.stop

        async def stop_slowly() -> None:
            await stop()
            async with reading(relay, {stream.id: None}) as reader:
                readers.append(reader.subscription)

        readers: list[object] = []
        relay._listener.stop = stop_slowly  # type: ignore[method-assign]
        await relay._sweep()
        assert readers
        assert relay._listener is not None


async def test_a_replay_that_fails_is_tried_again(
    engine: Engine, conn: asyncpg.Connection, relay: Relay
) -> None:
    """The database is away for a moment: the reader waits and goes on, nothing is lost."""
    stream = await a_stream(engine, conn)
    await stream.say(50)

    async def away() -> None:
        raise DatabaseUnavailable("it is away")

    staged(engine).after["replay"] = away
    async with reading(relay, {stream.id: None}) as reader:
        await reader.has(50)
        assert reader.logged == list(range(1, 51))


async def test_a_goodbye_does_not_wait_for_a_replay(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A process that stops leaves a reader whose page of the table does not come."""
    stream = await a_stream(engine, conn)
    await stream.say(50)
    async with Relay(engine, slow()) as relay:

        async def never() -> None:
            await asyncio.Event().wait()

        staged(engine).after["replay"] = never
        async with reading(relay, {stream.id: None}) as reader:
            await until(lambda: "replay" in staged(engine).calls)
            relay.drain()
            await reader.over()
            assert reader.messages[-1].name == "bye"


async def test_two_who_read_the_same_page_ask_once(
    engine: Engine, conn: asyncpg.Connection, still: Relay
) -> None:
    """All readers of a process that was restarted come back at once, with the same wish."""
    stream = await a_stream(engine, conn)
    await stream.say(200)
    subscriptions = [await still.subscribe({stream.id: None}) for _ in range(20)]

    async def read(chunks: AsyncIterator[bytes]) -> int:
        await anext(chunks)  # the hello
        return (await anext(chunks)).count(b"event: log")

    counts = await asyncio.gather(*(read(one.chunks()) for one in subscriptions))
    assert counts == [200] * 20
    assert staged(engine).calls.count("replay") == 1
    for one in subscriptions:
        await one.close()


async def test_who_leaves_a_page_does_not_take_it_from_others(
    engine: Engine, conn: asyncpg.Connection, still: Relay
) -> None:
    """A task that several wait for is not cancelled with one of them."""
    stream = await a_stream(engine, conn)
    await stream.say(10)
    held = asyncio.Event()

    async def wait() -> None:
        await held.wait()

    staged(engine).after["replay"] = wait
    async with reading(still, {stream.id: None}) as stays:
        async with reading(still, {stream.id: None}):
            await until(lambda: "replay" in staged(engine).calls)
        held.set()
        await stays.has(10)


async def test_all_of_it_pruned_before_a_slow_reader_came_to_it(
    engine: Engine, conn: asyncpg.Connection, still: Relay
) -> None:
    """A reader whose next events are gone, with nothing after them, is told, and gets the end."""
    stream = await a_stream(engine, conn, "completed")
    await stream.say(20)
    await engine.events.end_streams([(stream.id, 900)], stream.writer)
    subscription = await still.subscribe({stream.id: "1.3"})
    await conn.execute("DELETE FROM fanout.event_batch WHERE stream_id = $1", stream.id)
    async with asyncio.timeout(20):
        chunks = [chunk async for chunk in subscription.chunks()]
    assert b"event: reset" in b"".join(chunks)
    await subscription.close()


async def test_an_engine_that_stops_first_ends_no_reader_with_an_error(
    database: str, conn: asyncpg.Connection
) -> None:
    """Whoever stops in the wrong order gets a goodbye all the same."""
    from tests.streaming.harness import engine_on  # noqa: PLC0415

    async with engine_on(database) as engine:
        stream = await a_stream(engine, conn)
        await stream.say(10)
        relay = Relay(engine, quick())
        await relay.start()
        async with reading(relay, {stream.id: None}) as reader:
            await reader.has(10)
            await engine.stop()
            await relay.stop()
            await reader.over()
            assert reader.messages[-1].name == "bye"


async def test_started_and_stopped_twice_is_fine(engine: Engine, conn: asyncpg.Connection) -> None:
    """And a relay that is started again serves again."""
    stream = await a_stream(engine, conn)
    relay = Relay(engine, quick())
    await relay.start()
    await relay.start()
    await relay.stop()
    await relay.stop()
    await relay.start()
    async with reading(relay, {stream.id: None}) as reader:
        await stream.say(1)
        await reader.has(1)
    await relay.stop()
    assert not [task for task in asyncio.all_tasks() if "relay" in task.get_name()]
