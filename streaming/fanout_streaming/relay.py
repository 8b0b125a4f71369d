"""The hub of a process: one LISTEN connection, a topic for each stream that somebody watches, and
readers on them.

    hint arrives ──▶ contiguous, with its events ──▶ ring ──▶ readers wake
                 └─▶ a gap, or without events    ──▶ one catch-up from the table ──▶ ring ──▶
                 readers wake
    every few seconds one query compares the heads of all topics: it heals every hint that was lost

A stream ends with its `end` event, which the database writes when the root job has ended; readers
get it, and leave. The table is the truth. Where LISTEN does not work the relay reads it once a
second: slower, not broken.

Everything here runs in one event loop, so what stands between two awaits is atomic. What was read
before an await may be old after it: a hint may have come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import asdict, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from fanout.errors import DatabaseUnavailable, JobNotFound, UsageError
from fanout.event_store import StreamHead
from fanout.events import lines_of, readable
from fanout.loop import Loop

from .cursor import parse_cursor
from .frames import Entry, entry, event_frame
from .hints import parsed
from .listener import Listener
from .settings import RelaySettings
from .subscription import PROGRESS_ONLY, Place, Subscription
from .topic import CHUNK_BYTES, Topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from fanout import Engine, Progress
    from fanout.event_store import StoredBatch

    from .cursor import Cursor
    from .hints import Hint
    from .subscription import Format

__all__ = ["Relay"]

_log = logging.getLogger("fanout.relay")

MAX_STREAMS: Final = 32
CATCH_UP_BYTES: Final = 256 << 10
RING_EVENTS: Final = 2000
"""Of a longer gap only the newest events are taken into the ring; who is behind reads the table."""
QUIET_SECONDS: Final = 0.05
"""Between two looks of which the first found nothing: hints may be forged, and many."""
KEPT_REPLAYS: Final = 32
"""Pages of the table that were read last: readers who come back at once ask for the same."""
DETAILS_A_ROUND: Final = 8
"""Jobs of which one round reads why nothing moves: a query each."""
PROGRESS_SECONDS: Final = 2.0
"""Between two frames of progress that tell no new count, only another rate."""


class Relay:
    """One a process, over a started engine: `async with Relay(engine) as relay: ...`."""

    def __init__(self, engine: Engine, settings: RelaySettings | None = None) -> None:
        self.settings = settings or RelaySettings()
        self._engine = engine
        self._topics: dict[int, Topic] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._missed: set[int] = set()
        self._catching_up: dict[int, asyncio.Task[None]] = {}
        self._ring_bytes = 0
        self._replays = asyncio.Semaphore(self.settings.replays)
        self._pages: OrderedDict[tuple[int, int, int], asyncio.Task[list[Entry]]] = OrderedDict()
        self._writer = uuid4()
        self._batches = count(1)
        self._readers: set[Subscription] = set()
        self._due: list[Subscription] = []
        self._is_draining = False
        self._drained = asyncio.Event()
        self._details: dict[int, tuple[float, Progress]] = {}
        self._round = 0
        self._counting = asyncio.Lock()
        self._listener: Listener | None = None
        self._sweeps = Loop("relay sweep", self._sweep, self.settings.poll_interval, jitter=0.1)
        self._watches = Loop("relay watch", self._say_watched, self.settings.watch_seconds / 3)
        self._loops = [
            self._sweeps,
            Loop(
                "relay progress", self._read_progress, self.settings.progress_interval, jitter=0.1
            ),
            Loop("relay tick", self._tick, 1.0, jitter=0),
            self._watches,
        ]
        self._swept_at = 0.0
        self._is_in_doubt = True
        """Were hints missed, perhaps?"""
        self.hints = 0
        self.garbage = 0
        """Notifications that are none of ours, or broken."""
        self.catch_ups = 0
        self.healed = 0
        """Gaps that only the sweep has found: hints were lost."""

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; again is fine. LISTEN begins with the first reader."""
        self._is_draining = False
        self._drained.clear()
        for loop in self._loops:
            loop.start()

    async def stop(self) -> None:
        """Say goodbye to all readers, and end. Again is fine."""
        self.drain()
        for loop in self._loops:
            await loop.stop()
        tasks: list[asyncio.Task[Any]] = [*self._catching_up.values(), *self._pages.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._pages.clear()
        await self._stop_listening()

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
        self._drained.set()
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
        gives the newest events, marked as a gap, never an error; `PROGRESS_ONLY` in its place gives
        progress and the end alone.

        Raises:
            JobNotFound: one of them is not a root job.
            UsageError: no stream, or more than 32.
            DatabaseUnavailable.
        """
        if not 1 <= len(streams) <= MAX_STREAMS:
            raise UsageError("streams", f"are {len(streams)}", f"Give 1 to {MAX_STREAMS} root jobs")
        cursors = {stream: parse_cursor(text) if text else None for stream, text in streams.items()}
        topics: list[Topic] = []
        try:
            for stream_id, cursor in cursors.items():
                only_progress = streams[stream_id] == PROGRESS_ONLY
                topic = await self._held_topic(stream_id, is_watched=not only_progress)
                topics.append(topic)
                await self._reach(topic, cursor)
            # From here on nothing is awaited: a reader that compares its cursor with the head, and
            # then joins, would miss what comes between.
            places = [
                Place(
                    topic,
                    cursors[topic.stream_id],
                    streams[topic.stream_id],
                    (only_jobs or {}).get(topic.stream_id),
                    self._round,
                )
                for topic in topics
            ]
            subscription = Subscription(self, places, progress=progress, encoding=format)
            self._join(subscription, topics, progress=progress)
        finally:
            for topic in topics:
                topic.holds -= 1
        return subscription

    def _join(self, subscription: Subscription, topics: list[Topic], *, progress: bool) -> None:
        self._readers.add(subscription)
        for topic in subscription.topics_read:
            if not topic.wants_events:
                self._watches.nudge()
            topic.wants_events += 1
        for topic in topics:
            topic.readers.add(subscription)
            topic.wants_progress += progress
            topic.newcomer_round = self._round
        if self._is_draining:
            subscription.drain()

    def leave(self, subscription: Subscription, topics: list[Topic], *, progress: bool) -> None:
        """Called by a subscription that is closed."""
        self._readers.discard(subscription)
        for topic in subscription.topics_read:
            topic.wants_events -= 1
        for topic in topics:
            topic.readers.discard(subscription)
            topic.wants_progress -= progress
            topic.idle_since = time.monotonic()

    def write_soon(self, subscription: Subscription) -> None:
        """Called by a subscription that is to be written to: one call for all of them, or the
        garbage collector would run with every event that thousands get.
        """
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write_due)
        self._due.append(subscription)

    def _write_due(self) -> None:
        due, self._due = self._due, []
        for subscription in due:
            subscription.write_now()

    async def _held_topic(self, stream_id: int, *, is_watched: bool) -> Topic:
        """The topic of a stream, which stays until the caller lets it go (`holds -= 1`)."""
        topic = self._topics.get(stream_id)
        was_there = topic is not None
        if topic is None:
            lock = self._opening.setdefault(stream_id, asyncio.Lock())
            async with lock:
                topic = self._topics.get(stream_id) or await self._open(
                    stream_id, is_watched=is_watched
                )
        topic.holds += 1
        try:
            if was_there and topic.closed:
                await self._refresh(topic)  # perhaps its job was opened again
        except BaseException:
            topic.holds -= 1
            raise
        return topic

    async def _open(self, stream_id: int, *, is_watched: bool) -> Topic:
        """Make a topic. It is LISTENed for before its head is read, or soon caught up."""
        try:
            job = await self._engine.store.job(stream_id)
            if job.parent_id is not None:
                raise JobNotFound(stream_id)
            await self._engine.events.open_streams([stream_id])
            if is_watched:
                await self._engine.events.watch([stream_id], self.settings.watch_seconds)
            self._listen()
            self._missed.discard(stream_id)
            heads = await self._engine.events.heads([stream_id])
        finally:
            self._opening.pop(stream_id, None)
        topic = self._topics.get(stream_id)
        if topic is None:
            topic = Topic(heads.get(stream_id) or StreamHead(stream_id, 1, 1, 0, closed=False))
            self._topics[stream_id] = topic
            self._listen()  # a sweep that saw no topic may have ended it
            if stream_id in self._missed:
                self._catch_up(topic)
        self._missed.discard(stream_id)
        return topic

    async def _reach(self, topic: Topic, cursor: Cursor | None) -> None:
        """See that this process is as far as a reader who comes from another one."""
        if cursor is not None and (
            cursor.generation > topic.generation
            or (cursor.generation == topic.generation and cursor.number > topic.last)
        ):
            await self._refresh(topic)

    async def _refresh(self, topic: Topic) -> None:
        """Be as far as the table was when this was called. Raises DatabaseUnavailable."""
        topic.quiet_until = 0.0
        self._catch_up(topic)
        task = self._catching_up.get(topic.stream_id)
        if task is not None:
            await asyncio.wait([task])  # many may wait for it: who leaves must not cancel it
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    # -- listening -------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is None and not self._is_draining:
            self._listener = Listener(
                self._engine.dsn,
                self._engine.settings,
                self._engine.events,
                on_hint=self._on_hint,
                on_connected=self._on_connected,
            )
            self._listener.start()

    async def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.stop()

    def _on_connected(self) -> None:
        """Hints may have been missed."""
        self._is_in_doubt = True
        self._sweeps.nudge()

    def _on_hint(self, payload: str) -> None:
        """A payload is anybody's: any role may send one.

        It is a hint, checked, and counted if it is not ours.
        """
        hint = parsed(payload)
        if hint is None:
            self.garbage += 1
            return
        self.hints += 1
        topic = self._topics.get(hint.stream_id)
        if topic is None:
            if hint.stream_id in self._opening:
                self._missed.add(hint.stream_id)
            return
        if hint.generation == topic.generation:
            if hint.last <= topic.last:
                return
            inline = hint.lines and self._engine.settings.inline_events
            if hint.first == topic.last + 1 and inline and hint.joins(topic.mark):
                self._take_inline(topic, hint)
                return
            topic.known_last = max(topic.known_last, hint.last)
        self._catch_up(topic)

    def _take_inline(self, topic: Topic, hint: Hint) -> None:
        if any(readable(line) is None for line in hint.lines):
            self.garbage += 1
            self._catch_up(topic)
            return
        self._append(
            topic,
            [
                entry(number, topic.generation, line)
                for number, line in enumerate(hint.lines, hint.first)
            ],
            hint.mark,
        )

    def _append(self, topic: Topic, entries: list[Entry], mark: int | None) -> None:
        """Take the next events; `mark`: of the batch of the last one."""
        if not entries:
            return
        topic.mark = mark
        for one in entries:
            self._ring_bytes += topic.append(one)
        if self._topics.get(topic.stream_id) is not topic:
            self._ring_bytes -= topic.clear()
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
        """Read what is missing, once at a time for each topic; what is said meanwhile is looked for
        afterwards.
        """
        topic.again = True
        running = self._catching_up.get(topic.stream_id)
        if (running is None or running.done()) and not self._is_draining:
            task = asyncio.create_task(self._caught_up(topic), name="fanout catch-up")
            self._catching_up[topic.stream_id] = task
            task.add_done_callback(lambda done: self._after_catch_up(topic, done))

    def _after_catch_up(self, topic: Topic, task: asyncio.Task[None]) -> None:
        if self._catching_up.get(topic.stream_id) is task:
            del self._catching_up[topic.stream_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a catch-up failed, the sweep tries again: %s", error)

    async def _caught_up(self, topic: Topic) -> None:
        while topic.again:
            pause = topic.quiet_until - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            topic.again = False
            self.catch_ups += 1
            before = topic.generation, topic.last, topic.closed
            heads = await self._engine.events.heads(
                [topic.stream_id], {topic.stream_id: topic.seen}
            )
            head = heads.get(topic.stream_id)
            if head is None:
                return
            if head.generation == before[0] and not head.is_lost:
                await self._follow(topic, head)
            else:
                await self._turn(topic, head)
            if topic.last < head.last_number or topic.generation != head.generation:
                topic.again = True
            elif before == (topic.generation, topic.last, topic.closed):
                topic.quiet_until = time.monotonic() + QUIET_SECONDS
            topic.known_last = topic.last  # whatever else was said was not true

    async def _follow(self, topic: Topic, head: StreamHead) -> None:
        """The stream is the one that the topic knows, and perhaps longer."""
        topic.first = max(topic.first, head.first_number)
        if head.last_number > topic.last:
            await self._fill(topic, head)
        # Of a head that is older than what hints have told meanwhile this is not true any more.
        if head.last_number == topic.last and topic.closed != head.closed:
            topic.closed = head.closed
            topic.wake()

    async def _turn(self, topic: Topic, head: StreamHead) -> None:
        """The stream has another generation, or has lost events that this process has seen: then it
        gets one, for their numbers are given out again, or were already.
        """
        generation = head.generation
        if generation <= topic.generation:
            _log.error("stream %d has lost events in a fail-over", topic.stream_id)
            renewed = await self._engine.events.renew_generation(topic.stream_id, topic.generation)
            if renewed is None:
                topic.again = True  # another process was first
                return
            generation = renewed
        self._ring_bytes -= topic.move_to(
            generation, head.first_number, head.last_number, head.mark, closed=head.closed
        )
        topic.again = True
        topic.wake()

    async def _fill(self, topic: Topic, head: StreamHead) -> None:
        """Take the events above the ring, or only the newest of them if they are very many."""
        first = max(topic.last + 1, head.last_number - RING_EVENTS + 1)
        batches = await self._engine.events.replay(
            topic.stream_id, first, head.last_number, CATCH_UP_BYTES
        )
        entries = [one for one in _entries(batches, topic.generation) if one.number >= first]
        if not entries:  # pruned meanwhile
            if head.last_number > topic.last:
                self._ring_bytes -= topic.move_to(
                    topic.generation,
                    head.last_number + 1,
                    head.last_number,
                    head.mark,
                    closed=head.closed,
                )
                topic.wake()
            return
        # Hints may have been faster.
        entries = [one for one in entries if one.number > topic.last]
        if entries and entries[0].number != topic.last + 1:
            self._ring_bytes -= topic.clear()
        self._append(topic, entries, batches[-1].mark)

    async def replay(self, topic: Topic, number: int) -> list[Entry]:
        """Entries above `number` from the table, for a reader that has fallen out of the ring.

        None are left when this process stops meanwhile. Raises DatabaseUnavailable.
        """
        key = topic.stream_id, topic.generation, number
        task = self._pages.get(key)
        if task is None:
            task = asyncio.create_task(self._page(topic, number), name="fanout replay")
            task.add_done_callback(_looked_at)
            self._pages[key] = task
            while len(self._pages) > KEPT_REPLAYS:
                self._pages.popitem(last=False)
        drained = asyncio.create_task(self._drained.wait(), name="fanout replay or drain")
        try:
            # Others may read the same page: who leaves must not cancel it.
            await asyncio.wait([task, drained], return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if not task.done() or task.cancelled():
            return []
        if task.exception() is not None or not task.result():
            self._pages.pop(key, None)
        return [one for one in task.result() if one.number <= topic.last]

    async def _page(self, topic: Topic, number: int) -> list[Entry]:
        async with self._replays:
            generation = topic.generation
            batches = await self._engine.events.replay(
                topic.stream_id, number + 1, topic.last, CHUNK_BYTES
            )
        return [one for one in _entries(batches, generation) if one.number > number]

    async def event(self, stream_id: int, number: int) -> dict[str, Any] | None:
        """One stored event, whole; None: there is none, or it was pruned."""
        for batch in await self._engine.events.replay(stream_id, number, number):
            if batch.first_number <= number < batch.first_number + batch.count:
                line = lines_of(batch.body, batch.count)[number - batch.first_number]
                return readable(line)
        return None

    # -- loops -----------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Compare the heads of all topics; forget those without readers."""
        now = time.monotonic()
        self._forget_idle(now)
        if not self._topics:
            if not self._opening:
                await self._stop_listening()
            return
        self._listen()
        listening = self._listener is not None and self._listener.is_listening
        recently = now - self._swept_at < self.settings.sweep_interval
        if listening and recently and not self._is_in_doubt:
            return
        self._is_in_doubt = False
        try:
            await self._compare(listening=listening)
        except BaseException:
            self._is_in_doubt = True
            raise
        self._swept_at = now

    def _forget_idle(self, now: float) -> None:
        for topic in list(self._topics.values()):
            if (
                not topic.readers
                and not topic.holds
                and topic.stream_id not in self._catching_up
                and now - topic.idle_since > self.settings.linger
            ):
                self._ring_bytes -= topic.clear()
                del self._topics[topic.stream_id]
                self._details.pop(topic.stream_id, None)

    async def _compare(self, *, listening: bool) -> None:
        heads = await self._engine.events.heads(
            self._topics, {topic.stream_id: topic.seen for topic in self._topics.values()}
        )
        for topic in list(self._topics.values()):
            head = heads.get(topic.stream_id)
            if head is None:
                continue
            if head.generation == topic.generation:
                topic.first = max(topic.first, head.first_number)
            ahead = head.last_number > topic.last
            if (
                ahead
                or head.generation != topic.generation
                or head.is_lost
                or (head.last_number == topic.last and head.closed != topic.closed)
            ):
                self.healed += listening and ahead
                self._catch_up(topic)

    async def _tick(self) -> None:
        now = time.monotonic()
        for reader in self._readers:
            reader.tick(now)

    async def _say_watched(self) -> None:
        """Workers flush watched streams at once, and others seldom."""
        watched = [t.stream_id for t in self._topics.values() if t.wants_events]
        if watched:
            await self._engine.events.watch(watched, self.settings.watch_seconds)

    # -- progress --------------------------------------------------------------------------------

    async def _read_progress(self) -> None:
        """Committed counters of watched jobs, one query for all; told when they changed."""
        topics = [
            t for t in self._topics.values() if t.readers and (t.wants_progress or not t.closed)
        ]
        if topics:
            await self._progress_of(topics)

    async def settle(self, topic: Topic, after_round: int) -> None:
        """Have the counters of a job that has ended told as they are, by a reading after its end
        and after this round.
        """
        end = topic.generation, topic.last
        async with self._counting:
            if topic.settled_at == end and topic.progress_round > after_round:
                return
            try:
                await self._read_counters([topic])
            except DatabaseUnavailable:
                return
            topic.settled_at = end

    async def _progress_of(self, topics: list[Topic]) -> None:
        async with self._counting:  # one after the other, or what is told could go back
            await self._read_counters(topics)

    async def _read_counters(self, topics: list[Topic]) -> None:
        self._round += 1
        now = time.monotonic()
        many = await self._engine.store.progress_many([t.stream_id for t in topics])
        details = 0
        for topic in topics:
            progress = many.get(topic.stream_id)
            if progress is None:
                continue
            read_at, earlier = self._details.get(topic.stream_id, (float("-inf"), progress))
            is_old = now - read_at > self.settings.detail_interval
            if is_old and details < DETAILS_A_ROUND and not progress.is_closed:
                details += 1
                progress = await self._engine.store.progress(topic.stream_id)
                self._details[topic.stream_id] = (now, progress)
            elif not progress.is_closed:
                progress = replace(progress, waits_for=earlier.waits_for)
            self._tell(topic, progress, now)
            await self._end_if_due(topic, progress, now)

    def _tell(self, topic: Topic, progress: Progress, now: float) -> None:
        topic.progress_round = self._round
        said = _said(progress)
        key = [said[name] for name in said if name not in {"rate_per_second", "eta_seconds"}]
        if key != topic.progress_key or now - topic.progress_told_at >= PROGRESS_SECONDS:
            frame = event_frame("progress", said)
            topic.progress_told_at = now
            if frame != topic.progress:
                topic.progress, topic.progress_key = frame, key
                topic.progress_version += 1
                topic.wake()
                return
        if 0 <= topic.newcomer_round < self._round:
            topic.newcomer_round = -1
            topic.wake()

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


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Its readers may have left; asyncio would complain that nobody wants its error."""
    if not task.cancelled():
        task.exception()


def _entries(batches: Iterable[StoredBatch], generation: int) -> list[Entry]:
    return [
        entry(number, generation, line, batch.late)
        for batch in batches
        for number, line in enumerate(lines_of(batch.body, batch.count), batch.first_number)
    ]


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
