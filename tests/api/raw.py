"""A client of streams on a bare socket: it counts everything, and costs next to nothing."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

__all__ = ["RawStream", "Told", "raw_stream", "vanish"]

BLOCK = re.compile(rb"(?:id: (\d+)\.(\d+)\n)?event: (\w+)\ndata: (.*)\n\n")


class Told(NamedTuple):
    """One event, as it came."""

    generation: int
    number: int
    """0: it has no id."""
    name: str
    data: bytes


class RawStream:
    """A response whose head has arrived."""

    def __init__(self, reader: asyncio.StreamReader, status: int) -> None:
        self.status = status
        self._reader = reader

    async def events(self) -> AsyncIterator[list[Told]]:
        """What came, a chunk at a time, until the end of the response or of the connection."""
        rest = b""
        while True:
            size = int((await self._reader.readline()) or b"0", 16)
            if not size:
                return
            rest += (await self._reader.readexactly(size + 2))[:-2]
            end = rest.rfind(b"\n\n") + 2
            if end > 1:
                told, rest = rest[:end], rest[end:]
                yield [
                    Told(int(found[1] or 0), int(found[2] or 0), found[3].decode(), found[4])
                    for found in BLOCK.finditer(told)
                ]


@asynccontextmanager
async def raw_stream(port: int, path: str, last_id: str | None = None) -> AsyncIterator[RawStream]:
    """A stream on this machine. Raises OSError, and EOFError when the server goes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        known = f"Last-Event-ID: {last_id}\r\n" if last_id else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{known}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        yield RawStream(reader, int(head.split(b" ", 2)[1]))
    finally:
        writer.transport.abort()


def vanish(port: int, path: str, *, reset: bool) -> None:
    """Ask for a stream, and be gone before its first byte."""
    one = socket.socket()
    one.connect(("127.0.0.1", port))
    one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    if reset:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
