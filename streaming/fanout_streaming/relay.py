"""The hub of a process: one LISTEN connection, a topic for each stream that somebody watches, and
readers on them.

    hint arrives ──▶ contiguous, with its events ──▶ ring ──▶ readers wake
                 └─▶ a gap, or without events    ──▶ one catch-up from the table ──▶ ring ──▶
                 readers wake
    every few seconds one query compares the heads of all topics: it heals every hint that was lost

A stream ends with its `end` event, which the database writes when the root job has ended; readers
get it, and leave. The table is the truth. Where LISTEN does not work the relay reads it once a
second: slower, not broken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import uuid4

from fanout.errors import JobNotFound, UsageError
from fanout.event_store import StreamHead
from fanout.loop import Loop

from .cursor import parse_cursor
from .frames import Entry, entry, event_frame
from .listener import Listener
from .settings import RelaySettings
from .subscription import Place, Subscription
from .topic import Topic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from fanout import Engine, Progress
    from fanout.event_store import StoredBatch

    from .subscription import Format

__all__ = ["Relay"]

_log = logging.getLogger("fanout.relay")

MAX_STREAMS: Final = 32
CATCH_UP_BATCHES: Final = 16
RING_EVENTS: Final = 2000
"""Of a longer gap only the newest events are taken into the ring; who is behind reads the table."""
MAX_HINT_BYTES: Final = 8000
MAX_HINT_EVENTS: Final = 10_000


class Relay:
    """One a process, over a started engine: `async with Relay(engine) as relay: ...`."""

    def __init__(self, engine: Engine, settings: RelaySettings | None = None) -> None:
        self.settings = settings or RelaySettings()
        self._engine = engine
        self._topics: dict[int, Topic] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._catching_up: dict[int, asyncio.Task[None]] = {}
        self._ring_bytes = 0
        self._replays = asyncio.Semaphore(self.settings.replays)
        self._writer = uuid4()
        self._batches = count(1)
        self._readers: set[Subscription] = set()
        self._is_draining = False
        self._details: dict[int, tuple[float, Progress]] = {}
        self._listener: Listener | None = None
        self._loops = [
            Loop("relay sweep", self._sweep, self.settings.poll_interval, jitter=0.1),
            Loop(
                "relay progress", self._read_progress, self.settings.progress_interval, jitter=0.1
            ),
            Loop("relay tick", self._tick, 1.0, jitter=0),
            Loop("relay watch", self._say_watched, self.settings.watch_seconds / 3),
        ]
        self._swept_at = 0.0
        self.hints = 0
        self.garbage = 0
        """Notifications that are none of ours, or broken."""
        self.catch_ups = 0
        self.healed = 0
        """Gaps that only the sweep has found: hints were lost."""

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; again is fine. LISTEN begins with the first reader."""
        for loop in self._loops:
            loop.start()

    async def stop(self) -> None:
        """Say goodbye to all readers, and end. Again is fine."""
        self.drain()
        for loop in self._loops:
            await loop.stop()
        for task in list(self._catching_up.values()):
            task.cancel()
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def drain(self) -> None:
        """This process stops: every reader gets a goodbye, and new ones get nothing else."""
        self._is_draining = True
        for reader in self._readers:
            reader.drain()

    # -- readers ---------------------------------------------------------------------------------

    async def subscribe(
        self,
        streams: Mapping[int, str | None],
        *,
        progress: bool = True,
        format: Format = "sse",  # noqa: A002 - what it is
        only_jobs: Mapping[int, int] | None = None,
    ) -> Subscription:
        """Read streams (root job ids) from their cursors on (None: from the first event that is
        kept).

        `only_jobs`: stream → the one job below it whose events are wanted. A cursor that is none
        gives the newest events, marked as a gap, never an error.

        Raises:
            JobNotFound: one of them is not a root job.
            UsageError: no stream, or more than 32.
            DatabaseUnavailable.
        """
        if not 1 <= len(streams) <= MAX_STREAMS:
            raise UsageError("streams", f"are {len(streams)}", f"Give 1 to {MAX_STREAMS} root jobs")
        topics = [await self._topic(stream_id) for stream_id in streams]
        # Joined before the cursor is compared with the head: what comes from now on wakes this
        # reader.
        places = [
            Place(
                topic,
                parse_cursor(text) if text else None,
                text,
                (only_jobs or {}).get(topic.stream_id),
            )
            for topic, text in zip(topics, streams.values(), strict=True)
        ]
        subscription = Subscription(self, places, progress=progress, encoding=format)
        self._readers.add(subscription)
        for topic in topics:
            topic.readers.add(subscription)
            topic.wants_progress += progress
        if self._is_draining:
            subscription.drain()
        return subscription

    def leave(self, subscription: Subscription, topics: list[Topic], *, progress: bool) -> None:
        """Called by a subscription that is closed."""
        self._readers.discard(subscription)
        for topic in topics:
            topic.readers.discard(subscription)
            topic.wants_progress -= progress
            topic.idle_since = time.monotonic()

    async def _topic(self, stream_id: int) -> Topic:
        """The topic of a stream; made, and LISTENed for, before its head is read."""
        lock = self._opening.setdefault(stream_id, asyncio.Lock())
        try:
            async with lock:
                topic = self._topics.get(stream_id)
                if topic is not None:
                    topic.idle_since = time.monotonic()
                    return topic
                job = await self._engine.store.job(stream_id)
                if job.parent_id is not None:
                    raise JobNotFound(stream_id)
                await self._engine.events.open_streams([stream_id])
                await self._engine.events.watch([stream_id], self.settings.watch_seconds)
                self._listen()
                heads = await self._engine.events.heads([stream_id])
                topic = Topic(heads.get(stream_id, StreamHead(stream_id, 1, 1, 0, closed=False)))
                self._topics[stream_id] = topic
                return topic
        finally:
            if not lock.locked():
                self._opening.pop(stream_id, None)

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(
                self._engine.dsn,
                self._engine.settings,
                self._engine.events,
                on_hint=self._on_hint,
                on_connected=self._on_connected,
            )
            self._listener.start()

    # -- hints -----------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        """Hints may have been missed."""
        self._swept_at = 0.0
        self._loops[0].nudge()

    def _on_hint(self, payload: str) -> None:
        """A payload is anybody's: any role may send one.

        It is a hint, checked, and counted if it is not ours.
        """
        hint = _parsed(payload)
        if hint is None:
            self.garbage += 1
            return
        self.hints += 1
        topic = self._topics.get(hint.stream_id)
        if topic is None or (hint.generation == topic.generation and hint.last <= topic.last):
            return
        contiguous = hint.generation == topic.generation and hint.first == topic.last + 1
        if contiguous and hint.events:
            self._take_inline(topic, hint)
            return
        if hint.generation == topic.generation:
            topic.known_last = max(topic.known_last, hint.last)
        self._catch_up(topic)

    def _take_inline(self, topic: Topic, hint: Hint) -> None:
        try:
            made = [
                entry(hint.first + n, topic.generation, line, late=hint.late)
                for n, line in enumerate(hint.events)
            ]
        except (ValueError, AttributeError, UnicodeError, RecursionError):
            self.garbage += 1
            self._catch_up(topic)
        else:
            self._append(topic, made)

    def _append(self, topic: Topic, entries: list[Entry]) -> None:
        for one in entries:
            self._ring_bytes += topic.append(one)
        if self._ring_bytes > self.settings.ring_budget:
            self._shrink()
        topic.wake()

    def _shrink(self) -> None:
        """Too much in memory: the rings that nobody has used for longest go first."""
        for topic in sorted(
            self._topics.values(), key=lambda topic: (bool(topic.readers), topic.idle_since)
        ):
            self._ring_bytes -= topic.shrink(0)
            if self._ring_bytes <= self.settings.ring_budget * 0.8:
                return

    # -- the table -------------------------------------------------------------------------------

    def _catch_up(self, topic: Topic) -> None:
        """Read what is missing, once at a time for each topic."""
        running = self._catching_up.get(topic.stream_id)
        if running is None or running.done():
            task = asyncio.create_task(self._caught_up(topic), name="fanout catch-up")
            self._catching_up[topic.stream_id] = task
            task.add_done_callback(lambda done: self._after_catch_up(topic, done))

    def _after_catch_up(self, topic: Topic, task: asyncio.Task[None]) -> None:
        if self._catching_up.get(topic.stream_id) is task:
            del self._catching_up[topic.stream_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a catch-up failed, the sweep tries again: %s", error)

    async def _caught_up(self, topic: Topic) -> None:
        self.catch_ups += 1
        while True:
            head = (await self._engine.events.heads([topic.stream_id])).get(topic.stream_id)
            if head is None:
                return
            if not await self._agree(topic, head):
                return
            if head.last_number <= topic.last:
                topic.closed = head.closed or topic.closed
                topic.wake()
                return
            await self._fill(topic, head)

    async def _agree(self, topic: Topic, head: StreamHead) -> bool:
        """Is this the stream that the topic knows?

        After a fail-over numbers may have been given out twice.
        """
        topic.first = head.first_number
        if head.generation == topic.generation and head.last_number < topic.last:
            _log.error("stream %d has lost events in a fail-over", topic.stream_id)
            renewed = await self._engine.events.renew_generation(topic.stream_id, topic.generation)
            generation = renewed if renewed is not None else head.generation + 1
        else:
            generation = head.generation
        if generation != topic.generation:
            self._ring_bytes -= topic.clear()
            topic.generation, topic.last, topic.closed = generation, head.last_number, head.closed
            topic.known_last = head.last_number
            topic.wake()
            return False
        if not head.closed:
            topic.closed = False  # its job was opened again
        return True

    async def _fill(self, topic: Topic, head: StreamHead) -> None:
        """Take the events above the ring, or only the newest of them if they are very many."""
        first = topic.last + 1
        if head.last_number - topic.last > RING_EVENTS:
            first = head.last_number - RING_EVENTS + 1
        batches = await self._engine.events.replay(
            topic.stream_id, first, head.last_number, CATCH_UP_BATCHES
        )
        entries = [one for one in _entries(batches, topic.generation) if one.number >= first]
        if not entries:  # pruned meanwhile
            self._ring_bytes -= topic.clear()
            topic.last = head.last_number
            topic.wake()
            return
        if entries[0].number != topic.last + 1:
            if entries[0].number <= topic.last:  # a hint was faster
                entries = [one for one in entries if one.number > topic.last]
            else:
                self._ring_bytes -= topic.clear()
        self._append(topic, entries)

    async def replay(self, topic: Topic, number: int) -> list[Entry]:
        """Entries above `number` from the table, for a reader that has fallen out of the ring."""
        async with self._replays:
            batches = await self._engine.events.replay(topic.stream_id, number + 1, topic.last, 4)
        return [
            one for one in _entries(batches, topic.generation) if number < one.number <= topic.last
        ]

    async def event(self, stream_id: int, number: int) -> dict[str, Any] | None:
        """One stored event, whole; None: there is none, or it was pruned."""
        for batch in await self._engine.events.replay(stream_id, number, number, 1):
            if batch.first_number <= number < batch.first_number + batch.count:
                line = batch.body.split(b"\n")[number - batch.first_number]
                event: dict[str, Any] = json.loads(line)
                return event
        return None

    # -- loops -----------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Compare the heads of all topics; forget those without readers."""
        now = time.monotonic()
        for topic in [
            t
            for t in self._topics.values()
            if not t.readers and now - t.idle_since > self.settings.linger
        ]:
            self._ring_bytes -= topic.clear()
            del self._topics[topic.stream_id]
            self._details.pop(topic.stream_id, None)
        if not self._topics:
            if self._listener is not None:
                await self._listener.stop()
                self._listener = None
            return
        listening = self._listener is not None and self._listener.is_listening
        if listening and now - self._swept_at < self.settings.sweep_interval:
            return
        self._swept_at = now
        heads = await self._engine.events.heads(self._topics)
        for topic in list(self._topics.values()):
            head = heads.get(topic.stream_id)
            if head is None:
                continue
            same = (topic.generation, topic.last, topic.closed) == (
                head.generation,
                head.last_number,
                head.closed,
            )
            topic.first = head.first_number
            if not same:
                self.healed += listening
                self._catch_up(topic)

    async def _read_progress(self) -> None:
        """Committed counters of watched jobs, one query for all; told when they changed."""
        topics = [t for t in self._topics.values() if t.wants_progress > 0]
        if not topics:
            return
        now = time.monotonic()
        many = await self._engine.store.progress_many([t.stream_id for t in topics])
        for topic in topics:
            progress = many.get(topic.stream_id)
            if progress is None:
                continue
            told = self._with_reasons(topic, progress, now)
            if told is None:
                told = await self._engine.store.progress(topic.stream_id)
                self._details[topic.stream_id] = (now, told)
            frame = event_frame("progress", _said(told))
            if frame != topic.progress:
                topic.progress = frame
                topic.progress_version += 1
                topic.wake()
            await self._end_if_due(topic, told, now)

    def _with_reasons(self, topic: Topic, progress: Progress, now: float) -> Progress | None:
        """The counters with the reasons that were read lately; None: they are to be read again."""
        if progress.is_closed:
            return progress
        read_at, earlier = self._details.get(topic.stream_id, (float("-inf"), progress))
        if now - read_at > self.settings.detail_interval:
            return None
        return type(progress)(**{**_fields(progress), "waits_for": earlier.waits_for})

    async def _end_if_due(self, topic: Topic, progress: Progress, now: float) -> None:
        """The backstop of the end: whoever closed the job may have died before it could say so."""
        if not progress.is_closed or topic.closed:
            topic.ended_at = None
            return
        topic.ended_at = topic.ended_at or now
        if now - topic.ended_at > self.settings.end_after:
            await self._engine.events.end_streams(
                [(topic.stream_id, next(self._batches))], self._writer
            )
            self._catch_up(topic)

    async def _tick(self) -> None:
        now = time.monotonic()
        for reader in self._readers:
            reader.tick(now)

    async def _say_watched(self) -> None:
        """Workers flush watched streams at once, and others seldom."""
        watched = [t.stream_id for t in self._topics.values() if t.readers]
        if watched:
            await self._engine.events.watch(watched, self.settings.watch_seconds)

    def stats(self) -> dict[str, float | None]:
        """Figures for metrics and health."""
        listener = self._listener
        return {
            "readers": len(self._readers),
            "topics": len(self._topics),
            "ring_bytes": self._ring_bytes,
            "hints": self.hints,
            "garbage": self.garbage,
            "catch_ups": self.catch_ups,
            "healed": self.healed,
            "lag": max((t.known_last - t.last for t in self._topics.values()), default=0),
            "listening": float(listener is not None and listener.is_listening),
            "listen_age_seconds": None if listener is None else listener.age_seconds,
            "reconnects": 0 if listener is None else listener.reconnects,
        }


class Hint(NamedTuple):
    """A NOTIFY payload that has our shape."""

    stream_id: int
    generation: int
    first: int
    last: int
    events: list[bytes]
    """One JSON text each; empty: they are in the table."""
    late: frozenset[int]


def _parsed(payload: str) -> Hint | None:
    """The hint that a payload says; None: it is none of ours."""
    try:
        said = json.loads(payload) if len(payload) <= MAX_HINT_BYTES else {}
        first, number = int(said["f"]), int(said["n"])
        events = [
            json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
            for event in said.get("b", ())
        ]
        hint = Hint(
            int(said["s"]),
            int(said["g"]),
            first,
            first + number - 1,
            events if len(events) == number else [],
            frozenset(said.get("l", ())),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return hint if said.get("v") == 1 and first >= 1 and 1 <= number <= MAX_HINT_EVENTS else None


def _entries(batches: list[StoredBatch], generation: int) -> list[Entry]:
    return [
        entry(batch.first_number + n, generation, line, late=batch.late)
        for batch in batches
        for n, line in enumerate(batch.body.split(b"\n"))
    ]


def _fields(progress: Progress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in progress.__slots__}


def _said(progress: Progress) -> dict[str, Any]:
    """What a watcher is told; elapsed seconds are left out, or every frame would differ from the
    last.
    """
    told = asdict(progress)
    told["stream"] = told["id"]
    del told["elapsed_seconds"]
    rate = told["rate_per_second"]
    told["rate_per_second"] = None if rate is None else round(rate, 3)
    if told["eta_seconds"]:
        told["eta_seconds"] = [round(seconds) for seconds in told["eta_seconds"]]
    return told
