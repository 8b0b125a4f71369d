"""`limit`: what may run at once, and how often, over all pods."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fanout.errors import UsageError

from .database import Dsn, Schema, opened
from .output import AsJson, Listing, console, print_json

if TYPE_CHECKING:
    from fanout.limits import Bounds
    from fanout.values import LimitRow

__all__ = ["limit"]

limit = typer.Typer(
    help="Limits over all pods: list, set, reset. What is set holds from the next claim on.",
    invoke_without_command=True,
)

Name = Annotated[str, typer.Argument(help="As parser; for a kind, kind:papers_extract.")]


def _bound(text: str) -> Any:
    return typer.Option(help=text, show_default=False, metavar="NUMBER|none")


@limit.callback()
def show(
    context: typer.Context, dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False
) -> None:
    """List all limits: what they bound, how many use one, how many wait."""
    if context.invoked_subcommand is not None:
        return

    async def read() -> list[LimitRow]:
        async with opened(dsn, schema) as engine:
            return await engine.limits.list()

    rows = asyncio.run(read())
    if as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        console.print("no limits; set one with: fanout limit set parser 2", markup=False)
        return
    listing = Listing("name", "limit", "in use", "waiting", "set by")
    listing.page(
        [(row.name, _bounds(row), str(row.in_use), str(row.waiting), row.set_by) for row in rows]
    )


@limit.command("set")
def set_(
    name: Name,
    concurrency: Annotated[
        str | None,
        typer.Argument(help="How many at once; 0: none for now; none: no such limit."),
    ] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    per_partition: Annotated[str | None, _bound("How many at once of one partition.")] = None,
    requests_per_minute: Annotated[str | None, _bound("How many may begin.")] = None,
    weight_per_minute: Annotated[str | None, _bound("What they may weigh: tokens.")] = None,
    burst: Annotated[
        str | None, _bound("Seconds of an unused rate that may be used at once; default 1.")
    ] = None,
) -> None:
    """Set a limit, over what the code says, until it is reset. It takes no slot away."""
    bounds: Bounds = {}
    if concurrency is not None:
        bounds["concurrency"] = _count("concurrency", concurrency)
    if per_partition is not None:
        bounds["per_partition"] = _count("per_partition", per_partition)
    if requests_per_minute is not None:
        bounds["requests_per_minute"] = _number("requests_per_minute", requests_per_minute)
    if weight_per_minute is not None:
        bounds["weight_per_minute"] = _number("weight_per_minute", weight_per_minute)
    if burst is not None:
        bounds["burst"] = _number("burst", burst)

    async def write() -> LimitRow:
        async with opened(dsn, schema) as engine:
            return await engine.limits.set(name, **bounds)

    row = asyncio.run(write())
    console.print(f"{row.name}: {_bounds(row)}", markup=False)


@limit.command()
def reset(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Back to what the code says."""

    async def forget() -> tuple[bool, LimitRow | None]:
        async with opened(dsn, schema) as engine:
            return await engine.limits.reset(name), await engine.limits.get(name)

    was_set, row = asyncio.run(forget())
    said = "was not set" if not was_set else "reset"
    console.print(f"{name} {said}: {'no limit' if row is None else _bounds(row)}", markup=False)


def _count(field: str, text: str) -> int | None:
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise UsageError(field, f"{text!r} is not a count", "Give a number, or none") from None


def _number(field: str, text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise UsageError(field, f"{text!r} is not a number", "Give one, or none") from None


def _bounds(row: LimitRow) -> str:
    """What a limit bounds, in few words."""
    said = [
        f"{value:g}{words}"
        for value, words in (
            (row.concurrency, " at once"),
            (row.per_partition, " of a partition"),
            (row.requests_per_minute, " requests a minute"),
            (row.weight_per_minute, " weight a minute"),
            (row.burst, " s burst"),
        )
        if value is not None
    ]
    return ", ".join(said) or "no limit"
