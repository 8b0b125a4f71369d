"""A worker process with one job that talks: lines by `job.log` as commands on standard input say.

`{"do": "say", "first": 1, "events": 500, "rate": 100}`, and `{"do": "fan_out", "children": 5000,
"rate": 1000, "lines": 2000}`: the job then makes children at that rate while it talks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.contenders.engine import engine_of
from benchmarks.lines import paced
from benchmarks.member import new_event_loop
from benchmarks.workload import CHILD, Workload, document_key
from fanout import Document, Engine, Job
from fanout.cli.serving import spare_collector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TALK = "bench_talk"
SPREAD_SECONDS = 0.02


def talking_engine(dsn: str, workload: Workload, orders: asyncio.Queue[dict[str, Any]]) -> Engine:
    """The benchmark's engine, and a job that does what it is told."""
    engine = engine_of(dsn, workload)

    @engine.job(name=TALK)
    async def talk(job: Job[Any]) -> None:
        def say(lines: list[str]) -> None:
            for one in lines:
                job.log(one)

        while True:
            order = await orders.get()
            verb = order.pop("do")
            if verb == "say":
                seconds = await paced(say, order["first"], order["events"], order["rate"])
                _tell({"seconds": seconds})
            elif verb == "fan_out":
                await _fan_out(job, workload, say, order)
                _tell({"stream": job.id})
                return

    return engine


async def _fan_out(
    job: Job[Any], workload: Workload, say: Callable[[list[str]], None], order: dict[str, Any]
) -> None:
    seconds = order["children"] / order["rate"]
    speaking = asyncio.create_task(
        paced(say, 1, int(order["lines"] * seconds), order["lines"])
        if order["lines"]
        else asyncio.sleep(0)
    )
    await job.fan_out(CHILD, _documents(workload, order["children"], order["rate"]))
    await speaking


async def _documents(workload: Workload, children: int, rate: float) -> AsyncIterator[Document]:
    started = time.perf_counter()
    for number in range(children):
        early = number / rate - (time.perf_counter() - started)
        if early > SPREAD_SECONDS:
            await asyncio.sleep(early)
        yield Document(document_key(number), workload.payload(number))


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _main(dsn: str, workload: Workload) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with talking_engine(dsn, workload, orders) as engine, engine.worker():
        handle = await engine.submit(TALK)
        spare_collector()
        _tell({"stream": handle.id})
        while text := await reader.readline():
            orders.put_nowait(json.loads(text))
        await handle.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_main(sys.argv[1], Workload.from_json(json.loads(sys.argv[2]))))
