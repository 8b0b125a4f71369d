"""One measured run of one contender, in a database and worker processes of its own.

Warm up, CHECKPOINT, measure, recount. The time is the database's: from `created_at` of the first
batch to `finished_at` of the last one. The client's clock, which looks every 20 ms, has to agree.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from fanout import Engine, Request

from .contenders.engine import engine_of
from .crew import crew
from .workload import BATCH, PING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fanout import Options

    from .cluster import Cluster
    from .crew import Crew
    from .workload import Workload

LOOK_SECONDS: Final = 0.02
LATE_CLIENT_SECONDS: Final = 0.5
WARM_UP_CHILDREN: Final = 2000
WARM_UP_BATCHES: Final = 10
PING_GAP_SECONDS: Final = (0.02, 0.1)
GIVE_UP_SECONDS: Final = 60.0
SLOWEST_RATE: Final = 100.0
"""Children per second, below which a run is given up after GIVE_UP_SECONDS more."""

CONTENDERS: Final = ("fanout", "ceiling", "naive")
MODULES: Final = {
    "fanout": "benchmarks.contenders.engine",
    "ceiling": "benchmarks.contenders.ceiling",
    "naive": "benchmarks.contenders.naive",
}

PARENTS: Final = f"""
INSERT INTO fanout.job (kind, status, total)
SELECT '{BATCH}', 'waiting', total FROM unnest($1::int[]) AS s (total) RETURNING id"""

TIMES: Final = """
SELECT extract(epoch FROM max(finished_at) - min(created_at))::float8
  FROM fanout.job WHERE id = ANY ($1)"""

# When the last child had ended: a batch that a sweep counts closes later.
ENDED: Final = """
SELECT extract(epoch FROM (SELECT max(c.finished_at) FROM fanout.job c WHERE c.parent_id = ANY ($1))
                          - min(p.created_at))::float8
  FROM fanout.job p WHERE p.id = ANY ($1)"""

# A recount from the children, with nothing of the counters in it.
RECOUNT: Final = """
SELECT p.id, p.status, p.total, p.completed, p.failed, p.cancelled,
       count(c.id) AS children, count(DISTINCT c.document_key) AS documents,
       count(*) FILTER (WHERE c.status = 'completed') AS children_completed,
       (SELECT count(*) FROM fanout.job f WHERE f.follows_id = p.id) AS follow_ups
  FROM fanout.job p LEFT JOIN fanout.job c ON c.parent_id = p.id
 WHERE p.id = ANY ($1) GROUP BY p.id ORDER BY p.id"""

PICKUPS: Final = """
SELECT extract(epoch FROM claimed_at - created_at)::float8 * 1000 AS ms
  FROM fanout.job WHERE id >= $1 AND kind = $2 ORDER BY id"""

# Transaction ids, not pg_stat_database: reads have none, and the counter is exact at once.
LOG_POSITION: Final = """
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xid,
       (pg_current_wal_insert_lsn() - '0/0')::bigint AS wal_bytes"""


@dataclass(frozen=True, slots=True)
class Bench:
    """A contender that is up and warm, and the client that watches it."""

    name: str
    workload: Workload
    cluster: Cluster
    crew: Crew
    connection: asyncpg.Connection
    client: Engine
    """Submits, where the contender is the engine."""
    options: Options
    """Of its batches, where it is the engine."""

    async def measure(self) -> dict[str, Any]:
        """One run, from a checkpoint to a recount."""
        await self.crew.prepare(self.workload.sizes)
        await self.connection.execute("CHECKPOINT")
        server_before = self.cluster.cpu_seconds()
        before = await self.connection.fetchrow(LOG_POSITION)
        parents, client_seconds = await self._run(self.workload)
        after = await self.connection.fetchrow(LOG_POSITION)
        server_after = self.cluster.cpu_seconds()
        told = await self.crew.halt()
        assert before is not None
        assert after is not None
        seconds: float = await self.connection.fetchval(TIMES, parents)
        ended: float = await self.connection.fetchval(ENDED, parents)
        children = self.workload.children
        return {
            "contender": self.name,
            "children": children,
            "seconds": seconds,
            "client_seconds": client_seconds,
            "clocks_agree": -0.001 <= client_seconds - seconds <= LATE_CLIENT_SECONDS,
            "rate": children / seconds,
            "work_rate": children / ended,
            "close_delay_ms": (seconds - ended) * 1000,
            "commits_per_child": (after["xid"] - before["xid"]) / children,
            "wal_bytes_per_child": (after["wal_bytes"] - before["wal_bytes"]) / children,
            "cpu_seconds": {
                "workers": sum(one["cpu_seconds"] for one in told),
                "server": None
                if server_before is None or server_after is None
                else server_after - server_before,
            },
            "peak_rss_mb": max(one["peak_rss_mb"] for one in told),
            **await self._checked(parents, sum(one["closes"] for one in told)),
            "workers": told,
        }

    async def warm_up(self) -> None:
        """The same at a smaller scale: connections, plans, code, files."""
        batches = min(self.workload.batches, WARM_UP_BATCHES)
        children = max(batches, min(self.workload.children // 2, WARM_UP_CHILDREN))
        small = replace(self.workload, batches=batches, children=children)
        await self.crew.prepare(small.sizes)
        await self._run(small)
        await self.crew.halt()

    async def pick_up(self, samples: int) -> list[float]:
        """Milliseconds from `created_at` to `claimed_at` of single jobs to idle workers."""
        first = None
        for _ in range(samples):
            await asyncio.sleep(random.uniform(*PING_GAP_SECONDS))
            handle = await self.client.submit(PING)
            first = first or handle.id
        if first is None:
            return []
        await self._until_closed("id >= $1", first)
        rows = await self.connection.fetch(PICKUPS, first, PING)
        return [row["ms"] for row in rows]

    async def _run(self, workload: Workload) -> tuple[list[int], float]:
        """The batches' ids, and the seconds that the client saw pass."""
        if self.name == "fanout":
            await self.crew.go([])
        started = time.perf_counter()
        parents = await self._submit(workload)
        if self.name != "fanout":
            await self.crew.go(parents)
        await self._until_closed("id = ANY ($1)", parents)
        return parents, time.perf_counter() - started

    async def _until_closed(self, which: str, argument: object) -> None:
        still_open = f"SELECT count(*) FROM fanout.job WHERE finished_at IS NULL AND {which}"
        async with asyncio.timeout(GIVE_UP_SECONDS + self.workload.children / SLOWEST_RATE):
            # Other processes close them: there is nothing to wait for but the database.
            while await self.connection.fetchval(still_open, argument):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)

    async def _submit(self, workload: Workload) -> list[int]:
        if self.name != "fanout":
            return [row["id"] for row in await self.connection.fetch(PARENTS, workload.sizes)]
        handles = await self.client.submit_many(
            [Request(BATCH, {"children": children}, **self.options) for children in workload.sizes]
        )
        return [handle.id for handle in handles]

    async def _checked(self, parents: Sequence[int], closes: int) -> dict[str, Any]:
        rows = await self.connection.fetch(RECOUNT, parents)
        exact = [
            row["status"] == "completed"
            and row["total"] == row["completed"] == row["children"] == row["children_completed"]
            and row["documents"] == children
            and row["total"] == children
            and row["failed"] == row["cancelled"] == 0
            for row, children in zip(rows, self.workload.sizes, strict=True)
        ]
        # Only the engine has follow-ups. A close that is told once is more than the unique index
        # on follow-ups can promise.
        wanted = 1 if self.name == "fanout" else 0
        return {
            "exact": all(exact),
            "closed_once": closes == len(parents)
            and all(row["follow_ups"] == wanted for row in rows),
            "closes": closes,
        }


async def bench(
    stack: AsyncExitStack,
    cluster: Cluster,
    dsn: str,
    name: str,
    workload: Workload,
    workers: int,
    options: Options | None = None,
) -> Bench:
    """A contender on `dsn`, warm, for as long as `stack` lives."""
    connection = await asyncpg.connect(dsn)
    stack.push_async_callback(connection.close)
    client = await stack.enter_async_context(engine_of(dsn, workload))
    members = await stack.enter_async_context(crew(MODULES[name], dsn, workload, workers))
    made = Bench(name, workload, cluster, members, connection, client, options or {})
    await made.warm_up()
    return made
