"""Wake-ups: a hint that jobs of a kind are due, so that an idle worker need not wait for its next
look; and that children of a batch were ended, so that who runs them stops them at once.

Lost ones cost a poll interval, or a heartbeat, and nothing else. They are sent after the commit
that they speak of, in statements of their own, coalesced; they are received on a connection of
their own, that nothing else uses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from .errors import DatabaseUnavailable
from .pool import connect, described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .pool import Connection
    from .settings import Settings
    from .store import Store

__all__ = ["Listener", "Waker", "channel_of"]

_log = logging.getLogger("fanout.wakeups")
MAX_PAYLOAD_BYTES = 7000
MOST_ENDED: Final = 300
"""Batches that one hint names: their ids fit into a payload."""
PROBE_SECONDS = 10.0
PROBE_TIMEOUT = 5.0


def channel_of(settings: Settings) -> str:
    """The channel of a schema's wake-ups; at most 45 bytes, of 63 that PostgreSQL allows."""
    return f"{settings.schema_name}_wake"


class Waker:
    """Sends.

    `wake(kind)` and `ended(job_ids)` return at once; what comes while a hint is on its way goes out
    together after it.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._channel = channel_of(settings)
        self._kinds: set[str] = set()
        self._ended: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0
        """Hints that could not be sent; workers find out by polling, or with a heartbeat."""

    def wake(self, kind: str) -> None:
        """Hint that jobs of `kind` are due."""
        self._kinds.add(kind)
        self._send_soon()

    def ended(self, job_ids: Iterable[int]) -> None:
        """Hint that claims on these jobs, or on children of them, were taken away."""
        self._ended.update(job_ids)
        self._send_soon()

    def _send_soon(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(), name="fanout waker")

    async def close(self) -> None:
        """Send what is left, for a second at most."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=1)
            self._task.cancel()

    async def _send(self) -> None:
        while self._kinds or self._ended:
            try:
                if self._kinds:
                    kinds, self._kinds = sorted(self._kinds), set()
                    payload = json.dumps(kinds)
                    # So many kinds at once: an empty list wakes everybody.
                    await self._store.wake(
                        self._channel, payload if len(payload) <= MAX_PAYLOAD_BYTES else "[]"
                    )
                if self._ended:
                    ended = sorted(self._ended)[:MOST_ENDED]
                    self._ended.difference_update(ended)
                    await self._store.wake(self._channel, json.dumps({"ended": ended}))
            except (DatabaseUnavailable, asyncpg.PostgresError) as error:
                self.dropped += 1
                _log.debug("a wake-up was not sent: %s", error)


class Listener:
    """Receives: calls `on_wake(kinds)` for each hint that jobs are due (an empty set: all) and
    `on_ended(job_ids)` for each that claims were taken away, reconnects for ever.
    """

    def __init__(
        self,
        dsn: str,
        settings: Settings,
        on_wake: Callable[[set[str]], None],
        on_ended: Callable[[set[int]], None] = lambda _: None,
    ) -> None:
        self._dsn = dsn
        self._settings = settings
        self._on_wake = on_wake
        self._on_ended = on_ended
        self._task: asyncio.Task[None] | None = None
        self.garbage = 0
        """Payloads that were not ours."""

    def start(self) -> None:
        """Begin; again is fine. Where LISTEN cannot work this does nothing: workers poll."""
        if self._task is None and not self._settings.transaction_pooler:
            self._task = asyncio.create_task(self._run(), name="fanout listener")

    async def stop(self) -> None:
        """End. Again is fine."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._listen()
                failures = 0
            except (
                DatabaseUnavailable,
                asyncpg.PostgresError,
                asyncpg.InterfaceError,
                OSError,
                TimeoutError,
            ) as error:
                if failures == 0:
                    _log.warning(
                        "listening was interrupted, workers poll meanwhile: %s",
                        described(error),
                    )
                failures += 1
            await asyncio.sleep(random.uniform(0.5, 1) * min(5.0, 0.1 * 2.0 ** min(failures, 10)))

    async def _listen(self) -> None:
        """Listen until the connection is lost.

        The session never opens a transaction: that would hold up the queue.
        """
        connection = await connect(self._dsn, self._settings, "listen")
        lost = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(channel_of(self._settings), self._received)
            self._on_wake(set())  # what came while nobody listened
            while not lost.is_set():
                try:
                    async with asyncio.timeout(PROBE_SECONDS):
                        await lost.wait()
                except TimeoutError:
                    # A dead socket reports nothing by itself.
                    await connection.execute("SELECT 1", timeout=PROBE_TIMEOUT)
        finally:
            connection.terminate()

    def _received(
        self, _connection: Connection | Any, _pid: int, _channel: str, payload: object
    ) -> None:
        """Runs in the connection's protocol: must not await, must not raise."""
        try:
            told = (
                json.loads(payload)
                if isinstance(payload, str) and len(payload) <= MAX_PAYLOAD_BYTES
                else None
            )
        except (ValueError, RecursionError):
            told = None
        ended = told.get("ended") if isinstance(told, dict) else None
        if isinstance(told, list) and all(isinstance(kind, str) for kind in told):
            self._on_wake(set(told))
        elif isinstance(ended, list) and all(isinstance(job_id, int) for job_id in ended):
            self._on_ended(set(ended))
        else:
            self.garbage += 1
