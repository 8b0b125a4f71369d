"""Every line of one job to every client of one API process: rates, latencies, memory.

Beside it, in turn and on the same machine: nginx with nchan, bare ASGI on uvicorn, and
sse-starlette as its documentation shows it. Those begin at the server; this engine's lines go the
whole way, from `job.log` in a worker process through the table and NOTIFY.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks import servers
from benchmarks.cluster import cluster
from benchmarks.figures import spread
from benchmarks.lines import as_event, paced
from benchmarks.scenarios.fan_out import story_of
from benchmarks.workload import Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    from benchmarks.cluster import Cluster

NAME: Final = "sse_relay"
CONTENDERS: Final = ("fanout", "nchan", "raw_asgi", "plain_sse")
MOST_P99_MS: Final = 250.0
STEADY_RATE: Final = 20.0
MANY_RATE: Final = 4.0
"""Events a second to `many` clients: with 5,000 of them 20,000 deliveries a second."""
FIRST_DELIVERIES: Final = 50_000
"""A second: where the search begins."""
MOST_EVENTS: Final = 8_000.0
"""A second: where it ends."""
HALVINGS: Final = 2
"""Looks between the highest rate that was good and the lowest that was not."""
LATE_SECONDS: Final = 3.0
DRAIN_SECONDS: Final = 12.0
STUCK_RATE: Final = 200.0
SETTLE_SECONDS: Final = 0.5
FEW: Final = 50
"""Clients that connect before memory is looked at: first ones make what all share."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    clients: int = 1000
    many: int = 5000
    """Clients of the run with very many; 0: none."""
    seconds: float = 2.0
    """Of one look at one rate."""
    burst: int = 300
    """Events said at once."""


async def run(
    size: Size,
    *,
    rounds: int,
    skip: Collection[str],
    dsn: str | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report. Contenders that this machine has not are left out, and named."""
    started_at = datetime.now(UTC)
    raise_limit()
    contenders = [name for name in CONTENDERS if name not in skip]
    if "nchan" in contenders and servers.nchan_module() is None:
        contenders.remove("nchan")
        tell("nchan is left out: this machine has no nginx with it (libnginx-mod-nchan)")
    done: list[dict[str, Any]] = []
    many: dict[str, Any] | None = None
    async with cluster(dsn) as server:
        story = await story_of(server, Workload(children=1), 1, started_at)
        for number in range(rounds):
            for name in contenders:
                async with _up(server, name) as relay:
                    one = {"round": number + 1, "contender": name} | await _measured(relay, size)
                done.append(one)
                tell(
                    f"round {number + 1} of {rounds}: {name} {one['deliveries']:,.0f} deliveries/s,"
                    f" burst {one['burst_deliveries']:,.0f}/s"
                )
        if size.many and "fanout" in contenders:
            async with _up(server, "fanout") as relay:
                await relay.connect(size.many)
                many = await relay.step(MANY_RATE, size.seconds * 2)
            tell(f"{size.many:,} clients: p99 {many['p99']} ms")
    story["workload"] = asdict(size) | {"rounds": rounds}
    left_out = [name for name in CONTENDERS if name not in contenders]
    return {
        "scenario": NAME,
        **figures(done, many),
        "left_out": left_out,
        **story,
        "many": many,
        "rounds": done,
    }


def figures(rounds: list[dict[str, Any]], many: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of the report."""
    of = {name: [one for one in rounds if one["contender"] == name] for name in CONTENDERS}
    middle = {
        name: {
            field: round(median([one[field] for one in some]), 2)
            for field in (
                *("deliveries", "deliveries_p50", "deliveries_p99", "cpu_us_per_delivery"),
                *("cpu_us_per_lone_delivery", "burst_deliveries", "steady_p50", "steady_p99"),
                *("kib_per_idle_client", "mib_with_stuck"),
            )
        }
        for name, some in of.items()
        if some
    }
    ours, theirs = middle.get("fanout"), middle.get("nchan")
    return {
        "ratio_to_nchan": ours and theirs and _ratio(ours["deliveries"], theirs["deliveries"]),
        "burst_to_nchan": ours
        and theirs
        and _ratio(ours["burst_deliveries"], theirs["burst_deliveries"]),
        "many_p99_ms": many and (many["p99"] if many["is_good"] else float("inf")),
        "kib_per_idle_client": ours and ours["kib_per_idle_client"],
        "steady_p99_ms": ours and ours["steady_p99"],
        "gapless": all(one["gapless"] for one in rounds),
        "contenders": middle,
        "spread_deliveries": {
            name: spread([one["deliveries"] for one in some]) for name, some in of.items() if some
        },
    }


def _ratio(first: float, second: float) -> float | None:
    return round(first / second, 3) if second else None


# -- one contender ------------------------------------------------------------------------------


class Relay:
    """A server that is up, who publishes to it, and the clients that watch."""

    def __init__(
        self,
        server: servers.Server,
        watchers: list[servers.Asked],
        say: Callable[[int, int, float], Awaitable[float]],
    ) -> None:
        self.server = server
        self._watchers = watchers
        self._say = say
        self._said = 0
        self._clients = 0
        self._is_behind = False

    async def connect(self, clients: int, *, stuck: bool = False) -> None:
        """More clients, over the client processes."""
        share, rest = divmod(clients, len(self._watchers))
        await self._ask_all(
            [
                {
                    "do": "connect",
                    "port": self.server.port,
                    "path": self.server.path,
                    "clients": share + (n < rest),
                    "stuck": stuck,
                }
                for n in range(len(self._watchers))
            ]
        )
        self._clients += 0 if stuck else clients
        await asyncio.sleep(SETTLE_SECONDS)

    async def step(self, rate: float, seconds: float) -> dict[str, Any]:
        """Lines at `rate` a second for so long; what became of them."""
        return await self.lines(max(2, round(rate * seconds)), rate)

    async def lines(self, events: int, rate: float) -> dict[str, Any]:
        """So many lines at `rate`, or all at once (0)."""
        first = self._said + 1
        self._said += events
        await self._ask_all([{"do": "begin", "first": first, "last": self._said}])
        cpu = self.server.cpu_seconds()
        started = time.monotonic_ns()
        limit = events / rate + LATE_SECONDS if rate else DRAIN_SECONDS
        reading = [
            asyncio.create_task(one.ask(do="until", seconds=limit)) for one in self._watchers
        ]
        saying = await self._say(first, events, rate)
        read = await asyncio.gather(*reading)
        cpu = self.server.cpu_seconds() - cpu
        delivered = sum(one["delivered"] for one in read)
        missing = sum(one["missing"] for one in read)
        self._is_behind = missing > 0
        ages = _merged([one["ages"] for one in read])
        ended = max((one["last_at"] for one in read), default=0)
        p99 = _percentile(ages, 0.99)
        broken = sum(one["gaps"] + one["lost"] for one in read)
        return {
            "events_per_second": round(events / saying, 1) if rate else None,
            "deliveries": round(events * self._clients / saying, 1)
            if rate
            else round(delivered / max(1e-9, (ended - started) / 1e9), 1),
            "delivered": delivered,
            "events_per_read": round(delivered / max(1, sum(one["reads"] for one in read)), 2),
            "missing": missing,
            "broken": broken,
            "p50": _percentile(ages, 0.5),
            "p99": p99,
            "cpu_us_per_delivery": round(cpu / max(1, delivered) * 1e6, 3),
            "is_good": not missing and not broken and p99 <= MOST_P99_MS,
        }

    async def drained(self) -> bool:
        """After a rate that was too high: have all clients got everything?"""
        if not self._is_behind:
            return True
        read = await self._ask_all([{"do": "until", "seconds": DRAIN_SECONDS}])
        return not any(one["missing"] + one["gaps"] + one["lost"] for one in read)

    async def _ask_all(self, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(commands) == 1:
            commands *= len(self._watchers)
        return await asyncio.gather(
            *(one.ask(**command) for one, command in zip(self._watchers, commands, strict=True))
        )


async def _measured(relay: Relay, size: Size) -> dict[str, Any]:
    """All that is measured of a contender in one round."""
    few = min(FEW, size.clients // 2)
    await relay.connect(few)
    await relay.step(STEADY_RATE, SETTLE_SECONDS)
    before = relay.server.rss_kib()
    await relay.connect(size.clients - few)
    idle = (relay.server.rss_kib() - before) / (size.clients - few)
    await relay.step(STEADY_RATE, SETTLE_SECONDS)
    steady = await relay.step(STEADY_RATE, size.seconds * 2)
    await relay.drained()
    burst = await relay.lines(size.burst, 0)
    await relay.drained()
    best, steps = await _searched(relay, size)
    # Last, for nobody says when those connections end.
    await relay.connect(max(1, size.clients // 10), stuck=True)
    stuck = await relay.step(STUCK_RATE, size.seconds * 2)
    return {
        "deliveries": best["deliveries"] if best else 0.0,
        "deliveries_p50": best["p50"] if best else 0.0,
        "deliveries_p99": best["p99"] if best else 0.0,
        "cpu_us_per_delivery": best["cpu_us_per_delivery"] if best else 0.0,
        "cpu_us_per_lone_delivery": steady["cpu_us_per_delivery"],
        "burst_deliveries": burst["deliveries"],
        "steady_p50": steady["p50"],
        "steady_p99": steady["p99"],
        "kib_per_idle_client": round(idle, 1),
        "mib_with_stuck": round(relay.server.rss_kib() / 1024, 1),
        "gapless": not any(one["broken"] for one in (steady, burst, *steps) if one["is_good"])
        and not steady["missing"]
        and not burst["missing"] + burst["broken"],
        "steady": steady,
        "burst": burst,
        "stuck": stuck,
        "steps": steps,
    }


async def _searched(relay: Relay, size: Size) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The highest rate whose p99 is good: doubled until it is not, then between the two."""
    best: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    good, bad = 0.0, 0.0
    rate = min(MOST_EVENTS, FIRST_DELIVERIES / size.clients)
    halvings = HALVINGS
    while True:
        step = await _looked_at(relay, rate, size.seconds, steps)
        if step["is_good"]:
            good = rate
            if best is None or step["deliveries"] > best["deliveries"]:
                best = step
        else:
            bad = rate
            if not await relay.drained():
                return best, steps
        if bad and good:
            if halvings == 0:
                return best, steps
            halvings -= 1
            rate = (good * bad) ** 0.5
        elif bad:
            if rate < 1:
                return best, steps
            rate /= 2
        elif rate >= MOST_EVENTS:
            return best, steps
        else:
            rate = min(MOST_EVENTS, rate * 2)


async def _looked_at(
    relay: Relay, rate: float, seconds: float, steps: list[dict[str, Any]]
) -> dict[str, Any]:
    """One rate; a second time where it was not good, for the machine may have hiccuped."""
    steps.append({"offered": round(rate, 1)} | await relay.step(rate, seconds))
    if not steps[-1]["is_good"] and await relay.drained():
        steps.append({"offered": round(rate, 1)} | await relay.step(rate, seconds))
    return steps[-1]


@asynccontextmanager
async def _up(cluster: Cluster, name: str) -> AsyncIterator[Relay]:
    """A contender, its publisher and its client processes, each on its core."""
    ours, others = servers.cores()
    async with AsyncExitStack() as stack:
        before = os.sched_getaffinity(0) if others else set()
        servers.pin([0], others)
        stack.callback(servers.pin, [0], before)
        if name == "fanout":
            dsn = await stack.enter_async_context(cluster.database())
            talker, stream = await talking(stack, dsn)
            relay = await stack.enter_async_context(api(dsn, stream))

            async def say(first: int, events: int, rate: float) -> float:
                told = await talker.ask(do="say", first=first, events=events, rate=rate)
                return float(told["seconds"])
        else:
            made = (
                servers.nchan_server()
                if name == "nchan"
                else servers.python_server("/sub", f"benchmarks.contenders.{name}")
            )
            relay = await stack.enter_async_context(made)
            posting = await stack.enter_async_context(
                _posts(relay.port, one_a_post=name == "nchan")
            )
            say = partial(_post_paced, posting)
        servers.pin(relay.pids, ours)
        processes = 1 if len(others) < 3 else 2
        watchers = [
            await stack.enter_async_context(servers.asked("benchmarks.watchers"))
            for _ in range(processes)
        ]
        yield Relay(relay, watchers, say)


async def talking(
    stack: AsyncExitStack, dsn: str, workload: Workload | None = None
) -> tuple[servers.Asked, int]:
    """A worker process whose one job talks, and that job's id."""
    work = workload or Workload(children=1)
    talker = await stack.enter_async_context(
        servers.asked("benchmarks.contenders.talker", dsn, json.dumps(work.as_json()))
    )
    return talker, (await talker.answer())["stream"]


def api(dsn: str, stream: int) -> Any:
    """`fanout api`, as a user runs it."""
    return servers.python_server(
        f"/v1/jobs/{stream}/events",
        *("fanout", "api", "--dsn", dsn, "--schema", "fanout", "--port", "0"),
    )


# -- publishing over HTTP -----------------------------------------------------------------------


class Posts:
    """One connection, on which requests do not wait for answers."""

    def __init__(self, writer: asyncio.StreamWriter, *, one_a_post: bool) -> None:
        self._writer = writer
        self._one_a_post = one_a_post

    def say(self, lines: list[str]) -> None:
        """Publish: a request for each line, or one for all, where the server takes that."""
        events = [as_event(line) for line in lines]
        bodies = events if self._one_a_post else [b"\n".join(events)]
        self._writer.writelines(
            b"POST /pub HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
            for body in bodies
        )


@asynccontextmanager
async def _posts(port: int, *, one_a_post: bool) -> AsyncIterator[Posts]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def answers() -> None:
        while await reader.read(1 << 16):
            pass

    reading = asyncio.create_task(answers())
    try:
        yield Posts(writer, one_a_post=one_a_post)
    finally:
        reading.cancel()
        writer.close()


async def _post_paced(posts: Posts, first: int, events: int, rate: float) -> float:
    return await paced(posts.say, first, events, rate)


# -- figures ------------------------------------------------------------------------------------


def _merged(many: list[list[list[float]]]) -> list[tuple[float, float]]:
    ages: dict[float, float] = {}
    for one in many:
        for tenths, weight in one:
            ages[tenths] = ages.get(tenths, 0.0) + weight
    return sorted(ages.items())


def _percentile(ages: list[tuple[float, float]], share: float) -> float:
    """In milliseconds; infinite without samples."""
    wanted = share * sum(weight for _, weight in ages)
    for tenths, weight in ages:
        wanted -= weight
        if wanted <= 0:
            return tenths / 10
    return float("inf")


def raise_limit() -> None:
    """A file descriptor for each client."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
