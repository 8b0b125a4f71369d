"""`alerts`: what is wrong now, and what was."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from fanout.alerts import Alert

from .database import Dsn, Schema, opened
from .exits import Exit
from .output import AsJson, Listing, console, duration, print_json, stamp

__all__ = ["alerts"]


def alerts(
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    only_open: Annotated[
        bool, typer.Option("--open", help="Only what lasts; exit code 1 if anything does.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    as_json: AsJson = False,
) -> int:
    """List incidents, newest first: batches that are stuck or fail, kinds without a worker."""

    async def read() -> list[Alert]:
        async with opened(dsn, schema) as engine:
            return await engine.alerts(open_only=only_open, limit=limit)

    rows = asyncio.run(read())
    if as_json:
        for row in rows:
            print_json(row)
    elif not rows:
        console.print("no alerts", markup=False)
    else:
        now = datetime.now(UTC)
        listing = Listing("alert", "kind", "began (UTC)", "state", "what", right=["alert"])
        listing.page(
            [
                (
                    row.id,
                    row.kind,
                    stamp(row.opened_at),
                    _state(row, now),
                    row.message,
                )
                for row in rows
            ]
        )
    return Exit.WRONG if only_open and rows else Exit.FINE


def _state(row: Alert, now: datetime) -> str:
    lasted = duration(((row.closed_at or now) - row.opened_at).total_seconds())
    return f"{'open for' if row.is_open else 'over after'} {lasted}"
