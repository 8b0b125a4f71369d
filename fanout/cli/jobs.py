"""`jobs` and `show`: root jobs, newest first, and one job whole."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from fanout.progress import percent_done
from fanout.states import Status
from fanout.values import FailureReason, JobRow, JobSummary, Progress

from .database import Dsn, Schema, opened
from .exits import clean
from .output import AsJson, Listing, console, duration, jsonable, print_json, stamp

__all__ = ["JobId", "jobs", "show"]

JobId = Annotated[int, typer.Argument(metavar="JOB", min=1, max=2**63 - 1, help="The job's id.")]


def jobs(
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    status: Annotated[Status | None, typer.Option(help="Only in this state.")] = None,
    before: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, help="Ids below this one: the next page.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List root jobs, newest first."""

    async def read() -> list[JobSummary]:
        async with opened(dsn, schema) as engine:
            return await engine.jobs(kind=kind, status=status, before_id=before, limit=limit)

    rows = asyncio.run(read())
    if as_json:
        for row in rows:
            print_json(jsonable(row) | {"outcome": row.outcome})
        return
    if not rows:
        console.print("no jobs", markup=False)
        return
    listing = Listing(
        "job", "kind", "outcome", "done", "children", "failed", "created (UTC)", "key or reason",
        right=["job", "done", "children", "failed"],
    )  # fmt: skip
    listing.page([_line(row) for row in rows])
    if len(rows) == limit:
        console.print(f"… fanout jobs --before {rows[-1].id}", style="dim", markup=False)


def _line(row: JobSummary) -> tuple[object, ...]:
    ended = row.completed + row.failed + row.cancelled
    percent = percent_done(ended, row.total, closed=row.status.is_terminal)
    return (
        row.id,
        row.kind,
        row.outcome,
        f"{percent} %" if row.total or row.status.is_terminal else "",
        row.total or "",
        row.failed or "",
        stamp(row.created_at),
        row.reason or row.error or row.key,
    )


def show(job: JobId, dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """Show one job, whole: state, counts, what it waits for, payload, result, failures."""

    async def read() -> tuple[JobRow, Progress, list[FailureReason]]:
        async with opened(dsn, schema) as engine:
            handle = engine.handle(job)
            row = await handle.job()
            reasons = await handle.failure_reasons(limit=10) if row.failed else []
            return row, await handle.progress(), reasons

    row, progress, reasons = asyncio.run(read())
    if as_json:
        extra = {
            "outcome": row.outcome,
            "percent": progress.percent,
            "waits_for": progress.waits_for,
            "failure_reasons": reasons,
        }
        print_json(jsonable(row) | jsonable(extra))
        return
    for name, value in _facts(row, progress):
        if value not in (None, ""):
            console.print(f"{name:<12}{clean(value)}", markup=False)
    for name, value in (("payload", row.payload), ("result", row.result)):
        if value is not None:
            text = json.dumps(value, ensure_ascii=False, indent=2)
            console.print(
                f"{name:<12}" + clean(text, one_line=False).replace("\n", "\n" + " " * 12),
                markup=False,
            )
    for reason in reasons:
        console.print(
            f"{'failures':<12}{reason.count} as {clean(reason.example)}: {clean(reason.error)}",
            markup=False,
        )


def _facts(row: JobRow, progress: Progress) -> list[tuple[str, object]]:
    took = f"{duration(progress.elapsed_seconds)}{'' if progress.is_closed else ' so far'}"
    return [
        ("job", row.id),
        ("kind", row.kind),
        ("outcome", row.outcome),
        ("verdict", row.verdict and f"{row.verdict}, once its open children have ended"),
        ("why", row.reason or row.error),
        ("error type", row.error_type),
        ("waits", "; ".join(progress.waits_for)),
        ("children", row.total and _counts(progress)),
        (
            "runs",
            f"{row.attempt}; {row.failures} of {row.max_retries + 1} failures, {row.deaths} deaths",
        ),
        ("generation", row.generation if row.generation > 1 else None),
        ("key", row.key),
        ("parent", row.parent_id),
        ("document", row.document_key),
        ("follows", row.follows_id),
        ("on closed", row.on_closed),
        ("priority", row.priority),
        ("at once", row.concurrency),
        ("deadline", stamp(row.deadline)),
        ("created", stamp(row.created_at)),
        ("due", stamp(row.run_at) if row.status is Status.PENDING else None),
        ("claimed", stamp(row.claimed_at)),
        ("finished", stamp(row.finished_at)),
        ("took", took),
    ]


def _counts(progress: Progress) -> str:
    parts = [
        f"{progress.total}: {progress.percent} %",
        f"{progress.completed} completed",
        f"{progress.failed} failed",
        progress.cancelled and f"{progress.cancelled} cancelled",
        progress.processing and f"{progress.processing} running",
        progress.pending and f"{progress.pending} waiting",
    ]
    return ", ".join(str(part) for part in parts if part)
