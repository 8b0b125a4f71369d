"""One fan-out, or many at once, from submit to closed: this engine, the ceiling and the naive form.

The three take turns, a round each, every time in a fresh database with fresh processes, so that no
one gets the warmer machine. Figures are medians over the rounds, with least and most beside them.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from benchmarks import facts
from benchmarks.cluster import cluster
from benchmarks.contenders.engine import settings_of
from benchmarks.figures import cpu_us_per_child, latencies, spread
from benchmarks.harness import CONTENDERS, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from benchmarks.cluster import Cluster
    from benchmarks.workload import Workload

NAME: Final = "fan_out"


async def run(
    workload: Workload,
    *,
    workers: int,
    rounds: int,
    pickups: int,
    skip: Collection[str],
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report, as it is written to a file. `pickups`: single jobs to the idle engine, in all."""
    started_at = datetime.now(UTC)
    contenders = [name for name in CONTENDERS if name not in skip]
    done: list[dict[str, Any]] = []
    async with cluster(dsn) as server:
        story = await story_of(server, workload, workers, started_at)
        for number in range(rounds):
            for name in contenders:
                share = pickups // rounds + (number < pickups % rounds)
                one = await one_round(server, name, workload, workers, share)
                done.append({"round": number + 1} | one)
                tell(f"round {number + 1} of {rounds}: {name} {one['rate']:,.0f} children/s")
    return {"scenario": NAME, **figures(done), **story, "rounds": done}


async def one_round(
    server: Cluster, name: str, workload: Workload, workers: int, pickups: int
) -> dict[str, Any]:
    """One contender, warmed up and measured once, in a database of its own."""
    async with server.database() as database, AsyncExitStack() as stack:
        ready = await bench(stack, server, database, name, workload, workers)
        measured = await ready.measure()
        if name == "fanout":
            measured["pickup_ms"] = await ready.pick_up(pickups)
        return measured


async def story_of(
    server: Cluster, workload: Workload, workers: int, started_at: datetime
) -> dict[str, Any]:
    """What a reader must know to make something of the figures. Raises NotDurable."""
    connection = await asyncpg.connect(server.dsn)
    try:
        durable = await facts.server_settings(connection)
        postgres = str(await connection.fetchval("SHOW server_version"))
    finally:
        await connection.close()
    return {
        "started_at": started_at.isoformat(timespec="seconds"),
        "workload": workload.as_json() | {"workers": workers},
        "settings": {"server": durable, "engine": settings_of(workload).model_dump(mode="json")},
        "versions": facts.versions(postgres),
        "machine": facts.machine(server.folder),
    }


def figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the report, from the rounds of all contenders."""
    of = {
        name: [one for one in rounds if one["contender"] == name]
        for name in ("fanout", "ceiling", "naive")
    }
    rates = {name: [one["rate"] for one in some] for name, some in of.items()}
    rate, ceiling, naive = (
        median(rates[name]) if rates[name] else None for name in ("fanout", "ceiling", "naive")
    )
    ours = of["fanout"]
    members = [worker for one in ours for worker in one["workers"]]
    return {
        "rate": _rounded(rate),
        "ceiling_rate": _rounded(ceiling),
        "naive_rate": _rounded(naive),
        "ratio_to_ceiling": _rounded(rate and ceiling and rate / ceiling, 3),
        "ratio_to_naive": _rounded(rate and naive and rate / naive, 2),
        "exact": all(one["exact"] for one in rounds),
        "closed_once": all(one["closed_once"] for one in rounds),
        "clocks_agree": all(one["clocks_agree"] for one in rounds),
        "pickup_latency_ms": latencies([ms for one in ours for ms in one["pickup_ms"]]),
        "commits_per_child": _middle(ours, "commits_per_child", 5),
        "wal_bytes_per_child": _middle(ours, "wal_bytes_per_child", 1),
        "peak_rss_mb": _rounded(max((one["peak_rss_mb"] for one in ours), default=None)),
        "parent_lock_ms": latencies([ms for one in members for ms in one["parent_lock_ms"]]),
        "claim_ms": latencies([ms for one in members for ms in one["claim_ms"]]),
        "children_per_flush": _rounded(_mean([n for one in members for n in one["flushed"]])),
        "cpu_seconds": {
            "workers": _rounded(_mean([one["cpu_seconds"]["workers"] for one in ours]), 3),
            "server": _rounded(
                _mean([s for one in ours if (s := one["cpu_seconds"]["server"]) is not None]), 3
            ),
        },
        "spread": {name: spread(some) for name, some in rates.items()},
        "cpu_us_per_child": {name: cpu_us_per_child(some) for name, some in of.items() if some},
    }


def _middle(rounds: list[dict[str, Any]], field: str, digits: int) -> float | None:
    return _rounded(median([one[field] for one in rounds]), digits) if rounds else None


def _mean(samples: list[float]) -> float | None:
    return sum(samples) / len(samples) if samples else None


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)
