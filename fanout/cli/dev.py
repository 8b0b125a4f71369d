"""`dev`: database, API, page and workers, which begin again when code changes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanout import embedded
from fanout.migrate import migrate

from .api import DEFAULT_PORT, INSTALL, Port, address_of, has_page, listening, serving
from .channel import STOP_SIGNALS, Channel, Word, exit_in
from .database import Schema, say, settings_for
from .demo_page import HOST
from .exits import Exit
from .loading import load_app
from .logs import LogFormat, LogLevel, set_up_logs
from .output import console, near
from .serving import _loop_factory, spare_collector
from .sources import Sources
from .supervisor import Supervisor, environment, python
from .worker import Fleet

if TYPE_CHECKING:
    from fanout_api.serving import Server

__all__ = ["dev"]

DEMO_APP: Final = "fanout.demo.app:engine"
GRACE_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 1.0
API_LAST_SECONDS: Final = 6.0
"""A stop of the API takes less."""


def dev(
    schema: Schema = None,
    *,
    app: Annotated[
        str, typer.Option(help="Whose engine and handlers, as shop.jobs:engine.")
    ] = DEMO_APP,
    processes: Annotated[
        int, typer.Option("--workers", "--processes", "-n", min=1, max=64, help="Worker processes.")
    ] = 2,
    port: Port = DEFAULT_PORT,
    channel_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> int:
    """Start embedded PostgreSQL, API with page, and workers; begin again when code changes.

    The folder of the app's code is looked at each second. What runs then has 3 s to end, the rest
    is released at no cost; open pages connect again by themselves. While code cannot be imported,
    it waits for the next change. Other commands find this database while it runs.
    """
    if channel_fd is not None:
        return _serve_api(app, port, channel_fd)
    set_up_logs(LogFormat.TEXT, LogLevel.WARNING, f"{socket.gethostname()}-{os.getpid()}")
    address, port = _claimed(port) if has_page() else (None, port)
    settings = settings_for(schema)
    with embedded.acquire() as server:
        report = asyncio.run(migrate(server.dsn(), schema=settings.schema_name, settings=settings))
        sources = Sources.of_app(app)
        for line in (
            f"database   {server.dsn()}",
            f"data       {server.data_dir}",
            f"schema     {report.schema}, version {report.after}",
            f"page, API  {address or f'not installed: {INSTALL}'}",
            f"workers    {processes} of {app}",
            *(f"reload     {folder}" for folder in sources.folders),
            "beside it  fanout workers · fanout jobs · fanout doctor; Ctrl-C stops everything",
        ):
            console.print(line, markup=False)
        if schema:
            os.environ["FANOUT_SCHEMA_NAME"] = schema
        fleet = Fleet(app, processes, schema=schema, is_embedded=True, stop_grace=GRACE_SECONDS)
        crew = _Crew(fleet, server.dsn(), port if address else None, sources)
        return asyncio.run(crew.run())


def _claimed(port: int) -> tuple[str, int]:
    """The address, and its port, which each API process binds anew. Raises UsageError."""
    sockets = listening(HOST, port)
    address, number = address_of(HOST, sockets), int(sockets[0].getsockname()[1])
    for one in sockets:
        one.close()
    return address, number


class _Crew:
    """The processes of one version of the code; when it changes they end, and others begin."""

    def __init__(self, fleet: Fleet, dsn: str, port: int | None, sources: Sources) -> None:
        self._fleet = fleet
        self._dsn = dsn
        self._port = port
        self._sources = sources
        self._stopping = asyncio.Event()
        self._running: list[Supervisor] = []
        self._ready = 0

    async def run(self) -> int:
        """Until Ctrl-C; 0 then."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        stopping = asyncio.create_task(self._stopping.wait())
        while not self._stopping.is_set():
            changing = asyncio.create_task(self._sources.changed(LOOK_SECONDS))
            await self._one_version(stopping, changing)
            await asyncio.wait([stopping, changing], return_when=asyncio.FIRST_COMPLETED)
            changing.cancel()
        return Exit.FINE

    async def _one_version(self, stopping: asyncio.Task[bool], changing: asyncio.Task[str]) -> None:
        """Run until the code changes, or what runs ends by itself, or everything is to stop."""
        self._ready = 0
        self._running = self._supervisors()
        runs = [asyncio.create_task(one.run()) for one in self._running]
        await asyncio.wait([stopping, changing, *runs], return_when=asyncio.FIRST_COMPLETED)
        has_ended = not stopping.done() and not changing.done()
        if changing.done():
            say(f"{near(changing.result())} has changed: begins again")
        for one in self._running:
            one.stop()
        await asyncio.wait(runs)
        for run in runs:
            run.result()
        if has_ended:
            say("waits for a change of the code; Ctrl-C stops everything")

    def _supervisors(self) -> list[Supervisor]:
        fleet = self._fleet
        made = [Supervisor(fleet.processes, fleet.command, fleet.environment(), self._is_ready)]
        if self._port is not None:
            made.append(Supervisor(1, self._api, environment(self._dsn), self._is_ready))
        return made

    def _api(self, _: int, fd: int) -> list[str]:
        arguments = [f"--app={self._fleet.app}", f"--port={self._port}", f"--channel-fd={fd}"]
        return python("dev", *arguments)

    def _is_ready(self) -> None:
        self._ready += 1
        if self._ready == len(self._running):
            print("ready", flush=True)  # noqa: T201 - for whoever started this

    def _on_signal(self) -> None:
        for one in self._running:
            if self._stopping.is_set():
                one.kill()
            else:
                one.stop()
        self._stopping.set()


# -- the API's own process -------------------------------------------------------------------------


def _serve_api(app: str, port: int, channel_fd: int) -> int:
    """Serve until the supervisor says stop, or is gone."""
    set_up_logs(LogFormat.TEXT, LogLevel.WARNING, f"{socket.gethostname()}-{os.getpid()}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor's word counts
    engine = load_app(app)
    sockets = listening(HOST, port)
    spare_collector()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        server = serving(engine, HOST, sockets, None, handle_signals=False)
        runner.run(_served(server, sockets, channel_fd))
    return Exit.FINE


async def _served(server: Server, sockets: list[socket.socket], channel_fd: int) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        exit_in(API_LAST_SECONDS, Exit.FINE)
        loop.call_soon_threadsafe(server.stop)

    def kill() -> None:
        exit_in(1, Exit.FINE)
        stop()

    channel = Channel(channel_fd, stop, kill)
    channel.say(Word.IMPORTED)
    running = asyncio.create_task(server.serve(sockets))
    while not server.started and not running.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    channel.say(Word.READY)
    await running
