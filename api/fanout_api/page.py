"""The page: files as they are, from the folder `dashboard`, under relative addresses only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from .problems import NotHere

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

__all__ = ["page_routes"]

FOLDER: Final = Path(__file__).parent / "dashboard"
HEADERS: Final = {"Cache-Control": "no-cache"}
"""Kept by the browser, and asked for again each time: what is shown is never a version behind."""


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


async def _page(_: Request) -> Response:
    """The page itself. It knows nothing until it is logged in."""
    file = FOLDER / "index.html"
    if not file.is_file():
        raise NotHere("the page is not part of this installation")
    return FileResponse(file, headers=HEADERS)


def page_routes() -> list[BaseRoute]:
    """`/` and `/static/…`, compressed to a third; nothing else is, for streams must not be."""
    compressed = [Middleware(GZipMiddleware, minimum_size=500)]
    return [
        Route("/", _page, name="page", middleware=compressed),
        Mount(
            "/static",
            _Files(directory=FOLDER, check_dir=False),
            name="static",
            middleware=compressed,
        ),
    ]
