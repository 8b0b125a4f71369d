"""Server-Sent Events as bytes.

Only numbers and fixed names are put into fields; everything else is JSON in `data`, which has no
line breaks, so no text can make a field or an event of its own.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

from fanout.events import as_reopened, as_told

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Entry", "bye", "entry", "event_frame", "retry_frame"]

NAMES: Final = {
    "log": b"log",
    "progress": b"step",  # a job's own; "progress" is the batch's, from committed counters
    "failed": b"failed",
    "retry": b"retry",
    "dropped": b"dropped",
    "end": b"end",
    "reopened": b"reopened",
}


class Entry:
    """One event of a stream, encoded once a process and shared by all its readers."""

    __slots__ = ("_data_at", "_rest_at", "frame", "job_id", "number", "type")

    def __init__(self, number: int, generation: int, kind: str, job_id: object, raw: bytes) -> None:
        self.number = number
        self.type = kind if kind in NAMES else "log"
        self.job_id = job_id
        identity = b"id: %d.%d\n" % (generation, number)
        name = b"event: %s\ndata: " % NAMES[self.type]
        self.frame = b"%s%s%s\n\n" % (identity, name, raw)
        self._rest_at = len(identity)
        self._data_at = len(identity) + len(name)

    @property
    def raw(self) -> bytes:
        """The event's JSON."""
        return self.frame[self._data_at : -2]

    @property
    def rest(self) -> bytes:
        """The frame without its id."""
        return self.frame[self._rest_at :]

    @property
    def size(self) -> int:
        """Bytes that it holds, roughly."""
        return len(self.frame) + 200

    def reopened(self, generation: int) -> Entry:
        """What to say in the place of an end that others follow: a client would leave at an end."""
        return Entry(self.number, generation, "reopened", self.job_id, as_reopened(self.raw))


def entry(number: int, generation: int, line: bytes, late: Collection[int] = ()) -> Entry:
    """An entry from a stored line, as watchers get it."""
    event, raw = as_told(line, late)
    return Entry(number, generation, str(event.get("type", "log")), event.get("job"), raw)


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
