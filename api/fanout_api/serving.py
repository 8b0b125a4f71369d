"""The server around the app: uvicorn, with sockets, deadlines and a stop of our own.

uvicorn has no deadline for a request to arrive, none for a reader that takes nothing, and waits for
open streams without end; each is closed here, by a means it leaves open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .event_stream import ABORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

    from .service import Service

__all__ = ["Server", "bound_sockets"]

_log = logging.getLogger("fanout.api")

SEND_BUFFER_BYTES: Final = 64 << 10
"""Else the kernel takes in megabytes for a reader that reads nothing."""
USER_TIMEOUT_MS: Final = 30_000
"""After so long without an acknowledgement a peer is gone."""
KEEPALIVE_SECONDS: Final = 30
MAX_HEAD_BYTES: Final = 32 << 10
STOP_SECONDS: Final = 2
"""What streams have to take their goodbye; with the engine's own stop it stays below 5 s."""
GRACE_SECONDS: Final = 1.0
"""Beyond the deadline of a request, so that the app's own answer comes first."""
TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound and do not listen yet, one for each address that `host` has.

    What is set on them is inherited by every connection. Port 0: any, the same for all.

    Raises:
        OSError: an address cannot be had.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if sockets and port == 0:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])  # noqa: PLW2901
            try:
                sockets.append(_bound(family, address))
            except OSError:
                # localhost has an IPv6 address also where IPv6 is switched off.
                if len({info[0] for info in found}) == 1 or family != socket.AF_INET6:
                    raise
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def _bound(family: int, address: Any) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        one.setblocking(False)  # noqa: FBT003 - the standard library's own
    except BaseException:
        one.close()
        raise
    return one


class Protocol(HttpToolsProtocol):
    """uvicorn's, which also ends a request that does not arrive, and one with endless headers."""

    receive_deadline = 15.0
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.access_log = False  # it would write queries; ours does not

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock runs from the first moment: one that says nothing waits, too."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Headers are counted before they are parsed."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + self._body_allowance(data):
                self.transport.write(TOO_LARGE)
                self.transport.close()
                return
        super().data_received(data)

    def _body_allowance(self, data: bytes) -> int:
        """What came in one piece with the headers may be a body."""
        return len(data) if b"\r\n\r\n" in data else 0

    def on_message_begin(self) -> None:
        """A request begins; the next one on this connection, too."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"cut": self.transport.abort, "write": self.write_now}}
        self._arm()

    def write_now(self, chunk: bytes) -> bool:
        """Write a part of the body that is being sent.

        False, and nothing is written: there is none, or the reader does not keep up.
        """
        cycle = self.cycle
        if (
            not cycle.chunked_encoding
            or cycle.response_complete
            or cycle.disconnected
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return False
        self.transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        return True

    def on_headers_complete(self) -> None:
        """The rest is the body, which has its own limit."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._disarm()
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing may hold this connection any more."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._deadline is None:
            seconds = self.receive_deadline + GRACE_SECONDS
            self._deadline = self.loop.call_later(seconds, self._is_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        self.transport.abort()


class Server(uvicorn.Server):
    """Serves one app on sockets that are bound already: `await Server(app).serve(sockets)`.

    `stop()`, or SIGTERM, SIGINT or SIGHUP where this runs in the main thread: streams get their
    goodbye, and everything is gone within 5 s, also with readers that take nothing. The second
    signal ends it at once.
    """

    def __init__(self, app: Starlette, *, handle_signals: bool = True) -> None:
        self._service: Service = app.state.fanout
        self._handles_signals = handle_signals
        protocol = type(
            "Protocol",
            (Protocol,),
            {"receive_deadline": self._service.settings.receive_deadline},
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )

    def stop(self) -> None:
        """Begin to stop; again is fine."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's, which raises them again in the end: a stop is no failure."""
        if not self._handles_signals:
            yield
            return
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Goodbye to all streams; then the connections; what is left is cut."""
        self._service.drain()
        # The process ends anyway; one task that uvicorn cancels is no news.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        try:
            await super().shutdown(sockets)
        finally:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
