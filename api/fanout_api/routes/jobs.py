"""Jobs: submit, list, show, cancel, retry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from starlette.responses import Response

from fanout import UsageError
from fanout.access import Scope
from fanout_api.models import (
    CancelBody,
    Cancelled,
    JobsFilter,
    JobsPage,
    JobSummaryView,
    JobView,
    ProgressView,
    Retried,
    RetryBody,
    SubmitBody,
)
from fanout_api.table import Call, NoQuery, Nothing, Table, rendered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fanout import JobHandle

__all__ = ["routes"]

routes = Table()

KEY_HEADER: Final = "Idempotency-Key"
KEY_PARAMETER: Final = {
    "name": KEY_HEADER,
    "in": "header",
    "description": "The same key with the same content gives the same job, however often.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 512},
}
YEARS: Final = range(1970, 2200)
"""A `run_at` beyond is a mistake, and its time zone could leave what dates can hold."""
CREATED: Final = 201


@routes.post(
    "/v1/jobs",
    body=SubmitBody,
    answers={200: JobView, 201: JobView},
    scope=Scope.SUBMIT,
    problems=frozenset({409}),
    headers=(KEY_PARAMETER,),
)
async def submit(call: Call[NoQuery, SubmitBody]) -> Response:
    """Submit a job: 201 for a new one, 200 if the Idempotency-Key had it already."""
    body = call.body
    if body.deadline is not None and body.deadline_seconds is not None:
        raise UsageError("deadline", "is given together with deadline_seconds", "Give one of them")
    handle = await call.reach.submit(
        body.kind,
        body.payload,
        key=_key_of(call),
        priority=body.priority,
        delay=body.delay,
        run_at=_time(body.run_at, "run_at"),
        max_retries=body.max_retries,
        on_closed=body.on_closed,
        partition=body.partition,
        closing=body.closing,
        concurrency=body.concurrency,
        fail_after=body.fail_after,
        deadline=_time(body.deadline, "deadline") or body.deadline_seconds,
        budget=body.budget,
        webhook=body.webhook,
    )
    response = rendered(await view_of(handle), CREATED if handle.created else 200)
    root_path = call.request.scope.get("root_path", "")
    response.headers["Location"] = f"{_ascii(root_path)}/v1/jobs/{handle.id}"
    return response


def _time(given: datetime | None, field: str) -> datetime | None:
    if given is None:
        return None
    if given.year not in YEARS:
        raise UsageError(field, f"is in the year {given.year}", "Give a time that comes")
    return given.astimezone(UTC)


def _key_of(call: Call[Any, Any]) -> str | None:
    given = call.request.headers.getlist(KEY_HEADER)
    if len(given) > 1:
        raise UsageError(KEY_HEADER, "is given more than once", "Give it once")
    if not given:
        return None
    try:
        return given[0].encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise UsageError(KEY_HEADER, "is not UTF-8", "Use letters and digits") from None


def _ascii(path: str) -> str:
    """A mount's prefix, fit for a header."""
    return quote(path)


async def view_of(handle: JobHandle) -> JobView:
    """A job, whole, with its progress. Raises JobNotFound."""
    row, progress = await handle.job(), await handle.progress()
    values = {name: getattr(row, name) for name in JobView.model_fields if name != "progress"}
    return JobView(**values, progress=ProgressView.model_validate(progress))


@routes.get("/v1/jobs", query=JobsFilter, answers=JobsPage)
async def jobs(call: Call[JobsFilter, Nothing]) -> JobsPage:
    """List root jobs, newest first."""
    asked = call.query
    limit = min(asked.limit, call.service.settings.max_page)
    rows: Sequence[Any] = await call.reach.jobs(asked.kind, asked.status, asked.before, limit + 1)
    page = [JobSummaryView.model_validate(row) for row in rows[:limit]]
    return JobsPage(jobs=page, next=page[-1].id if len(rows) > limit else None)


@routes.get("/v1/jobs/{job_id}", answers=JobView)
async def job(call: Call[NoQuery, Nothing]) -> JobView:
    """Show one job with its progress."""
    return await view_of(await call.handle())


@routes.post("/v1/jobs/{job_id}/cancel", body=CancelBody, answers=Cancelled, scope=Scope.OPERATE)
async def cancel(call: Call[NoQuery, CancelBody]) -> Cancelled:
    """Cancel a job and everything below it that has not ended."""
    handle = await call.handle()
    reason = call.body.reason
    done = await (handle.cancel() if reason is None else handle.cancel(reason))
    return Cancelled(cancelled=done)


@routes.post(
    "/v1/jobs/{job_id}/retry",
    body=RetryBody,
    answers=Retried,
    scope=Scope.OPERATE,
    problems=frozenset({409}),
)
async def retry(call: Call[NoQuery, RetryBody]) -> Retried:
    """Run what failed again: all of it, some keys, or all with one error."""
    retried = await (await call.handle()).retry(keys=call.body.keys, error=call.body.error)
    return Retried(retried=retried)
