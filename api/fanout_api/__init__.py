"""HTTP over the engine: routes, server-sent events, the page. Never touches asyncpg.

app = create_app(engine)                        # alone: `fanout api`, or any ASGI server
outer.mount("/fanout", app)                     # or in a Starlette or FastAPI app
async with lifespan(app): ...                   # in that app's own lifespan
"""

from __future__ import annotations

from fanout.access import Scope

from .app import create_app, lifespan
from .callers import Authenticate, Caller
from .settings import ApiSettings

__all__ = ["ApiSettings", "Authenticate", "Caller", "Scope", "create_app", "lifespan"]
