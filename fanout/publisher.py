"""Publishing events: handlers put them into a bounded buffer and go on; batches form by themselves.

A flush commits the rows, THEN hints in a statement of its own. Nothing here ever fails, blocks or
slows a job: a full buffer drops the oldest log lines and says so, a database that is away costs
lines, not children.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

import asyncpg

from .errors import DatabaseUnavailable
from .event_store import NewBatch
from .events import dropped_event, envelope

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from .event_store import Appended, EventStore
    from .settings import Settings

__all__ = ["Publisher", "channel_of"]

_log = logging.getLogger("fanout.publisher")

WATCHED_FLUSH_SECONDS: Final = 0.05
UNWATCHED_FLUSH_SECONDS: Final = 1.0
MAX_BATCH_EVENTS: Final = 200
MAX_BATCH_BYTES: Final = 64 << 10
MAX_STREAM_BYTES: Final = 1 << 20
MAX_BUFFER_BYTES: Final = 8 << 20
MAX_STREAMS_A_FLUSH: Final = 64
END_DELAY_SECONDS: Final = 0.25
"""How long the end of a stream waits for the last lines of other processes."""
KNOWN_STREAMS: Final = 10_000


def channel_of(settings: Settings) -> str:
    """The channel of a schema's events; at most 44 bytes, of 63 that PostgreSQL allows."""
    return f"{settings.schema_name}_sse"


@dataclass(slots=True)
class _Line:
    text: bytes
    claim: tuple[int, int] | None
    keeps: bool
    """Lifecycle: never dropped."""
    latest_of: int | None = None
    """Progress of this job: a newer one takes its place."""


@dataclass(slots=True)
class _Buffer:
    """What one stream has to say."""

    lines: deque[_Line] = field(default_factory=deque)
    size: int = 0
    dropped: int = 0
    due_at: float = 0.0
    sending: NewBatch | None = None


class Publisher:
    """The one publisher of a process. `publish` may be called from the event loop's thread only."""

    def __init__(self, store: EventStore, writer: UUID, settings: Settings) -> None:
        self._store = store
        self._writer = writer
        self._settings = settings
        self._channel = channel_of(settings)
        self._buffers: dict[int, _Buffer] = {}
        self._size = 0
        self._known: dict[int, bool] = {}  # streams that have a head: does anybody watch?
        self._batches = count(1)
        self._ending: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.published = 0
        self.dropped = 0
        """Lines that a full buffer lost, or that came after the end of their stream."""
        self.hints_dropped = 0

    def start(self) -> None:
        """Begin; again is fine."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="fanout publisher")

    async def stop(self, seconds: float = 2.0) -> None:
        """Send what is left, for `seconds` at most, and end. Again is fine."""
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping = True
        self._wake.set()
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.wait([task])

    def publish(
        self,
        stream_id: int,
        text: bytes,
        claim: tuple[int, int] | None,
        *,
        lifecycle: bool = False,
        latest_of: int | None = None,
    ) -> None:
        """Have one event (a JSON text without a line break) stored and sent.

        Returns at once, never raises.
        """
        buffer = self._buffers.get(stream_id)
        if buffer is None:
            buffer = self._buffers[stream_id] = _Buffer()
        if latest_of is not None and self._replace_progress(buffer, text, latest_of):
            return
        if not buffer.lines:
            buffer.due_at = time.monotonic() + self._pause(stream_id)
            self._wake.set()
        buffer.lines.append(_Line(text, claim, lifecycle, latest_of))
        buffer.size += len(text)
        self._size += len(text)
        self.published += 1
        if len(buffer.lines) >= MAX_BATCH_EVENTS or buffer.size >= MAX_BATCH_BYTES:
            buffer.due_at = 0.0
            self._wake.set()
        if buffer.size > MAX_STREAM_BYTES or self._size > MAX_BUFFER_BYTES:
            self._drop_oldest(buffer)

    def end(self, stream_ids: Collection[int]) -> None:
        """The root jobs of these streams have closed: send the end, after the last lines."""
        due_at = time.monotonic() + END_DELAY_SECONDS
        for stream_id in stream_ids:
            self._ending[stream_id] = due_at
            if buffer := self._buffers.get(stream_id):
                buffer.due_at = 0.0
        self._wake.set()

    def _pause(self, stream_id: int) -> float:
        """Seconds until a first line goes out: at once where the end waits for it, seldom where
        nobody looks.
        """
        if stream_id in self._ending:
            return 0.0
        watched = self._known.get(stream_id, True)
        return WATCHED_FLUSH_SECONDS if watched else UNWATCHED_FLUSH_SECONDS

    def _replace_progress(self, buffer: _Buffer, text: bytes, job_id: int) -> bool:
        for line in reversed(buffer.lines):
            if line.latest_of == job_id:
                buffer.size += len(text) - len(line.text)
                self._size += len(text) - len(line.text)
                line.text = text
                return True
        return False

    def _drop_oldest(self, buffer: _Buffer) -> None:
        """Make room for one batch by losing the oldest lines that may be lost."""
        kept: deque[_Line] = deque()
        target = buffer.size - MAX_BATCH_BYTES
        for line in buffer.lines:
            if line.keeps or buffer.size <= target:
                kept.append(line)
            else:
                buffer.size -= len(line.text)
                self._size -= len(line.text)
                buffer.dropped += 1
                self.dropped += 1
        buffer.lines = kept

    async def _run(self) -> None:
        tries = 0
        while True:
            try:
                await self._wait()
                await self._flush()
                await self._end_due()
                tries = 0
            except DatabaseUnavailable as error:
                if tries == 0:
                    _log.warning("events wait for the database: %s", error)
                tries += 1
                if self._stopping:
                    return
                await asyncio.sleep(random.uniform(0.5, 1) * min(5.0, 0.1 * 2.0 ** min(tries, 10)))
            except Exception:  # noqa: BLE001 - logged; lines may be lost, the publisher not
                _log.exception("a batch of events was lost")
                self._forget_sending()
            if self._stopping and not self._buffers and not self._ending:
                return

    async def _wait(self) -> None:
        """Until something is due."""
        if self._stopping:
            return
        dues = [0.0 if buffer.sending else buffer.due_at for buffer in self._buffers.values()]
        dues += self._ending.values()
        self._wake.clear()
        pause = min(dues) - time.monotonic() if dues else None
        if pause is not None and pause <= 0:
            return
        try:
            async with asyncio.timeout(pause):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _flush(self) -> None:
        now = time.monotonic()
        due = [
            stream_id
            for stream_id, buffer in self._buffers.items()
            if buffer.sending or buffer.due_at <= now or self._stopping
        ][:MAX_STREAMS_A_FLUSH]
        if not due:
            return
        batches = [self._batch(stream_id) for stream_id in due]
        await self._know([batch.stream_id for batch in batches])
        appended = {
            done.stream_id: done for done in await self._store.append(batches, self._writer)
        }
        hints: list[str] = []
        for batch in batches:
            done = appended.get(batch.stream_id)
            self._sent(batch, done)
            if done is not None and done.watched:
                hints.append(
                    envelope(
                        batch.stream_id,
                        done.generation,
                        done.first_number,
                        batch.count,
                        batch.body,
                        late=done.late,
                        inline=self._settings.inline_events,
                    )
                )
        await self._hint(hints)

    def _batch(self, stream_id: int) -> NewBatch:
        """The batch to send: the one whose answer was lost, or the next lines."""
        buffer = self._buffers[stream_id]
        if buffer.sending is not None:
            return buffer.sending
        texts: list[bytes] = []
        claims: set[tuple[int, int]] = set()
        size = 0
        if buffer.dropped:
            texts.append(dropped_event(buffer.dropped))
            buffer.dropped = 0
        while buffer.lines and len(texts) < MAX_BATCH_EVENTS and size < MAX_BATCH_BYTES:
            line = buffer.lines.popleft()
            texts.append(line.text)
            size += len(line.text)
            if line.claim is not None:
                claims.add(line.claim)
        buffer.size -= size
        self._size -= size
        buffer.sending = NewBatch(
            stream_id, len(texts), b"\n".join(texts), next(self._batches), frozenset(claims)
        )
        return buffer.sending

    def _sent(self, batch: NewBatch, done: Appended | None) -> None:
        buffer = self._buffers[batch.stream_id]
        buffer.sending = None
        if done is None:  # the stream has ended: nobody can be told
            self.dropped += batch.count
        else:
            self._known[batch.stream_id] = done.watched
        if not buffer.lines:
            del self._buffers[batch.stream_id]
            return
        full = len(buffer.lines) >= MAX_BATCH_EVENTS or buffer.size >= MAX_BATCH_BYTES
        buffer.due_at = time.monotonic() + (0.0 if full else self._pause(batch.stream_id))

    async def _know(self, stream_ids: Collection[int]) -> None:
        new = [stream_id for stream_id in stream_ids if stream_id not in self._known]
        if not new:
            return
        await self._store.open_streams(new)
        for stream_id in new:
            self._known[stream_id] = True
        while len(self._known) > KNOWN_STREAMS:
            del self._known[next(iter(self._known))]

    async def _end_due(self) -> None:
        now = time.monotonic()
        due = [
            stream_id
            for stream_id, due_at in self._ending.items()
            if (due_at <= now or self._stopping) and stream_id not in self._buffers
        ]
        if not due:
            return
        ended = await self._store.end_streams(
            [(stream_id, next(self._batches)) for stream_id in due], self._writer
        )
        for stream_id in due:
            self._ending.pop(stream_id, None)
            self._known.pop(stream_id, None)
        await self._hint(
            [
                envelope(
                    done.stream_id,
                    done.generation,
                    done.first_number,
                    1,
                    done.body,
                    closed=True,
                    inline=self._settings.inline_events,
                )
                for done in ended
                if done.watched
            ]
        )

    async def _hint(self, payloads: list[str]) -> None:
        """Lost hints are healed by the watchers, who compare heads every few seconds."""
        if not payloads:
            return
        try:
            await self._store.notify(self._channel, payloads)
        except (DatabaseUnavailable, asyncpg.PostgresError) as error:
            self.hints_dropped += len(payloads)
            _log.debug("hints were not sent: %s", error)

    def _forget_sending(self) -> None:
        for stream_id, buffer in list(self._buffers.items()):
            if buffer.sending is not None:
                self.dropped += buffer.sending.count
                buffer.sending = None
                if not buffer.lines:
                    del self._buffers[stream_id]
