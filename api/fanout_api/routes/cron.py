"""Schedules: list them, pause and resume one, run one now."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from fanout import UsageError
from fanout.access import Scope
from fanout.cron import Schedules
from fanout.wire import decode
from fanout_api.models import Ran, SchedulesView, ScheduleView, VerbBody
from fanout_api.problems import NotHere
from fanout_api.table import Call, NoQuery, Nothing, Table, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.responses import Response

    from fanout.cron import ScheduleRow

__all__ = ["routes"]

routes = Table()

TAG = "cron"
CREATED: Final = 201


@routes.get("/v1/cron", answers=SchedulesView, is_whole=True, tag=TAG)
async def schedules(call: Call[NoQuery, Nothing]) -> SchedulesView:
    """List all schedules, with their next times."""
    rows = await Schedules(call.store).all()
    return SchedulesView(schedules=[_view(row) for row in rows])


@routes.get("/v1/cron/{name}", answers=ScheduleView, is_whole=True, tag=TAG)
async def schedule(call: Call[NoQuery, Nothing]) -> ScheduleView:
    """Show one schedule."""
    with _there():
        return _view(await Schedules(call.store).get(call.name))


@routes.post(
    "/v1/cron/{name}/pause",
    body=VerbBody,
    answers=ScheduleView,
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def pause_schedule(call: Call[NoQuery, VerbBody]) -> ScheduleView:
    """Submit nothing of a schedule until it is resumed."""
    found = Schedules(call.store)
    with _there():
        await found.pause(call.name)
        return _view(await found.get(call.name))


@routes.post(
    "/v1/cron/{name}/resume",
    body=VerbBody,
    answers=ScheduleView,
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def resume_schedule(call: Call[NoQuery, VerbBody]) -> ScheduleView:
    """Let a paused schedule go on, from its next time."""
    found = Schedules(call.store)
    with _there():
        await found.resume(call.name)
        return _view(await found.get(call.name))


@routes.post(
    "/v1/cron/{name}/run",
    body=VerbBody,
    answers={201: Ran},
    scope=Scope.OPERATE,
    is_whole=True,
    tag=TAG,
)
async def run_schedule(call: Call[NoQuery, VerbBody]) -> Response:
    """Submit one job of a schedule now, whatever its times."""
    with _there():
        kind, job_id = await Schedules(call.store).run(call.name)
    call.service.engine.wake(kind)
    return rendered(Ran(kind=kind, job_id=job_id), CREATED)


@contextmanager
def _there() -> Iterator[None]:
    """What is wrong with a name in an address: nobody has it."""
    try:
        yield
    except UsageError as unknown:
        if unknown.field != "name":
            raise
        raise NotHere(unknown.problem) from None


def _view(row: ScheduleRow) -> ScheduleView:
    said = asdict(row.schedule)
    said |= {"payload": decode(said["payload"]), "options": decode(said["options"])}
    state = {name: getattr(row, name) for name in ScheduleView.model_fields if name not in said}
    return ScheduleView.model_validate(said | state)
