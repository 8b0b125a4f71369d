"""Handlers that the worker processes of these tests run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from fanout import Document, Engine, Job, PermanentError

# The tests import it too, for its handlers.
engine = Engine(os.environ.get("DATABASE_URL", "postgresql://nowhere/none"))


@engine.job
async def echo(job: Job[Any]) -> Any:
    return job.payload


@engine.job
async def nap(job: Job[float]) -> str:
    await asyncio.sleep(job.payload)
    return "slept"


@engine.job(timeout=0.5)
def hang(job: Job[float]) -> None:
    time.sleep(job.payload)


@engine.job
async def block(job: Job[float]) -> None:
    time.sleep(job.payload)  # noqa: ASYNC251 - the mistake that is to be survived


@engine.job
async def page(job: Job[dict[str, Any]]) -> int:
    await asyncio.sleep(job.payload.get("seconds", 0))
    if problem := job.payload.get("problem"):
        raise PermanentError(problem)
    return 1


@engine.job
async def book(job: Job[dict[str, Any]]) -> None:
    given = dict(job.payload)
    pages, problems = given.pop("pages"), given.pop("problems", 0)
    await job.fan_out(
        page,
        [
            Document(f"p{n:03}", given | ({"problem": "=1+1 is torn"} if n < problems else {}))
            for n in range(pages)
        ],
    )


@engine.job
async def die_once(job: Job[str]) -> str:
    """Kill this process the first time: the file says that it was done."""
    mark = Path(job.payload)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "lived"
