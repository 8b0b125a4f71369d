"""`up`: database, API, page and workers in one command, ended by one Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanout import embedded

from .api import DEFAULT_PORT, AllowHost, Host, Port, address_of, listening, serving
from .channel import STOP_SIGNALS
from .database import Schema, checked
from .exits import Exit
from .loading import load_app
from .logs import LogFormat, LogLevel, set_up_logs
from .serving import _loop_factory, spare_collector
from .supervisor import Supervisor
from .worker import Fleet

if TYPE_CHECKING:
    from fanout_api.serving import Server

__all__ = ["up"]

DEMO_APP: Final = "fanout.demo.app:engine"
GRACE_SECONDS: Final = 5.0


def up(
    dsn: Annotated[
        str | None,
        typer.Option(
            help="A database of your own, instead of the embedded PostgreSQL.", show_default=False
        ),
    ] = None,
    schema: Schema = None,
    *,
    app: Annotated[
        str, typer.Option(help="Whose engine and handlers, as shop.jobs:engine.")
    ] = DEMO_APP,
    processes: Annotated[
        int, typer.Option("--workers", "-n", min=1, max=64, help="Worker processes.")
    ] = 2,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    allow_host: AllowHost = None,
    log_level: Annotated[LogLevel, typer.Option(help="From where on.")] = LogLevel.WARNING,
) -> int:
    """Start everything: database, API, page and workers, until Ctrl-C.

    Prints "ready" and the page's address. The first Ctrl-C lets running handlers end, for 5 s; the
    second ends them at once.
    """
    set_up_logs(LogFormat.TEXT, log_level, f"{socket.gethostname()}-{os.getpid()}")
    sockets = listening(host, port)
    if schema:
        os.environ["FANOUT_SCHEMA_NAME"] = schema
    server = None if checked(dsn, "--dsn") else embedded.acquire()
    try:
        os.environ["DATABASE_URL"] = dsn or (server.dsn() if server else "")
        fleet = Fleet(
            app,
            processes,
            dsn=dsn,
            schema=schema,
            is_embedded=server is not None,
            stop_grace=GRACE_SECONDS,
            log_level=log_level,
        )
        web = serving(load_app(app), host, sockets, allow_host, handle_signals=False)
        spare_collector()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Everything(fleet, web, sockets, address_of(host, sockets)).run())
    finally:
        if server is not None:
            server.release()


class _Everything:
    """Workers and API side by side; the API goes last, so that watchers see how it ends."""

    def __init__(
        self, fleet: Fleet, web: Server, sockets: list[socket.socket], address: str
    ) -> None:
        self._web = web
        self._sockets = sockets
        self._address = address
        self._worked = asyncio.Event()
        self._supervisor = Supervisor(
            fleet.processes, fleet.command, fleet.environment(), self._worked.set
        )
        self._is_stopping = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._web.serve(self._sockets))
        working = asyncio.create_task(self._supervisor.run())
        saying = asyncio.create_task(self._say_ready())
        await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
        saying.cancel()
        self._supervisor.stop()
        code = await working
        self._web.stop()
        await serving
        return Exit.FINE if self._is_stopping and code in (0, Exit.INTERRUPTED) else code

    async def _say_ready(self) -> None:
        await self._worked.wait()
        while not self._web.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        print(f"ready {self._address}", flush=True)  # noqa: T201 - for whoever started it

    def _on_signal(self) -> None:
        if self._is_stopping:
            self._supervisor.kill()
            self._web.force_exit = True
        self._is_stopping = True
        self._supervisor.stop()
