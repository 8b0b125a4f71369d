"""One worker process: import the app, wait for the database, work, stop when told to.

The first signal stops gracefully: nothing more is claimed, what runs may end within the grace, the
rest is released. The second stops now. Under a supervisor the words on its channel count instead,
and any signal is a first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final

from fanout import embedded
from fanout.engine import Engine
from fanout.errors import DatabaseUnavailable
from fanout.worker import Worker

from .channel import STOP_SIGNALS, Channel, Word, exit_in
from .exits import Exit

__all__ = ["Orders", "Process"]

_log = logging.getLogger("fanout.process")

LAST_SECONDS: Final = 3.0
"""What a stop may take beyond its own limits before the process simply ends."""
LONGEST_WAIT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker process is told."""

    app: str
    concurrency: int | None = None
    dsn: str | None = None
    schema: str | None = None
    is_embedded: bool = False
    stop_grace: float | None = None
    """Seconds; None: the settings'."""
    name: str | None = None
    channel_fd: int | None = None
    """The supervisor's socket; None: there is no supervisor."""


class Process:
    """State of one worker process between signals, channel and event loop."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._signal = 0
        self._grace = 20.0
        self._channel = (
            Channel(orders.channel_fd, self._told_to_stop, self._told_to_kill)
            if orders.channel_fd is not None
            else None
        )
        for number in STOP_SIGNALS:
            # Not the loop's own: user code that blocks the loop must not make this process deaf.
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._channel is not None or not self._stop.is_set():
            self._signal = self._signal or number
            self._told_to_stop()
        else:
            self._signal = number
            self._told_to_kill()

    def _told_to_stop(self) -> None:
        if not self._stop.is_set():
            exit_in(self._grace + 3 * LAST_SECONDS, Exit.WRONG)
            self._loop.call_soon_threadsafe(self._stop.set)

    def _told_to_kill(self) -> None:
        exit_in(LAST_SECONDS, 128 + (self._signal or signal.SIGTERM))
        self._loop.call_soon_threadsafe(self._stop.set)
        self._loop.call_soon_threadsafe(self._kill.set)

    async def run(self, engine: Engine) -> int:
        """Work until told to stop. Returns the exit code."""
        orders = self._orders
        self._grace = (
            orders.stop_grace if orders.stop_grace is not None else engine.settings.stop_grace
        )
        self._grace += 2 * engine.settings.database_timeout
        self._say(Word.IMPORTED)
        if not await self._database_is_there(engine):
            return Exit.FINE
        try:
            worker = engine.worker(
                concurrency=orders.concurrency, name=orders.name, exit_when_stuck=True
            )
            await self._started(worker)
            _log.info(
                "serves %s, %d at once", ", ".join(sorted(engine.handlers)), worker.concurrency
            )
            self._say(Word.READY)
            return await self._work(worker)
        finally:
            with contextlib.suppress(DatabaseUnavailable):
                await engine.stop()

    def _say(self, word: Word) -> None:
        if self._channel is not None:
            self._channel.say(word)
        elif word is Word.READY:
            print("ready", flush=True)  # noqa: T201 - for whoever started this

    async def _database_is_there(self, engine: Engine) -> bool:
        """Wait for it, for as long as it takes; False: told to stop meanwhile."""
        return await self._tried(engine.start)

    async def _started(self, worker: Worker) -> None:
        await self._tried(worker.start)

    async def _tried(self, start: Callable[[], object]) -> bool:
        pause, said = 0.1, False
        while not self._stop.is_set():
            try:
                await start()  # type: ignore[misc]  # both are coroutine functions
            except (DatabaseUnavailable, embedded.EmbeddedPostgresError) as error:
                if not said:
                    _log.warning("waits for the database: %s", error)
                said = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.8, 1.2)):
                        await self._stop.wait()
                pause = min(LONGEST_WAIT_SECONDS, pause * 2)
                continue
            if said:
                _log.info("the database is there")
            return True
        return False

    async def _work(self, worker: Worker) -> int:
        stop = asyncio.create_task(self._stop.wait())
        failed = asyncio.create_task(worker.failed.wait())
        await asyncio.wait([stop, failed], return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            _log.error("a handler does not stop: this process ends, to be started again")
            exit_in(self._grace + LAST_SECONDS, Exit.START_AGAIN)
        else:
            _log.info("stops: %d running", worker.running)
        stopping = asyncio.create_task(worker.stop(self._orders.stop_grace))
        kill = asyncio.create_task(self._kill.wait())
        await asyncio.wait([stopping, kill], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            _log.warning("stops now: %d running", worker.running)
            await worker.kill()
            await stopping
        stopping.result()
        for task in (stop, failed, kill):
            task.cancel()
        if self._kill.is_set():
            return 128 + (self._signal or signal.SIGTERM)
        if worker.failed.is_set():
            return Exit.START_AGAIN
        _log.info("stopped, %d jobs were run", worker.executed)
        return Exit.FINE
