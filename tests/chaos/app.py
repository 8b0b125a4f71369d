"""The program under chaos: an engine with handlers that behave as their payload says, badly if need
be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg

from fanout import Document, Engine, Job, PermanentError, Settings, TransientError
from tests.chaos.calls import CallLog

__all__ = ["NAMED", "SCARCE", "SETTINGS", "build"]

SCARCE = 6
"""Jobs of the kind `scarce` that run at once, over all processes."""
NAMED = {"parser": 2, "llm": 3}
"""And what of them may be within a block of these."""

# Small, so that what takes half a minute in production is over in two seconds.
SETTINGS = {
    "FANOUT_LEASE": "2",
    "FANOUT_HEARTBEAT": "0.5",
    "FANOUT_SWEEP_INTERVAL": "0.5",
    "FANOUT_POLL_INTERVAL": "0.2",
    "FANOUT_BACKOFF_BASE": "0.1",
    "FANOUT_BACKOFF_MAX": "0.5",
    "FANOUT_STOP_GRACE": "3",
    "FANOUT_TIMEOUT": "30",
    "FANOUT_TIMEOUT_GRACE": "0.5",
    "FANOUT_DATABASE_TIMEOUT": "2",
    "FANOUT_CHUNK_SIZE": "100",
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def once(mark: str | None) -> bool:
    """True for the first caller of all processes that names this mark; without a mark always."""
    if mark is None:
        return True
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Logged:
    """Writes the start and the end of one call."""

    def __init__(self, log: CallLog, job: Job[Any]) -> None:
        self._log = log
        self._of = {"job": job.id, "attempt": job.attempt, "kind": job.kind}

    def __enter__(self) -> None:
        self._log.write("start", **self._of)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        how = "ok" if kind is None else kind.__name__
        self._log.write("end", **self._of, how=how)


async def behave(job: Job[Any]) -> None:  # noqa: C901, PLR0912 - a case a behaviour
    """What a child does: payload {"do": …}."""
    wish: dict[str, Any] = job.payload or {}
    match wish.get("do", "work"):
        case "nothing":
            pass
        case "work":
            await asyncio.sleep(wish.get("seconds", 0))
        case "flaky":
            if job.failures < wish.get("times", 1):
                raise TransientError("not yet")
        case "broken":
            raise PermanentError("not a PDF")
        case "die":
            if once(wish.get("mark")):
                await asyncio.sleep(wish.get("after", 0.05))
                die()
        case "block":
            if once(wish.get("mark")):
                time.sleep(wish["seconds"])  # noqa: ASYNC251 -- that is the point
        case "stubborn":
            end = time.monotonic() + wish["seconds"]
            while time.monotonic() < end:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(end - time.monotonic())
        case "hog":
            await asyncio.to_thread(time.sleep, wish["seconds"])
        case "crowd":  # user code that takes every connection it can get
            mine = await asyncpg.create_pool(wish["dsn"], min_size=wish["n"], max_size=wish["n"])
            async with mine:
                await asyncio.sleep(wish["seconds"])
        case unknown:
            raise AssertionError(unknown)


async def documents(wish: dict[str, Any]) -> AsyncIterator[Document]:
    """The documents of a batch; at `die_at` of them, asking for one more kills the process."""
    n, child, mix = wish["n"], wish.get("child"), wish.get("mix", {})
    for index in range(n + 1):
        if index == wish.get("die_at") and once(wish.get("mark")):
            die()
        if index < n:
            yield Document(f"{index:06}", mix.get(str(index), child))
        if wish.get("pause"):
            await asyncio.sleep(wish["pause"])


def build(dsn: str, log: CallLog, settings: Settings | None = None) -> Engine:
    """The engine, not started; its settings come from the environment if none are given."""
    engine = Engine(dsn, settings=settings)

    @engine.job(max_retries=2)
    async def leaf(job: Job[Any]) -> dict[str, int]:
        with Logged(log, job):
            await behave(job)
            return {"attempt": job.attempt}

    @engine.job(max_retries=0, timeout=1)
    async def hasty(job: Job[Any]) -> dict[str, int]:
        with Logged(log, job):
            await behave(job)
            return {"attempt": job.attempt}

    @engine.job(max_retries=0, timeout=1)
    def threaded(job: Job[Any]) -> dict[str, int]:
        with Logged(log, job):
            time.sleep(job.payload["seconds"])
            return {"attempt": job.attempt}

    @engine.job(max_retries=2, timeout=60, on_closed="report")
    async def batch(job: Job[Any]) -> None:
        with Logged(log, job):
            await job.fan_out(job.payload.get("kind", "leaf"), documents(job.payload))

    @engine.job(max_retries=5, limit=SCARCE)
    async def scarce(job: Job[Any]) -> None:
        with Logged(log, job):
            for name, concurrency in NAMED.items():
                async with job.limit(name, concurrency):
                    line = {"job": job.id, "attempt": job.attempt, "limit": name}
                    log.write("in", **line)
                    await asyncio.sleep(job.payload["seconds"])
                    log.write("out", **line)

    @engine.job(max_retries=2)
    async def report(job: Job[Any]) -> dict[str, Any]:
        with Logged(log, job):
            return {"of": job.payload["job_id"]}

    return engine
