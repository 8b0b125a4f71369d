"""A job's events for a program that has no relay: read from the table, again and again."""

from __future__ import annotations

import asyncio
import random
import re
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from .errors import DatabaseUnavailable, UsageError
from .events import Event, as_told, lines_of, readable
from .pool import NotStarted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .event_store import EventStore, StoredBatch, StreamHead
    from .store import Store

__all__ = ["follow"]

FIRST_LOOK_SECONDS: Final = 0.05
LONGEST_LOOK_SECONDS: Final = 1.0
WATCH_SECONDS: Final = 60.0
END_AFTER_SECONDS: Final = 1.5
"""How long after a job's end its last lines may come from other processes."""
_CURSOR: Final = re.compile(r"([1-9][0-9]{0,8})\.([0-9]{1,18})", re.ASCII)


async def follow(
    store: Store, events: EventStore, job_id: int, after: str | None = None
) -> AsyncIterator[Event]:
    """The events of a job after a cursor, and those that come, until its end; of a child its own
    ones, until its batch has ended.

    Raises:
        JobNotFound.
        UsageError: `after` is not the id of an event.
        DatabaseUnavailable: the engine has stopped. Outages are waited out.
    """
    cursor = _cursor(after)
    row = await store.job(job_id)
    follower = _Follower(store, events, row.root_id or row.id, cursor)
    only = None if row.root_id is None else job_id
    pause = FIRST_LOOK_SECONDS
    while True:
        try:
            found = await follower.look()
        except NotStarted:
            raise
        except DatabaseUnavailable:
            await asyncio.sleep(random.uniform(0.5, 1.0))
            continue
        for event in found:
            if (
                only is None
                or event.data.get("job") == only
                or event.type in {"end", "reopened", "reset"}
            ):
                yield event
        if follower.is_over:
            return
        pause = FIRST_LOOK_SECONDS if found else min(LONGEST_LOOK_SECONDS, pause * 1.3)
        if not follower.has_more:
            await asyncio.sleep(pause)


def _cursor(after: str | None) -> tuple[int, int] | None:
    if after is None:
        return None
    found = _CURSOR.fullmatch(after)
    if found is None:
        raise UsageError("after", f"is {after[:40]!r}", "Give the id of an event, like 1.42")
    return int(found[1]), int(found[2])


class _Follower:
    """Where a program is in a stream."""

    def __init__(
        self, store: Store, events: EventStore, stream_id: int, cursor: tuple[int, int] | None
    ) -> None:
        self._store = store
        self._events = events
        self._stream_id = stream_id
        self._cursor = cursor
        self._seen: tuple[int, int | None] | None = None
        """The last number that was read here, and its batch's mark."""
        self._watched_at = float("-inf")
        self._ended_at: float | None = None
        self._writer = uuid4()
        self._batches = count(1)
        self.has_more = False
        self.is_over = False

    async def look(self) -> list[Event]:
        """What is new."""
        await self._say_watched()
        seen = None if self._seen is None else {self._stream_id: self._seen}
        head = (await self._events.heads([self._stream_id], seen)).get(self._stream_id)
        if head is None:
            return []
        if head.is_lost and self._cursor is not None and self._cursor[0] == head.generation:
            await self._events.renew_generation(self._stream_id, head.generation)
            self._seen = None  # the next look finds the new generation, whoever made it
            self.has_more = True
            return []
        found = self._reset(head)
        generation, number = self._cursor or (head.generation, head.first_number - 1)
        batches = (
            await self._events.replay(self._stream_id, number + 1, head.last_number)
            if number < head.last_number
            else []
        )
        events = [one for one in self._told(batches, head) if int(one.id.split(".")[1]) > number]
        if events and events[0].id != f"{generation}.{number + 1}":
            found.append(self._reset_to("pruned", generation, number, events[0].id))
        found += events
        number = int(events[-1].id.split(".")[1]) if events else head.last_number
        if events:
            self._seen = number, batches[-1].mark
        self._cursor = generation, number
        self.has_more = number < head.last_number
        self.is_over = head.closed and not self.has_more
        if not found and not head.closed:
            await self._end_if_due()
        return found

    def _reset(self, head: StreamHead) -> list[Event]:
        """Is what follows the cursor not there any more? Never a silent gap."""
        if self._cursor is None:
            return []
        generation, number = self._cursor
        if generation == head.generation and head.first_number <= number + 1:
            self._cursor = generation, min(number, head.last_number)
            return []
        reason = "pruned" if generation == head.generation else "generation"
        self._cursor = head.generation, head.first_number - 1
        first = f"{head.generation}.{head.first_number}"
        return [self._reset_to(reason, generation, number, first)]

    def _reset_to(self, reason: str, generation: int, number: int, first: str) -> Event:
        """Events between what was seen and `first` are lost."""
        seen = f"{generation}.{number}"
        data: dict[str, Any] = {"job": self._stream_id, "reason": reason, "seen": seen}
        return Event(self._stream_id, seen, "reset", {**data, "from": first})

    def _told(self, batches: list[StoredBatch], head: StreamHead) -> list[Event]:
        return [
            self._event(number, line, batch.late, head)
            for batch in batches
            for number, line in enumerate(lines_of(batch.body, batch.count), batch.first_number)
        ]

    def _event(self, number: int, line: bytes, late: frozenset[int], head: StreamHead) -> Event:
        """Whole: what is cut for watchers is not cut here."""
        told, _ = as_told(line, late)
        data = readable(line) or told
        if told.get("late"):
            data["late"] = True
        kind = str(data.get("type", "log"))
        if kind == "end" and not (head.closed and number == head.last_number):
            kind = data["type"] = "reopened"
        return Event(self._stream_id, f"{head.generation}.{number}", kind, data)

    async def _say_watched(self) -> None:
        if time.monotonic() - self._watched_at > WATCH_SECONDS / 3:
            await self._events.open_streams([self._stream_id])
            await self._events.watch([self._stream_id], WATCH_SECONDS)
            self._watched_at = time.monotonic()

    async def _end_if_due(self) -> None:
        """Whoever closed the job may have died before it could say so."""
        if (await self._store.job(self._stream_id)).finished_at is None:
            self._ended_at = None
            return
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at > END_AFTER_SECONDS:
            await self._events.end_streams([(self._stream_id, next(self._batches))], self._writer)
