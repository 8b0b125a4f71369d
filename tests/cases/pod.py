"""A worker process for the cases: `python -m tests.cases.pod`. One line a fact, written whole,
to the file POD_LOG."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from typing import Any

from fanout import DatabaseUnavailable, Document, Engine, Job


def say(*words: object) -> None:
    line = " ".join(map(str, words)) + "\n"
    descriptor = os.open(os.environ["POD_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def build() -> Engine:
    engine = Engine()

    @engine.job(max_retries=2)
    async def leaf(job: Job[Any]) -> Any:
        say("start", job.id, job.attempt)
        wish = job.payload or {}
        if wish.get("grow"):
            hoard = []
            while True:
                hoard.append(bytearray(16 << 20))
        if wish.get("exit") and not wish.get("once_over"):
            os._exit(int(wish["exit"]))
        await asyncio.sleep(wish.get("seconds", 0))
        say("end", job.id, job.attempt)
        return {"attempt": job.attempt}

    @engine.job
    async def batch(job: Job[Any]) -> None:
        mix = job.payload.get("mix", {})
        await job.fan_out(
            leaf,
            (
                Document(f"{i:05}", mix.get(str(i), job.payload.get("child")))
                for i in range(job.payload["n"])
            ),
        )

    return engine


async def main() -> int:
    engine = build()
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    while not asked.is_set():
        try:
            await engine.start()
            break
        except DatabaseUnavailable as error:
            say("waits", error)
            await asyncio.sleep(0.2)
    async with (
        engine,
        engine.worker(name=os.environ.get("POD_NAME", "pod"), exit_when_stuck=True) as worker,
    ):
        say("up", worker.token)
        await asked.wait()
        say("signal")
    say("down")
    return 0


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    if limit := os.environ.get("POD_MEMORY"):
        resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    sys.exit(asyncio.run(main()))
