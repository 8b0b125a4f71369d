"""Endpoints of webhooks: list, add, rotate the secret, switch off and on, test, remove.

A secret is in one answer, when it is made, and never again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from fanout import UsageError
from fanout.access import Scope
from fanout.webhooks import KIND
from fanout_api.models import (
    DisableBody,
    EndpointBody,
    EndpointsView,
    EndpointView,
    Ran,
    RotateBody,
    Secret,
    VerbBody,
)
from fanout_api.problems import NotHere
from fanout_api.table import Call, NoQuery, Nothing, Table, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["routes"]

routes = Table()

TAG = "webhooks"
CREATED: Final = 201


@routes.get("/v1/webhooks", answers=EndpointsView, is_whole=True, tag=TAG)
async def webhooks(call: Call[NoQuery, Nothing]) -> EndpointsView:
    """List the endpoints of webhooks."""
    found = await call.service.engine.webhooks.list()
    return EndpointsView(endpoints=[EndpointView.model_validate(one) for one in found])


@routes.post(
    "/v1/webhooks",
    body=EndpointBody,
    answers={201: Secret},
    scope=Scope.OPERATE,
    is_whole=True,
    problems=frozenset({409}),
    tag=TAG,
)
async def add_webhook(call: Call[NoQuery, EndpointBody]) -> Response:
    """Add an endpoint; its secret is in this answer, and never again."""
    body = call.body
    secret = await call.service.engine.webhooks.add(
        body.name, body.url, events=body.events, tenant=body.tenant
    )
    return rendered(Secret(name=body.name, secret=secret), CREATED)


@routes.post(
    "/v1/webhooks/{endpoint}/rotate",
    body=RotateBody,
    answers=Secret,
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def rotate_webhook(call: Call[NoQuery, RotateBody]) -> Secret:
    """Give an endpoint a new secret, which is in this answer, and never again."""
    with _there():
        secret = await call.service.engine.webhooks.rotate(
            call.endpoint, keep_seconds=call.body.keep_seconds
        )
    return Secret(name=call.endpoint, secret=secret)


@routes.post(
    "/v1/webhooks/{endpoint}/disable",
    body=DisableBody,
    answers=EndpointView,
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def disable_webhook(call: Call[NoQuery, DisableBody]) -> EndpointView:
    """Send nothing more to an endpoint."""
    reason = call.body.reason
    with _there():
        await call.service.engine.webhooks.disable(
            call.endpoint, *(() if reason is None else (reason,))
        )
    return await _view(call)


@routes.post(
    "/v1/webhooks/{endpoint}/enable",
    body=VerbBody,
    answers=EndpointView,
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def enable_webhook(call: Call[NoQuery, VerbBody]) -> EndpointView:
    """Send to an endpoint again."""
    with _there():
        await call.service.engine.webhooks.enable(call.endpoint)
    return await _view(call)


@routes.post(
    "/v1/webhooks/{endpoint}/test",
    body=VerbBody,
    answers={201: Ran},
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def test_webhook(call: Call[NoQuery, VerbBody]) -> Response:
    """Send webhook.test to an endpoint, as a job: its result holds the answer's status."""
    with _there():
        handle = await call.service.engine.webhooks.test(call.endpoint)
    return rendered(Ran(kind=KIND, job_id=handle.id), CREATED)


@routes.delete("/v1/webhooks/{endpoint}", answers={204: None}, scope=Scope.OPERATE, tag=TAG)
async def remove_webhook(call: Call[NoQuery, Nothing]) -> Response:
    """Forget an endpoint; what is still to be sent there fails."""
    with _there():
        await call.service.engine.webhooks.remove(call.endpoint)
    return Response(status_code=204)


async def _view(call: Call[Any, Any]) -> EndpointView:
    for one in await call.service.engine.webhooks.list():
        if one.name == call.endpoint:
            return EndpointView.model_validate(one)
    raise NotHere("it was removed in this moment")


@contextmanager
def _there() -> Iterator[None]:
    """What is wrong with a name in an address: nobody has it."""
    try:
        yield
    except UsageError as unknown:
        if unknown.field != "name":
            raise
        raise NotHere(unknown.problem) from None
