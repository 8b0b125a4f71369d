"""A step again and again, for as long as the process lives: it backs off from errors and never dies
silently.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from .errors import DatabaseUnavailable
from .pool import described

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Loop"]

MOST_SECONDS_BETWEEN_TRIES = 5.0
SECONDS_BETWEEN_LINES = 60.0


class Loop:
    """Calls `step` every `interval` seconds, jittered, or at once after `nudge()`; tests call the
    step itself.

    An error is logged, once a minute at most for the same trouble, and the step is tried again
    after 0.1 to 5 s (or `longest_pause`), so a database that is down costs neither the loop nor a
    flood of lines.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        interval: float,
        *,
        jitter: float = 0.2,
        longest_pause: float = MOST_SECONDS_BETWEEN_TRIES,
    ) -> None:
        self._name = name
        self._step = step
        self._interval = interval
        self._jitter = jitter
        self._longest_pause = min(longest_pause, MOST_SECONDS_BETWEEN_TRIES)
        self._nudged = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._log = logging.getLogger(f"fanout.{name}")
        self._logged_at = float("-inf")
        self.failures = 0
        """Errors in a row; 0: the last step went well."""
        self.last_error = ""

    def start(self) -> None:
        """Begin; again is fine."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.create_task(self._run(), name=f"fanout {self._name}")

    async def stop(self, patience: float = 0) -> None:
        """End; returns when it has ended.

        A step that runs has `patience` seconds to end by itself. Again is fine.
        """
        task, self._task = self._task, None
        if task is None:
            return
        if patience:
            self._stopping = True
            self._nudged.set()
            await asyncio.wait([task], timeout=patience)
        task.cancel()
        await asyncio.wait([task])

    def nudge(self) -> None:
        """Do the next step now."""
        self._nudged.set()

    @property
    def name(self) -> str:
        """What it is called in logs."""
        return self._name

    @property
    def is_running(self) -> bool:
        """Is its task alive?"""
        return self._task is not None and not self._task.done()

    async def _run(self) -> None:
        while not self._stopping:
            self._nudged.clear()
            try:
                await self._step()
            except Exception as error:  # noqa: BLE001 - the loop is the backstop: it outlives whatever a step raises
                self._report(error)
                self.failures += 1
                self.last_error = described(error)
                await asyncio.sleep(
                    random.uniform(0.5, 1)
                    * min(self._longest_pause, 0.1 * 2.0 ** min(self.failures, 10))
                )
                continue
            if self.failures:
                self._log.info("%s works again after %d errors", self._name, self.failures)
                self.failures = 0
                self._logged_at = float("-inf")
            try:
                async with asyncio.timeout(
                    self._interval * random.uniform(1 - self._jitter, 1 + self._jitter)
                ):
                    await self._nudged.wait()
            except TimeoutError:
                pass

    def _report(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at < SECONDS_BETWEEN_LINES:
            return
        self._logged_at = now
        known = isinstance(error, DatabaseUnavailable)
        self._log.warning("%s: %s", self._name, described(error), exc_info=None if known else error)
