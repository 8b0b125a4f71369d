"""What watching costs: children/s at half the highest rate, with log lines and with watchers.

First the highest rate of a batch is measured. Then batches whose manager makes children at half
that rate run in turn: `quiet`; with 2,000 log lines a second that one client watches; with 1,000
clients that watch the batch on one API process.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from benchmarks import servers
from benchmarks.cluster import cluster
from benchmarks.figures import spread
from benchmarks.harness import LOOK_SECONDS, MODULES, RECOUNT, bench
from benchmarks.scenarios.fan_out import story_of
from benchmarks.scenarios.sse_relay import api, raise_limit, talking

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cluster import Cluster
    from benchmarks.workload import Workload

NAME: Final = "notify"
SHARE: Final = 0.5
LINES: Final = 2000
"""A second."""
CHUNK: Final = 100
"""Children in one statement: at half the rate larger ones would come in jerks."""
LATE_SECONDS: Final = 60.0
READ_SECONDS: Final = 20.0

IS_OPEN: Final = "SELECT finished_at IS NULL FROM fanout.job WHERE id = $1"
# Not from the batch's own creation: its clients connect before it begins.
MADE_TO_FINISHED: Final = """
SELECT extract(epoch FROM max(finished_at) - min(created_at))::float8
  FROM fanout.job WHERE parent_id = $1"""


async def run(
    workload: Workload,
    *,
    workers: int,
    rounds: int,
    clients: int,
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report: three rates at the same offered load, and what the two others lose."""
    started_at = datetime.now(UTC)
    raise_limit()
    done: list[dict[str, Any]] = []
    async with cluster(dsn) as server:
        story = await story_of(server, workload, workers, started_at)
        highest: list[float] = []
        for number in range(rounds):
            async with server.database() as database, AsyncExitStack() as stack:
                ready = await bench(stack, server, database, "fanout", workload, workers)
                highest.append((await ready.measure())["rate"])
            tell(f"round {number + 1} of {rounds}: at most {highest[-1]:,.0f} children/s")
        offered = median(highest) * SHARE
        for number in range(rounds):
            for name, lines, watchers in (
                ("quiet", 0, 0),
                ("lines", LINES, 1),
                ("watchers", 0, clients),
            ):
                one = await _one(server, workload, workers, offered, lines, watchers)
                done.append({"round": number + 1, "beside": name} | one)
                tell(f"round {number + 1} of {rounds}: {name} {one['rate']:,.0f} children/s")
    rates = {
        name: [one["rate"] for one in done if one["beside"] == name]
        for name in ("quiet", "lines", "watchers")
    }
    quiet = median(rates["quiet"])
    return {
        "scenario": NAME,
        "highest_rate": round(median(highest), 1),
        "offered_rate": round(offered, 1),
        "rate": round(quiet, 1),
        "loss_with_lines": round(1 - median(rates["lines"]) / quiet, 4),
        "loss_with_watchers": round(1 - median(rates["watchers"]) / quiet, 4),
        "exact": all(one["exact"] for one in done),
        "spread": {name: spread(some) for name, some in rates.items()},
        **story,
        "watchers": clients,
        "rounds": done,
    }


async def _one(
    server: Cluster, workload: Workload, workers: int, rate: float, lines: int, watchers: int
) -> dict[str, Any]:
    """One batch at `rate`. It is over when its last child is."""
    work = replace(workload, chunk_size=min(CHUNK, workload.chunk_size))
    async with server.database() as database, AsyncExitStack() as stack:
        connection = await asyncpg.connect(database)
        stack.push_async_callback(connection.close)
        for _ in range(workers - 1):
            await stack.enter_async_context(
                servers.asked(MODULES["fanout"], database, json.dumps(work.as_json()))
            )
        talker, stream = await talking(stack, database, work)
        said = int(lines * work.children / rate)
        watching = None
        if watchers:
            relay = await stack.enter_async_context(api(database, stream))
            watching = await stack.enter_async_context(servers.asked("benchmarks.watchers"))
            await watching.ask(do="connect", port=relay.port, path=relay.path, clients=watchers)
            await watching.ask(do="begin", first=1, last=said)
        before = server.cpu_seconds()
        started = time.perf_counter()
        talker.tell(do="fan_out", children=work.children, rate=rate, lines=lines)
        async with asyncio.timeout(LATE_SECONDS + work.children / rate):
            while await connection.fetchval(IS_OPEN, stream):  # noqa: ASYNC110 - other processes end it
                await asyncio.sleep(LOOK_SECONDS)
        after = server.cpu_seconds()
        client_seconds = time.perf_counter() - started
        read = await watching.ask(do="until", seconds=READ_SECONDS) if said and watching else {}
        seconds = await connection.fetchval(MADE_TO_FINISHED, stream)
        row = await connection.fetchrow(RECOUNT, [stream])
        assert row is not None
        return {
            "offered": round(rate, 1),
            "rate": work.children / seconds,
            "seconds": seconds,
            "client_seconds": client_seconds,
            "lines_said": said,
            "lines_read": read.get("delivered", 0),
            "server_cpu_seconds": None if before is None or after is None else after - before,
            "exact": row["completed"] == row["children_completed"] == work.children
            and read.get("delivered", 0) == said
            and not read.get("gaps"),
        }
