"""Figures out of samples: percentiles, the median and the spread of rounds."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -int(-share * len(ordered) // 1)
    return ordered[max(0, rank - 1)]


def latencies(samples: Sequence[float]) -> dict[str, float | int] | None:
    """p50, p99, most and number of samples, in their unit; None without samples."""
    if not samples:
        return None
    return {
        "p50": round(percentile(samples, 0.5), 3),
        "p99": round(percentile(samples, 0.99), 3),
        "max": round(max(samples), 3),
        "n": len(samples),
    }


def spread(samples: Sequence[float], digits: int = 1) -> dict[str, float] | None:
    """Median, least and most of the rounds; None without rounds."""
    if not samples:
        return None
    return {
        "median": round(median(samples), digits),
        "min": round(min(samples), digits),
        "max": round(max(samples), digits),
    }


def cpu_us_per_child(rounds: list[dict[str, Any]]) -> dict[str, float | None]:
    """Processor time in microseconds per child: it cares little who else is busy."""
    children = sum(one["children"] for one in rounds)
    totals = {
        part: [one["cpu_seconds"][part] for one in rounds if one["cpu_seconds"][part] is not None]
        for part in ("workers", "server")
    }
    return {
        part: round(sum(some) / children * 1e6, 1) if some else None
        for part, some in totals.items()
    }
