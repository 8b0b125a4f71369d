"""`webhooks`: where closes and alerts are sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from fanout.engine import Engine
from fanout.states import Status
from fanout.values import JobRow
from fanout.webhooks import EVENTS, KEEP_OLD_SECONDS, KIND, Endpoint

from .database import Dsn, Schema, opened, say
from .exits import Exit
from .output import AsJson, Listing, console, print_json, stamp

__all__ = ["webhooks"]

T = TypeVar("T")

webhooks = typer.Typer(
    help="Endpoints of webhooks: add, list, rotate, test. Workers send with FANOUT_WEBHOOKS=true.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="The endpoint's name, as billing.")]


def _run(dsn: str | None, schema: str | None, body: Callable[[Engine], Awaitable[T]]) -> T:
    async def on_engine() -> T:
        async with opened(dsn, schema) as engine:
            return await body(engine)

    return asyncio.run(on_engine())


@webhooks.command()
def add(
    name: Name,
    url: Annotated[str, typer.Argument(help="Where to: https://host/path.")],
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    event: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What it is told of: {', '.join(EVENTS)}; give it once for each.",
            show_default="batch.closed",
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="The one tenant whose batches it takes.", show_default="all"),
    ] = None,
) -> None:
    """Add an endpoint and print its secret, which is shown this once."""
    secret = _run(
        dsn,
        schema,
        lambda engine: engine.webhooks.add(
            name, url, events=event or ["batch.closed"], tenant=tenant
        ),
    )
    print(secret, flush=True)  # noqa: T201 - the one thing a script wants to read
    say(f"endpoint {name}; its secret is not shown again. Next: fanout webhooks test {name}")


@webhooks.command("list")
def show(dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """List endpoints."""
    rows: list[Endpoint] = _run(dsn, schema, lambda engine: engine.webhooks.list())
    if as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        console.print("no endpoints; add one with: fanout webhooks add NAME URL", markup=False)
        return
    listing = Listing("name", "state", "events", "tenant", "added", "url")
    listing.page(
        [
            (
                row.name,
                "enabled" if row.enabled else f"disabled: {row.disabled_reason}",
                " ".join(row.events),
                row.tenant,
                stamp(row.created_at),
                row.url,
            )
            for row in rows
        ]
    )


@webhooks.command()
def rotate(
    name: Name,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    keep: Annotated[
        float, typer.Option(help="Seconds for which the old secret signs as well; 0: it is burnt.")
    ] = KEEP_OLD_SECONDS,
) -> None:
    """Give an endpoint a new secret and print it."""
    secret = _run(dsn, schema, lambda engine: engine.webhooks.rotate(name, keep_seconds=keep))
    print(secret, flush=True)  # noqa: T201 - the one thing a script wants to read
    say(f"a new secret of {name}; it is not shown again")


@webhooks.command()
def enable(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Send to an endpoint again."""
    _run(dsn, schema, lambda engine: engine.webhooks.enable(name))
    console.print(f"enabled {name}", markup=False)


@webhooks.command()
def disable(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Send nothing more to an endpoint."""
    _run(dsn, schema, lambda engine: engine.webhooks.disable(name))
    console.print(f"disabled {name}", markup=False)


@webhooks.command()
def remove(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """Forget an endpoint and its secrets."""
    _run(dsn, schema, lambda engine: engine.webhooks.remove(name))
    console.print(f"removed {name}", markup=False)


@webhooks.command("test")
def probe(
    name: Name,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for the answer.")] = 30,
) -> int:
    """Have a worker send `webhook.test` to an endpoint, and say what it answered."""

    async def send(engine: Engine) -> JobRow:
        handle = await engine.webhooks.test(name)
        with contextlib.suppress(TimeoutError):
            await handle.wait(patience)
        return await handle.job()

    row = _run(dsn, schema, send)
    if row.status is Status.COMPLETED:
        console.print(f"{name} answered {row.result['status']}", markup=False)
        return Exit.FINE
    if row.attempt == 0 and not row.status.is_terminal:
        say(f"job {row.id} waits: does a worker serve {KIND}? It needs FANOUT_WEBHOOKS=true")
        return Exit.WRONG
    say(f"job {row.id} is {row.status}: {row.error}")
    return Exit.WRONG
