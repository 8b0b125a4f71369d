"""Readers that keep up are written to at once, and those that do not have their task for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
import pytest
from fanout_streaming import Relay

from fanout import Engine
from tests.engine.running import until
from tests.streaming.harness import Stream, a_stream, listening


class Taker:
    """The two ways that bytes reach a client, in the order in which they came."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.directly = 0
        self.body = b""

    def write(self, chunk: bytes) -> bool:
        if self.takes:
            self.directly += 1
            self.body += chunk
        return self.takes

    def has(self, number: int) -> bool:
        return self.numbers[-1:] == [number]

    @property
    def numbers(self) -> list[int]:
        ids = [part.split(b"\n")[0] for part in self.body.split(b"id: 1.")[1:]]
        return [
            int(one)
            for one, part in zip(ids, self.body.split(b"id: 1.")[1:], strict=True)
            if b"event: log" in part
        ]


@pytest.fixture
async def stream(engine: Engine, conn: asyncpg.Connection) -> Stream:
    return await a_stream(engine, conn)


@asynccontextmanager
async def taking(relay: Relay, stream: Stream, taker: Taker) -> AsyncIterator[asyncio.Task[None]]:
    """A response that prefers to write at once, as the API's does."""
    subscription = await relay.subscribe({stream.id: None})
    subscription.write_by(taker.write)

    async def run() -> None:
        async for chunk in subscription.chunks():
            taker.body += chunk

    task = asyncio.create_task(run())
    try:
        yield task
    finally:
        await subscription.close()
        await task


async def test_who_keeps_up_is_written_to_at_once(relay: Relay, stream: Stream) -> None:
    """No task wakes for live events; the order is that of the stream."""
    taker = Taker()
    async with taking(relay, stream, taker):
        await listening(relay)
        for _ in range(5):
            await stream.say(3)
        await until(lambda: taker.numbers == list(range(1, 16)))
        assert taker.directly > 0


async def test_what_cannot_be_written_at_once_comes_in_its_place(
    relay: Relay, stream: Stream
) -> None:
    """A full buffer loses nothing, doubles nothing, and what follows stays behind it."""
    taker = Taker()
    async with taking(relay, stream, taker):
        await listening(relay)
        for number in range(20):
            taker.takes = number % 3 != 1
            await stream.say(2)
            await until(partial(taker.has, 2 * number + 2))
        assert taker.numbers == list(range(1, 41))
        assert taker.directly > 0


async def test_a_reader_that_takes_nothing_at_once_is_told_of_the_stop(
    relay: Relay, stream: Stream
) -> None:
    """The goodbye comes after the events, by its task."""
    taker = Taker(takes=False)
    async with taking(relay, stream, taker) as task:
        await listening(relay)
        await stream.say(3)
        await until(lambda: taker.numbers == [1, 2, 3])
        relay.drain()
        await task
    assert b"event: bye" in taker.body
    assert taker.directly == 0
