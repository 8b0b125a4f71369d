"""The answer of a stream that cannot be opened now: 200, come back later, goodbye."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from .event_stream import HEADERS

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["is_stream", "turned_away"]

LEAST_MS: Final = 5000
MOST_MS: Final = 30_000


def is_stream(path: str) -> bool:
    """Is it the path of a stream?"""
    return path == "/v1/streams" or (path.startswith("/v1/jobs/") and path.endswith("/events"))


def turned_away(request: Request) -> Response:
    """Come back in 5 to 30 s, each reader at another time."""
    accept = request.headers.get("accept", "")
    if "application/x-ndjson" in accept and "text/event-stream" not in accept:
        return Response(b"", headers=HEADERS, media_type="application/x-ndjson")
    retry = random.randint(LEAST_MS, MOST_MS)
    frames = f'retry: {retry}\n\nevent: bye\ndata: {{"reason":"busy"}}\n\n'
    headers = HEADERS | {"X-Accel-Buffering": "no"}
    return Response(frames.encode(), headers=headers, media_type="text/event-stream")
