"""Verbs on a batch that is open: pause, resume, another priority or concurrency, more documents.

What a verb needs of the job's state is checked by the statement that does it: 409 says why not.
"""

from __future__ import annotations

from fanout import Document
from fanout.access import Scope
from fanout_api.models import (
    AddBody,
    Added,
    ConcurrencyBody,
    JobView,
    Paused,
    PriorityBody,
    Resumed,
    VerbBody,
)
from fanout_api.table import Call, NoQuery, Table

from .jobs import view_of

__all__ = ["routes"]

routes = Table()

REFUSED = frozenset({409})


@routes.post(
    "/v1/jobs/{job_id}/pause", body=VerbBody, answers=Paused, scope=Scope.OPERATE, problems=REFUSED
)
async def pause(call: Call[NoQuery, VerbBody]) -> Paused:
    """Start nothing more of a batch; what runs goes on to its end."""
    return Paused(paused=await (await call.handle()).pause())


@routes.post(
    "/v1/jobs/{job_id}/resume",
    body=VerbBody,
    answers=Resumed,
    scope=Scope.OPERATE,
    problems=REFUSED,
)
async def resume(call: Call[NoQuery, VerbBody]) -> Resumed:
    """Let a paused batch go on."""
    return Resumed(resumed=await (await call.handle()).resume())


@routes.post(
    "/v1/jobs/{job_id}/priority",
    body=PriorityBody,
    answers=JobView,
    scope=Scope.OPERATE,
    problems=REFUSED,
)
async def set_priority(call: Call[NoQuery, PriorityBody]) -> JobView:
    """Give a batch, and its children that have not ended, another priority."""
    handle = await call.handle()
    await handle.set_priority(call.body.priority)
    return await view_of(handle)


@routes.post(
    "/v1/jobs/{job_id}/concurrency",
    body=ConcurrencyBody,
    answers=JobView,
    scope=Scope.OPERATE,
    problems=REFUSED,
)
async def set_concurrency(call: Call[NoQuery, ConcurrencyBody]) -> JobView:
    """Say how many children of a batch may run at once."""
    handle = await call.handle()
    await handle.set_concurrency(call.body.concurrency)
    return await view_of(handle)


@routes.post(
    "/v1/jobs/{job_id}/children",
    body=AddBody,
    answers=Added,
    scope=Scope.OPERATE,
    problems=REFUSED,
)
async def add(call: Call[NoQuery, AddBody]) -> Added:
    """Add documents to a batch that is open; one whose key has a child is passed over."""
    body = call.body
    done = await (await call.handle()).add(
        body.kind,
        [Document(one.key, one.payload, one.gone) for one in body.documents],
        priority=body.priority,
        max_retries=body.max_retries,
        on_closed=body.on_closed,
    )
    return Added(created=done.created, known=done.known)
