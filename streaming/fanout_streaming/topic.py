"""One stream that somebody watches: how far it is, and its newest events, encoded once for all
readers.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fanout.event_store import StreamHead

    from .frames import Entry
    from .subscription import Subscription

__all__ = ["Topic"]

RING_BYTES: Final = 256 << 10


class Topic:
    """A ring of entries without a gap, up to `last`. Readers below it replay from the table."""

    __slots__ = (
        "closed",
        "ended_at",
        "entries",
        "first",
        "generation",
        "idle_since",
        "known_last",
        "last",
        "progress",
        "progress_version",
        "readers",
        "ring_bytes",
        "stream_id",
        "wants_progress",
    )

    def __init__(self, head: StreamHead) -> None:
        self.stream_id = head.stream_id
        self.generation = head.generation
        self.first = head.first_number
        self.last = head.last_number
        """The last number that readers may have; the ring ends with it."""
        self.known_last = head.last_number
        """The last number that anybody spoke of."""
        self.closed = head.closed
        self.entries: deque[Entry] = deque()
        self.ring_bytes = 0
        self.readers: set[Subscription] = set()
        self.idle_since = time.monotonic()
        self.progress: bytes = b""
        self.progress_version = 0
        self.wants_progress = 0
        self.ended_at: float | None = None
        """time.monotonic() since when its job is known to have ended, while the stream has no end.
        """

    @property
    def ring_first(self) -> int:
        """The lowest number in the ring; one above `last` when it is empty."""
        return self.last + 1 - len(self.entries)

    def append(self, entry: Entry) -> int:
        """Take the next event. Returns by how many bytes the ring has grown, or shrunk."""
        before = self.ring_bytes
        self.entries.append(entry)
        self.ring_bytes += entry.size
        self.last = entry.number
        self.known_last = max(self.known_last, entry.number)
        if entry.type == "end":
            self.closed = True
        self.shrink(RING_BYTES)
        return self.ring_bytes - before

    def shrink(self, most_bytes: int) -> int:
        """Forget the oldest entries beyond `most_bytes`, but the newest.

        Returns the bytes that went.
        """
        gone = 0
        while self.ring_bytes - gone > most_bytes and len(self.entries) > 1:
            gone += self.entries.popleft().size
        self.ring_bytes -= gone
        return gone

    def clear(self) -> int:
        """Empty the ring. Returns the bytes that went."""
        gone, self.ring_bytes = self.ring_bytes, 0
        self.entries.clear()
        return gone

    def after(self, number: int, most: int) -> list[Entry] | None:
        """At most `most` entries above `number`, without a gap; None: they have left the ring."""
        start = number + 1 - self.ring_first
        if start < 0:
            return None
        return list(islice(self.entries, start, start + most))

    def wake(self) -> None:
        """Tell all readers that there is something."""
        for reader in self.readers:
            reader.wake()
