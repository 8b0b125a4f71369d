"""The app, put together: routes from the table, the page, guards before them, a life around it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from .guards import Bodies, Envelope, Hosts, Origins
from .page import page_routes
from .problems import on_http_error
from .routes import TABLE
from .service import Service
from .settings import ApiSettings
from .table import routes_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fanout_streaming import Relay

    from fanout import Engine

    from .callers import Authenticate

__all__ = ["create_app", "lifespan"]


def create_app(
    engine: Engine,
    *,
    settings: ApiSettings | None = None,
    relay: Relay | None = None,
    auth: Authenticate | None = None,
) -> Starlette:
    """The HTTP API and the page over an engine: run it alone, or mount it under any prefix.

        app.mount("/fanout", create_app(engine))

    Mounted, its life is the embedder's: `async with app.state.fanout:` (or `lifespan(app)`) in
    their lifespan. Without that it begins with the first request and has no goodbye for streams.

    Args:
        engine: started or not; only who started it stops it.
        relay: one that others share; default: one of its own.
        auth: the embedder's own way to tell who asks; default: what `settings.auth` says.
    """
    service = Service(engine, settings or ApiSettings(), relay=relay, auth=auth)
    service.endpoints = TABLE.endpoints

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        async with service:
            yield

    app = Starlette(
        routes=[*routes_of(TABLE.endpoints, service), *page_routes()],
        middleware=[
            Middleware(Envelope),
            Middleware(Hosts, service.settings),
            Middleware(Origins, service.settings),
            Middleware(Bodies, service.settings),
        ],
        exception_handlers={HTTPException: on_http_error},
        lifespan=life,
    )
    app.state.fanout = service
    return app


def lifespan(app: Starlette) -> AbstractAsyncContextManager[Service]:
    """What an app that is mounted in another one needs around it, in that one's own lifespan."""
    service: Service = app.state.fanout
    return service
