"""How the rate holds: at ten times the children, and for the same children in many batches.

The three sizes take turns; the ratios are those of the bars "100,000 within 20 % of 10,000" and
"100 batches of 100 at least half of one batch of 10,000".
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.cluster import cluster
from benchmarks.figures import spread
from benchmarks.scenarios.fan_out import one_round, story_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.workload import Workload

NAME: Final = "scales"
TIMES_LARGER: Final = 10
CHILDREN_OF_A_SMALL_BATCH: Final = 100


async def run(
    workload: Workload,
    *,
    workers: int,
    rounds: int,
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report. `workload` is the standard size; --batches is not looked at."""
    started_at = datetime.now(UTC)
    standard = replace(workload, batches=1)
    sizes = {
        "standard": standard,
        "large": replace(standard, children=standard.children * TIMES_LARGER),
        "many": replace(standard, batches=max(1, standard.children // CHILDREN_OF_A_SMALL_BATCH)),
    }
    done: list[dict[str, Any]] = []
    async with cluster(dsn) as server:
        story = await story_of(server, standard, workers, started_at)
        for number in range(rounds):
            for name, size in sizes.items():
                one = await one_round(server, "fanout", size, workers, 0)
                done.append({"round": number + 1, "size": name} | one)
                tell(f"round {number + 1} of {rounds}: {name} {one['rate']:,.0f} children/s")
    rates = {name: [one["rate"] for one in done if one["size"] == name] for name in sizes}
    middle = {name: median(some) for name, some in rates.items()}
    large = [one for one in done if one["size"] == "large"]
    return {
        "scenario": NAME,
        "rate": round(middle["standard"], 1),
        "large_to_standard": round(middle["large"] / middle["standard"], 3),
        "many_to_standard": round(middle["many"] / middle["standard"], 3),
        "peak_rss_mb": round(max(one["peak_rss_mb"] for one in large), 1),
        "exact": all(one["exact"] for one in done),
        "closed_once": all(one["closed_once"] for one in done),
        "spread": {name: spread(some) for name, some in rates.items()},
        **story,
        "rounds": done,
    }
