"""One API process over the test app: `python -m tests.browser.server PORT [JOBS_AT_ONCE] [PREFIX]`.

DATABASE_URL names its database; FANOUT_API_… its settings. With JOBS_AT_ONCE it works as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import uvicorn
from fanout_api.app import create_app, lifespan
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.browser.app import build


async def main(port: int, jobs_at_once: int = 0, prefix: str = "") -> None:
    """Serve until SIGTERM."""
    engine = build()
    app = create_app(engine)
    config = uvicorn.Config(
        Starlette(routes=[Mount(prefix, app)]) if prefix else app,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=2,
        access_log=False,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        if prefix:
            await stack.enter_async_context(lifespan(app))
        if jobs_at_once:
            worker = engine.worker(concurrency=jobs_at_once, name="pod-1")
            await stack.enter_async_context(worker)
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(int(given[0]), int((given[1:2] or ["0"])[0]), (given[2:3] or [""])[0]))
