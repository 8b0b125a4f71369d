"""Renewing leases, from a thread, an event loop and a connection of its own.

User code that blocks the worker's loop must not lose leases, and user code that uses up the
worker's pool must not either. A claim whose handler did not stop after its timeout is not renewed:
a process that cannot stop it lets go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import asyncpg

from .errors import DatabaseUnavailable
from .pool import connect, described
from .statements import load_statements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from .held import Held
    from .pool import Connection
    from .settings import Settings
    from .values import Claim

__all__ = ["Heartbeat", "Vitals"]

_log = logging.getLogger("fanout.heartbeat")


class Vitals(Protocol):
    """What a worker says of itself with each beat; read from the heartbeat's thread."""

    @property
    def kinds(self) -> list[str]:
        """The kinds it serves."""

    @property
    def concurrency(self) -> int:
        """Handlers that it runs at once."""

    @property
    def running(self) -> int:
        """Handlers that run now."""

    @property
    def has_free_slot(self) -> bool:
        """Would it start a job now, if there were one?"""

    @property
    def state(self) -> str:
        """One of: running, stopping."""


class Heartbeat:
    """Beats for the claims in `held`, from `start()` to `stop()`.

    `on_lost(claims)` is called, in the heartbeat's thread, with claims that were given away;
    `on_silence()` when a beat failed, so that nobody is declared dead by a process that had no
    contact itself; `on_overdue(ids)` with claims that were let go because their handlers did not
    stop in time.
    """

    def __init__(
        self,
        dsn: str,
        settings: Settings,
        token: UUID,
        name: str,
        version: str,
        vitals: Vitals,
        held: Mapping[int, Held],
        *,
        on_lost: Callable[[list[Claim]], None],
        on_silence: Callable[[], None],
        on_overdue: Callable[[list[int]], bool],
    ) -> None:
        self._dsn = dsn
        self._settings = settings
        self._token = token
        self._name = name
        self._version = version
        self._vitals = vitals
        self._held = held
        self._on_lost = on_lost
        self._on_silence = on_silence
        self._on_overdue = on_overdue
        self._sql = load_statements(settings.schema_name)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._wake: asyncio.Event | None = None
        self.beats = 0
        self.last_beat_at = time.monotonic()

    def start(self) -> None:
        """Begin; again is fine."""
        if self._thread is None:
            # A daemon: a process that must die does not wait for it.
            self._thread = threading.Thread(target=self._main, name="fanout heartbeat", daemon=True)
            self._thread.start()

    async def stop(self, patience: float) -> None:
        """Take this worker off the list, and end, in `patience` seconds at most. Again is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        self._nudge()
        # Not in a thread of the loop's own: user code may have all of those, and never give one
        # back.
        deadline = time.monotonic() + patience
        while thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - another loop's end
            await asyncio.sleep(0.005)

    def beat_now(self) -> None:
        """Do the next beat at once: what was taken away is known when it is over."""
        self._nudge()

    def _nudge(self) -> None:
        if self._loop is not None and self._wake is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _main(self) -> None:
        # Its own loop, and never uvloop's policy by accident: this thread must not share anything.
        with asyncio.Runner() as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        connection: Connection | None = None
        failures = 0
        while not self._stopping:
            self._wake.clear()
            try:
                if connection is None or connection.is_closed():
                    connection = await self._connect()
                await self._beat(connection)
                failures = 0
                pause = self._settings.heartbeat * random.uniform(0.8, 1.0)
            except Exception as error:  # noqa: BLE001 - the last thing in this process that may die
                if failures == 0:
                    _log.warning("a heartbeat failed: %s", described(error))
                failures += 1
                self._on_silence()
                if connection is not None:
                    connection.terminate()
                    connection = None
                pause = random.uniform(0.5, 1) * min(
                    self._settings.heartbeat / 2, 0.1 * 2.0 ** min(failures, 10)
                )
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
        await self._say_goodbye(connection)

    async def _connect(self) -> Connection:
        connection = await connect(self._dsn, self._settings, "heartbeat")
        if not self._settings.transaction_pooler:
            # A manager's row that somebody holds must not cost the managers behind it their leases.
            patience = max(1, int(self._settings.heartbeat * 1000 / 4))
            try:
                await connection.execute(f"SET lock_timeout = {patience}")
            except BaseException:
                connection.terminate()
                raise
        return connection

    async def _beat(self, connection: Connection) -> None:
        lease = timedelta(seconds=self._settings.lease)
        # If the worker's loop is stuck, nothing that it holds will end here, begun or not.
        is_stuck = self._let_go()
        held = [one for one in dict(self._held).values() if not (is_stuck or one.is_overdue)]
        leaves = [one.claim for one in held if not one.fans_out]
        lost: list[Claim] = []
        if leaves:
            rows = await connection.fetch(
                self._sql["heartbeat"],
                [c.id for c in leaves],
                [c.attempt for c in leaves],
                self._token,
                lease,
            )
            gone = {row["id"] for row in rows if row["lost"]}
            lost += [claim for claim in leaves if claim.id in gone]
            grown = {row["id"] for row in rows if not row["lost"]}
            for one in held:
                one.fans_out = one.fans_out or one.claim.id in grown
        await self._beat_worker(connection)
        for manager in (one.claim for one in held if one.fans_out):
            try:
                if not await connection.fetch(
                    self._sql["heartbeat_manager"], manager.id, manager.attempt, self._token, lease
                ):
                    lost.append(manager)
            except asyncpg.LockNotAvailableError:
                continue  # locked is not lost
        if lost:
            self._on_lost(lost)
        self.beats += 1
        self.last_beat_at = time.monotonic()

    async def _beat_worker(self, connection: Connection) -> None:
        vitals = self._vitals
        if self.beats and await connection.fetch(
            self._sql["beat_worker"],
            self._token,
            vitals.running,
            vitals.has_free_slot,
            vitals.state,
        ):
            return
        await connection.execute(
            self._sql["register_worker"],
            self._token,
            self._name,
            socket.gethostname(),
            os.getpid(),
            self._version,
            vitals.kinds,
            vitals.concurrency,
            timedelta(seconds=self._settings.lease),
        )
        await connection.execute(
            self._sql["beat_worker"],
            self._token,
            vitals.running,
            vitals.has_free_slot,
            vitals.state,
        )

    def _let_go(self) -> bool:
        overdue = [one.claim.id for one in dict(self._held).values() if one.is_overdue]
        return bool(overdue) and self._on_overdue(overdue)

    async def _say_goodbye(self, connection: Connection | None) -> None:
        if connection is None or connection.is_closed():
            return
        try:
            await connection.execute(self._sql["remove_worker"], self._token, timeout=2)
            await connection.close(timeout=2)
        except (
            OSError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            DatabaseUnavailable,
            TimeoutError,
        ):
            connection.terminate()
