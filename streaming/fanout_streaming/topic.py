"""One stream that somebody watches: how far it is, and its newest events, encoded once for all
readers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fanout.event_store import StreamHead

    from .frames import Entry
    from .subscription import Subscription

__all__ = ["CHUNK_BYTES", "Topic"]

RING_BYTES: Final = 512 << 10
CHUNK_BYTES: Final = 64 << 10
JOINS: Final = 16
"""Joined chunks that are kept until the next event: readers that keep up all ask for the same."""


class Topic:
    """A ring of entries without a gap, up to `last`. Readers below it replay from the table."""

    __slots__ = (
        "_gone",
        "_joined",
        "_ring",
        "again",
        "closed",
        "ended_at",
        "first",
        "generation",
        "holds",
        "idle_since",
        "known_last",
        "last",
        "mark",
        "newcomer_round",
        "progress",
        "progress_key",
        "progress_round",
        "progress_told_at",
        "progress_version",
        "quiet_until",
        "readers",
        "ring_bytes",
        "settled_at",
        "stream_id",
        "wants_events",
        "wants_progress",
    )

    def __init__(self, head: StreamHead) -> None:
        self.stream_id = head.stream_id
        self.generation = head.generation
        self.first = head.first_number
        self.last = head.last_number
        """The last number that readers may have; the ring ends with it."""
        self.mark: int | None = head.mark
        """Of the batch that holds `last`; None: it has none, or nobody knows it."""
        self.known_last = head.last_number
        """The last number that anybody spoke of."""
        self.closed = head.closed
        self._ring: list[Entry] = []
        self._gone = 0  # entries at the ring's beginning that have left it
        self._joined: dict[int, tuple[bytes, int]] = {}
        self.ring_bytes = 0
        self.readers: set[Subscription] = set()
        self.holds = 0
        """Readers that are about to join."""
        self.idle_since = time.monotonic()
        self.again = False
        """Look once more: something was said of this stream while it was being looked at."""
        self.quiet_until = 0.0
        """time.monotonic() before which nobody looks again: the last look found nothing."""
        self.progress: bytes = b""
        self.progress_key: object = None
        self.progress_version = 0
        self.progress_round = 0
        """The round of readings that `progress` is of."""
        self.progress_told_at = float("-inf")
        self.newcomer_round = -1
        """The latest round that was under way when a reader joined."""
        self.wants_progress = 0
        self.wants_events = 0
        """Readers that want more of it than progress and the end."""
        self.settled_at: tuple[int, int] | None = None
        """Generation and number of the end at which the counters were read for the last time."""
        self.ended_at: float | None = None
        """time.monotonic() since when its job is known to have ended, while the stream has no end.
        """

    @property
    def ring_first(self) -> int:
        """The lowest number in the ring; one above `last` when it is empty."""
        return self.last + 1 - (len(self._ring) - self._gone)

    def append(self, entry: Entry) -> int:
        """Take the next event. Returns by how many bytes the ring has grown, or shrunk."""
        before = self.ring_bytes
        self._ring.append(entry)
        self.ring_bytes += entry.size
        self.last = entry.number
        self.known_last = max(self.known_last, entry.number)
        self.closed = entry.type == "end"
        self.shrink(RING_BYTES)
        return self.ring_bytes - before

    def shrink(self, most_bytes: int) -> int:
        """Forget the oldest entries beyond `most_bytes`, but the newest.

        Returns the bytes that went.
        """
        gone = 0
        ring = self._ring
        while self.ring_bytes - gone > most_bytes and len(ring) - self._gone > 1:
            gone += ring[self._gone].size
            self._gone += 1
        if 2 * self._gone > len(ring):
            del ring[: self._gone]
            self._gone = 0
        self.ring_bytes -= gone
        return gone

    def clear(self) -> int:
        """Empty the ring. Returns the bytes that went."""
        gone, self.ring_bytes = self.ring_bytes, 0
        self._ring.clear()
        self._gone = 0
        self._joined.clear()
        return gone

    @property
    def seen(self) -> tuple[int, int | None]:
        """The last number, and its mark: what the table is asked about."""
        return self.last, self.mark

    def move_to(
        self, generation: int, first: int, last: int, mark: int | None, *, closed: bool
    ) -> int:
        """Go on elsewhere, with an empty ring. Returns the bytes that went."""
        self.generation, self.first, self.last, self.mark = generation, first, last, mark
        self.known_last, self.closed = last, closed
        return self.clear()

    def after(self, number: int, most_bytes: int = CHUNK_BYTES) -> list[Entry] | None:
        """The entries above `number`, without a gap, as many as `most_bytes` hold but one at least;
        None: they have left the ring.
        """
        start = number - self.ring_first + 1
        if start < 0:
            return None
        start += self._gone
        end = start
        ring = self._ring
        while end < len(ring) and (most_bytes > 0 or end == start):
            most_bytes -= len(ring[end].frame)
            end += 1
        return ring[start:end]

    def joined(self, number: int) -> tuple[bytes, int] | None:
        """The frames above `number` as one chunk, and its last number; None: they have left the
        ring.

        Made once for all readers that are equally far.
        """
        found = self._joined.get(number)
        if found is None:
            entries = self.after(number)
            if entries is None:
                return None
            last = entries[-1].number if entries else number
            found = b"".join(self.as_of_now(one).frame for one in entries), last
            if len(self._joined) < JOINS:
                self._joined[number] = found
        return found

    def as_of_now(self, entry: Entry) -> Entry:
        """An end is one only while nothing follows."""
        if entry.type != "end" or (self.closed and entry.number >= self.last):
            return entry
        return entry.reopened(self.generation)

    def wake(self) -> None:
        """Something has changed: tell all readers."""
        self._joined.clear()
        for reader in self.readers:
            reader.wake()
