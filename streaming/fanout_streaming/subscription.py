"""A reader: a cursor for each of its streams, not a queue.

What it has not read yet lies in the ring or in the table.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from fanout.errors import DatabaseUnavailable
from fanout.events import Event

from .cursor import Cursor, join_cursors
from .frames import bye, event_frame, retry_frame
from .topic import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from .frames import Entry
    from .relay import Relay
    from .topic import Topic

__all__ = ["PROGRESS_ONLY", "Subscription"]

PROGRESS_ONLY: Final = "progress"
"""In place of a cursor: of this stream only progress and the end, as a list of batches wants it."""

BOUNDED_REPLAY: Final = 1000
"""Events that a reader gets whose cursor is none, or is of another generation: bounded, never the
whole stream.
"""
SECONDS_UNTIL_NEXT_TRY: Final = 0.5
"""After a replay that failed, for the database is away."""

Format = Literal["sse", "ndjson"]


class Place:
    """Where a reader is in one stream."""

    __slots__ = (
        "after_round",
        "cursor",
        "gap",
        "is_done",
        "job_id",
        "only_progress",
        "progress_seen",
        "reset",
        "rest",
        "topic",
    )

    def __init__(
        self,
        topic: Topic,
        cursor: Cursor | None,
        text: str | None,
        job_id: int | None,
        after_round: int,
    ) -> None:
        self.topic = topic
        self.job_id = job_id
        """Only this job's events; None: all."""
        self.only_progress = text == PROGRESS_ONLY
        self.gap = False
        """The cursor that was given is none: what is shown may not join on to what was seen."""
        self.reset: dict[str, Any] | None = None
        self.rest: list[Entry] = []
        """Of a page of the table, what was not taken yet."""
        self.is_done = False
        self.progress_seen = -1
        self.after_round = after_round
        """Progress is told from readings after this one: older ones the reader may have seen
        overtaken, elsewhere.
        """
        self.cursor = self._start(cursor, text)

    def _start(self, cursor: Cursor | None, text: str | None) -> Cursor:
        """Where to begin: after the cursor, if what follows it is still there."""
        topic = self.topic
        begin = Cursor(topic.generation, topic.first - 1)
        newest = Cursor(topic.generation, max(begin.number, topic.last - BOUNDED_REPLAY))
        if self.only_progress:
            return Cursor(topic.generation, topic.last)
        if cursor is None:
            if not text:
                return begin
            self.gap = True
            return newest
        if cursor.generation != topic.generation:
            return self.reset_to(newest, "generation", cursor)
        if cursor.number > topic.last:
            self.gap = True
            return Cursor(topic.generation, topic.last)
        if cursor.number < begin.number:
            return self.reset_to(begin, "pruned", cursor)
        return cursor

    def follow(self) -> bool:
        """Go on in the topic's generation, if it has a new one, and say so."""
        topic = self.topic
        if self.cursor.generation == topic.generation:
            return False
        number = max(topic.first - 1, topic.last - BOUNDED_REPLAY)
        begin = Cursor(topic.generation, number)
        self.cursor = self.reset_to(begin, "generation", self.cursor)
        self.rest = []
        return True

    def skip_to(self, number: int) -> None:
        """What follows the cursor was pruned: go on after `number`, and say so."""
        self.cursor = self.reset_to(Cursor(self.cursor.generation, number), "pruned", self.cursor)

    def reset_to(self, begin: Cursor, reason: str, seen: Cursor) -> Cursor:
        """Go on at `begin` and say so: never a silent gap."""
        self.reset = {
            "job": self.topic.stream_id,
            "reason": reason,
            "seen": str(seen),
            "from": f"{begin.generation}.{begin.number + 1}",
        }
        return begin

    def took(self, entries: list[Entry], most_bytes: int) -> list[Entry]:
        """As many of a page as `most_bytes` hold, one at least; the rest is kept."""
        for end, one in enumerate(entries, 1):
            most_bytes -= len(one.frame)
            if most_bytes <= 0:
                self.rest = entries[end:]
                return entries[:end]
        return entries

    def move(self, number: int) -> None:
        """`number` was read."""
        self.cursor = Cursor(self.cursor.generation, number)

    def wants(self, entry: Entry) -> bool:
        """Is this one of the events that the reader asked for?"""
        if entry.type in {"end", "reopened"}:
            return True
        return not self.only_progress and self.job_id in (None, entry.job_id)

    @property
    def is_at_end(self) -> bool:
        """Is there nothing more, ever?"""
        return self.topic.closed and self.cursor.number >= self.topic.last


class Subscription:
    """Iterate `chunks()` or `events()`, once; `close()` in any case."""

    def __init__(
        self, relay: Relay, places: list[Place], *, progress: bool, encoding: Format
    ) -> None:
        self._relay = relay
        self._places = places
        self._progress = progress
        self._is_sse = encoding == "sse"
        self._many = len(places) > 1
        self._event = asyncio.Event()
        self._write: Callable[[bytes], bool] | None = None
        self._is_due = False
        self._is_waiting = False
        self._unsent = b""
        self._closed = False
        self._is_draining = False
        self._ends_at = time.monotonic() + relay.settings.max_age * random.uniform(0.8, 1.2)
        self.last_sent_at = time.monotonic()
        self.finished_at_start = all(
            place.is_at_end and place.reset is None for place in places
        ) and not any(place.gap for place in places)
        """Everything was seen already, and nothing will follow:

        HTTP's 204, which stops every browser.
        """

    # -- told by the relay -----------------------------------------------------------------------

    def wake(self) -> None:
        """There is something."""
        if self._write is None or not self._is_waiting:
            self._event.set()
        elif not self._is_due:
            # Soon, not now: whatever else has arrived is written with it.
            self._is_due = True
            self._relay.write_soon(self)

    def tick(self, now: float) -> None:
        """Once a second: is a heartbeat due, or is this reader to connect again?"""
        if now - self.last_sent_at >= self._relay.settings.heartbeat or now >= self._ends_at:
            self._event.set()

    def drain(self) -> None:
        """The process stops: say goodbye."""
        self._is_draining = True
        self._event.set()

    async def close(self) -> None:
        """Leave. Again is fine, also when iteration was never begun."""
        if not self._closed:
            self._closed = True
            self._event.set()  # whoever iterates ends
            self._relay.leave(
                self, [place.topic for place in self._places], progress=self._progress
            )

    @property
    def topics_read(self) -> list[Topic]:
        """Those of which events are wanted, and not only progress."""
        return [place.topic for place in self._places if not place.only_progress]

    # -- reading ---------------------------------------------------------------------------------

    def write_by(self, write: Callable[[bytes], bool]) -> None:
        """Have what comes written at once while `chunks()` waits for it: most readers keep up, and
        need no task to wake for that.

        `write` does not wait. It says False where it cannot write: `chunks()` then has the bytes.
        """
        if self._is_sse and not self._many:
            self._write = write

    def write_now(self) -> None:
        """Called by the relay, soon after a wake."""
        self._is_due = False
        write = self._write
        if write is None or not self._is_waiting or self._event.is_set():
            self._event.set()
            return
        now = time.monotonic()
        ends = self._is_draining or self._closed or now >= self._ends_at
        parts = None if ends else self._quick_parts(self._places[0])
        if parts is None:
            self._event.set()
        elif parts:
            self.last_sent_at = now
            chunk = parts[0] if len(parts) == 1 else b"".join(parts)
            if not write(chunk):
                self._unsent = chunk
                self._event.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Bytes to be written, at most about 64 KiB at a time: everything that is there, joined.

        Ends after the last stream's end, after a goodbye, or at the reader's greatest age, when a
        browser comes back by itself.
        """
        if self._is_sse:
            yield retry_frame(2000, 5000) + self._hello()
        while not self._closed:
            self._event.clear()
            parts = await self._new_parts()
            now = time.monotonic()
            if parts:
                self.last_sent_at = now
                yield parts[0] if len(parts) == 1 else b"".join(parts)
            if self._all_done():
                return
            if self._is_draining or now >= self._ends_at:
                if not self._is_sse:
                    yield b'{"type":"bye"}\n'
                elif self._is_draining:
                    yield bye()
                return
            if parts:
                continue
            self._is_waiting = True
            try:
                await self._event.wait()
            finally:
                self._is_waiting = False
            if self._unsent:
                chunk, self._unsent = self._unsent, b""
                yield chunk

    async def events(self) -> AsyncIterator[Event]:
        """The events one by one, for programs, until the last stream's end.

        One of type `reset` says that events were lost there.
        """
        while not self._closed and not self._all_done():
            self._event.clear()
            told: list[Event] = []
            for place in self._places:
                entries = await self._read(place, CHUNK_BYTES)
                stream_id = place.topic.stream_id
                generation = place.cursor.generation
                if place.reset is not None:
                    told.append(Event(stream_id, str(place.cursor), "reset", place.reset))
                    place.reset = None
                told += [
                    Event(stream_id, f"{generation}.{one.number}", one.type, json.loads(one.raw))
                    for one in entries
                ]
            for event in told:
                yield event
            if not told and not self._all_done():
                if self._is_draining:
                    return
                await self._event.wait()

    def _all_done(self) -> bool:
        places = self._places
        if not self._many:
            return places[0].is_done
        return all(place.is_done for place in places)

    async def _new_parts(self) -> list[bytes]:
        """Everything that is there for this reader, framed; a heartbeat after long silence."""
        if not self._many and self._is_sse:
            parts = self._quick_parts(self._places[0])
            if parts is not None:
                return parts
        parts = []
        room = CHUNK_BYTES
        for place in self._places:
            if room <= 0:
                self._event.set()
                break
            entries = await self._read(place, room)
            if place.is_done and entries and self._progress and self._is_sse:
                await self._relay.settle(place.topic, place.after_round)
                parts += self._progress_frames()  # a client leaves at the end
            if place.reset is not None:
                parts.append(self._reset(place))
                place.reset = None
            framed = self._framed if self._is_sse else self._line
            parts += [framed(place, one) for one in entries]
            room -= sum(len(one.frame) for one in entries)
        if not self._is_sse:
            return parts
        parts += self._progress_frames()
        return parts or self._heartbeat()

    def _quick_parts(self, place: Place) -> list[bytes] | None:
        """What almost every wake of almost every reader comes to, with no work of its own; None:
        there is more to it.
        """
        topic = place.topic
        number = place.cursor.number
        if (
            place.job_id is not None
            or place.only_progress
            or place.reset is not None
            or place.cursor.generation != topic.generation
            or topic.closed
        ):
            return None
        parts: list[bytes] = []
        if number < topic.last:
            joined = topic.joined(number)
            if joined is None:
                return None
            parts.append(joined[0])
            place.move(joined[1])
            place.is_done = False
            if joined[1] < topic.last:
                self._event.set()
        if self._progress and place.progress_seen != topic.progress_version:
            parts += self._progress_frames()
        return parts or self._heartbeat()

    def _heartbeat(self) -> list[bytes]:
        silent = time.monotonic() - self.last_sent_at >= self._relay.settings.heartbeat
        return [event_frame("hb", {}, self._identity())] if silent else []

    async def _read(self, place: Place, most_bytes: int) -> list[Entry]:
        """The next entries of one stream that are wanted; the cursor moves over all of them.

        Exactly those after it; wakes this reader again if there are more.
        """
        topic = place.topic
        if place.follow():
            self._event.set()
            return []
        if place.only_progress:
            place.move(max(place.cursor.number, topic.last - topic.closed))
        number = place.cursor.number
        entries: list[Entry] | None = []
        if number < topic.last:
            entries = topic.after(number, most_bytes)
            if entries is None:
                entries = await self._replayed(place, most_bytes)
            else:
                place.rest = []
        if entries:
            place.move(entries[-1].number)
            if place.cursor.number < topic.last:
                self._event.set()
        place.is_done = place.is_at_end
        return [topic.as_of_now(one) for one in entries or () if place.wants(one)]

    async def _replayed(self, place: Place, most_bytes: int) -> list[Entry]:
        """The next entries from the table. Nothing: look again later."""
        topic = place.topic
        number, generation = place.cursor.number, place.cursor.generation
        entries, place.rest = place.rest, []
        if not entries or entries[0].number != number + 1:
            try:
                entries = await self._relay.replay(topic, number)
            except DatabaseUnavailable:
                if not self._is_draining:
                    loop = asyncio.get_running_loop()
                    loop.call_later(SECONDS_UNTIL_NEXT_TRY, self._event.set)
                return []
        if topic.generation != generation:
            self._event.set()
            return []
        if not entries:
            if not self._is_draining:
                # All of it was pruned, or the table has a hole, which nothing will fill.
                place.skip_to(topic.first - 1 if topic.first - 1 > number else topic.last)
                self._event.set()
            return []
        if entries[0].number != number + 1:
            place.skip_to(entries[0].number - 1)
        return place.took(entries, most_bytes)

    # -- framing ---------------------------------------------------------------------------------

    def _identity(self) -> str:
        if not self._many:
            return str(self._places[0].cursor)
        return join_cursors({place.topic.stream_id: place.cursor for place in self._places})

    def _framed(self, place: Place, entry: Entry) -> bytes:
        if not self._many:
            return entry.frame
        others = {other.topic.stream_id: other.cursor for other in self._places}
        others[place.topic.stream_id] = Cursor(place.topic.generation, entry.number)
        data = b'data: {"stream":%d,' % place.topic.stream_id
        return b"id: %s\n%s" % (
            join_cursors(others).encode(),
            entry.rest.replace(b"data: {", data, 1),
        )

    def _line(self, place: Place, entry: Entry) -> bytes:
        head = b'{"stream":%d,"id":"%d.%d",' % (
            place.topic.stream_id,
            place.cursor.generation,
            entry.number,
        )
        return head + entry.raw[1:] + b"\n"

    def _reset(self, place: Place) -> bytes:
        if self._is_sse:
            return event_frame("reset", place.reset)
        told = {"stream": place.topic.stream_id, "type": "reset", **(place.reset or {})}
        return json.dumps(told, separators=(",", ":")).encode() + b"\n"

    def _hello(self) -> bytes:
        streams = [
            {
                "job": place.topic.stream_id,
                "generation": place.topic.generation,
                "first": place.topic.first,
                "last": place.topic.last,
                "after": place.cursor.number,
                "gap": place.gap,
                "closed": place.topic.closed,
            }
            for place in self._places
        ]
        return event_frame("hello", {"streams": streams}, self._identity())

    def _progress_frames(self) -> list[bytes]:
        if not self._progress or not self._is_sse:
            return []
        frames = []
        for place in self._places:
            topic = place.topic
            if (
                place.progress_seen != topic.progress_version
                and topic.progress_round > place.after_round
                and topic.progress
            ):
                place.progress_seen = topic.progress_version
                frames.append(topic.progress)
        return frames
