"""A TCP proxy before PostgreSQL's socket, that can stop to pass anything on: a network that
swallows everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

__all__ = ["Proxy", "proxied"]


class Proxy:
    """Passes bytes on in each direction unless that one is frozen. Frozen, it still accepts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._to_server = asyncio.Event()
        self._to_client = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.thaw()

    def freeze(self, *, requests: bool = True, answers: bool = True) -> None:
        """Swallow, or rather hold: nothing is lost if it thaws, as with a route that comes back."""
        if requests:
            self._to_server.clear()
        if answers:
            self._to_client.clear()

    def thaw(self) -> None:
        self._to_server.set()
        self._to_client.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._to_server.wait()
            upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._path)
            try:
                pumps = [
                    asyncio.ensure_future(self._pump(reader, upstream_writer, self._to_server)),
                    asyncio.ensure_future(self._pump(upstream_reader, writer, self._to_client)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                upstream_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await may_pass.wait()
                writer.write(data)
                await writer.drain()
            await may_pass.wait()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before the server of `dsn`, and the DSN that leads through it."""
    parts = urlsplit(dsn)
    options = parse_qs(parts.query)
    proxy = Proxy(f"{options['host'][0]}/.s.PGSQL.{options['port'][0]}")
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy, f"postgresql://postgres@127.0.0.1:{proxy.port}{parts.path}"
    finally:
        server.close()
        await proxy.close()
