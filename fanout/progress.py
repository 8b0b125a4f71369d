"""From one row of `reads/progress.sql` to what a person wants to know. Pure."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from .states import Status
from .values import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

__all__ = ["percent_done", "progress_from"]

STALE_SECONDS: Final = 120.0
"""A mark older than this says nothing about the rate now."""
SHORTEST_WINDOW_SECONDS: Final = 0.5
SAMPLE: Final = 1000
"""Pending children that the query looks at for its reasons."""


def percent_done(ended: int, total: int, *, closed: bool) -> int:
    """Rounded down; 100 when closed and never before, also for the empty batch."""
    if closed:
        return 100
    return min(99, ended * 100 // total) if total else 0


def progress_from(row: Mapping[str, Any]) -> Progress:
    """The progress that a row of `reads/progress.sql` tells."""
    status = Status(row["status"])
    ended = row["completed"] + row["failed"] + row["cancelled"]
    remaining = row["total"] - ended
    rate = _rate(row, ended)
    outcome = (
        "completed with failures" if status is Status.COMPLETED and row["failed"] else str(status)
    )
    return Progress(
        id=row["id"],
        kind=row["kind"],
        status=status,
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        cancelled=row["cancelled"],
        processing=row["processing"],
        pending=max(0, remaining - row["processing"] - row["nested"]),
        percent=percent_done(ended, row["total"], closed=status.is_terminal),
        rate_per_second=rate,
        eta_seconds=_eta(row, remaining, rate, status),
        elapsed_seconds=((row["finished_at"] or row["now"]) - row["created_at"]).total_seconds(),
        outcome=outcome,
        generation=row["generation"],
        waits_for=() if status.is_terminal else tuple(_reasons(row, status, remaining)),
        reason=row["reason"] or row["error"],
        sums=None if row["sums"] is None else json.loads(row["sums"]),
        paused=row["paused"] and not status.is_terminal,
    )


def _window(row: Mapping[str, Any]) -> tuple[datetime, int] | None:
    """Since when, and how many had ended by then: the older mark, unless it is too old to say
    anything about now.
    """
    for at, ended in (
        (row["last_mark_at"], row["last_mark_ended"]),
        (row["mark_at"], row["mark_ended"]),
    ):
        if at is not None and (row["now"] - at).total_seconds() <= STALE_SECONDS:
            return at, ended
    return None


def _rate(row: Mapping[str, Any], ended: int) -> float | None:
    if row["finished_at"] is not None:
        seconds = (row["finished_at"] - (row["claimed_at"] or row["created_at"])).total_seconds()
        return ended / seconds if ended and seconds > 0 else None
    window = _window(row)
    if window is None:
        return None
    seconds = (row["now"] - window[0]).total_seconds()
    return (ended - window[1]) / seconds if seconds >= SHORTEST_WINDOW_SECONDS else None


def _eta(
    row: Mapping[str, Any], remaining: int, rate: float | None, status: Status
) -> tuple[float, float] | None:
    """Two standard deviations of a Poisson count around the rate.

    Before the seal the total is not known: no ETA.
    """
    if status is not Status.WAITING or not rate or rate <= 0 or row["finished_at"] is not None:
        return None
    window = _window(row)
    if window is None:
        return None
    seen = max(1.0, rate * (row["now"] - window[0]).total_seconds())
    spread = min(0.9, 2 / math.sqrt(seen))
    return remaining / (rate * (1 + spread)), remaining / (rate * (1 - spread))


def _reasons(row: Mapping[str, Any], status: Status, remaining: int) -> list[str]:
    """Sentences. `row["sampled"]` counts what was looked at, at most 1,000."""
    said: list[str] = []
    if row["paused"]:
        said.append("it is paused: nothing more of it starts until it is resumed")
    at_least = "at least " if row["sampled"] >= SAMPLE else ""
    said += [f"no worker serves {kind}" for kind in sorted(row["unserved"] or ())]
    if row["later"]:
        what = (
            "it waits"
            if status is Status.PENDING and not row["total"]
            else f"{at_least}{row['later']} of {remaining} wait"
        )
        said.append(f"{what} until {row['next_run_at']:%H:%M:%S} UTC or later (backoff or run_at)")
    said += [_full(limit) for limit in json.loads(row["limits"] or "[]")]
    if row["suspects"]:
        said.append(f"{row['suspects']} wait to run alone: a worker died while they ran")
    if row["ahead"] and not row["processing"]:
        said.append(f"behind {row['ahead']} other {_plural(row['ahead'])} of the same kind")
    if row["verdict"]:
        said.append(
            f"it is being ended as {row['verdict']}: {row['reason'] or 'no reason was kept'}"
        )
    return said


def _full(limit: Mapping[str, Any]) -> str:
    """Of a row of `full_limit`: whose limit is in the way, and how full it is."""
    name = limit["name"] or "its own limit"
    if limit["most"] is not None and limit["used"] >= limit["most"]:
        partition = limit["partition"]
        # "#17" is what children of batch 17 have that were given none.
        whose = (
            "" if not partition else " of its batch" if partition[0] == "#" else f" of {partition}"
        )
        return f"waiting for {name} ({limit['used']} of {limit['most']}{whose} in use)"
    if (seconds := limit["next_seconds"]) is not None and seconds > 0:
        return f"waiting for {name} (next in about {math.ceil(seconds)} s)"
    return f"waiting for {name} (others come first)"


def _plural(count: int) -> str:
    return "batch" if count == 1 else "batches"
