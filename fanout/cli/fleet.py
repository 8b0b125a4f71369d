"""`workers` and `stuck`: who works, and what does not move."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from fanout.values import WorkerRow

from .database import Dsn, Schema, opened
from .exits import Exit
from .output import AsJson, Listing, ago, console, print_json

__all__ = ["stuck", "workers"]

STUCK_LIMIT = 200


def workers(dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """List worker processes that live, or were lost within the last day."""

    async def read() -> list[WorkerRow]:
        async with opened(dsn, schema) as engine:
            return await engine.workers()

    rows = asyncio.run(read())
    if as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        console.print("no workers", markup=False)
        return
    listing = Listing(
        "worker", "state", "running", "free", "last beat", "started", "version",
        "host", "pid", "kinds",
        right=["running", "free", "last beat", "pid"],
    )  # fmt: skip
    listing.page(
        [
            (
                row.name,
                row.state,
                f"{row.running} of {row.concurrency}",
                "" if row.state == "lost" else row.free,
                ago(row.beat_age_seconds),
                ago((datetime.now(UTC) - row.started_at).total_seconds()),
                row.version,
                row.host,
                row.pid,
                ", ".join(row.kinds),
            )
            for row in rows
        ]
    )


def stuck(dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> int:
    """List what does not move, and why. Exit code 1 if there is anything."""

    async def read() -> list[dict[str, Any]]:
        async with opened(dsn, schema) as engine:
            return await engine.store.stuck(STUCK_LIMIT)

    rows = asyncio.run(read())
    if as_json:
        for row in rows:
            print_json(row)
    elif not rows:
        console.print("nothing is stuck", markup=False)
    else:
        listing = Listing("job", "batch", "kind", "for", "why", right=["job", "batch", "for"])
        now = datetime.now(UTC)
        listing.page(
            [
                (
                    row["id"],
                    row["parent_id"],
                    row["kind"],
                    ago((now - row["since"]).total_seconds()),
                    row["why"],
                )
                for row in rows
            ]
        )
    return Exit.WRONG if rows else Exit.FINE
