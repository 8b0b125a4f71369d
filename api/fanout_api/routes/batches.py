"""What is inside a batch: children, failures, a grid, a history, downloads."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response, StreamingResponse

from fanout.access import Scope
from fanout.tree import MOST_NODES, MOST_STEPS_UP
from fanout_api.exports import MEDIA_TYPES, lines_of
from fanout_api.models import (
    Attempts,
    AttemptView,
    Bucket,
    ChildKeys,
    ChildrenFilter,
    ChildrenPage,
    ChildView,
    Density,
    DensityBucket,
    ExportFilter,
    Failures,
    GridView,
    HistoryView,
    KeysFilter,
    Limit,
    ReasonView,
    Squares,
    TreeView,
)
from fanout_api.table import Call, NoQuery, Nothing, Table

if TYPE_CHECKING:
    from fanout import Child, JobRow

__all__ = ["routes"]

routes = Table()

MOST_SQUARES: Final = 5000
MOST_BUCKETS: Final = 500
MOST_TIMES: Final = 120
NICE_SECONDS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)


@routes.get("/v1/jobs/{job_id}/children", query=ChildrenFilter, answers=ChildrenPage)
async def children(call: Call[ChildrenFilter, Nothing]) -> ChildrenPage:
    """List children by document key."""
    handle, asked = await call.handle(), call.query
    limit = min(asked.limit, call.service.settings.max_page)
    rows = await handle.children_page(
        status=asked.status, error=asked.error, after_key=asked.after, limit=limit + 1
    )
    page = [_child_view(row) for row in rows[:limit]]
    return ChildrenPage(children=page, next=page[-1].document_key if len(rows) > limit else None)


def _child_view(child: Child) -> ChildView:
    values = {n: getattr(child, n) for n in ChildView.model_fields if n != "took_seconds"}
    return ChildView(**values, took_seconds=child.took.total_seconds() if child.took else None)


@routes.get("/v1/jobs/{job_id}/attempts", answers=Attempts)
async def attempts(call: Call[NoQuery, Nothing]) -> Attempts:
    """The runs of a job, the first one first: how each ended, and on which worker."""
    rows = await (await call.handle()).attempts()
    return Attempts(
        attempts=[
            AttemptView(
                **{n: getattr(row, n) for n in AttemptView.model_fields if n != "took_seconds"},
                took_seconds=row.took.total_seconds() if row.took is not None else None,
            )
            for row in rows
        ]
    )


@routes.get("/v1/jobs/{job_id}/failures", query=Limit, answers=Failures)
async def failures(call: Call[Limit, Nothing]) -> Failures:
    """Failures by reason, most frequent first."""
    handle = await call.handle()
    limit = min(call.query.limit, call.service.settings.max_page)
    rows = await handle.failure_reasons(limit)
    return Failures(reasons=[ReasonView.model_validate(row) for row in rows])


@routes.get("/v1/jobs/{job_id}/grid", answers=GridView)
async def grid(call: Call[NoQuery, Nothing]) -> GridView:
    """All children at one look: a letter each, or counts for very many."""
    job, store = await call.job(), call.store
    if job.total <= MOST_SQUARES:
        states, total = await store.grid(job.id, MOST_SQUARES)
        return GridView(Squares(total=total, kind="squares", states=states))
    rows = await store.density(job.id, math.ceil(job.total / MOST_BUCKETS))
    buckets = [DensityBucket(**row) for row in rows]
    total = sum(b.p + b.r + b.w + b.c + b.f + b.x for b in buckets)
    return GridView(Density(total=total, kind="density", buckets=buckets[:MOST_BUCKETS]))


@routes.get("/v1/jobs/{job_id}/keys", query=KeysFilter, answers=ChildKeys)
async def keys(call: Call[KeysFilter, Nothing]) -> ChildKeys:
    """Ids and keys of children, by their place in the grid."""
    job, asked = await call.job(), call.query
    limit = min(asked.limit, call.service.settings.max_page)
    return ChildKeys.model_validate(
        {"keys": await call.store.child_keys(job.id, asked.first, limit)}
    )


@routes.get("/v1/jobs/{job_id}/tree", answers=TreeView)
async def tree(call: Call[NoQuery, Nothing]) -> TreeView:
    """The chain that a job belongs to: what it came from, the batches inside, what followed."""
    job = await call.job()
    found = await call.store.tree(job.id, MOST_NODES, MOST_STEPS_UP, call.caller.tenant)
    return TreeView.model_validate(found)


@routes.get("/v1/jobs/{job_id}/history", answers=HistoryView)
async def history(call: Call[NoQuery, Nothing]) -> HistoryView:
    """How many children ended when."""
    job = await call.job()
    progress = await call.store.progress(job.id)
    first = job.claimed_at or job.created_at
    begin = min(first, job.created_at + timedelta(seconds=progress.elapsed_seconds))
    skipped = max(0.0, (begin - job.created_at).total_seconds())
    seconds = _bucket_seconds(progress.elapsed_seconds - skipped)
    rows = await call.store.history(job.id, seconds)
    return _history(job, rows, seconds, int(skipped // seconds))


def _bucket_seconds(span: float) -> float:
    fits = (nice for nice in NICE_SECONDS if span < nice * (MOST_TIMES - 1))
    return float(next(fits, math.ceil(span / (MOST_TIMES - 1))))


def _history(job: JobRow, rows: list[dict[str, Any]], seconds: float, first: int) -> HistoryView:
    """Buckets from `first` to the last in which anything ended, with those in which nothing did."""
    first = min([first, *(row["bucket"] for row in rows)])
    counts = {row["bucket"]: row for row in rows}
    last = max(counts, default=first - 1)
    first = max(first, last - MOST_TIMES + 1)
    none = {"completed": 0, "failed": 0, "cancelled": 0}
    return HistoryView.model_validate(
        {
            "bucket_seconds": seconds,
            "from": job.created_at + timedelta(seconds=first * seconds),
            "buckets": [
                Bucket.model_validate(counts.get(number, none)) for number in range(first, last + 1)
            ],
        }
    )


@routes.get(
    "/v1/jobs/{job_id}/export",
    query=ExportFilter,
    answers={200: "text/csv"},
    scope=Scope.READ,
)
async def export(call: Call[ExportFilter, Nothing]) -> Response:
    """Download children, results or failures, as CSV or JSON lines."""
    handle, asked = await call.handle(), call.query
    # Nothing of a user's in a header: the name is made of numbers and of our own words.
    name = f"fanout-job-{handle.id}-{asked.what}.{asked.format}"
    return StreamingResponse(
        lines_of(handle, asked.what, asked.format),
        media_type=MEDIA_TYPES[asked.format],
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )
