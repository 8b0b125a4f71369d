"""Claims beside a long dead prefix, which somebody's open transaction holds back from vacuum.

Many finished rows stand at the front of the index that claims walk. The same batch runs in two
databases, in turn: one where a REPEATABLE READ transaction was opened before the rows were finished
and stays open (`held`), one that was vacuumed (`clean`). Without the floors of the worker each
claim would walk all of the dead rows.
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
from benchmarks.workload import BATCH, CHILD

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cluster import Cluster
    from benchmarks.workload import Workload

NAME: Final = "dead_prefix"
ROWS_AT_ONCE: Final = 50_000

PARENT: Final = f"""
INSERT INTO fanout.job (kind, status, total) VALUES ('{BATCH}', 'waiting', $1) RETURNING id"""
FILL: Final = f"""
INSERT INTO fanout.job (parent_id, root_id, depth, document_key, kind)
SELECT $1::bigint, $1::bigint, 1, 'old-' || n, '{CHILD}'
  FROM generate_series($2::int, $3::int) AS n"""
END: Final = """
UPDATE fanout.job SET status = 'completed', finished_at = clock_timestamp()
 WHERE parent_id = $1 AND status = 'pending'"""
CLOSE: Final = """
UPDATE fanout.job SET status = 'completed', completed = total, finished_at = clock_timestamp()
 WHERE id = $1"""


async def run(
    workload: Workload,
    *,
    workers: int,
    rounds: int,
    finished_rows: int,
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report: rates, and the latency of claims, with and without the open transaction."""
    started_at = datetime.now(UTC)
    done: list[dict[str, Any]] = []
    async with cluster(dsn) as server:
        story = await story_of(server, workload, workers, started_at)
        for number in range(rounds):
            for name in ("clean", "held"):
                one = await _one(server, workload, workers, finished_rows, held=name == "held")
                done.append({"round": number + 1, "prefix": name} | one)
                tell(f"round {number + 1} of {rounds}: {name} {one['rate']:,.0f} children/s")
    of = {name: [one for one in done if one["prefix"] == name] for name in ("clean", "held")}
    rates = {name: [one["rate"] for one in some] for name, some in of.items()}
    return {
        "scenario": NAME,
        "finished_rows": finished_rows,
        "rate": round(median(rates["held"]), 1),
        "clean_rate": round(median(rates["clean"]), 1),
        "held_to_clean": round(median(rates["held"]) / median(rates["clean"]), 3),
        "claim_ms": latencies(_claims(of["held"])),
        "clean_claim_ms": latencies(_claims(of["clean"])),
        "exact": all(one["exact"] for one in done),
        "closed_once": all(one["closed_once"] for one in done),
        "spread": {name: spread(some) for name, some in rates.items()},
        **story,
        "rounds": done,
    }


async def _one(
    server: Cluster, workload: Workload, workers: int, finished_rows: int, *, held: bool
) -> dict[str, Any]:
    async with server.database() as database, AsyncExitStack() as stack:
        connection = await asyncpg.connect(database)
        stack.push_async_callback(connection.close)
        if held:
            # On the stack before the workers: they end first, so it is open for all of the run.
            holder = await asyncpg.connect(database)
            stack.push_async_callback(holder.close)
            await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await holder.fetchval("SELECT count(*) FROM fanout.job")
        await _fill(connection, finished_rows)
        await connection.execute("VACUUM ANALYZE fanout.job")
        ready = await bench(stack, server, database, "fanout", workload, workers)
        return await ready.measure()


async def _fill(connection: asyncpg.Connection, finished_rows: int) -> None:
    """Rows that were pending once and have finished, in the order in which claims meet them."""
    parent = await connection.fetchval(PARENT, finished_rows)
    for first in range(1, finished_rows + 1, ROWS_AT_ONCE):
        await connection.execute(FILL, parent, first, min(finished_rows, first + ROWS_AT_ONCE - 1))
        await connection.execute(END, parent)
    await connection.execute(CLOSE, parent)


def _claims(rounds: list[dict[str, Any]]) -> list[float]:
    return [ms for one in rounds for worker in one["workers"] for ms in worker["claim_ms"]]
