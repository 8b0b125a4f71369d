"""The installation: kinds, workers, what is stuck, versions; health and metrics for machines."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Final

from starlette.responses import JSONResponse, Response

from fanout.access import Scope
from fanout_api.health import ready_of
from fanout_api.metrics import CONTENT_TYPE, exposition
from fanout_api.models import (
    About,
    Alerts,
    AlertsFilter,
    AlertView,
    Alive,
    Kinds,
    KindView,
    Ready,
    Stuck,
    StuckView,
    Workers,
    WorkerView,
)
from fanout_api.openapi import document_of
from fanout_api.table import Call, NoQuery, Nothing, Table, rendered

__all__ = ["routes"]

routes = Table()

STUCK_LIMIT: Final = 200
UNREADY: Final = 503


@routes.get("/v1/kinds", answers=Kinds, tag="installation")
async def kinds(call: Call[NoQuery, Nothing]) -> Kinds:
    """List the kinds that workers registered, with the schemas of their payloads."""
    rows = await call.store.kinds()
    return Kinds(kinds=[KindView(**row) for row in rows])


@routes.get("/v1/workers", answers=Workers, is_whole=True, tag="installation")
async def workers(call: Call[NoQuery, Nothing]) -> Workers:
    """List workers that live, or were lost within the last day."""
    rows = await call.store.workers()
    return Workers(workers=[WorkerView.model_validate(row) for row in rows])


@routes.get("/v1/stuck", answers=Stuck, is_whole=True, tag="installation")
async def stuck(call: Call[NoQuery, Nothing]) -> Stuck:
    """List what does not move, and why."""
    rows = await call.store.stuck(STUCK_LIMIT)
    return Stuck(stuck=[StuckView(**row) for row in rows])


@routes.get("/v1/alerts", query=AlertsFilter, answers=Alerts, is_whole=True, tag="installation")
async def alerts(call: Call[AlertsFilter, Nothing]) -> Alerts:
    """List incidents, newest first."""
    limit = min(call.query.limit, call.service.settings.max_page)
    found = await call.service.engine.alerts(open_only=call.query.open, limit=limit)
    return Alerts(alerts=[AlertView.model_validate(one) for one in found])


@routes.get("/v1/about", answers=About, scope=None, tag="installation")
async def about(call: Call[NoQuery, Nothing]) -> About:
    """What this is, and what the caller may."""
    facts = await call.store.about()
    return About(
        version=_version(),
        scopes=sorted(call.caller.scopes),
        auth=call.service.auth,
        **facts,
    )


def _version() -> str:
    try:
        return version_of("pgfanout")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


@routes.get("/healthz", answers=Alive, scope=None, is_open=True, needs_database=False, tag="health")
async def healthz(_: Call[NoQuery, Nothing]) -> Alive:
    """Does the process answer?"""
    return Alive(alive=True)


@routes.get(
    "/readyz",
    answers={200: Ready, 503: Ready},
    scope=None,
    is_open=True,
    needs_database=False,
    tag="health",
)
async def readyz(call: Call[NoQuery, Nothing]) -> Response:
    """Can it do its work: database, schema, LISTEN, and the claims of workers in this process?"""
    ready = await ready_of(call.service)
    return rendered(ready, 200 if ready.ready else UNREADY)


@routes.get(
    "/metrics",
    answers={200: "text/plain"},
    scope=Scope.READ,
    is_whole=True,
    tag="health",
)
async def metrics(call: Call[NoQuery, Nothing]) -> Response:
    """Figures for Prometheus."""
    return Response(await exposition(call.service), media_type=CONTENT_TYPE)


@routes.get(
    "/openapi.json",
    answers={200: "application/json"},
    scope=None,
    needs_database=False,
    tag="health",
)
async def openapi(call: Call[NoQuery, Nothing]) -> Response:
    """This API, as an OpenAPI 3.1 document."""
    return JSONResponse(document_of(call.service, call.request.scope.get("root_path", "")))
