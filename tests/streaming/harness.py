"""Streams to test: jobs with events in the table, relays over them, and readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import asyncpg
from fanout_streaming import Relay, RelaySettings, Subscription

from fanout import Engine, Settings
from fanout.event_store import Appended, EventStore, NewBatch, StoredBatch, StreamHead
from fanout.events import envelopes
from fanout.publisher import channel_of
from tests.engine.running import until
from tests.factories import insert_job
from tests.streaming.wire import Browser, Message

PATIENCE = 20
"""Seconds after which a test that waits has failed."""


def quick(**values: Any) -> RelaySettings:
    """A relay that is quick in everything that is a setting."""
    return RelaySettings(
        **{
            "sweep_interval": 0.2,
            "poll_interval": 0.05,
            "progress_interval": 0.05,
            "detail_interval": 0.2,
            "end_after": 0.1,
            "linger": 5,
            **values,
        }
    )


def slow(**values: Any) -> RelaySettings:
    """A relay of which nothing happens by itself: only what the test does."""
    return RelaySettings(
        **{
            "sweep_interval": 600,
            "poll_interval": 600,
            "progress_interval": 600,
            "end_after": 600,
            "linger": 600,
            **values,
        }
    )


class Staged(EventStore):
    """An event store at whose answers a test can act: `after["heads"] = something`, once."""

    def __init__(self, store: EventStore) -> None:
        self._pool, self._sql = store._pool, store._sql
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.calls: list[str] = []

    async def _act(self, name: str) -> None:
        self.calls.append(name)
        if (act := self.after.pop(name, None)) is not None:
            await act()

    async def heads(self, stream_ids: Any, seen: Any = None) -> dict[int, StreamHead]:
        answer = await super().heads(stream_ids, seen)
        await self._act("heads")
        return answer

    async def replay(
        self, stream_id: int, first: int, last: int, most_bytes: int = 256 << 10
    ) -> list[StoredBatch]:
        answer = await super().replay(stream_id, first, last, most_bytes)
        await self._act("replay")
        return answer

    async def append(self, batches: Sequence[NewBatch], writer: uuid.UUID) -> list[Appended]:
        answer = await super().append(batches, writer)
        await self._act("append")
        return answer


class Stream:
    """A root job's stream, and a writer of it."""

    def __init__(self, engine: Engine, job_id: int) -> None:
        self.engine = engine
        self.id = job_id
        self.writer = uuid.uuid4()
        self._batches = count(1)
        self._said = count(1)

    def lines(self, number: int, **more: Any) -> bytes:
        """That many events, each with a running number of its own in `n`."""
        return b"\n".join(
            json.dumps({"type": "log", "job": self.id, "n": next(self._said), **more}).encode()
            for _ in range(number)
        )

    async def say(
        self, number: int = 1, *, hint: bool = True, inline: bool = True, **more: Any
    ) -> Appended:
        """Store so many events in one batch, and hint, as the publisher does."""
        return await self.store(self.lines(number, **more), number, hint=hint, inline=inline)

    async def store(
        self, body: bytes, number: int = 1, *, hint: bool = True, inline: bool = True
    ) -> Appended:
        """Store a batch."""
        events = self.engine.events
        batch = NewBatch(self.id, number, body, next(self._batches), frozenset())
        (done,) = await events.append([batch], self.writer)
        if hint:
            payloads = envelopes(
                self.id,
                done.generation,
                done.first_number,
                number,
                body,
                inline=inline,
                marks=(done.mark_before, done.mark),
            )
            await events.notify(channel_of(self.engine.settings), payloads)
        return done

    def envelope(
        self,
        first: int,
        number: int,
        *,
        inline: bool = True,
        marks: tuple[int | None, int | None] = (None, None),
        **more: Any,
    ) -> list[str]:
        """Hints of a batch that was never stored."""
        lines = self.lines(number, **more)
        return envelopes(self.id, 1, first, number, lines, inline=inline, marks=marks)

    def hint_of(self, done: Appended, number: int = 1) -> list[str]:
        """Hints that follow what was stored, with lines of their own."""
        marks = done.mark_before, done.mark
        return self.envelope(done.first_number, number, marks=marks)


class Standby:
    """A standby that has what a stream had when this was made, and gets nothing more."""

    def __init__(self, conn: asyncpg.Connection, stream_id: int, head: asyncpg.Record) -> None:
        self._conn = conn
        self._stream_id = stream_id
        self._head = head

    @classmethod
    async def of(cls, conn: asyncpg.Connection, stream: Stream) -> Standby:
        return cls(conn, stream.id, await head_of(conn, stream))

    async def promote(self) -> None:
        """Its state becomes the truth: what came later was never there."""
        async with self._conn.transaction():
            await self._conn.execute(
                "SELECT 1 FROM fanout.stream WHERE stream_id = $1 FOR UPDATE", self._stream_id
            )
            await self._conn.execute(
                "DELETE FROM fanout.event_batch WHERE stream_id = $1 AND first_number > $2",
                self._stream_id,
                self._head["last_number"],
            )
            await self._conn.execute(
                """UPDATE fanout.stream SET last_number = $2, generation = $3, closed = $4,
                          mark = $5 WHERE stream_id = $1""",
                self._stream_id,
                self._head["last_number"],
                self._head["generation"],
                self._head["closed"],
                self._head["mark"],
            )


async def head_of(conn: asyncpg.Connection, stream: Stream) -> asyncpg.Record:
    """A stream's head."""
    row = await conn.fetchrow("SELECT * FROM fanout.stream WHERE stream_id = $1", stream.id)
    assert row is not None
    return row


@contextlib.asynccontextmanager
async def engine_on(dsn: str, **settings: Any) -> AsyncIterator[Engine]:
    """An engine without handlers, started."""
    async with Engine(dsn, settings=Settings(**{"database_timeout": 20, **settings})) as engine:
        engine._events = Staged(engine.events)
        yield engine


def staged(engine: Engine) -> Staged:
    """The engine's event store, at which a test can act."""
    events = engine.events
    assert isinstance(events, Staged)
    return events


async def a_stream(
    engine: Engine, conn: asyncpg.Connection, status: str = "processing", **columns: Any
) -> Stream:
    """A root job in some state, with a stream without events."""
    stream = Stream(engine, await insert_job(conn, status, **columns))
    await engine.events.open_streams([stream.id])
    return stream


class Reader:
    """A subscription that is read, as a browser would."""

    def __init__(self, relay: Relay, subscription: Subscription) -> None:
        self.relay = relay
        self.subscription = subscription
        self.browser = Browser()
        self.messages: list[Message] = []
        self.is_over = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for chunk in self.subscription.chunks():
                self.messages += self.browser.feed(chunk)
        finally:
            self.is_over = True

    def named(self, *names: str) -> list[Message]:
        return [message for message in self.messages if message.name in names]

    @property
    def logged(self) -> list[int]:
        """The running numbers of the log lines that it got."""
        return [message.data["n"] for message in self.named("log")]

    async def has(self, number: int) -> None:
        """Wait until it has got so many log lines."""
        await self.until(lambda: len(self.named("log")) >= number)

    async def got(self, *names: str) -> Message:
        """Wait for an event of one of these names."""
        await self.until(lambda: self.named(*names))
        return self.named(*names)[0]

    async def over(self) -> None:
        """Wait until its stream has ended."""
        await self.until(lambda: self.is_over)
        await self._task

    async def until(self, condition: Callable[[], Any]) -> None:
        def check() -> Any:
            if self._task.done() and (error := self._task.exception()) is not None:
                raise error
            return condition()

        await until(check)

    async def close(self) -> None:
        await self.subscription.close()
        self._task.cancel()
        await asyncio.wait([self._task])


@contextlib.asynccontextmanager
async def reading(
    relay: Relay, streams: dict[int, str | None], **options: Any
) -> AsyncIterator[Reader]:
    """A reader of these streams."""
    reader = Reader(relay, await relay.subscribe(streams, **options))
    try:
        yield reader
    finally:
        await reader.close()


async def listening(relay: Relay) -> None:
    """Wait until hints arrive."""
    await until(lambda: relay.stats()["listening"])


async def ndjson(subscription: Subscription) -> list[Any]:
    """All lines of a reader that ends."""
    async with asyncio.timeout(PATIENCE):
        data = b"".join([chunk async for chunk in subscription.chunks()])
    await subscription.close()
    return [json.loads(line) for line in data.splitlines()]
