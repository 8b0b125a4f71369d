"""One API process over the test app: `python -m tests.browser.server PORT`, DATABASE_URL set.

With a second argument, a number, it works as well: so many jobs at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import uvicorn

from fanout_api.app import create_app
from fanout_api.settings import ApiSettings
from tests.browser.app import build


async def main(port: int, concurrency: int, **settings: object) -> None:
    """Serve until SIGTERM."""
    engine = build()
    app = create_app(engine, settings=ApiSettings(**settings))
    config = uvicorn.Config(
        app, port=port, log_level="warning", timeout_graceful_shutdown=2, access_log=False
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        if concurrency:
            await stack.enter_async_context(engine.worker(concurrency=concurrency, name="pod-1"))
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
