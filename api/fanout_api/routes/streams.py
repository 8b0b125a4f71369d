"""Streams: what a browser's EventSource, or a script, reads while a batch runs.

Any status but 200 ends an EventSource for ever, so overload, a stop and an absent database answer
200, say when to come back, and close. 204 says that there is nothing more, ever. A stream that is
not the caller's is 404, like one that never was.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from fanout_streaming import PROGRESS_ONLY, Looking, parse_cursor, parse_cursors, search
from starlette.requests import Request
from starlette.responses import Response

from fanout import DatabaseUnavailable, JobNotFound, UsageError
from fanout_api.bodies import positive
from fanout_api.event_stream import HEADERS, EventStream
from fanout_api.models import EventsFilter, LogFilter, LogLine, LogPage, StreamsFilter
from fanout_api.problems import NotHere
from fanout_api.table import Call, NoQuery, Nothing, Table
from fanout_api.turned_away import turned_away

if TYPE_CHECKING:
    from fanout_streaming import Subscription

__all__ = ["routes"]

_log = logging.getLogger("fanout.api")

routes = Table()

SSE: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
LAST_ID: Final = "Last-Event-ID"
LAST_ID_PARAMETER: Final = {
    "name": LAST_ID,
    "in": "header",
    "description": "The id of the last event that was seen; browsers send it by themselves. "
    "One that is none gives the newest events, and is never an error.",
    "schema": {"type": "string"},
}
ANSWERS: Final[dict[int, Any]] = {200: SSE, 204: None}
MAX_CURSOR: Final = 2048


@routes.get(
    "/v1/jobs/{job_id}/events",
    query=EventsFilter,
    answers=ANSWERS,
    tag="streams",
    headers=(LAST_ID_PARAMETER,),
)
async def job_events(call: Call[EventsFilter, Nothing]) -> Response:
    """Follow a job: its events from a cursor on, then live, as server-sent events or NDJSON."""
    cursor = call.query.after
    if cursor != PROGRESS_ONLY:
        cursor = _last_id(call.request) or cursor
    form = _format(call.request)

    async def subscribe() -> Subscription:
        root, job = await _root_of(call)
        only = None if root == job else {root: job}
        return await call.service.relay.subscribe({root: cursor}, format=form, only_jobs=only)

    return await _opened(call, form, subscribe)


async def _root_of(call: Call[Any, Nothing]) -> tuple[int, int]:
    """(the job whose stream it is, the job). Raises JobNotFound."""
    row = await call.job()
    return row.root_id or row.id, row.id


@routes.get(
    "/v1/streams",
    query=StreamsFilter,
    answers=ANSWERS,
    tag="streams",
    headers=(LAST_ID_PARAMETER,),
    problems=frozenset({404}),
)
async def many_events(call: Call[StreamsFilter, Nothing]) -> Response:
    """Follow up to 32 root jobs over one connection."""
    wanted = _wanted(call.query.s)
    for stream, cursor in parse_cursors(_last_id(call.request) or call.query.after or "").items():
        if wanted.get(stream, PROGRESS_ONLY) != PROGRESS_ONLY:
            wanted[stream] = str(cursor)

    async def subscribe() -> Subscription:
        if call.caller.tenant is not None:
            for stream in wanted:
                await call.reach.job(stream)
        return await call.service.relay.subscribe(wanted)

    return await _opened(call, "sse", subscribe)


def _wanted(asked: list[str]) -> dict[int, str | None]:
    wanted: dict[int, str | None] = {}
    for text in asked:
        stream, _, cursor = text.partition(":")
        wanted[positive(stream)] = cursor[:MAX_CURSOR] or None
    return wanted


async def _opened(call: Call[Any, Nothing], form: Any, subscribe: Any) -> Response:
    """The stream; 204 if all was seen. Raises JobNotFound, as for one that never was."""
    if not call.service.has_room(call.caller):
        return turned_away(call.request)
    try:
        subscription = await subscribe()
    except UsageError as error:
        raise NotHere(error.problem) from None
    except (JobNotFound, NotHere):
        raise
    except DatabaseUnavailable as error:
        _log.warning("a stream could not be opened: %s", error)
        return turned_away(call.request)
    # From here on only the response may end it: nothing is awaited in between.
    if subscription.finished_at_start:
        await subscription.close()
        return Response(status_code=204, headers=HEADERS)
    media_type = SSE if form == "sse" else NDJSON
    return EventStream(subscription, call.service, call.caller, call.request, media_type)


def _last_id(request: Request) -> str | None:
    """What the browser saw last; not what it says of itself beyond a cursor's length."""
    return (request.headers.get(LAST_ID) or "")[:MAX_CURSOR] or None


def _format(request: Request) -> Any:
    accept = request.headers.get("accept", "")
    return "ndjson" if NDJSON in accept and SSE not in accept else "sse"


@routes.get("/v1/jobs/{job_id}/log", query=LogFilter, answers=LogPage, tag="streams")
async def log(call: Call[LogFilter, Nothing]) -> LogPage:
    """Look through the stored log of a job for lines of a level, or that contain some text."""
    asked = call.query
    root, job = await _root_of(call)
    found = await search(
        call.service.engine.events,
        root,
        Looking(None if root == job else job, asked.level, asked.contains),
        parse_cursor(asked.after) if asked.after else None,
        min(asked.limit, call.service.settings.max_page),
    )
    lines = [LogLine(id=identity, event=event) for identity, event in found.lines]
    return LogPage(lines=lines, next=found.next)


@routes.get("/v1/jobs/{job_id}/events/{number}", answers={200: "application/json"}, tag="streams")
async def event(call: Call[NoQuery, Nothing]) -> Response:
    """One stored event, whole: the full text of a line that was cut."""
    number = call.number("number")
    root, _ = await _root_of(call)
    found = await call.service.relay.event(root, number)
    if found is None:
        raise NotHere("there is no such event, or it was pruned")
    # In ASCII: a lone surrogate that came in by SQL is no UTF-8, but can be told.
    return Response(json.dumps(found), media_type="application/json")
