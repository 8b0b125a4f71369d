"""`retry`, `cancel` and `sweep`: what changes jobs by hand."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from fanout.engine import Engine
from fanout.errors import UsageError
from fanout.values import Progress

from .database import Dsn, Schema, opened
from .exits import Exit, clean
from .jobs import JobId
from .output import console

__all__ = ["cancel", "retry", "sweep"]


def retry(
    job: JobId,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    key: Annotated[
        list[str] | None, typer.Option(help="Only the child of this document; may be given again.")
    ] = None,
    error: Annotated[
        str | None, typer.Option(help="Only children that failed with exactly this error.")
    ] = None,
) -> None:
    """Run what failed again: a batch's failed children, or a failed single job."""

    async def again() -> None:
        async with opened(dsn, schema) as engine:
            handle = engine.handle(job)
            count = await handle.retry(keys=key or None, error=error)
            row = await handle.job()
            what = (
                f"{count} failed {'child' if count == 1 else 'children'} of batch {job}"
                if row.total
                else f"job {job}"
            )
            console.print(f"runs again: {what}, generation {row.generation}", markup=False)

    asyncio.run(again())


def cancel(
    job: JobId,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    reason: Annotated[
        str, typer.Option(help="Kept with the job, and shown.")
    ] = "cancelled on request",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Cancel a job and what below it has not ended. Asks once, and says what will happen."""

    async def stop() -> int:
        async with opened(dsn, schema) as engine:
            before = await engine.handle(job).progress()
            if before.is_closed:
                return _closed(before)
            console.print(_intent(before), markup=False)
            if not yes and not await asyncio.to_thread(_agreed):
                console.print("nothing was changed", markup=False)
                return Exit.WRONG
            return await _cancel(engine, job, reason)

    return asyncio.run(stop())


def _intent(before: Progress) -> str:
    what = f"cancels job {before.id} ({before.kind}, {before.status})"
    if not before.total:
        return what
    still_open = before.total - before.ended
    running = f", {before.processing} of them running" if before.processing else ""
    children = "child that has" if still_open == 1 else "children that have"
    return (
        f"{what} and {still_open} {children} not ended{running}; "
        f"{before.ended} have ended and stay as they are"
    )


def _agreed() -> bool:
    try:
        return typer.confirm("Go on?")
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UsageError("yes", "there is nobody to ask", "Give --yes") from None


async def _cancel(engine: Engine, job: int, reason: str) -> int:
    handle = engine.handle(job)
    await handle.cancel(reason)
    after = await handle.progress()
    if after.outcome == "cancelled":
        console.print(f"job {job} is cancelled", markup=False)
    elif after.is_closed:
        return _closed(after)
    else:
        console.print(f"job {job} is being ended: {'; '.join(after.waits_for)}", markup=False)
    return Exit.FINE


def _closed(progress: Progress) -> int:
    console.print(
        f"job {progress.id} has closed already: {progress.outcome}"
        + (f", {clean(progress.reason)}" if progress.reason else ""),
        markup=False,
    )
    return Exit.WRONG


def sweep(
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    rescue: Annotated[
        bool,
        typer.Option(
            "--rescue",
            help="Also put back what lost its worker; waits one lease first, for it may come back.",
        ),
    ] = False,
) -> None:
    """Do one round of mending by hand, as every worker does every few seconds."""

    async def mend() -> None:
        async with opened(dsn, schema) as engine:
            sweeper = engine.sweeper()
            await sweeper.sweep()
            if rescue:
                await asyncio.sleep(engine.settings.lease)
                await sweeper.sweep()
            await sweeper.give_up()
            console.print(
                f"swept: {sweeper.rescued} rescued, {sweeper.drifts} recounted, "
                f"{sweeper.given_up} given up",
                markup=False,
            )

    asyncio.run(mend())
