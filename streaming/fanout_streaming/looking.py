"""Looking through what a stream has stored: a bounded piece of it at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fanout.events import as_told, lines_of, readable

from .cursor import Cursor

if TYPE_CHECKING:
    from fanout.event_store import EventStore, StoredBatch, StreamHead

__all__ = ["Found", "Looking", "search"]

PAGE_BYTES: Final = 256 << 10
PAGES: Final = 16
"""Of one search: 4 MiB of the table, or some 20,000 short lines."""

LEVEL_OF: Final = {"log": "info", "failed": "error", "retry": "warning"}
"""Events that are lines, and how grave they are where they do not say so."""


class Looking(NamedTuple):
    """What is looked for. None: that may be anything."""

    job_id: int | None = None
    """Lines of this job alone."""
    level: str | None = None
    contains: str | None = None
    """In the message, whatever the case of its letters."""

    def fits(self, event: dict[str, Any]) -> bool:
        """Is this event one of those?"""
        kind = event.get("type")
        if kind not in LEVEL_OF:
            return False
        if self.job_id is not None and event.get("job") != self.job_id:
            return False
        if self.level is not None and event.get("level", LEVEL_OF[kind]) != self.level:
            return False
        return self.contains is None or self.contains.casefold() in _message(event).casefold()


class Found(NamedTuple):
    """Lines that fit, with their cursors."""

    lines: list[tuple[str, dict[str, Any]]]
    next: str | None
    """The cursor to look on after; None: everything that is stored was looked at."""


async def search(
    events: EventStore, stream_id: int, looking: Looking, after: Cursor | None, limit: int
) -> Found:
    """At most `limit` lines of a stream that fit, in order, as watchers get them; fewer, or
    none, when they lie far apart. A cursor of another generation begins at the first line.

    Raises DatabaseUnavailable.
    """
    head = (await events.heads([stream_id])).get(stream_id)
    if head is None:
        return Found([], None)
    is_known = after is not None and after.generation == head.generation
    number = max(head.first_number - 1, after.number if is_known and after is not None else 0)
    found: list[tuple[str, dict[str, Any]]] = []
    for _ in range(PAGES):
        if number >= head.last_number:
            return Found(found, None)
        batches = await events.replay(stream_id, number + 1, head.last_number, PAGE_BYTES)
        if not batches:
            return Found(found, None)  # pruned meanwhile
        number = _take(batches, head, looking, found, number, limit)
        if len(found) >= limit:
            break
    return Found(found, f"{head.generation}.{number}" if number < head.last_number else None)


def _take(
    batches: list[StoredBatch],
    head: StreamHead,
    looking: Looking,
    found: list[tuple[str, dict[str, Any]]],
    after: int,
    limit: int,
) -> int:
    """Add what fits, until there are `limit`. Returns the last number that was looked at."""
    for batch in batches:
        for number, line in enumerate(lines_of(batch.body, batch.count), batch.first_number):
            if number <= after:
                continue
            after = number
            event = readable(line)  # whole: watchers get it cut
            if event is None or not looking.fits(event):
                continue
            found.append((f"{head.generation}.{number}", as_told(line, batch.late)[0]))
            if len(found) >= limit:
                return after
    return after


def _message(event: dict[str, Any]) -> str:
    message = event.get("message")
    return message if isinstance(message, str) else ""
