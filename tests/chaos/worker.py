"""A worker process: `python -m tests.chaos.worker`. SIGTERM stops it in good order, a second one at
once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from fanout import DatabaseUnavailable
from tests.chaos.app import build
from tests.chaos.calls import CallLog


async def main() -> int:
    log = CallLog.of_environment()
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    engine = build(os.environ["DATABASE_URL"], log)
    while True:
        try:
            await engine.start()
            break
        except DatabaseUnavailable:
            await asyncio.sleep(0.1)
    workers = [
        engine.worker(
            concurrency=int(os.environ.get("CHAOS_CONCURRENCY", "10")),
            name=os.environ["CHAOS_NAME"],
            exit_when_stuck=bool(os.environ.get("CHAOS_EXIT_WHEN_STUCK", "1")),
        )
        for _ in range(int(os.environ.get("CHAOS_WORKERS", "1")))
    ]
    killing: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        log.write("signal")
        if asked.is_set():
            killing.extend(loop.create_task(worker.kill()) for worker in workers)
        asked.set()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    for worker in workers:
        await worker.start()
        log.write("boot", token=str(worker.token), name=worker.name)
    waits = [asyncio.ensure_future(asked.wait())]
    waits += [asyncio.ensure_future(worker.failed.wait()) for worker in workers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(worker.stop() for worker in workers), *killing)
    await engine.stop()
    failed = any(worker.failed.is_set() for worker in workers)
    log.write("exit", failed=failed)
    return os.EX_SOFTWARE if failed and not killing else 0


if __name__ == "__main__":
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("CHAOS_LEVEL", "WARNING"),
        format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s",
    )
    # Not asyncio.run: it would wait for handlers and threads that do not stop.
    code = asyncio.new_event_loop().run_until_complete(main())
    sys.stderr.flush()
    os._exit(code)
