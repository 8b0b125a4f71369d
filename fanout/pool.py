"""Connections of the engine: how they are made, how their errors are read, when a transaction is
run again.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import asyncpg

from .errors import ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from .settings import Settings

__all__ = [
    "Connection",
    "Pool",
    "connect",
    "is_data_error",
    "is_unavailable",
    "reraise",
    "translated",
]

T = TypeVar("T")

SESSION: Final = {
    "default_transaction_isolation": "read committed",
    # Generic plans that were made while the table was empty would scan it for ever after; every
    # statement here has an index to walk. The price of disabled nodes would switch JIT on.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    # A pod that is gone must not hold row locks until the kernel notices.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    # Keepalives are not sent while data waits to be taken: a session that NOTIFY writes to would
    # hold vacuum back for as long as its pod stands still.
    "tcp_user_timeout": "25000",
}

MIGRATE: Final = "migrate"
"""The connection whose statements may take longer than `database_timeout`."""

RUN_AGAIN: Final = frozenset({"40P01", "40001", "55P03", "0A000"})
"""Deadlock, serialization, lock timeout, "cached plan must not change result type": the whole
transaction, again.
"""
INFRASTRUCTURE: Final = ("08", "53", "57", "58", "25006", "25P03", "XX")
"""Connection, resources (disk full, too many connections), operator intervention, system error,
read-only.
"""
DATA: Final = ("22", "23", "54")


class NotStarted(DatabaseUnavailable):
    """The pool is not open: nothing to wait for."""


class Connection(asyncpg.Connection):
    """A connection whose release costs no round trip: the engine leaves no session state."""

    def get_reset_query(self) -> str:
        """Nothing to reset."""
        return ""


def is_unavailable(error: BaseException) -> bool:
    """Is this trouble with the server or the way to it, and not with what was asked?"""
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate or "").startswith(INFRASTRUCTURE)
    return isinstance(
        error,
        OSError
        | TimeoutError
        | asyncpg.InterfaceError
        # The driver's own, when a connection breaks between two of its states.
        | asyncpg.InternalClientError
        | DatabaseUnavailable,
    ) and not isinstance(error, asyncpg.DataError)


def is_data_error(error: BaseException) -> bool:
    """Was the data itself refused, so that the same data will be refused again?"""
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate or "").startswith(DATA)
    return isinstance(error, asyncpg.DataError | UnicodeError | OverflowError)


def _runs_again(error: BaseException) -> bool:
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate in RUN_AGAIN)


def translated(error: BaseException) -> BaseException:
    """The error to raise for `error`: DatabaseUnavailable for infrastructure, ConfigurationError
    for a pooler that nobody mentioned, else itself.
    """
    if isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error):
        return ConfigurationError(
            "transaction_pooler",
            f"the way to the database refuses session settings ({error})",
            "For a DSN that leads through a pooler set FANOUT_TRANSACTION_POOLER=1",
        )
    if is_unavailable(error) and not isinstance(error, DatabaseUnavailable):
        return DatabaseUnavailable(described(error))
    return error


def reraise(error: BaseException) -> NoReturn:
    """Raise `error`, or what it is translated to."""
    known = translated(error)
    if known is error:
        raise error
    raise known from error


def described(error: BaseException) -> str:
    """An error in one line; many of the network's have no text of their own."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _options(settings: Settings, name: str) -> dict[str, Any]:
    session = {"application_name": f"{settings.schema_name} {name}"[:63]}
    if settings.transaction_pooler:
        return {"server_settings": session, "statement_cache_size": 0}
    session |= SESSION
    milliseconds = str(max(1, int(settings.database_timeout * 1000)))
    # A process that is frozen, or whose loop user code blocks, between two statements must not keep
    # every pod from counting.
    session["idle_in_transaction_session_timeout"] = milliseconds
    if name != MIGRATE:
        # The client gives up by closing, which a backend that waits for a lock does not see: each
        # try would leave one behind, until the server has no connection left for anybody.
        session["statement_timeout"] = milliseconds
    return {"server_settings": session}


async def connect(dsn: str, settings: Settings, name: str) -> Connection:
    """One connection outside the pool (LISTEN, heartbeat, migration).

    Raises:
        DatabaseUnavailable: the server did not answer in `database_timeout` seconds.
    """
    try:
        connection: Connection = await asyncpg.connect(
            dsn,
            timeout=settings.database_timeout,
            command_timeout=settings.database_timeout,
            connection_class=Connection,
            **_options(settings, name),
        )
    except Exception as error:  # noqa: BLE001 - raised again
        reraise(error)
    return connection


class Pool:
    """The engine's few connections.

    Errors come out translated, and a connection that timed out is never reused.
    """

    def __init__(self, dsn: str, settings: Settings, name: str = "engine") -> None:
        self._dsn = dsn
        self._settings = settings
        self._name = name
        self._pool: asyncpg.Pool | None = None

    async def open(self) -> None:
        """Connect. Raises DatabaseUnavailable."""
        try:
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=1,
                max_size=self._settings.pool_size,
                timeout=self._settings.database_timeout,
                command_timeout=self._settings.database_timeout,
                connection_class=Connection,
                **_options(self._settings, self._name),
            )
        except Exception as error:  # noqa: BLE001 - raised again
            reraise(error)

    async def close(self) -> None:
        """Close; connections that do not say goodbye in time are cut. Closing twice is fine."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            await asyncio.wait_for(pool.close(), timeout=5)
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pool.terminate()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """A connection.

        If the body fails for reasons of infrastructure it is cut, not handed out again.

        Raises:
            DatabaseUnavailable: no connection, or it broke.
        """
        pool = self._pool  # `close` may come while the connection is in use
        if pool is None:
            raise NotStarted("the engine is not started")
        try:
            connection: Any = await pool.acquire(timeout=self._settings.database_timeout)
        except Exception as error:  # noqa: BLE001 - raised again
            reraise(error)
        try:
            yield connection
        except BaseException as error:  # noqa: BLE001 - raised again
            # A cancelled or timed-out statement may still hold its row locks on the server.
            if is_unavailable(error) or isinstance(error, asyncio.CancelledError):
                # One that is lost has left the pool by itself, and says so by an error.
                with suppress(asyncpg.InterfaceError):
                    connection.terminate()
            reraise(error)
        finally:
            await pool.release(connection)

    async def fetch(self, sql: str, *arguments: object) -> list[Any]:
        """Rows of one autocommit statement, run again after a deadlock."""

        async def once() -> list[Any]:
            async with self.acquire() as connection:
                rows: list[Any] = await connection.fetch(sql, *arguments)
                return rows

        return await self.again(once)

    async def transaction(self, body: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `body` in one transaction, the whole of it again after a deadlock or serialization
        failure.
        """

        async def once() -> T:
            async with self.acquire() as connection, connection.transaction():
                return await body(connection)

        return await self.again(once)

    async def again(self, once: Callable[[], Awaitable[T]]) -> T:
        """Call `once` until it does not end in a deadlock or the like, at most ten times.

        Raises:
            DatabaseUnavailable: it did so ten times: who asked has no part in that.
        """
        for round_number in range(9):
            try:
                return await once()
            except asyncpg.PostgresError as error:
                if not _runs_again(error):
                    raise
            await asyncio.sleep(random.uniform(0, 0.01 * 2**round_number))
        try:
            return await once()
        except asyncpg.PostgresError as error:
            if _runs_again(error):
                raise DatabaseUnavailable(described(error)) from error
            raise
