"""A receiver of webhooks on loopback, over TLS or not, that answers what a test says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

OK = b"HTTP/1.1 204 No Content\r\n\r\n"

Answer = Callable[["Received", asyncio.StreamWriter], Awaitable[None]]


def status(code: int, *headers: str) -> bytes:
    """The head of an answer without a body."""
    lines = [f"HTTP/1.1 {code} Said", "content-length: 0", *headers, "", ""]
    return "\r\n".join(lines).encode()


@dataclass(frozen=True)
class Received:
    """One request."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def is_signed_with(self, secret: str) -> bool:
        """By the text of the standard, with nothing of what signed it."""
        key = base64.b64decode(secret.removeprefix("whsec_"))
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode()
        right = base64.b64encode(hmac.digest(key, signed + self.body, hashlib.sha256)).decode()
        return f"v1,{right}" in self.headers["webhook-signature"].split(" ")


@dataclass
class Receiver:
    """What came, and what is answered: each of `answers` in its turn, then `OK`."""

    port: int = 0
    scheme: str = "http"
    answers: list[bytes | Answer] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    server_names: list[str | None] = field(default_factory=list)
    """What SNI said, a connection each."""

    def url(self, host: str = "localhost", path: str = "/hook") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers["content-length"]))
            request = Received(head[0], headers, body)
            self.received.append(request)
            answer = self.answers.pop(0) if self.answers else OK
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(request, writer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def receiver(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver that listens on 127.0.0.1."""
    it = Receiver(scheme="http" if tls is None else "https")
    if tls is not None:
        tls.sni_callback = lambda _socket, name, _context: it.server_names.append(name)
    server = await asyncio.start_server(it._serve, "127.0.0.1", 0, ssl=tls)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()
