"""Level 2 against level 3: a batch that a sweep counts, and one that its children count.

In turn, a round each, every time in a fresh database with fresh processes. The rate is that of the
work, until the last child has ended; how long after that the batch closed stands beside it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.cluster import cluster
from benchmarks.figures import cpu_us_per_child, latencies, spread
from benchmarks.harness import bench
from benchmarks.scenarios.fan_out import story_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cluster import Cluster
    from benchmarks.workload import Workload
    from fanout import Options

NAME: Final = "levels"
LEVELS: Final[dict[str, Options]] = {
    "level 3": {"closing": "count"},
    "level 2": {"closing": "aggregate"},
}


async def run(
    workload: Workload,
    *,
    workers: int,
    rounds: int,
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report: for each level the rate, the close after the last child, WAL and CPU a child."""
    started_at = datetime.now(UTC)
    done: list[dict[str, Any]] = []
    async with cluster(dsn) as server:
        story = await story_of(server, workload, workers, started_at)
        for number in range(rounds):
            for name, options in LEVELS.items():
                one = await _one(server, workload, workers, options)
                done.append({"round": number + 1, "level": name} | one)
                tell(
                    f"round {number + 1} of {rounds}: {name} {one['work_rate']:,.0f} children/s, "
                    f"closed {one['close_delay_ms']:,.0f} ms after the last one"
                )
    of = {name: [one for one in done if one["level"] == name] for name in LEVELS}
    rates = {name: [one["work_rate"] for one in some] for name, some in of.items()}
    middle = {name: median(some) for name, some in rates.items()}
    return {
        "scenario": NAME,
        "rate": round(middle["level 3"], 1),
        "level_2_rate": round(middle["level 2"], 1),
        "level_3_to_level_2": round(middle["level 3"] / middle["level 2"], 3),
        "close_delay_ms": latencies([one["close_delay_ms"] for one in of["level 3"]]),
        "level_2_close_delay_ms": latencies([one["close_delay_ms"] for one in of["level 2"]]),
        "wal_bytes_per_child": _wal(of["level 3"]),
        "level_2_wal_bytes_per_child": _wal(of["level 2"]),
        "exact": all(one["exact"] for one in done),
        "closed_once": all(one["closed_once"] for one in done),
        "spread": {name: spread(some) for name, some in rates.items()},
        "cpu_us_per_child": {name: cpu_us_per_child(some) for name, some in of.items()},
        **story,
        "rounds": done,
    }


async def _one(
    server: Cluster, workload: Workload, workers: int, options: Options
) -> dict[str, Any]:
    async with server.database() as database, AsyncExitStack() as stack:
        ready = await bench(stack, server, database, "fanout", workload, workers, options)
        return await ready.measure()


def _wal(rounds: list[dict[str, Any]]) -> float:
    middle: float = median([one["wal_bytes_per_child"] for one in rounds])
    return round(middle, 1)
