"""The page beside a run of the demo: API and page in the demo's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fanout.engine import Engine
from fanout.errors import UsageError

from .api import DEFAULT_PORT, INSTALL, address_of, has_page, listening, serving
from .database import say

__all__ = ["HOST", "Page", "page_beside"]

HOST: Final = "127.0.0.1"


class Page:
    """A page that is served; `address` ends with a slash."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_hasty = False
        """End without waiting for who watches."""

    def of_job(self, job_id: int) -> str:
        """Where a person finds one job."""
        return f"{self.address}#/jobs/{job_id}"


@asynccontextmanager
async def page_beside(engine: Engine, port: int | None) -> AsyncIterator[Page | None]:
    """Serve API and page of a started engine while the body runs; None: they are not installed.

    Raises:
        UsageError: `port` cannot be had. With None it is the usual one, or any that is free.
    """
    if not has_page():
        say(f"goes on without the page, which is not installed: {INSTALL}")
        yield None
        return
    sockets = _sockets(port)
    server = serving(engine, HOST, sockets, None, handle_signals=False)
    running = asyncio.create_task(server.serve(sockets), name="fanout demo page")
    page = Page(address_of(HOST, sockets))
    try:
        while not server.started:
            if running.done():
                running.result()
                raise UsageError("page", "it could not be served", "Try another --port")
            await asyncio.sleep(0.01)
        yield page
    finally:
        server.force_exit = page.is_hasty
        server.stop()
        with contextlib.suppress(OSError):
            await running


def _sockets(port: int | None) -> list[socket.socket]:
    """Sockets that listen already: who comes at the same moment must see that this one is taken."""
    if port is not None:
        return _claimed(port)
    try:
        return _claimed(DEFAULT_PORT)
    except UsageError:
        return _claimed(0)


def _claimed(port: int) -> list[socket.socket]:
    sockets = listening(HOST, port)
    try:
        for one in sockets:
            one.listen()
    except OSError as error:
        for one in sockets:
            one.close()
        raise UsageError(
            "port", f"{HOST} {port} cannot be had: {error.strerror or error}", "Give another one"
        ) from None
    return sockets
