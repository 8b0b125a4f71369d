"""Server-Sent Events as bytes.

Only numbers and fixed names are put into fields; everything else is JSON in `data`, which has no
line breaks, so no text can make a field or an event of its own.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

from fanout.events import shortened

__all__ = ["Entry", "bye", "entry", "event_frame", "retry_frame"]

NAMES: Final = {
    "log": b"log",
    "progress": b"step",  # a job's own; "progress" is the batch's, from committed counters
    "failed": b"failed",
    "retry": b"retry",
    "dropped": b"dropped",
    "end": b"end",
}


class Entry:
    """One event of a stream, encoded once a process and shared by all its readers."""

    __slots__ = ("frame", "job_id", "number", "raw", "rest", "type")

    def __init__(self, number: int, generation: int, event: dict[str, Any], raw: bytes) -> None:
        self.number = number
        self.type: str = str(event.get("type", "log"))
        self.job_id = event.get("job")
        self.raw = raw
        self.rest = b"event: %s\ndata: %s\n\n" % (NAMES.get(self.type, b"log"), raw)
        self.frame = b"id: %d.%d\n%s" % (generation, number, self.rest)

    @property
    def size(self) -> int:
        """Bytes that it holds, roughly."""
        return 2 * len(self.frame) + 200


def entry(
    number: int, generation: int, line: bytes, *, late: frozenset[int] = frozenset()
) -> Entry:
    """An entry from a stored line; a long message is cut, and marked `truncated` with its full
    length.
    """
    event: dict[str, Any] = json.loads(line)
    if late and event.get("job") in late:
        event["late"] = True
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    short = shortened(line)
    return Entry(number, generation, event, short)


def event_frame(name: str, data: Any, identity: str | None = None) -> bytes:
    """A frame of our own making. `name` and `identity` are never a user's text."""
    head = f"id: {identity}\n" if identity is not None else ""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), default=str)
    return f"{head}event: {name}\ndata: {text}\n\n".encode()


def retry_frame(least_ms: int, most_ms: int) -> bytes:
    """How long a browser waits before it connects again; random, or all come at once."""
    return b"retry: %d\n\n" % random.randint(least_ms, most_ms)


def bye() -> bytes:
    """Said before the server leaves: come back in a while, not all at once."""
    return retry_frame(500, 5000) + event_frame("bye", {})
