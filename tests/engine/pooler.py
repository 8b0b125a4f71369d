"""A transaction pooler in a few lines: what PgBouncer's pool_mode=transaction does to its clients.

Each transaction, and each statement outside one, goes to whichever server connection is next; two
in a row never to the same. So what a session keeps (prepared statements, also the unnamed one, SET,
LISTEN) is lost at once, not now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

SERVERS = 6
SSL_REQUEST, CANCEL_REQUEST = 80877103, 80877102


class Server:
    """One connection to PostgreSQL, logged in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.greeting = b""

    async def log_in(self, user: str, database: str) -> None:
        body = b"".join(part.encode() + b"\0" for part in ("user", user, "database", database))
        packet = struct.pack("!I", 196608) + body + b"\0"
        self.writer.write(struct.pack("!I", len(packet) + 4) + packet)
        while True:
            kind, message = await read_message(self.reader)
            if kind == b"E":
                raise ConnectionError(message)
            self.greeting += message
            if kind == b"Z":
                return


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """A message's kind, and the whole of it."""
    head = await reader.readexactly(5)
    (length,) = struct.unpack("!I", head[1:])
    return head[:1], head + await reader.readexactly(length - 4)


class Client:
    """One client, and the server connection of its transaction, if it is in one."""

    def __init__(
        self, pooler: Pooler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pooler, self.reader, self.writer = pooler, reader, writer
        self.server: Server | None = None
        self.answers: asyncio.Task[None] | None = None
        self.expected = 0

    async def serve(self) -> None:
        if not await self._greet():
            return
        while True:
            kind, message = await read_message(self.reader)
            if kind == b"X":
                return
            if self.server is None:
                self.server = await self.pooler.take()
                self.answers = asyncio.create_task(self._relay(self.server))
            self.expected += kind in {b"S", b"Q"}
            self.server.writer.write(message)

    async def close(self) -> None:
        """One that goes in mid-transaction takes the server connection with it."""
        if self.answers is not None:
            self.answers.cancel()
            await asyncio.wait([self.answers])
        if self.server is not None:
            self.server.writer.close()
        self.writer.close()

    async def _greet(self) -> bool:
        while True:
            (length, code) = struct.unpack("!II", await self.reader.readexactly(8))
            await self.reader.readexactly(length - 8)
            if code == CANCEL_REQUEST:
                return False
            if code != SSL_REQUEST:
                self.writer.write(self.pooler.greeting)
                return True
            self.writer.write(b"N")

    async def _relay(self, server: Server) -> None:
        while True:
            kind, message = await read_message(server.reader)
            self.writer.write(message)
            if kind == b"Z":
                self.expected -= 1
                if message[-1:] == b"I" and not self.expected:
                    self.server = None
                    self.pooler.give(server)
                    return


class Pooler:
    """Server connections, handed out in turn."""

    def __init__(self) -> None:
        self.idle: asyncio.Queue[Server] = asyncio.Queue()
        self.greeting = b""
        self.transactions = 0

    async def take(self) -> Server:
        return await self.idle.get()

    def give(self, server: Server) -> None:
        self.transactions += 1
        self.idle.put_nowait(server)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(self, reader, writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await client.serve()
        await client.close()


@contextlib.asynccontextmanager
async def pooled(dsn: str) -> AsyncIterator[tuple[str, Pooler]]:
    """The DSN of a pooler in front of `dsn`, which must trust who comes, and the pooler."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    user, database = parts.username or "postgres", parts.path[1:]
    pooler = Pooler()
    servers = []
    for _ in range(SERVERS):
        if "host" in query:
            path = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
            server = Server(*await asyncio.open_unix_connection(path))
        else:
            server = Server(*await asyncio.open_connection(parts.hostname, parts.port or 5432))
        await server.log_in(user, database)
        pooler.idle.put_nowait(server)
        pooler.greeting = server.greeting
        servers.append(server)
    listening = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"postgresql://{user}@127.0.0.1:{port}/{database}?sslmode=disable", pooler
    finally:
        listening.close()
        for server in servers:
            server.writer.close()
