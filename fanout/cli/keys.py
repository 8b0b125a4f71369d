"""`keys`: who may use the HTTP API."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated

import typer

from fanout.access import Access, ApiKey, Scope

from .database import Dsn, Schema, opened, say
from .output import AsJson, Listing, console, print_json, stamp

__all__ = ["keys"]

keys = typer.Typer(
    help="Keys of the HTTP API: make, list, revoke. Only hashes are stored.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Whose key it is, as ci or dashboard.")]


@keys.command()
def create(
    name: Name,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="What it is good for; give it once for each.", show_default="read submit operate"
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="The one tenant it sees. Default: all.", show_default=False),
    ] = None,
) -> None:
    """Make a key and print it. It is shown this once, and kept nowhere."""

    async def make() -> tuple[ApiKey, str]:
        async with opened(dsn, schema) as engine:
            return await Access(engine.store).add_key(name, scope or list(Scope), tenant)

    made, text = asyncio.run(make())
    print(text, flush=True)  # noqa: T201 - the one thing a script wants to read
    said = f" of tenant {made.tenant}" if made.tenant is not None else ""
    say(f"key {made.name} for {', '.join(sorted(made.scopes))}{said}; it is not shown again")


@keys.command("list")
def show(dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> None:
    """List all keys, those that are revoked too."""

    async def read() -> list[ApiKey]:
        async with opened(dsn, schema) as engine:
            return await Access(engine.store).keys()

    rows = asyncio.run(read())
    if as_json:
        for row in rows:
            print_json({**dataclasses.asdict(row), "scopes": sorted(row.scopes)})
        return
    if not rows:
        console.print("no keys; make one with: fanout keys create NAME", markup=False)
        return
    listing = Listing("name", "scopes", "tenant", "created", "last used", "revoked")
    listing.page(
        [
            (
                row.name,
                " ".join(sorted(row.scopes)),
                row.tenant or "",
                stamp(row.created_at),
                stamp(row.last_used_at) or "never",
                stamp(row.revoked_at),
            )
            for row in rows
        ]
    )


@keys.command()
def revoke(name: Name, dsn: Dsn = None, schema: Schema = None) -> None:
    """End a key and every session it opened, at once."""

    async def end() -> None:
        async with opened(dsn, schema) as engine:
            await Access(engine.store).revoke_key(name)

    asyncio.run(end())
    console.print(f"revoked {name}", markup=False)
