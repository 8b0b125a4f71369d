"""Fan-out of events in bare ASGI on uvicorn: a queue and one write per event for each client.

`POST /pub` takes events, one a line, and `GET /sub` is the stream. No cursor, no replay, no table.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.contenders.plain_sse import body_of, serve

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

QUEUES: set[asyncio.Queue[bytes]] = set()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The app."""
    if scope["type"] != "http":
        return
    if scope["method"] == "POST":
        for event in (await body_of(receive)).splitlines():
            for one in QUEUES:
                one.put_nowait(b"data: %s\n\n" % event)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        return
    writing = asyncio.create_task(_write(send))
    while (await receive())["type"] != "http.disconnect":
        pass
    writing.cancel()


async def _write(send: Send) -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    QUEUES.add(queue)
    try:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})
        while True:
            body = await queue.get()
            await send({"type": "http.response.body", "body": body, "more_body": True})
    finally:
        QUEUES.discard(queue)


if __name__ == "__main__":
    serve(app)
