"""(a) This engine, as a user runs it: handlers on an `Engine`, a `Worker` in each process.

The handler does nothing but return a small result. Measured beside it: how long flushes hold the
parent's row. That figure is an upper bound: it ends when the event loop has read the server's
answer and the store has sorted it, not when the commit was done.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.facts import peak_rss_mb
from benchmarks.member import run
from benchmarks.workload import BATCH, CHILD, FOLLOW_UP, PING, Workload, document_key
from fanout import Document, Engine, Job, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fanout.store import Store
    from fanout.values import Counted, Look
    from fanout.worker import Worker

IDLE_LOOK_SECONDS = 0.005


def settings_of(workload: Workload) -> Settings:
    """The engine's settings: defaults, except for what the workload says."""
    return Settings(
        schema_name="fanout",
        concurrency=workload.concurrency,
        prefetch=workload.prefetch,
        chunk_size=workload.chunk_size,
        flush_limit=workload.claim_limit,
        migrate_on_start=False,
    )


def engine_of(dsn: str, workload: Workload) -> Engine:
    """An engine with the four handlers of the benchmark."""
    engine = Engine(dsn, settings=settings_of(workload))

    @engine.job(name=CHILD)
    async def child(job: Job[Any]) -> Any:
        return {"n": job.payload["n"]}

    @engine.job(name=BATCH, on_closed=FOLLOW_UP)
    async def batch(job: Job[Any]) -> None:
        numbers = range(job.payload["children"])
        await job.fan_out(child, (Document(document_key(n), workload.payload(n)) for n in numbers))

    @engine.job(name=FOLLOW_UP)
    async def follow_up(_job: Job[Any]) -> None:
        return

    @engine.job(name=PING)
    async def ping(_job: Job[Any]) -> None:
        return

    return engine


class Watched:
    """What the store's busiest methods did since the last look: seconds, rows, closes."""

    def __init__(self, store: Store) -> None:
        self._finish, self._claim, self._recount = store.finish, store.claim, store.recount
        self.clear()
        # A user has no hook here; a benchmark needs one.
        store.finish = self.finish  # type: ignore[method-assign]
        store.claim = self.claim  # type: ignore[method-assign]
        store.recount = self.recount  # type: ignore[method-assign]

    def clear(self) -> None:
        self.parent_lock_ms: list[float] = []
        self.claim_ms: list[float] = []
        self.flushed: list[int] = []
        self.claimed: list[int] = []
        self.closes = 0

    async def finish(self, *arguments: Any, **options: Any) -> Counted:
        counted = await self._finish(*arguments, **options)
        acknowledged = time.time()
        if counted.locked_at is not None:
            self.parent_lock_ms.append((acknowledged - counted.locked_at.timestamp()) * 1000)
        self.flushed.append(sum(len(group.ids) for group in counted.groups))
        self.closes += len(counted.closed)
        # A manager whose children were all faster than it is closed by its own finish.
        self.closes += sum(
            len(group.ids)
            for group in counted.groups
            if group.on_closed and group.status.is_terminal
        )
        return counted

    async def recount(self, job_id: int) -> Counted:
        """How a batch of level 2 closes."""
        counted = await self._recount(job_id)
        self.closes += sum(job.status.is_terminal for job in counted.moved)
        return counted

    async def claim(self, *arguments: Any, **options: Any) -> Look:
        started = time.perf_counter()
        look = await self._claim(*arguments, **options)
        self.claim_ms.append((time.perf_counter() - started) * 1000)
        self.claimed.append(len(look.claims))
        return look


class EngineMember:
    """One worker process."""

    def __init__(self, worker: Worker, watched: Watched) -> None:
        self._worker = worker
        self._watched = watched
        self._cpu_before = 0.0
        self._executed_before = 0

    async def prepare(self, *, sizes: list[int], leads: bool) -> dict[str, Any]:
        """Nothing: a manager dispatches."""
        return {"sizes": sizes, "leads": leads}

    async def go(self, parents: list[int]) -> dict[str, Any]:
        """Only the clocks: this worker works all the time."""
        self._watched.clear()
        self._cpu_before = time.process_time()
        self._executed_before = self._worker.executed
        return {"parents": len(parents)}

    async def halt(self) -> dict[str, Any]:
        while not self._worker.is_idle:  # noqa: ASYNC110 -- the worker tells nobody, and need not
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        watched = self._watched
        return {
            "cpu_seconds": time.process_time() - self._cpu_before,
            "executed": self._worker.executed - self._executed_before,
            "lost": self._worker.finisher.lost,
            "peak_rss_mb": peak_rss_mb(),
            "closes": watched.closes,
            "parent_lock_ms": watched.parent_lock_ms,
            "claim_ms": watched.claim_ms,
            "claimed": watched.claimed,
            "flushed": watched.flushed,
        }


@asynccontextmanager
async def member(dsn: str, workload: Workload) -> AsyncIterator[EngineMember]:
    """An engine and its worker, started."""
    async with engine_of(dsn, workload) as engine:
        watched = Watched(engine.store)
        async with engine.worker() as worker:
            yield EngineMember(worker, watched)


if __name__ == "__main__":
    run(member)
