"""What a limit costs that does not bind: a batch, with and without one on its children's kind.

In turn, a round each, every time in a fresh database with fresh processes. Claims of a kind with a
limit are made one at a time over all workers, and count what runs.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from benchmarks.cluster import cluster
from benchmarks.figures import latencies, spread
from benchmarks.harness import bench
from benchmarks.scenarios.fan_out import story_of
from benchmarks.workload import CHILD

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cluster import Cluster
    from benchmarks.workload import Workload

NAME: Final = "limits"

SET: Final = f"""
INSERT INTO fanout.limits (name, operator) VALUES ('kind:{CHILD}', '{{"concurrency": 1000000}}')"""


async def run(
    workload: Workload,
    *,
    workers: int,
    rounds: int,
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report: rates with and without the limit."""
    started_at = datetime.now(UTC)
    done: list[dict[str, Any]] = []
    async with cluster(dsn) as server:
        story = await story_of(server, workload, workers, started_at)
        for number in range(rounds):
            for name in ("without", "with"):
                one = await _one(server, workload, workers, is_limited=name == "with")
                done.append({"round": number + 1, "limit": name} | one)
                tell(f"round {number + 1} of {rounds}: {name} {one['rate']:,.0f} children/s")
    of = {name: [one for one in done if one["limit"] == name] for name in ("without", "with")}
    rates = {name: [one["rate"] for one in some] for name, some in of.items()}
    return {
        "scenario": NAME,
        "rate": round(median(rates["with"]), 1),
        "unlimited_rate": round(median(rates["without"]), 1),
        "limited_to_unlimited": round(median(rates["with"]) / median(rates["without"]), 3),
        "claim_ms": latencies(_claims(of["without"])),
        "exact": all(one["exact"] for one in done),
        "closed_once": all(one["closed_once"] for one in done),
        "spread": {name: spread(some) for name, some in rates.items()},
        **story,
        "rounds": done,
    }


async def _one(
    server: Cluster, workload: Workload, workers: int, *, is_limited: bool
) -> dict[str, Any]:
    async with server.database() as database, AsyncExitStack() as stack:
        if is_limited:
            connection = await asyncpg.connect(database)
            await connection.execute(SET)
            await connection.close()
        ready = await bench(stack, server, database, "fanout", workload, workers)
        return await ready.measure()


def _claims(rounds: list[dict[str, Any]]) -> list[float]:
    return [ms for one in rounds for worker in one["workers"] for ms in worker["claim_ms"]]
