"""Four processes under three limits, killed at random: none is ever exceeded, and no slot leaks.

Who was within a limit is told by a log outside the database.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from tests.chaos.app import NAMED, SCARCE
from tests.chaos.calls import settled
from tests.chaos.harness import Fleet, closed, until


async def _killed_at_random(fleet: Fleet, seconds: float) -> dict[int, float]:
    """Kill a process now and then, and start another. Pid → when it was gone."""
    gone: dict[int, float] = {}
    living = await fleet.ups(4)
    until_time = time.monotonic() + seconds
    while time.monotonic() < until_time:
        await asyncio.sleep(random.uniform(0.2, 1))
        victim = living.pop(random.randrange(len(living)))
        await victim.killed()
        gone[victim.pid] = time.time()
        living.append(await fleet.up(f"next{len(gone)}"))
    return gone


def _times_within(
    lines: list[dict[str, Any]], first: str, last: str, gone: dict[int, float]
) -> Iterator[tuple[float, int]]:
    """(+1, -1) at the times at which somebody came and went.

    Who was killed went then; whose claim was given away, since his process had stood still for a
    lease, when the next attempt of the job began.
    """
    open_since: dict[tuple[int, int], dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: line["at"]):
        key = line["job"], line["attempt"]
        if line["event"] == first:
            open_since[key] = line
        elif line["event"] == last and key in open_since:
            yield open_since[key]["at"], 1
            yield line["at"], -1
            del open_since[key]
    for (job, attempt), line in open_since.items():
        ends = [gone.get(line["pid"], float("inf"))]
        ends += [
            one["at"] for one in lines if (one["job"], one["attempt"] > attempt) == (job, True)
        ]
        yield line["at"], 1
        yield min(ends), -1


def _most(times: Iterator[tuple[float, int]]) -> int:
    """How many there were at once, at most."""
    now = most = 0
    for _, step in sorted(times, key=lambda one: (one[0], one[1])):
        now += step
        most = max(most, now)
    return most


async def _no_limit_is_exceeded(
    fleet: Fleet, conn: asyncpg.Connection, *, children: int, seconds: float
) -> None:
    async with fleet.engine() as engine:
        handle = await engine.submit(
            "batch", {"n": children, "kind": "scarce", "child": {"seconds": 0.02}}
        )
        gone = await _killed_at_random(fleet, seconds)
        progress = await closed(engine, handle.id, 120)
        assert progress.completed + progress.failed == children
        # It ran at all while others died.
        assert progress.completed > children / 2
        lines = list(fleet.calls.lines())
        calls = [line for line in lines if line.get("kind") == "scarce"]
        assert 1 < _most(_times_within(calls, "start", "end", gone)) <= SCARCE
        for name, concurrency in NAMED.items():
            within = [line for line in lines if line.get("limit") == name]
            assert 1 < _most(_times_within(within, "in", "out", gone)) <= concurrency
        # No slot is left: what a last death left behind goes with the next who asks.
        last = await engine.submit("scarce", {"seconds": 0})
        await closed(engine, last.id)
        await until(conn, "SELECT count(*) = 0 FROM fanout.slot")
    await settled(conn, fleet.calls)


async def test_no_limit_is_exceeded_and_no_slot_leaks_while_processes_die(
    fleet: Fleet, conn: asyncpg.Connection
) -> None:
    """Seconds of it."""
    await _no_limit_is_exceeded(fleet, conn, children=150, seconds=4)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_minutes_of_deaths_under_limits(fleet: Fleet, conn: asyncpg.Connection) -> None:
    """Minutes of it."""
    await _no_limit_is_exceeded(fleet, conn, children=3000, seconds=150)
