"""What the two contenders without an engine share: dispatch and claim by bare SQL.

The table is the engine's own: same rows, columns, indexes and CHECKs. Left out: who may still write
(attempt and token are set because the CHECKs want them, and never looked at), leases that anybody
renews, retries, kinds and priorities in turn, the check that a document has no child yet, the
follow-up, and all Python per child: payloads and results travel as arrays.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

import asyncpg
from pydantic_core import to_json

from benchmarks.facts import peak_rss_mb
from benchmarks.workload import CHILD, Workload, document_key
from fanout.pool import SESSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DISPATCH: Final = f"""
INSERT INTO fanout.job (parent_id, root_id, depth, document_key, kind, payload)
SELECT $1, $1, 1, d.key, '{CHILD}', d.payload::json
  FROM unnest($2::text[], $3::text[]) AS d (key, payload)"""

CLAIM: Final = f"""
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE status = 'pending' AND deaths = 0 AND kind = '{CHILD}' AND priority = 5
     ORDER BY run_at, id LIMIT $1 FOR UPDATE SKIP LOCKED),
claimed AS (
    UPDATE fanout.job j
       SET status = 'processing', attempt = j.attempt + 1, claim_token = $2,
           claimed_at = clock_timestamp(), lease_expires_at = clock_timestamp() + interval '30 s'
      FROM pick WHERE j.id = pick.id
 RETURNING j.id, j.parent_id, j.payload::text)
SELECT array_agg(id) AS ids, array_agg(parent_id) AS parents, array_agg(payload) AS payloads
  FROM claimed"""

IDLE_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class Claimed:
    """What one claim took."""

    ids: list[int]
    parents: list[int]
    payloads: list[str]


async def connect(dsn: str) -> asyncpg.Connection:
    """A connection with the engine's own session settings, so that both get the same plans."""
    return await asyncpg.connect(dsn, server_settings=SESSION)


async def claim(connection: asyncpg.Connection, limit: int, token: object) -> Claimed | None:
    """At most `limit` rows; None: nothing is pending."""
    row = await connection.fetchrow(CLAIM, limit, token)
    assert row is not None
    return Claimed(*row.values()) if row["ids"] else None


class BareMember:
    """One worker process: dispatches if it leads, and does `work` until it is told to halt."""

    def __init__(
        self,
        dsn: str,
        workload: Workload,
        work: Callable[[BareMember], Awaitable[None]],
        connections: int,
    ) -> None:
        self._dsn = dsn
        self.workload = workload
        self._work = work
        self._size = connections
        self.connections: list[asyncpg.Connection] = []
        self.token = uuid4()
        self.result = to_json({"n": workload.children}).decode()
        self.closes = 0
        self.executed = 0
        self._chunks: list[tuple[int, list[str], list[str]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._halting = False
        self._cpu_before = 0.0

    async def __aenter__(self) -> Self:
        self.connections = [await connect(self._dsn) for _ in range(self._size)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self.connections:
            await connection.close()

    @property
    def halting(self) -> bool:
        return self._halting

    async def prepare(self, *, sizes: list[int], leads: bool) -> dict[str, Any]:
        """The chunks to dispatch, made before the clock starts."""
        self._chunks = self._made_chunks(sizes) if leads else []
        return {"chunks": len(self._chunks)}

    def _made_chunks(self, sizes: list[int]) -> list[tuple[int, list[str], list[str]]]:
        size = self.workload.chunk_size
        return [
            (
                batch,
                [document_key(n) for n in numbers],
                [to_json(self.workload.payload(n)).decode() for n in numbers],
            )
            for batch, children in enumerate(sizes)
            for numbers in (
                range(first, min(children, first + size)) for first in range(0, children, size)
            )
        ]

    async def go(self, parents: list[int]) -> dict[str, Any]:
        self.closes = self.executed = 0
        self._halting = False
        self._cpu_before = time.process_time()
        self._tasks = [asyncio.ensure_future(self._work(self))]
        if self._chunks:
            self._tasks.append(asyncio.create_task(self._dispatch(parents)))
        return {}

    async def halt(self) -> dict[str, Any]:
        self._halting = True
        await asyncio.gather(*self._tasks)
        return {
            "cpu_seconds": time.process_time() - self._cpu_before,
            "executed": self.executed,
            "peak_rss_mb": peak_rss_mb(),
            "closes": self.closes,
        }

    async def _dispatch(self, parents: list[int]) -> None:
        connection = await connect(self._dsn)
        statement = await connection.prepare(DISPATCH)
        for batch, keys, payloads in self._chunks:
            await statement.fetch(parents[batch], keys, payloads)
        await connection.close()
