"""One API process over the test app: `python -m tests.browser.server PORT [PREFIX]`.

DATABASE_URL names its database; FANOUT_API_… its settings. With PREFIX it is mounted in another
app, as an embedder does it; else served as `fanout api` does.
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn
from fanout_api.app import create_app, lifespan
from fanout_api.serving import Server, bound_sockets
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.browser.app import build


async def main(port: int, prefix: str = "") -> None:
    """Serve until SIGTERM."""
    engine = build()
    app = create_app(engine)
    async with engine:
        if not prefix:
            await Server(app).serve(bound_sockets("localhost", port))
            return
        outer = Starlette(routes=[Mount(prefix, app)])
        config = uvicorn.Config(outer, port=port, log_level="warning", access_log=False)
        async with lifespan(app):
            await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:3]))
