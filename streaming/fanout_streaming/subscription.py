"""A reader: a cursor for each of its streams, not a queue.

What it has not read yet lies in the ring or in the table.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .cursor import Cursor, join_cursors
from .frames import bye, event_frame, retry_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .frames import Entry
    from .relay import Relay
    from .topic import Topic

__all__ = ["Event", "Subscription"]

CHUNK_BYTES: Final = 64 << 10
CHUNK_EVENTS: Final = 500
GARBAGE_REPLAY: Final = 1000
"""Events that a reader with a cursor that is none gets: bounded, never the whole stream."""

Format = Literal["sse", "ndjson"]


class Event(NamedTuple):
    """One event, for programs."""

    stream_id: int
    id: str
    """`generation.number`: the cursor to go on after it."""
    type: str
    data: dict[str, Any]


class Place:
    """Where a reader is in one stream."""

    __slots__ = ("cursor", "gap", "is_done", "job_id", "progress_seen", "reset", "topic")

    def __init__(
        self, topic: Topic, cursor: Cursor | None, text: str | None, job_id: int | None
    ) -> None:
        self.topic = topic
        self.job_id = job_id
        """Only this job's events; None: all."""
        self.gap = False
        """The cursor that was given is none: what is shown may not join on to what was seen."""
        self.reset: dict[str, Any] | None = None
        self.is_done = False
        self.progress_seen = 0
        self.cursor = self._start(cursor, text)

    def _start(self, cursor: Cursor | None, text: str | None) -> Cursor:
        """Where to begin: after the cursor, if what follows it is still there."""
        topic = self.topic
        begin = Cursor(topic.generation, topic.first - 1)
        if cursor is None:
            if not text:
                return begin
            self.gap = True
            return Cursor(topic.generation, max(begin.number, topic.last - GARBAGE_REPLAY))
        if cursor.generation != topic.generation:
            return self.reset_to(begin, "generation", cursor)
        if cursor.number > topic.last:
            self.gap = True
            return Cursor(topic.generation, topic.last)
        if cursor.number < begin.number:
            return self.reset_to(begin, "pruned", cursor)
        return cursor

    def reset_to(self, begin: Cursor, reason: str, seen: Cursor) -> Cursor:
        """Go on at `begin` and say so: never a silent gap."""
        self.reset = {
            "job": self.topic.stream_id,
            "reason": reason,
            "seen": str(seen),
            "from": f"{begin.generation}.{begin.number + 1}",
        }
        return begin

    def wants(self, entry: Entry) -> bool:
        """Is this one of the events that the reader asked for?"""
        return self.job_id is None or entry.job_id == self.job_id or entry.type == "end"

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
        self._event.set()

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
            self._relay.leave(
                self, [place.topic for place in self._places], progress=self._progress
            )

    # -- reading ---------------------------------------------------------------------------------

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
                yield b"".join(parts)
            if all(place.is_done for place in self._places):
                return
            if self._is_draining or now >= self._ends_at:
                if self._is_sse and self._is_draining:
                    yield bye()
                return
            if not parts:
                await self._event.wait()

    async def _new_parts(self) -> list[bytes]:
        """Everything that is there for this reader, framed; a heartbeat after long silence."""
        parts: list[bytes] = []
        size = 0
        for place in self._places:
            entries = await self._read(place, CHUNK_BYTES - size)
            if self._is_sse and place.reset is not None:
                parts.append(event_frame("reset", place.reset))
            place.reset = None
            framed = self._framed if self._is_sse else self._line
            parts += [framed(place, one) for one in entries if place.wants(one)]
            size += sum(len(one.frame) for one in entries)
        if not self._is_sse:
            return parts
        if self._progress:
            parts += self._progress_frames()
        silent = time.monotonic() - self.last_sent_at >= self._relay.settings.heartbeat
        return parts or ([event_frame("hb", {}, self._identity())] if silent else [])

    async def events(self) -> AsyncIterator[Event]:
        """The events one by one, for programs, until the last stream's end."""
        while not self._closed and not all(place.is_done for place in self._places):
            self._event.clear()
            read = 0
            for place in self._places:
                for entry in await self._read(place, CHUNK_BYTES):
                    read += 1
                    if place.wants(entry):
                        identity = f"{place.cursor.generation}.{entry.number}"
                        yield Event(
                            place.topic.stream_id, identity, entry.type, json.loads(entry.raw)
                        )
            if not read:
                if self._is_draining:
                    return
                await self._event.wait()

    async def _read(self, place: Place, most_bytes: int) -> list[Entry]:
        """The next entries of one stream, exactly those after the cursor; the cursor moves."""
        topic = place.topic
        if place.cursor.generation != topic.generation:
            begin = Cursor(topic.generation, topic.first - 1)
            place.cursor = place.reset_to(begin, "generation", place.cursor)
            self._event.set()
            return []
        if most_bytes <= 0 or place.cursor.number >= topic.last:
            place.is_done = place.is_at_end
            return []
        entries = topic.after(place.cursor.number, CHUNK_EVENTS)
        if entries is None:
            entries = await self._relay.replay(topic, place.cursor.number)
            if entries and entries[0].number != place.cursor.number + 1:
                # Pruned under the reader's feet.
                begin = Cursor(topic.generation, entries[0].number - 1)
                place.cursor = place.reset_to(begin, "pruned", place.cursor)
        taken: list[Entry] = []
        for entry in entries:
            if taken and most_bytes < len(entry.frame):
                self._event.set()
                break
            most_bytes -= len(entry.frame)
            taken.append(entry)
        if taken:
            place.cursor = Cursor(place.cursor.generation, taken[-1].number)
            if place.cursor.number < topic.last:
                self._event.set()
        place.is_done = place.is_at_end
        return taken

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
            place.topic.generation,
            entry.number,
        )
        return head + entry.raw[1:] + b"\n"

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
        frames = []
        for place in self._places:
            if place.progress_seen != place.topic.progress_version:
                place.progress_seen = place.topic.progress_version
                frames.append(place.topic.progress)
        return frames
