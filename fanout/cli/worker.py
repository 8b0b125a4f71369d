"""`worker`: run an app's handlers, in as many processes as asked for."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .database import Schema, checked
from .logs import LogFormat, LogLevel, set_up_logs
from .process import Orders
from .serving import serve
from .supervisor import Supervisor, environment, python

__all__ = ["Fleet", "worker"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Worker processes of one app, as asked for on the command line."""

    app: str
    processes: int
    concurrency: int | None = None
    dsn: str | None = None
    schema: str | None = None
    is_embedded: bool = False
    stop_grace: float | None = None
    """Seconds."""
    log_format: LogFormat = LogFormat.TEXT
    log_level: LogLevel = LogLevel.INFO

    def command(self, index: int, fd: int) -> list[str]:
        """What one process executes."""
        arguments = ["worker", f"--app={self.app}", "--processes=0", f"--channel-fd={fd}"]
        arguments += [f"--name={socket.gethostname()}-{os.getpid()}-{index}"]
        arguments += [f"--log-format={self.log_format}", f"--log-level={self.log_level}"]
        if self.concurrency is not None:
            arguments.append(f"--concurrency={self.concurrency}")
        if self.stop_grace is not None:
            arguments.append(f"--stop-grace={self.stop_grace}")
        if self.schema is not None:
            arguments.append(f"--schema={self.schema}")
        if self.is_embedded:
            arguments.append("--embedded")
        elif self.dsn is not None:
            arguments.append("--dsn-in-environment")
        return python(*arguments)

    def environment(self) -> dict[str, str]:
        """What one process finds in its environment."""
        return environment(self.dsn)


def worker(
    app: Annotated[
        str, typer.Option(help="Where the engine is, as shop.jobs:engine.", show_default=False)
    ],
    dsn: Annotated[
        str | None,
        typer.Option(
            help="The database. Default: the engine's own, or DATABASE_URL.", show_default=False
        ),
    ] = None,
    schema: Schema = None,
    *,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            "-n",
            min=0,
            max=256,
            help="Worker processes; one that dies is started again. "
            "0: work in this process, and leave that to an orchestrator.",
        ),
    ] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            max=10_000,
            help="Handlers at once in each process.",
            show_default="FANOUT_CONCURRENCY, 10",
        ),
    ] = None,
    embedded: Annotated[
        bool,
        typer.Option("--embedded", help="Use the embedded PostgreSQL, starting it if none runs."),
    ] = False,
    stop_grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds that running handlers have after SIGTERM.",
            show_default="FANOUT_STOP_GRACE, 20",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            help="Write a file when all processes work; removed at the end.", show_default=False
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="json: one object a line.")
    ] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="From where on.")] = LogLevel.INFO,
    name: Annotated[str | None, typer.Option(hidden=True)] = None,
    channel_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    dsn_in_environment: Annotated[bool, typer.Option("--dsn-in-environment", hidden=True)] = False,
) -> int:
    """Run the handlers of an app until SIGTERM or Ctrl-C.

    The first signal stops gracefully: nothing more is claimed, running handlers get the grace, the
    rest is released at no cost, and the exit code is 0. The second stops at once (128 + signal).
    Prints "ready" when all processes work. A database that is down is waited for.
    """
    checked(dsn, "--dsn")
    own_name = name or f"{socket.gethostname()}-{os.getpid()}"
    set_up_logs(log_format, log_level, own_name)
    if processes == 0:
        if dsn_in_environment:
            dsn = os.environ["DATABASE_URL"]
        return serve(
            Orders(app, concurrency, dsn, schema, embedded, stop_grace, own_name, channel_fd)
        )
    fleet = Fleet(
        app, processes, concurrency, dsn, schema, embedded, stop_grace, log_format, log_level
    )
    return supervised(fleet, ready_file)


def supervised(fleet: Fleet, ready_file: Path | None = None) -> int:
    """Run a fleet until a signal. Returns the exit code."""

    def ready() -> None:
        if ready_file is not None:
            ready_file.write_text(f"{os.getpid()}\n", encoding="utf-8")
        print("ready", flush=True)  # noqa: T201 - for whoever started this

    async def run() -> int:
        supervisor = Supervisor(fleet.processes, fleet.command, fleet.environment(), ready)
        supervisor.handle_signals()
        return await supervisor.run()

    try:
        return asyncio.run(run())
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
