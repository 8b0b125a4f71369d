"""`watch`: follow one job to its end, live."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import typer

from fanout.engine import Engine
from fanout.errors import FanoutError
from fanout.events import Event
from fanout.handle import JobHandle
from fanout.states import Status
from fanout.values import Child, FailureReason, Progress

from .database import Dsn, Schema, opened
from .exits import clean, of_outcome
from .jobs import JobId
from .live import View, facts
from .output import STYLES, AsJson, Listing, console, duration, print_json

__all__ = ["Failures", "followed", "summary", "watch"]

NEW_FAILURES_LOOKED_FOR: Final = 1000
"""Failures come by document key, not by time: above this many nobody looks which are new."""
GROUPS: Final = 10
SLOWEST: Final = 5
EARLIER_LINES: Final = 50
"""Log lines from before `watch` was called that are shown as well."""
LAST_LINES_SECONDS: Final = 0.5
"""How long the last lines of a job that has closed are waited for, after each that comes."""


def watch(
    job: JobId,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    interval: Annotated[
        float | None, typer.Option(min=0.05, help="Seconds between two looks.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Follow a job to its end: bar, rate, what is left, log lines and failures as they come, what
    it waits for.

    Ends with 0 (completed), 4 (completed, but children failed) or 1 (failed or cancelled). --json
    prints the progress again and again, the last line when it is closed.
    """

    async def follow() -> int:
        async with opened(dsn, schema) as engine:
            return await followed(engine, job, interval=interval, as_json=as_json)

    return asyncio.run(follow())


class Failures:
    """Which failures of a batch are new since the last look."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle = handle
        self._seen: set[int] = set()
        self._count = 0

    async def new(self, progress: Progress) -> list[Child]:
        """The children that failed since; empty above a thousand, where the summary has to do."""
        if progress.failed == self._count or progress.failed > NEW_FAILURES_LOOKED_FOR:
            return []
        self._count = progress.failed
        found = [child async for child in self._handle.failures() if child.id not in self._seen]
        self._seen |= {child.id for child in found}
        return found


async def followed(
    engine: Engine, job: int, *, interval: float | None = None, as_json: bool = False
) -> int:
    """Follow a job to its end and sum it up. Returns the exit code."""
    handle = engine.handle(job)
    last: Progress | None = None
    if as_json:
        async for last in handle.watch(interval or 1.0):
            print_json(last)
    else:
        last = await _live(engine, handle, interval)
        await summary(handle, last)
    return of_outcome(last.status, last.failed) if last is not None else 1


async def _live(engine: Engine, handle: JobHandle, interval: float | None) -> Progress:
    progress = await handle.progress()
    failures = Failures(handle)
    with View(f"{progress.kind} {progress.id}") as view:
        lines = _Lines(view)
        reading = asyncio.create_task(lines.read(engine, handle))
        try:
            async for progress in handle.watch(interval):
                view.show(progress, await failures.new(progress))
            await lines.settle(reading)
        finally:
            reading.cancel()
            await asyncio.wait([reading])
    return progress


class _Lines:
    """The log lines of a job, as they come."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._count = 0

    async def read(self, engine: Engine, handle: JobHandle) -> None:
        """Until the job's end. Trouble with the log is no trouble with the job."""
        try:
            head = (await engine.events.heads([handle.id])).get(handle.id)
            after = None
            if head is not None:
                first = max(head.first_number - 1, head.last_number - EARLIER_LINES)
                after = f"{head.generation}.{first}"
            async for event in handle.events(after):
                self._count += 1
                self._show(event)
        except FanoutError as error:
            self._view.say(f"the log cannot be read: {error}", "warning")

    def _show(self, event: Event) -> None:
        data = event.data
        if event.type == "log":
            key = data.get("key")
            level = str(data.get("level", "info"))
            self._view.say(str(data.get("message", "")), level, str(key or ""))
        elif event.type == "dropped":
            self._view.say(f"{data.get('count')} lines were dropped here", "warning")
        elif event.type == "reset":
            self._view.say("lines are missing here", "warning")

    async def settle(self, reading: asyncio.Task[None]) -> None:
        """Let the last lines come."""
        count = -1
        while not reading.done() and count != self._count:
            count = self._count
            await asyncio.wait([reading], timeout=LAST_LINES_SECONDS)


async def summary(handle: JobHandle, progress: Progress) -> None:
    """How a closed job ended: counts and rate, the slowest children, the failures by reason."""
    console.print(f"{progress.kind} {progress.id}: ", end="", markup=False)
    console.print(progress.outcome, style=STYLES.get(progress.outcome, ""), end="", markup=False)
    console.print(
        f" · {facts(progress)}"
        if progress.total
        else f" · {duration(progress.elapsed_seconds)} in all",
        markup=False,
    )
    if progress.reason:
        console.print(clean(progress.reason), style="red", markup=False)
    if progress.total:
        show_slowest(await handle.slowest(SLOWEST))
    if progress.failed:
        show_reasons(await handle.failure_reasons(GROUPS + 1))


def show_slowest(slowest: list[tuple[str, Status, float]]) -> None:
    """The children whose last attempt took longest."""
    if slowest:
        console.print()
        listing = Listing("took", "status", "slowest", right=["took"])
        listing.page([(duration(took), status, key) for key, status, took in slowest])


def show_reasons(reasons: list[FailureReason]) -> None:
    """Failures, grouped."""
    console.print()
    listing = Listing("failed", "as", "why", right=["failed"])
    listing.page([(reason.count, reason.example, reason.error) for reason in reasons[:GROUPS]])
    if len(reasons) > GROUPS:
        console.print("… and other reasons", style="dim", markup=False)
