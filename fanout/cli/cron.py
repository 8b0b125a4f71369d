"""`cron`: schedules. List them; add, remove, pause, resume one; run one now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

import typer

from fanout.checks import check_kind
from fanout.cron import Missed, Schedule, ScheduleRow, Schedules
from fanout.settings import MAX_PAYLOAD_BYTES
from fanout.wire import encode

from .database import Dsn, Schema, opened, say
from .output import AsJson, Listing, console, print_json, stamp
from .submit import parsed

__all__ = ["cron"]

T = TypeVar("T")

cron = typer.Typer(
    help="Schedules: jobs at set times, each once over all workers.",
    invoke_without_command=True,
)

Name = Annotated[str, typer.Argument(help="The schedule's name.")]


@cron.callback()
def show(
    context: typer.Context, dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False
) -> None:
    """List all schedules, with their next times; or do one of the commands below."""
    if context.invoked_subcommand is None:
        _list(_with(dsn, schema, lambda schedules: schedules.all()), as_json=as_json)


@cron.command("list")
def list_all(dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """List all schedules, with their next times in UTC."""
    _list(_with(dsn, schema, lambda schedules: schedules.all()), as_json=as_json)


def _list(rows: list[ScheduleRow], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print_json(_plain(row))
        return
    if not rows:
        console.print("no schedules; add one with: fanout cron add NAME KIND EXPRESSION")
        return
    listing = Listing("name", "kind", "expression", "zone", "next (UTC)", "last", "job", "by")
    listing.page(
        [
            (
                row.schedule.name,
                row.schedule.kind,
                row.schedule.expression,
                row.schedule.timezone,
                stamp(row.next_at) if row.enabled else "paused",
                stamp(row.last_at) or "never",
                row.last_job_id or "",
                row.declared_by,
            )
            for row in rows
        ]
    )


def _plain(row: ScheduleRow) -> dict[str, Any]:
    one = row.schedule
    return {
        "name": one.name,
        "kind": one.kind,
        "expression": one.expression,
        "timezone": one.timezone,
        "missed": one.missed,
        "enabled": row.enabled,
        "declared_by": row.declared_by,
        "next_at": row.next_at if row.enabled else None,
        "last_at": row.last_at,
        "last_job_id": row.last_job_id,
    }


@cron.command()
def add(
    name: Name,
    kind: Annotated[str, typer.Argument(help="The kind of its jobs, as papers_report.")],
    expression: Annotated[
        str,
        typer.Argument(
            help='Minute, hour, day of the month, month, weekday, in quotes: "0 7 * * 1-5".'
        ),
    ],
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    timezone: Annotated[
        str, typer.Option(help="Whose wall clock that is, as Europe/Berlin.")
    ] = "UTC",
    missed: Annotated[
        Missed,
        typer.Option(help="Of times at which no worker lived: one job for all, skip, or all."),
    ] = "one",
    payload: Annotated[
        str | None,
        typer.Option(help="JSON, at most 1 KB.", show_default="null"),
    ] = None,
) -> None:
    """Add a schedule, or change one that was added here. Jobs are submitted by any worker."""
    one = Schedule(
        name=check_kind(name, "name"),
        kind=kind,
        expression=expression,
        timezone=timezone,
        missed=missed,
        payload=encode(parsed(payload), "payload", MAX_PAYLOAD_BYTES),
    )
    row = _with(dsn, schema, lambda schedules: schedules.add(one))
    console.print(f"schedule {name}: next {_both(row.next_at, timezone)}", markup=False)
    for at in _then(row)[1:]:
        console.print(f"{'then ':>{len(name) + 16}}{_both(at, timezone)}", markup=False)


def _then(row: ScheduleRow) -> list[datetime]:
    times, found = row.schedule.times(), [row.next_at]
    while len(found) < 3:  # noqa: PLR2004 - enough to see whether it is meant
        found.append(times.after(found[-1]))
    return found


def _both(at: datetime, timezone: str) -> str:
    local = f"{at.astimezone(ZoneInfo(timezone)):%a %Y-%m-%d %H:%M} {timezone}"
    return local if timezone == "UTC" else f"{local}, {at.astimezone(UTC):%H:%M} UTC"


@cron.command()
def remove(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Remove a schedule. Jobs that it submitted stay."""
    who = _with(dsn, schema, lambda schedules: schedules.remove(name))
    console.print(f"removed {name}", markup=False)
    if who == "code":
        say(f"{name} was declared in code: a worker that starts with that code adds it again")


@cron.command()
def pause(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Submit no jobs of a schedule until it is resumed, also if code declares it anew."""
    _with(dsn, schema, lambda schedules: schedules.pause(name))
    console.print(f"paused {name}", markup=False)


@cron.command()
def resume(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Go on with a schedule's next time; those that passed meanwhile are not made up for."""
    at = _with(dsn, schema, lambda schedules: schedules.resume(name))
    console.print(f"resumed {name}: next {stamp(at)} UTC", markup=False)


@cron.command()
def run(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Submit one job of a schedule now, beside its times."""

    async def submit() -> int:
        async with opened(dsn, schema) as engine:
            kind, job_id = await engine.schedules.run(name)
            engine.wake(kind)
            return job_id

    console.print(f"job {asyncio.run(submit())}", markup=False)


def _with(dsn: str | None, schema: str | None, call: Callable[[Schedules], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with opened(dsn, schema) as engine:
            return await call(engine.schedules)

    return asyncio.run(ask())
