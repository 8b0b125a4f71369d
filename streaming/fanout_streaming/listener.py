"""The LISTEN connection: its own, checked by an echo, repaired for ever.

LISTEN is no sign of life: a dead session reports nothing, a pooler swallows it silently. Only a
notification that we send to ourselves, and see arrive, tests the whole way.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import asyncpg

from fanout.errors import DatabaseUnavailable
from fanout.pool import connect, described
from fanout.publisher import channel_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fanout.event_store import EventStore
    from fanout.pool import Connection
    from fanout.settings import Settings

__all__ = ["Listener"]

_log = logging.getLogger("fanout.listener")

PROBE_SECONDS: Final = 8.0
"""Between two probes, ± 20 %: a way that is dead is found within 15 s."""
ECHO_SECONDS: Final = 3.0
ECHO: Final = "fanout echo "
"""Not JSON, and nobody's hint."""


class Listener:
    """Calls `on_hint(payload)` for each notification, and `on_connected()` when something may have
    been missed.
    """

    def __init__(
        self,
        dsn: str,
        settings: Settings,
        store: EventStore,
        *,
        on_hint: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._settings = settings
        self._store = store
        self._on_hint = on_hint
        self._on_connected = on_connected
        self._task: asyncio.Task[None] | None = None
        self._echo = ""
        self._echoed = asyncio.Event()
        self._heard_at = float("-inf")
        self.is_listening = False
        self.reconnects = 0

    def start(self) -> None:
        """Begin; again is fine."""
        if self._task is None and not self._settings.transaction_pooler:
            self._task = asyncio.create_task(self._run(), name="fanout relay listener")

    async def stop(self) -> None:
        """End. Again is fine."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self.is_listening = False

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the way was last seen to work; None: never."""
        return None if self._heard_at == float("-inf") else time.monotonic() - self._heard_at

    async def _run(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            try:
                await self._listen()
            except Exception as error:  # noqa: BLE001 - it is repaired for ever, whatever it was
                if failures == 0:
                    _log.warning(
                        "listening was interrupted, reading the table meanwhile: %s",
                        described(error),
                    )
            self.is_listening = False
            self.reconnects += 1
            failures = 0 if time.monotonic() - started > PROBE_SECONDS else failures + 1
            await asyncio.sleep(random.uniform(0.5, 1) * min(5.0, 0.1 * 2.0 ** min(failures, 10)))

    async def _listen(self) -> None:
        connection = await connect(self._dsn, self._settings, "relay")
        lost = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: lost.set())
            # A plain function: coroutines would run as tasks, in any order.
            await connection.add_listener(channel_of(self._settings), self._received)
            await self._probe(connection, lost)  # a pooler accepts LISTEN, and never delivers
            self.is_listening = True
            self._on_connected()
            while not lost.is_set():
                try:
                    async with asyncio.timeout(PROBE_SECONDS * random.uniform(0.8, 1.2)):
                        await lost.wait()
                except TimeoutError:
                    await self._probe(connection, lost)
        finally:
            connection.terminate()

    async def _probe(self, connection: Connection, lost: asyncio.Event) -> None:
        """Raises TimeoutError unless a notification of our own comes back."""
        self._echoed.clear()
        self._echo = uuid4().hex
        payload = f"{ECHO}{self._echo}"
        try:
            # From elsewhere, for the two may be on different servers after a fail-over.
            async with asyncio.timeout(ECHO_SECONDS):
                await self._store.notify(channel_of(self._settings), [payload])
        except (DatabaseUnavailable, asyncpg.PostgresError, TimeoutError):
            # The pool is busy, or the lock: no reason to tear this connection down.
            await connection.execute(
                "SELECT pg_notify($1, $2)", channel_of(self._settings), payload
            )
        async with asyncio.timeout(ECHO_SECONDS):
            await self._echoed.wait()
        if lost.is_set():
            raise DatabaseUnavailable("the connection was closed")

    def _received(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        self._heard_at = time.monotonic()
        if not isinstance(payload, str):
            return
        if payload.startswith(ECHO):
            if self._echo and payload == f"{ECHO}{self._echo}":
                self._echoed.set()
            return
        self._on_hint(payload)
