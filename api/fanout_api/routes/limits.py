"""Limits, global over all pods: look at them, set one over what the code says, take that back."""

from __future__ import annotations

from starlette.responses import Response

from fanout.access import Scope
from fanout.limits import Limits
from fanout_api.models import LimitBody, LimitsView, LimitView
from fanout_api.problems import NotHere
from fanout_api.table import Call, NoQuery, Nothing, Table

__all__ = ["routes"]

routes = Table()

TAG = "limits"


@routes.get("/v1/limits", answers=LimitsView, is_whole=True, tag=TAG)
async def limits(call: Call[NoQuery, Nothing]) -> LimitsView:
    """List all limits, with how many use one and how many wait."""
    rows = await Limits(call.store).list()
    return LimitsView(limits=[LimitView.model_validate(row) for row in rows])


@routes.get("/v1/limits/{name}", answers=LimitView, is_whole=True, tag=TAG)
async def limit(call: Call[NoQuery, Nothing]) -> LimitView:
    """Show one limit."""
    row = await Limits(call.store).get(call.name)
    if row is None:
        raise NotHere("nobody has named such a limit yet")
    return LimitView.model_validate(row)


@routes.put("/v1/limits/{name}", body=LimitBody, answers=LimitView, tag=TAG)
async def set_limit(call: Call[NoQuery, LimitBody]) -> LimitView:
    """Bound a limit, from now on and over what the code says; who has a slot keeps it."""
    bounds = {name: getattr(call.body, name) for name in call.body.model_fields_set}
    return LimitView.model_validate(await Limits(call.store).set(call.name, **bounds))


@routes.delete("/v1/limits/{name}", answers={204: None}, scope=Scope.OPERATE, tag=TAG)
async def reset_limit(call: Call[NoQuery, Nothing]) -> Response:
    """Go back to what the code says of a limit."""
    if not await Limits(call.store).reset(call.name):
        raise NotHere("nothing was set there")
    return Response(status_code=204)
