"""What the routes of one app share: the engine, the relay, who may do what. Its life, too.

The router of a framework does not run the lifespan of an app that is mounted in another one, so the
engine and the relay are started by whoever comes first: this lifespan, the embedder's
(`async with app.state.fanout:`), or the first request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, Self

from fanout_streaming import Relay

from fanout import DatabaseUnavailable

from .callers import anonymous, by_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from fanout import Engine, Worker

    from .callers import Authenticate, Caller
    from .settings import ApiSettings
    from .table import Endpoint

__all__ = ["Service"]

_log = logging.getLogger("fanout.api")

PAUSE_SECONDS: Final = 1.0
"""After a start that failed, who comes meanwhile is told so at once: a queue would only wait."""


class Service:
    """`async with service:` starts what is not started, and ends what it has started."""

    def __init__(
        self,
        engine: Engine,
        settings: ApiSettings,
        *,
        relay: Relay | None = None,
        auth: Authenticate | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.relay = relay or Relay(engine)
        self.authenticate: Authenticate
        self.auth: Literal["none", "key", "own"]
        if auth is not None:
            self.authenticate, self.auth = auth, "own"
        elif settings.auth == "key":
            self.authenticate, self.auth = by_key(engine), "key"
        else:
            self.authenticate, self.auth = anonymous, "none"
        self.streams: Counter[str] = Counter()
        """Open streams by caller."""
        self.streams_served = 0
        self.streams_refused = 0
        """Turned away because there were too many."""
        self.streams_dropped = 0
        """Readers that took nothing for too long."""
        self.endpoints: Sequence[Endpoint] = ()
        """The rows of the table that the app serves."""
        self._owns_relay = relay is None
        self._owns_engine = False
        self._is_ready = False
        self._starting: asyncio.Task[None] | None = None
        self._failed_at: float | None = None

    @property
    def workers(self) -> list[Worker]:
        """Workers of this engine in this process."""
        return self.engine.local_workers

    @property
    def asks_database(self) -> bool:
        """Does finding out who asks take the database?"""
        return self.auth == "key"

    async def ready(self) -> None:
        """Start what is not started; many at once, and again, is fine.

        Raises:
            DatabaseUnavailable, SchemaMismatch: nothing is started; the next call tries again.
        """
        if self._is_ready:
            return
        if self._failed_at is not None and time.monotonic() - self._failed_at < PAUSE_SECONDS:
            raise DatabaseUnavailable("the engine could not be started a moment ago")
        if self._starting is None:
            # A task of its own: the request that came first may be cancelled, the others wait on.
            self._starting = asyncio.create_task(self._start(), name="fanout api start")
            self._starting.add_done_callback(self._started)
        await asyncio.shield(self._starting)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        failed = task.cancelled() or task.exception() is not None
        self._failed_at = time.monotonic() if failed else None

    async def _start(self) -> None:
        was_started = self.is_engine_started
        await self.engine.start()
        self._owns_engine = self._owns_engine or not was_started
        await self.relay.start()
        self._is_ready = True

    @property
    def is_engine_started(self) -> bool:
        """Can statements be run?"""
        try:
            _ = self.engine.store
        except DatabaseUnavailable:
            return False
        return True

    def drain(self) -> None:
        """The process stops: every stream says goodbye. Again is fine."""
        self.relay.drain()

    async def __aenter__(self) -> Self:
        try:
            await self.ready()
        except DatabaseUnavailable as error:
            # A pod that comes up before its database must not fall into a crash loop.
            _log.warning("the database is not there yet, the first request tries again: %s", error)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drain()
        if self._starting is not None:
            self._starting.cancel()
        if self._owns_relay:
            await self.relay.stop()
        if self._owns_engine:
            await self.engine.stop()
        self._is_ready = self._owns_engine = False

    # -- streams ---------------------------------------------------------------------------------

    def has_room(self, caller: Caller) -> bool:
        """May this caller open another stream?"""
        most = self.settings.max_streams
        if self.auth != "none":
            most = min(most, self.settings.streams_per_caller)
        is_free = (
            self.streams[caller.name] < most and self.streams.total() < self.settings.max_streams
        )
        self.streams_refused += not is_free
        return is_free

    @contextmanager
    def streaming(self, caller: Caller) -> Iterator[None]:
        """A stream of this caller is open while the body runs."""
        self.streams[caller.name] += 1
        self.streams_served += 1
        try:
            yield
        finally:
            self.streams[caller.name] -= 1
            if not self.streams[caller.name]:
                del self.streams[caller.name]
