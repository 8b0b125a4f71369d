"""`dev`: a database and two workers, to try things out beside."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from fanout import embedded
from fanout.migrate import migrate

from .database import Schema, settings_for
from .output import console
from .worker import Fleet, supervised

__all__ = ["dev"]

DEMO_APP = "fanout.demo.app:engine"


def dev(
    schema: Schema = None,
    *,
    app: Annotated[
        str, typer.Option(help="Whose handlers to run, as shop.jobs:engine.")
    ] = DEMO_APP,
    processes: Annotated[
        int, typer.Option("--processes", "-n", min=1, max=64, help="Worker processes.")
    ] = 2,
) -> int:
    """Start the embedded PostgreSQL and two workers of the demo's app, until Ctrl-C.

    Changed code is not reloaded: stop it and start it again. The other commands find this database
    by themselves while it runs.
    """
    settings = settings_for(schema)
    with embedded.acquire() as server:
        report = asyncio.run(migrate(server.dsn(), schema=settings.schema_name, settings=settings))
        for line in (
            f"database   {server.dsn()}",
            f"data       {server.data_dir}",
            f"schema     {report.schema}, version {report.after}",
            f"workers    {processes} of {app}, without reload; Ctrl-C stops everything",
            "beside it  fanout workers · fanout jobs · fanout doctor",
        ):
            console.print(line, markup=False)
        return supervised(Fleet(app, processes, schema=schema, is_embedded=True))
