"""Fail-overs at random: standbys that lag are promoted under publishers and readers of two
processes. No line is lost, and after its last reset every reader has exactly what the table has.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from contextlib import AsyncExitStack

import asyncpg
import pytest
from fanout_streaming import Relay

from fanout.publisher import Publisher
from tests.engine.running import until
from tests.streaming.harness import Reader, Standby, Stream, a_stream, engine_on, head_of, quick
from tests.streaming.test_storm import Lossy


async def looked(publisher: Publisher) -> None:
    """Wait until it has looked for what it stored, and has sent again what was not there."""
    await until(lambda: not publisher._buffers)
    publisher._check_at = 0.0
    await publisher._look_for_kept()
    publisher._wake.set()
    await until(lambda: not publisher._buffers)


async def lines_of(stream: Stream) -> dict[int, int]:
    """Event number → what was said, as the table has it."""
    return {
        number: json.loads(line)["n"]
        for batch in await stream.engine.events.replay(stream.id, 1, 10**9, 10**9)
        for number, line in enumerate(batch.body.split(b"\n"), batch.first_number)
    }


async def speak(publishers: list[Publisher], stream: Stream, said: int, rnd: random.Random) -> int:
    """Say some lines, each by one of them, as `n` after `said`. Returns the last `n`."""
    for n in range(said + 1, said + rnd.randint(2, 60)):
        said = n
        rnd.choice(publishers).publish(stream.id, b'{"type":"log","n":%d}' % n, None)
        if rnd.random() < 0.2:
            await asyncio.sleep(rnd.uniform(0, 0.02))
    await asyncio.sleep(rnd.uniform(0, 0.1))
    return said


def told_since_reset(reader: Reader) -> dict[int, int]:
    """Event number → what was said, as the reader was told after its last reset."""
    told: dict[int, int] = {}
    for message in reader.messages:
        if message.name == "reset":
            told = {}
        elif message.name == "log":
            assert message.number not in told
            told[message.number] = message.data["n"]
    return told


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(3, 40))]
)
async def test_fail_overs_at_random_lose_no_line_and_mislead_no_reader(
    database: str, conn: asyncpg.Connection, seed: int
) -> None:
    """Publishers look for what they stored at times of their own, one NOTIFY of four is lost."""
    rnd = random.Random(seed)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(engine_on(database, pool_size=6)) for _ in range(2)
        ]
        for engine in engines:
            engine._events = Lossy(engine.events)
        stream = await a_stream(engines[0], conn)
        readers: list[Reader] = []
        for engine in engines:
            relay = await stack.enter_async_context(Relay(engine, quick()))
            for _ in range(2):
                subscription = await relay.subscribe({stream.id: None}, progress=False)
                readers.append(Reader(relay, subscription))
                stack.push_async_callback(readers[-1].close)
        publishers = [
            Publisher(engine.events, uuid.uuid4(), engine.settings)
            for engine in (*engines, engines[0])
        ]
        for publisher in publishers:
            publisher.start()
            stack.push_async_callback(publisher.stop)
        said = 0
        for _ in range(8):
            standby = await Standby.of(conn, stream)
            said = await speak(publishers, stream, said, rnd)
            if rnd.random() < 0.7:
                await standby.promote()
                for publisher in rnd.sample(publishers, rnd.randint(0, 3)):
                    publisher._check_at = 0.0
                    publisher._wake.set()
        for publisher in publishers:
            await looked(publisher)
        head = await head_of(conn, stream)
        stored = await lines_of(stream)
        assert list(stored) == list(range(1, head["last_number"] + 1))
        assert sorted(stored.values()) == list(range(1, said + 1))
        last = f"{head['generation']}.{head['last_number']}"
        for reader in readers:
            await reader.until(lambda: reader.browser.last_id == last)  # noqa: B023 - awaited here
            assert told_since_reset(reader) == stored
