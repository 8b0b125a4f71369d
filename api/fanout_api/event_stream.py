"""The response of a stream: one that always gives its place back.

sse-starlette's response keeps four tasks for each client and finds its generator's `finally` not
run when the client vanished before the first byte. This one is of the same base, for its headers,
with one task beside the request's own, which waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from sse_starlette import EventSourceResponse

from fanout import DatabaseUnavailable

from .callers import authenticated
from .problems import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from fanout_streaming import Subscription
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from .callers import Caller
    from .service import Service

__all__ = ["ABORT", "EventStream"]

ABORT: Final = "fanout.abort"
"""The extension of our own server. `cut` cuts the connection, with what it has not sent; `write`
writes a part of a body without waiting, or says False: the way through `send` costs ten times that.
"""

HEADERS: Final = {"Cache-Control": "no-store, no-transform"}


class EventStream(EventSourceResponse):
    """Writes a subscription's chunks until it ends, or the client leaves or takes nothing."""

    def __init__(
        self,
        subscription: Subscription,
        service: Service,
        caller: Caller,
        request: Request,
        media_type: str,
    ) -> None:
        super().__init__(_nothing(), headers=HEADERS, media_type=media_type, ping=0)
        self._subscription = subscription
        self._service = service
        self._caller = caller
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Never ends without closing the subscription, not even before it began."""
        try:
            with self._service.streaming(self._caller):
                await self._run(scope, receive, send)
        finally:
            await self._subscription.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        writing = asyncio.current_task()
        assert writing is not None  # noqa: S101 - the server runs every request in a task
        leaving = _Leaving(receive, writing, self._may_still, self._service)
        try:
            await send(start)
            write: Callable[[bytes], bool] = _server_of(scope).get("write", _cannot)
            self._subscription.write_by(write)
            async for chunk in self._subscription.chunks():
                if write(chunk):
                    continue
                # Waits only while what was written before lies in the socket's buffer.
                async with asyncio.timeout(self._service.settings.send_timeout):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            self._service.streams_dropped += 1
            await _cut(scope)
        except asyncio.CancelledError:
            if not leaving.has_left:
                await _cut(scope)  # the server stops, and this one took not even the goodbye
                raise
            writing.uncancel()
        finally:
            await leaving.stop()

    async def _may_still(self) -> bool:
        """Is the caller still the caller? An outage of the database is no answer to that."""
        try:
            caller = await authenticated(self._service.authenticate, self._request)
        except ApiError:
            return False
        except DatabaseUnavailable:
            return True
        return caller == self._caller


class _Leaving:
    """Waits for the client to leave, or to lose its key; then ends the task that writes to it."""

    def __init__(
        self,
        receive: Receive,
        writing: asyncio.Task[Any],
        may_still: Callable[[], Awaitable[bool]],
        service: Service,
    ) -> None:
        self.has_left = False
        self._receive = receive
        self._writing = writing
        self._may_still = may_still
        self._seconds = service.settings.recheck_seconds if service.auth != "none" else None
        self._task = asyncio.create_task(self._wait(), name="fanout stream")

    async def _wait(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._seconds):
                    if (await self._receive())["type"] == "http.disconnect":
                        break
            except TimeoutError:
                if not await self._may_still():
                    break
        self.has_left = True
        self._writing.cancel()

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def _cut(scope: Scope) -> None:
    """Closing would wait until everything is sent, which such a reader never lets happen."""
    abort: Callable[[], None] | None = _server_of(scope).get("cut")
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server hears of it in the loop's next round


def _server_of(scope: Scope) -> dict[str, Any]:
    extension: dict[str, Any] = (scope.get("extensions") or {}).get(ABORT, {})
    return extension


def _cannot(_chunk: bytes) -> bool:
    return False


async def _nothing() -> AsyncIterator[bytes]:
    """The base wants an iterator; this response reads its subscription itself."""
    for nothing in list[bytes]():
        yield nothing
