"""`pause`, `resume`, `priority`, `concurrency`, `add`, `retry`, `cancel` and `sweep`: what changes
jobs by hand.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from pydantic_core import from_json

from fanout.engine import Engine
from fanout.errors import UsageError
from fanout.handle import JobHandle
from fanout.values import Dispatched, Document, Progress

from .database import Dsn, Schema, opened
from .exits import Exit, clean
from .jobs import JobId
from .output import AsJson, console, print_json

__all__ = ["add", "cancel", "concurrency", "pause", "priority", "resume", "retry", "sweep"]

LONGEST_LINE_BYTES: Final = 1 << 16
"""Far above what a document may have: enough to say how much too large it is."""
DOCUMENT_FIELDS: Final = frozenset(Document.__dataclass_fields__)


def pause(job: JobId, dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """Start nothing more of a batch, or single job, until it is resumed. What runs goes on."""

    async def hold() -> tuple[bool, Progress]:
        async with opened(dsn, schema) as engine:
            handle = engine.handle(job)
            return await handle.pause(), await handle.progress()

    changed, after = asyncio.run(hold())
    if as_json:
        print_json({"id": job, "changed": changed, "paused": after.paused})
        return
    running = f"; {after.processing} that run go on to their ends" if after.processing else ""
    console.print(
        f"job {job} is paused{running}" if changed else f"job {job} was paused already",
        markup=False,
    )


def resume(job: JobId, dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """Let a paused batch, or single job, go on."""

    async def go_on() -> tuple[bool, Progress]:
        async with opened(dsn, schema) as engine:
            handle = engine.handle(job)
            return await handle.resume(), await handle.progress()

    changed, after = asyncio.run(go_on())
    if as_json:
        print_json({"id": job, "changed": changed, "paused": after.paused})
        return
    console.print(f"job {job} goes on" if changed else f"job {job} was not paused", markup=False)


def priority(
    job: JobId,
    value: Annotated[
        int, typer.Argument(metavar="PRIORITY", min=0, max=9, help="0 (first) to 9 (last).")
    ],
    dsn: Dsn = None,
    schema: Schema = None,
) -> None:
    """Give a batch, or single job, and all children that have not ended another priority."""

    async def give() -> None:
        async with opened(dsn, schema) as engine:
            await engine.handle(job).set_priority(value)

    asyncio.run(give())
    console.print(f"job {job} has priority {value}", markup=False)


def concurrency(
    job: JobId,
    value: Annotated[
        str,
        typer.Argument(metavar="COUNT", help="Children that may run at once; none: no limit."),
    ],
    dsn: Dsn = None,
    schema: Schema = None,
) -> None:
    """Say how many children of a batch may run at once, over all workers."""
    count = _count(value)

    async def give() -> None:
        async with opened(dsn, schema) as engine:
            await engine.handle(job).set_concurrency(count)

    asyncio.run(give())
    said = f"at most {count} at once" if count is not None else "as many at once as may"
    console.print(f"children of job {job} run {said}", markup=False)


def _count(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            "concurrency", f"{text!r} is not a count", "Give 1 or more, or none"
        ) from None


def add(
    job: JobId,
    kind: Annotated[str, typer.Argument(help="The children's kind, as papers_extract.")],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help='Documents, one JSON object a line: {"key": "a", "payload": …}; - reads stdin.',
        ),
    ],
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Add documents to a batch while it is open. Those whose keys it has are passed over."""

    async def grow() -> Dispatched:
        async with opened(dsn, schema) as engine:
            with _source(file) as lines:
                return await _grow(engine.handle(job), kind, lines)

    done = asyncio.run(grow())
    if as_json:
        print_json({"id": job, "created": done.created, "known": done.known})
        return
    known = f"; {done.known} it had already" if done.known else ""
    console.print(f"added to batch {job}: {done.created}{known}", markup=False)


async def _grow(handle: JobHandle, kind: str, lines: BinaryIO) -> Dispatched:
    return await handle.add(kind, _documents(lines))


def _source(file: str) -> AbstractContextManager[BinaryIO]:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise UsageError(
            "file", f"{file!r} cannot be read: {error.strerror}", "Give a file, or - for stdin"
        ) from None


def _documents(lines: BinaryIO) -> Iterator[Document]:
    number = 0
    while line := lines.readline(LONGEST_LINE_BYTES):
        number += 1
        if line.strip():
            yield _document(line, number)


def _document(line: bytes, number: int) -> Document:
    field, remedy = f"line {number}", 'Give an object a line, as {"key": "a", "payload": 1}'
    if len(line) == LONGEST_LINE_BYTES:
        raise UsageError(field, f"has {LONGEST_LINE_BYTES:,} bytes or more", remedy)
    try:
        value: Any = from_json(line)
    except ValueError as error:
        raise UsageError(field, f"is not JSON: {error}", remedy) from None
    if not isinstance(value, dict) or "key" not in value:
        raise UsageError(field, "is no object with a key", remedy)
    if unknown := sorted(set(value) - DOCUMENT_FIELDS):
        raise UsageError(
            field, f"has {unknown[0]!r}", f"One of: {', '.join(sorted(DOCUMENT_FIELDS))}"
        )
    return Document(**value)


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
