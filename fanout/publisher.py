"""Publishing events: handlers put them into a bounded buffer and go on; batches form by themselves.

A flush commits the rows, THEN hints in a statement of its own. Nothing here ever fails, blocks or
slows a job: a full buffer drops the oldest log lines and says so, a database that is away costs
lines, not children.

What was stored of late is kept for some seconds: a standby that was behind, and was promoted, has
lost it. It is looked for, and sent again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Final

import asyncpg

from .errors import DatabaseUnavailable
from .event_store import NewBatch
from .events import dropped_event, envelopes
from .pool import described

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from .event_store import Appended, EventStore
    from .settings import Settings

__all__ = ["Publisher", "channel_of"]

_log = logging.getLogger("fanout.publisher")

WATCHED_FLUSH_SECONDS: Final = 0.05
"""Between two flushes of a stream: the first line after a silence goes out at once."""
LEAST_FLUSH_SECONDS: Final = 0.01
"""Between two flushes of a process whose watched streams all say little."""
UNWATCHED_FLUSH_SECONDS: Final = 1.0
MAX_BATCH_EVENTS: Final = 200
MAX_BATCH_BYTES: Final = 64 << 10
MAX_STREAM_BYTES: Final = 1 << 20
MAX_BUFFER_BYTES: Final = 8 << 20
MAX_STREAMS_A_FLUSH: Final = 64
MAX_ENDS_A_FLUSH: Final = 500
WATCHED_END_SECONDS: Final = 0.25
"""How long the end of a stream waits for the last lines of other processes."""
UNWATCHED_END_SECONDS: Final = UNWATCHED_FLUSH_SECONDS + 0.5
"""The same where other processes may think that nobody looks, and flush seldom."""
LONGEST_END_SECONDS: Final = 2.0
"""How long it waits beyond that for lines that never stop: a handler that was told to, and does
not.
"""
KNOWN_STREAMS: Final = 10_000
KEPT_SECONDS: Final = 10.0
"""How long what was stored is kept: longer than a standby that is fit for promotion is behind."""
KEPT_BYTES: Final = 4 << 20
CHECK_SECONDS: Final = 2.0
"""Between two looks whether what is kept is still stored."""
TRIES: Final = 5
"""For errors that are neither the database's absence nor the lines' fault, like a lost grant."""
SECONDS_BETWEEN_REPORTS: Final = 60.0


def channel_of(settings: Settings) -> str:
    """The channel of a schema's events; at most 44 bytes, of 63 that PostgreSQL allows."""
    return f"{settings.schema_name}_sse"


@dataclass(slots=True)
class _Line:
    text: bytes
    claim: tuple[int, int] | None
    """(job id, attempt) of who speaks."""
    keeps: bool
    """Lifecycle, and the latest progress of a job: never dropped."""
    latest_of: int | None = None
    """Progress of this job: a newer one takes its place."""


@dataclass(slots=True)
class _Known:
    """A stream that has a head."""

    watched_since: float | None
    """time.monotonic(); None: nobody watches."""
    flushed_at: float = float("-inf")


@dataclass(slots=True)
class _Kept:
    """A batch that was stored, and where."""

    batch: NewBatch
    generation: int
    first_number: int
    at: float

    @property
    def size(self) -> int:
        """Bytes that it holds, roughly: many small ones are to be looked for one by one."""
        return len(self.batch.body) + 500


@dataclass(slots=True)
class _Buffer:
    """What one stream has to say."""

    lines: deque[_Line] = field(default_factory=deque)
    latest: dict[int, _Line] = field(default_factory=dict)
    """Job id → its progress among the lines."""
    size: int = 0
    loose: int = 0
    """Bytes of lines that may be dropped."""
    dropped: int = 0
    due_at: float = 0.0
    sending: NewBatch | None = None
    again: deque[_Kept] = field(default_factory=deque)
    """Stored once, and lost in a fail-over: they go first."""

    @property
    def is_empty(self) -> bool:
        return not (self.lines or self.dropped or self.has_batch)

    @property
    def has_batch(self) -> bool:
        """Is there a batch that is only to be sent?"""
        return bool(self.sending or self.again)

    @property
    def is_full(self) -> bool:
        """Is there enough for a batch?"""
        return len(self.lines) >= MAX_BATCH_EVENTS or self.size >= MAX_BATCH_BYTES


class Publisher:
    """The one publisher of a process. `publish` may be called from the event loop's thread only."""

    def __init__(self, store: EventStore, writer: UUID, settings: Settings) -> None:
        self._store = store
        self._writer = writer
        self._settings = settings
        self._channel = channel_of(settings)
        self._buffers: dict[int, _Buffer] = {}
        self._loose = 0
        self._known: dict[int, _Known] = {}
        self._flushed_at = float("-inf")
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._check_at = 0.0
        self._batches = count(1)
        # Two queues by due time, for one look at their beginnings must do.
        self._ending: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self._wake = asyncio.Event()
        self._wakes_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._reported_at = float("-inf")
        self.published = 0
        self.dropped = 0
        """Lines that a full buffer lost, or that came after the end of their stream."""
        self.hints_dropped = 0
        self.sent_again = 0
        """Batches that a fail-over had lost."""

    def start(self) -> None:
        """Begin; again is fine."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.create_task(self._run(), name="fanout publisher")

    async def stop(self, seconds: float = 2.0) -> None:
        """Send what is left, for `seconds` at most, and end. Again is fine.

        An end that waits for other processes' lines is left to whoever watches.
        """
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
        if latest_of is not None and (line := buffer.latest.get(latest_of)) is not None:
            buffer.size += len(text) - len(line.text)
            line.text, line.claim = text, claim
            return
        if not buffer.lines:
            buffer.due_at = self._due_at(stream_id)
        line = _Line(text, claim, lifecycle or latest_of is not None, latest_of)
        buffer.lines.append(line)
        buffer.size += len(text)
        self.published += 1
        if latest_of is not None:
            buffer.latest[latest_of] = line
        if not line.keeps:
            buffer.loose += len(text)
            self._loose += len(text)
            if buffer.loose > MAX_STREAM_BYTES:
                self._drop_oldest(buffer)
            elif self._loose > MAX_BUFFER_BYTES:
                self._drop_oldest(max(self._buffers.values(), key=lambda one: one.loose))
        if buffer.is_full:
            buffer.due_at = 0.0
        if buffer.due_at < self._wakes_at:
            self._wake.set()

    def end(self, stream_ids: Collection[int]) -> None:
        """The root jobs of these streams have closed: send the end, after the last lines."""
        now = time.monotonic()
        for stream_id in stream_ids:
            known = self._known.get(stream_id)
            since = None if known is None else known.watched_since
            quick = since is not None and now - since > UNWATCHED_END_SECONDS
            due_at = now + (WATCHED_END_SECONDS if quick else UNWATCHED_END_SECONDS)
            self._ending[quick].setdefault(stream_id, due_at)
            if due_at < self._wakes_at:
                self._wake.set()
            buffer = self._buffers.get(stream_id)
            if buffer is not None and buffer.due_at > 0:
                buffer.due_at = 0.0
                self._wake.set()

    def _due_at(self, stream_id: int) -> float:
        """When a first line goes out: at once after a silence, or where the end waits for it;
        seldom where nobody looks.
        """
        if stream_id in self._ending[0] or stream_id in self._ending[1]:
            return 0.0
        known = self._known.get(stream_id)
        if known is None:
            return self._flushed_at + WATCHED_FLUSH_SECONDS
        if known.watched_since is None:
            return time.monotonic() + UNWATCHED_FLUSH_SECONDS
        return max(known.flushed_at + WATCHED_FLUSH_SECONDS, self._flushed_at + LEAST_FLUSH_SECONDS)

    def _drop_oldest(self, buffer: _Buffer) -> None:
        """Make room for one batch by losing the oldest lines that may be lost."""
        kept: deque[_Line] = deque()
        target = buffer.loose - MAX_BATCH_BYTES
        while buffer.lines and buffer.loose > target:
            line = buffer.lines.popleft()
            if line.keeps:
                kept.append(line)
            else:
                buffer.size -= len(line.text)
                buffer.loose -= len(line.text)
                self._loose -= len(line.text)
                buffer.dropped += 1
                self.dropped += 1
        buffer.lines.extendleft(reversed(kept))

    # -- the loop --------------------------------------------------------------------------------

    async def _run(self) -> None:
        tries = 0
        while True:
            try:
                await self._wait()
                await self._look_for_kept()
                await self._flush(alone=tries > TRIES)
                await self._end_due()
                tries = 0
            except DatabaseUnavailable as error:
                if tries == 0:
                    _log.warning("events wait for the database: %s", error)
                tries = min(tries + 1, TRIES)
                self._check_at = 0.0  # perhaps another server takes its place
                if self._stopping:
                    return
                await asyncio.sleep(_backoff(tries))
            except Exception as error:  # noqa: BLE001 - reported; lines may be lost, the publisher not
                self._report(error)
                tries += 1
                await asyncio.sleep(_backoff(tries))
            if self._stopping and not self._buffers:
                return

    async def _wait(self) -> None:
        """Until something is due."""
        self._wake.clear()
        if self._stopping:
            return
        due_at = min(
            (0.0 if buffer.has_batch else buffer.due_at for buffer in self._buffers.values()),
            default=float("inf"),
        )
        if self._kept:
            due_at = min(due_at, self._check_at)
        for ending in self._ending:
            if ending:
                due_at = min(due_at, next(iter(ending.values())))
        pause = due_at - time.monotonic()
        if pause <= 0:
            return
        self._wakes_at = due_at
        try:
            async with asyncio.timeout(None if due_at == float("inf") else pause):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._wakes_at = float("-inf")

    async def _flush(self, *, alone: bool) -> None:
        now = time.monotonic()
        due = [
            stream_id
            for stream_id, buffer in self._buffers.items()
            if buffer.has_batch or buffer.due_at <= now or self._stopping
        ][:MAX_STREAMS_A_FLUSH]
        if not due:
            return
        batches = [self._batch(stream_id) for stream_id in due]
        if not alone:
            await self._send(batches)
            return
        for batch in batches:  # the others must not be lost with the one that is refused
            try:
                await self._send([batch])
            except DatabaseUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - reported, and this batch is given up
                self._report(error)
                self._sent(batch, None)

    async def _send(self, batches: Sequence[NewBatch]) -> None:
        await self._know([batch.stream_id for batch in batches])
        appended = {
            done.stream_id: done for done in await self._store.append(batches, self._writer)
        }
        hints: list[str] = []
        self._flushed_at = time.monotonic()
        for batch in batches:
            done = appended.get(batch.stream_id)
            if done is not None:
                done = await self._renumbered(batch, done)
            self._sent(batch, done)
            if done is not None and done.watched:
                hints += envelopes(
                    batch.stream_id,
                    done.generation,
                    done.first_number,
                    batch.count,
                    batch.body,
                    late=done.late,
                    inline=self._settings.inline_events,
                    marks=(done.mark_before, done.mark),
                )
        await self._hint(hints)

    async def _renumbered(self, batch: NewBatch, done: Appended) -> Appended:
        """If the batch was stored before, and other events stand under its numbers now, who has
        seen them there must know.
        """
        again = self._buffers[batch.stream_id].again
        kept = again[0] if again and again[0].batch is batch else None
        if (
            kept is None
            or done.generation != kept.generation
            or done.first_number == kept.first_number
        ):
            return done
        generation = await self._store.renew_generation(done.stream_id, done.generation)
        return done if generation is None else replace(done, generation=generation)

    def _batch(self, stream_id: int) -> NewBatch:
        """The batch to send: one that was lost, one whose answer was lost, or the next lines."""
        buffer = self._buffers[stream_id]
        if buffer.again:
            return buffer.again[0].batch
        if buffer.sending is not None:
            return buffer.sending
        texts: list[bytes] = []
        claims: dict[int, int] = {}
        size = 0
        if buffer.dropped:
            texts.append(dropped_event(buffer.dropped))
            buffer.dropped = 0
        while buffer.lines and len(texts) < MAX_BATCH_EVENTS and size < MAX_BATCH_BYTES:
            line = buffer.lines[0]
            if line.claim is not None:
                job_id, attempt = line.claim
                if claims.setdefault(job_id, attempt) != attempt:
                    break  # a batch says of jobs, not of lines, which came late
            buffer.lines.popleft()
            texts.append(line.text)
            size += len(line.text)
            if line.latest_of is not None:
                del buffer.latest[line.latest_of]
            if not line.keeps:
                buffer.loose -= len(line.text)
                self._loose -= len(line.text)
        buffer.size -= size
        buffer.sending = NewBatch(
            stream_id,
            len(texts),
            b"\n".join(texts),
            next(self._batches),
            frozenset(claims.items()),
        )
        return buffer.sending

    def _sent(self, batch: NewBatch, done: Appended | None) -> None:
        """The batch was stored, or refused."""
        buffer = self._buffers[batch.stream_id]
        if buffer.again and buffer.again[0].batch is batch:
            buffer.again.popleft()
            self.sent_again += done is not None
        else:
            buffer.sending = None
        if done is None:  # the stream has ended: nobody can be told
            self.dropped += batch.count
        else:
            self._keep(_Kept(batch, done.generation, done.first_number, self._flushed_at))
        if done is not None and (known := self._known.get(batch.stream_id)) is not None:
            known.flushed_at = self._flushed_at
            if not done.watched:
                known.watched_since = None
            elif known.watched_since is None:
                known.watched_since = self._flushed_at
        if buffer.is_empty:
            del self._buffers[batch.stream_id]
            return
        buffer.due_at = 0.0 if buffer.is_full else self._due_at(batch.stream_id)

    async def _know(self, stream_ids: Collection[int]) -> None:
        new = [stream_id for stream_id in stream_ids if stream_id not in self._known]
        if not new:
            return
        await self._store.open_streams(new)
        now = time.monotonic()
        for stream_id in new:
            self._known[stream_id] = _Known(watched_since=now)
        while len(self._known) > KNOWN_STREAMS:
            del self._known[next(iter(self._known))]

    # -- fail-over -------------------------------------------------------------------------------

    def _keep(self, kept: _Kept) -> None:
        if not self._kept:
            self._check_at = kept.at + CHECK_SECONDS
        self._kept.append(kept)
        self._kept_bytes += kept.size
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popleft().size

    async def _look_for_kept(self) -> None:
        """Is what was stored of late still there? All of it: what a fail-over lost may lie between
        what it left and what was stored since.
        """
        now = time.monotonic()
        if not self._kept or now < self._check_at or self._stopping:
            return
        self._check_at = now + CHECK_SECONDS
        lost = await self._store.unstored(
            [(kept.batch.stream_id, kept.batch.batch, kept.first_number) for kept in self._kept],
            self._writer,
        )
        if lost:
            _log.error("a fail-over lost %d batches of events, they are sent again", len(lost))
            found, self._kept, self._kept_bytes = self._kept, deque(), 0
            for kept in found:
                if kept.batch.batch not in lost:
                    self._keep(kept)
                    continue
                stream_id = kept.batch.stream_id
                self._buffers.setdefault(stream_id, _Buffer()).again.append(kept)
                self._known.pop(stream_id, None)  # its head may be lost as well
        while self._kept and now - self._kept[0].at > KEPT_SECONDS:
            self._kept_bytes -= self._kept.popleft().size

    async def _end_due(self) -> None:
        now = time.monotonic()
        due: list[int] = []
        for ending in self._ending:
            for stream_id, due_at in ending.items():
                if due_at > now or len(due) >= MAX_ENDS_A_FLUSH:
                    break
                if stream_id not in self._buffers or now - due_at > LONGEST_END_SECONDS:
                    due.append(stream_id)
        if not due:
            return
        try:
            ended = await self._store.end_streams(
                [(stream_id, next(self._batches)) for stream_id in sorted(set(due))], self._writer
            )
        except DatabaseUnavailable:
            raise
        except Exception:
            self._forget(due)  # whoever watches will end them
            raise
        self._forget(due)
        hints: list[str] = []
        for done in ended:
            if done.watched:
                hints += envelopes(
                    done.stream_id,
                    done.generation,
                    done.first_number,
                    1,
                    done.body,
                    closed=True,
                    inline=self._settings.inline_events,
                    marks=(done.mark_before, done.mark),
                )
        await self._hint(hints)

    def _forget(self, stream_ids: Collection[int]) -> None:
        for stream_id in stream_ids:
            self._ending[0].pop(stream_id, None)
            self._ending[1].pop(stream_id, None)
            self._known.pop(stream_id, None)

    async def _hint(self, payloads: list[str]) -> None:
        """Lost hints are healed by the watchers, who compare heads every few seconds."""
        if not payloads:
            return
        try:
            await self._store.notify(self._channel, payloads)
        except (DatabaseUnavailable, asyncpg.PostgresError) as error:
            self.hints_dropped += len(payloads)
            _log.debug("hints were not sent: %s", error)

    def _report(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._reported_at >= SECONDS_BETWEEN_REPORTS:
            self._reported_at = now
            _log.error("events cannot be stored: %s", described(error), exc_info=error)


def _backoff(tries: int) -> float:
    return random.uniform(0.5, 1) * min(5.0, 0.1 * 2.0 ** min(tries, 10))
