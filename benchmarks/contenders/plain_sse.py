"""Fan-out of events as sse-starlette's documentation shows it: an async generator a client.

`POST /pub` takes events, one a line, and `GET /sub` is the stream. No cursor, no replay, no table.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from sse_starlette import EventSourceResponse

from benchmarks.member import new_event_loop
from fanout.cli.serving import spare_collector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

QUEUES: set[asyncio.Queue[str]] = set()


async def body_of(receive: Receive) -> bytes:
    """All of a request's body."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The app."""
    if scope["type"] != "http":
        return
    if scope["method"] == "POST":
        for event in (await body_of(receive)).decode().splitlines():
            for queue in QUEUES:
                queue.put_nowait(event)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        return
    await EventSourceResponse(_events())(scope, receive, send)


async def _events() -> AsyncIterator[dict[str, str]]:
    queue: asyncio.Queue[str] = asyncio.Queue()
    QUEUES.add(queue)
    try:
        while True:
            yield {"data": await queue.get()}
    finally:
        QUEUES.discard(queue)


def serve(which: Any) -> None:
    """Serve an app on a free port of this machine, and say which."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        which,
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        timeout_keep_alive=600,  # who publishes may be silent
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        running = asyncio.create_task(server.serve([listening]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        print(f"ready http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
        await running

    spare_collector()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    serve(app)
