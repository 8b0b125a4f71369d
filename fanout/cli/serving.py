"""One worker process from its first line to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable

from fanout import embedded
from fanout.embedded import EmbeddedServer
from fanout.engine import Engine
from fanout.errors import UsageError

from .channel import exit_in
from .exits import Exit
from .loading import load_app
from .process import LAST_SECONDS, Orders, Process

__all__ = ["serve", "spare_collector"]


def spare_collector() -> None:
    """Have the garbage collector leave alone what imports made, and look seldom: workers and
    the hub make and drop objects by the thousand, none of them in a cycle; a full collection with
    5,000 readers takes a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def serve(orders: Orders) -> int:
    """Run one worker process to its end. Returns the exit code, unless a thread hangs."""
    server = _database(orders)
    try:
        engine = load_app(orders.app)
        _check_place(engine, orders)
        spare_collector()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_run(orders, engine))
            # Closing the loop joins threads of asyncio.to_thread, which may hang in user code.
            exit_in(LAST_SECONDS, code)
            if code not in (Exit.FINE, Exit.USAGE):
                _end(server, code)
    finally:
        if server is not None:
            server.release()
    exit_in(LAST_SECONDS, code)
    return code


async def _run(orders: Orders, engine: Engine) -> int:
    return await Process(orders).run(engine)


def _end(server: EmbeddedServer | None, code: int) -> None:
    """Now: outcomes are written, and a hung thread would hold up a regular exit for ever."""
    if server is not None:
        server.release()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _database(orders: Orders) -> EmbeddedServer | None:
    """Set DATABASE_URL for the app that is imported next; hold the embedded server if asked to."""
    if orders.schema:
        os.environ["FANOUT_SCHEMA_NAME"] = orders.schema
    if orders.dsn:
        os.environ["DATABASE_URL"] = orders.dsn
    if not orders.is_embedded:
        return None
    server = embedded.acquire()
    os.environ["DATABASE_URL"] = server.dsn()
    return server


def _check_place(engine: Engine, orders: Orders) -> None:
    """An engine that names its own database must not quietly win over the command line."""
    wanted = os.environ.get("DATABASE_URL") if orders.dsn or orders.is_embedded else None
    is_the_same = engine.dsn == wanted or (orders.is_embedded and engine.dsn == "embedded")
    if wanted is not None and not is_the_same:
        raise UsageError(
            "dsn",
            f"the engine {orders.app} names a database of its own",
            "Make it without one, as Engine(), or leave --dsn and --embedded out",
        )
    if orders.schema and engine.settings.schema_name != orders.schema:
        raise UsageError(
            "schema",
            f"the engine {orders.app} names schema {engine.settings.schema_name!r}",
            "Leave it out of its Settings, or leave --schema out",
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - comes with an extra
    except ImportError:
        return None
    return uvloop.new_event_loop
