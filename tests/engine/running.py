"""An engine with a worker, quick in everything that is a setting; and a look at its batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg

from fanout import Engine, JobHandle, Progress, Settings, Status, Worker

PATIENCE = 30
"""Seconds after which a test that waits has failed; nothing here takes one."""


def quick(**values: Any) -> Settings:
    """Settings under which nothing takes long."""
    return Settings(
        **{
            "lease": 3,
            "heartbeat": 0.1,
            "poll_interval": 0.1,
            "sweep_interval": 0.2,
            "backoff_base": 0.02,
            "backoff_max": 0.2,
            "timeout_grace": 0.3,
            "stop_grace": 2,
            **values,
        }
    )


@contextlib.asynccontextmanager
async def running(engine: Engine, **worker: Any) -> AsyncIterator[Worker]:
    """The engine, started, and one worker of it."""
    async with engine, engine.worker(**worker) as it:
        yield it


async def closed(handle: JobHandle) -> Progress:
    """Wait until it is."""
    return await handle.wait(PATIENCE)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition()` is true, or the (awaitable) answer of it is."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = condition()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return
            await asyncio.sleep(0.005)


def counts(progress: Progress) -> tuple[int, int, int, int]:
    """Its total, completed, failed and cancelled children."""
    return progress.total, progress.completed, progress.failed, progress.cancelled


async def assert_true_to_its_children(conn: asyncpg.Connection) -> None:
    """Counters are what the children are, and no closed job has an open child."""
    wrong = await conn.fetch(
        """SELECT p.id, p.status, p.total, p.completed, p.failed, p.cancelled, t.*
             FROM fanout.job p CROSS JOIN LATERAL (
                  SELECT count(*) AS n, count(*) FILTER (WHERE status = 'completed') AS c,
                         count(*) FILTER (WHERE status = 'failed') AS f,
                         count(*) FILTER (WHERE status = 'cancelled') AS x
                    FROM fanout.job WHERE parent_id = p.id) t
            WHERE (p.total, p.completed, p.failed, p.cancelled) <> (t.n, t.c, t.f, t.x)
               OR p.finished_at IS NOT NULL AND t.n <> t.c + t.f + t.x"""
    )
    assert not wrong, [dict(row) for row in wrong]


async def statuses(handle: JobHandle) -> dict[str, Status]:
    """Document key → status of a batch's children."""
    return {child.document_key: child.status async for child in handle.children()}
