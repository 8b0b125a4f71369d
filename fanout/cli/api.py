"""`api`: the HTTP API and the page, beside workers that run elsewhere."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanout.engine import Engine
from fanout.errors import ConfigurationError, UsageError

from .database import Dsn, Schema, checked, found
from .exits import Exit
from .loading import load_app
from .logs import LogFormat, LogLevel, set_up_logs
from .serving import _loop_factory, spare_collector

if TYPE_CHECKING:
    from fanout_api.serving import Server

__all__ = ["INSTALL", "AllowHost", "Host", "Port", "api", "has_page", "listening", "serving"]

DEFAULT_PORT: Final = 8321
INSTALL: Final = 'pip install "pgfanout[api]"'
LIBRARIES: Final = (
    "httptools",
    "openapi_pydantic",
    "prometheus_client",
    "sse_starlette",
    "starlette",
    "uvicorn",
)

Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on. Any but this machine's own takes FANOUT_API_AUTH=key."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        help="Another name that requests may be for, as jobs.example.com.", show_default=False
    ),
]


def api(
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    app: Annotated[
        str | None,
        typer.Option(
            help="Whose engine, as shop.jobs:engine: payloads are then checked when submitted.",
            show_default=False,
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    allow_host: AllowHost = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="json: one object a line.")
    ] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="From where on.")] = LogLevel.WARNING,
) -> int:
    """Serve the HTTP API and the page until SIGTERM or Ctrl-C.

    Prints "ready" and the address. It answers only this machine; with FANOUT_API_AUTH=key it may
    listen elsewhere, and asks for keys (fanout keys create). A stop says goodbye to every stream
    and takes less than 5 s.
    """
    set_up_logs(log_format, log_level, f"{socket.gethostname()}-{os.getpid()}")
    sockets = listening(host, port)
    engine = _engine(app, dsn, schema)
    server = serving(engine, host, sockets, allow_host)

    def ready() -> None:
        print(f"ready {address_of(host, sockets)}", flush=True)  # noqa: T201 - for who started it

    spare_collector()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_served(server, sockets, ready))
    return Exit.FINE


def _engine(app: str | None, dsn: str | None, schema: str | None) -> Engine:
    if app is None:
        database = found(dsn, schema)
        return Engine(database.dsn, settings=database.settings)
    if schema:
        os.environ["FANOUT_SCHEMA_NAME"] = schema
    if checked(dsn, "--dsn"):
        os.environ["DATABASE_URL"] = str(dsn)
    engine = load_app(app)
    if dsn and engine.dsn != dsn:
        raise UsageError(
            "dsn",
            f"the engine {app} names a database of its own",
            "Make it without one, as Engine(), or leave --dsn out",
        )
    return engine


def has_page() -> bool:
    """Is the extra `api` installed?"""
    return all(find_spec(name) is not None for name in LIBRARIES)


def listening(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, or a readable error.

    Raises:
        ConfigurationError: there would be no auth on an address that others can reach.
        UsageError: the extra is not installed, or the address cannot be had.
    """
    if not has_page():
        raise UsageError("api", "it is not installed", INSTALL)
    from fanout_api import ApiSettings  # noqa: PLC0415 - an extra
    from fanout_api.serving import bound_sockets  # noqa: PLC0415

    try:
        sockets = bound_sockets(host, port)
    except OSError as error:
        raise UsageError(
            "port", f"{host} {port} cannot be had: {error.strerror or error}", "Give another one"
        ) from None
    if ApiSettings().auth == "none" and not all(_is_loopback(one) for one in sockets):
        for one in sockets:
            one.close()
        raise ConfigurationError(
            "host",
            f"others can reach {host}, and nobody would be asked for a key",
            "Set FANOUT_API_AUTH=key and make one (fanout keys create NAME), "
            "or listen on 127.0.0.1",
        )
    return sockets


def _is_loopback(one: socket.socket) -> bool:
    return ip_address(one.getsockname()[0].partition("%")[0]).is_loopback


def serving(
    engine: Engine,
    host: str,
    sockets: list[socket.socket],
    allow_host: list[str] | None,
    *,
    handle_signals: bool = True,
) -> Server:
    """A server of the whole app over an engine."""
    from fanout_api import ApiSettings, create_app  # noqa: PLC0415 - an extra
    from fanout_api.serving import Server  # noqa: PLC0415

    settings = ApiSettings()
    own = {host, *(_bracketed(one.getsockname()[0]) for one in sockets), *(allow_host or ())}
    names = tuple(sorted({*settings.allowed_hosts, *own}))
    app = create_app(engine, settings=settings.model_copy(update={"allowed_hosts": names}))
    return Server(app, handle_signals=handle_signals)


def address_of(host: str, sockets: list[socket.socket]) -> str:
    """Where a person finds the page."""
    name = "127.0.0.1" if host in ("", "0.0.0.0", "::") else _bracketed(host)  # noqa: S104 - compared
    return f"http://{name}:{sockets[0].getsockname()[1]}/"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _served(server: Server, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
    running = asyncio.create_task(server.serve(sockets))
    while not server.started and not running.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    if server.started:
        ready()
    await running
