"""The statements of streams: append, end, replay, watch.

The relay and the publisher call these, nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg

from .statements import load_statements

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from uuid import UUID

    from .pool import Pool

__all__ = ["Appended", "EventStore", "NewBatch", "StoredBatch", "StreamHead"]


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Events of one stream, to be numbered and stored."""

    stream_id: int
    count: int
    body: bytes
    """A JSON text a line."""
    batch: int
    """The writer's running number: a batch that is sent twice is written once."""
    claims: frozenset[tuple[int, int]]
    """(job id, attempt) of the claims that speak in it."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A batch that was stored."""

    stream_id: int
    generation: int
    first_number: int
    watched: bool
    """Does anybody look?"""
    late: frozenset[int] = frozenset()
    """Jobs in it that had been given to another worker by then."""
    mark: int | None = None
    """It says the batch and all that came before it in the stream."""
    mark_before: int | None = None
    """The mark of the batch before it; 0: it is the first."""
    body: bytes = b""
    """Of an end: the event, which the database wrote."""


@dataclass(frozen=True, slots=True)
class StreamHead:
    """How far a stream is."""

    stream_id: int
    generation: int
    first_number: int
    """The first event that is still stored."""
    last_number: int
    closed: bool
    """Its last event is the end."""
    mark: int = 0
    """Of its last batch."""
    is_lost: bool = False
    """Is what was seen of it not there any more, or something else in its place?"""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A stored batch: `count` events, a JSON text a line, numbered from `first_number` on."""

    first_number: int
    count: int
    late: frozenset[int]
    body: bytes
    mark: int | None = None


class EventStore:
    """Raises DatabaseUnavailable from every method."""

    def __init__(self, pool: Pool, schema: str = "fanout") -> None:
        self._pool = pool
        self._sql = load_statements(schema)

    async def open_streams(self, stream_ids: Collection[int]) -> None:
        """Make heads where there are none."""
        await self._pool.fetch(self._sql["open_streams"], sorted(stream_ids))

    async def append(self, batches: Sequence[NewBatch], writer: UUID) -> list[Appended]:
        """Number and store batches of different streams in one commit, each once: one that was sent
        before is found.

        A stream that is missing in the answer has ended.
        """
        ordered = sorted(batches, key=lambda batch: batch.stream_id)
        claims = [(batch.stream_id, *claim) for batch in ordered for claim in sorted(batch.claims)]
        arguments = (
            [batch.stream_id for batch in ordered],
            [batch.count for batch in ordered],
            [batch.body for batch in ordered],
            [batch.batch for batch in ordered],
            writer,
            [stream_id for stream_id, _, _ in claims],
            [job_id for _, job_id, _ in claims],
            [attempt for _, _, attempt in claims],
        )
        try:
            rows = await self._pool.fetch(self._sql["append"], *arguments)
        except asyncpg.UniqueViolationError:
            # A first try whose answer was given up had gone on, and this one waited for its lock.
            rows = await self._pool.fetch(self._sql["append"], *arguments)
        return [
            Appended(
                row["stream_id"],
                row["generation"],
                row["first_number"],
                row["watched"],
                frozenset(row["late"] or ()),
                row["mark"],
                row["mark_before"],
            )
            for row in rows
        ]

    async def end_streams(self, batches: Sequence[tuple[int, int]], writer: UUID) -> list[Appended]:
        """Store the last event of streams whose root job has ended.

        `batches`: (stream id, batch number).
        """
        ordered = sorted(batches)
        rows = await self._pool.fetch(
            self._sql["end_streams"],
            [stream_id for stream_id, _ in ordered],
            writer,
            [batch for _, batch in ordered],
        )
        return [
            Appended(
                row["stream_id"],
                row["generation"],
                row["first_number"],
                row["watched"],
                mark=row["mark"],
                mark_before=row["mark_before"],
                body=row["body"].encode(),
            )
            for row in rows
        ]

    async def unstored(self, batches: Collection[tuple[int, int, int]], writer: UUID) -> set[int]:
        """The numbers of those batches, (stream id, batch, first number), that were told to be
        stored, and are not: a fail-over lost them.
        """
        ordered = sorted(batches)
        rows = await self._pool.fetch(
            self._sql["unstored"],
            writer,
            [stream_id for stream_id, _, _ in ordered],
            [batch for _, batch, _ in ordered],
            [first_number for _, _, first_number in ordered],
        )
        return {row["batch"] for row in rows}

    async def heads(
        self, stream_ids: Collection[int], seen: Mapping[int, tuple[int, int | None]] | None = None
    ) -> dict[int, StreamHead]:
        """Heads by stream id; a stream that never had an event may be missing.

        `seen`: stream id → the last number that was seen of it, and the mark of the batch that
        held it. The head says whether that is lost.
        """
        ids = list(stream_ids)
        known = seen or {}
        rows = await self._pool.fetch(
            self._sql["heads"],
            ids,
            [known.get(stream_id, (None, None))[0] for stream_id in ids],
            [known.get(stream_id, (None, None))[1] for stream_id in ids],
        )
        return {
            row["stream_id"]: StreamHead(
                row["stream_id"],
                row["generation"],
                row["first_number"],
                row["last_number"],
                row["closed"],
                row["mark"],
                row["lost"],
            )
            for row in rows
        }

    async def replay(
        self, stream_id: int, first: int, last: int, most_bytes: int = 256 << 10
    ) -> list[StoredBatch]:
        """Batches with the events `first` to `last`, in order, until they have `most_bytes`; the
        first may begin before `first`.
        """
        rows = await self._pool.fetch(self._sql["replay"], stream_id, first, last, most_bytes)
        return [
            StoredBatch(
                row["first_number"],
                row["count"],
                frozenset(row["late"] or ()),
                row["body"],
                row["mark"],
            )
            for row in rows
        ]

    async def watch(self, stream_ids: Collection[int], seconds: float) -> None:
        """Say that somebody watches these streams for `seconds`."""
        await self._pool.fetch(self._sql["watch"], sorted(stream_ids), timedelta(seconds=seconds))

    async def renew_generation(self, stream_id: int, generation: int) -> int | None:
        """After a fail-over that lost events which somebody has seen: a new generation of numbers.

        None: somebody did so already.
        """
        rows = await self._pool.fetch(self._sql["renew_generation"], stream_id, generation)
        return rows[0]["generation"] if rows else None

    async def notify(self, channel: str, payloads: Sequence[str]) -> None:
        """Hint.

        An autocommit statement of its own: NOTIFY takes a lock on the whole server at commit. Once:
        a hint that is not to be had soon is worth nothing.

        Raises asyncpg.LockNotAvailableError after 250 ms behind somebody else's commit.
        """
        async with self._pool.acquire() as connection:
            await connection.fetch(self._sql["notify"], channel, list(payloads))

    async def prune(self, retention_seconds: float, limit: int) -> int:
        """Delete at most `limit` batches older than the retention. Returns how many went."""
        rows = await self._pool.fetch(
            self._sql["prune_events"], timedelta(seconds=retention_seconds), limit
        )
        await self._pool.fetch(self._sql["prune_watches"])
        gone: int = rows[0]["gone"]
        return gone
