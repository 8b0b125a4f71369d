"""What the cases share: quick settings, an engine whose handlers log their calls, a wire that can
be spoiled.

A case is one test. Its docstring names the public thread (repository and number) and the right
value."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

import fanout.pool
from fanout import Document, Engine, Job, PermanentError, Settings, TransientError
from fanout.statements import load_statements

__all__ = [
    "Calls",
    "Fault",
    "Pod",
    "Proxy",
    "Wire",
    "counters",
    "engine_on",
    "quick",
    "settle",
    "until",
    "until_true",
]

T = TypeVar("T")

QUICK: Final[dict[str, Any]] = {
    "lease": 1.5,
    "heartbeat": 0.3,
    "sweep_interval": 0.3,
    "poll_interval": 0.2,
    "backoff_base": 0.05,
    "backoff_max": 0.1,
    "database_timeout": 2,
    "stop_grace": 2,
    "timeout": 20,
    "timeout_grace": 0.5,
}
ROOT: Final = Path(__file__).parents[2]


def quick(**changes: Any) -> Settings:
    """Settings with which half a minute is over in two seconds."""
    return Settings(**{**QUICK, **changes})


class Calls:
    """Every call of a handler, kept outside the database: (job id, attempt), and when it began
    by this clock."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, int]] = []
        self.at: list[float] = []
        self.ends: list[tuple[int, int]] = []

    def of(self, job_id: int) -> list[int]:
        """The attempts in which a job was called."""
        return [attempt for called, attempt in self.starts if called == job_id]

    @property
    def repeated(self) -> list[tuple[int, int]]:
        """Attempts that were called more than once: never."""
        return [one for one, n in Counter(self.starts).items() if n > 1]


def handlers(engine: Engine, calls: Calls) -> None:
    """`leaf` does what its payload says, `batch` fans out `n` of them, `report` follows up."""

    @engine.job(max_retries=3)
    async def leaf(job: Job[Any]) -> Any:
        calls.starts.append((job.id, job.attempt))
        calls.at.append(time.monotonic())
        wish = job.payload or {}
        await asyncio.sleep(wish.get("seconds", 0))
        if wish.get("broken"):
            raise PermanentError("not a PDF")
        if job.failures < wish.get("flaky", 0):
            raise TransientError("not yet")
        calls.ends.append((job.id, job.attempt))
        return {"attempt": job.attempt}

    @engine.job(on_closed="report")
    async def batch(job: Job[Any]) -> None:
        calls.starts.append((job.id, job.attempt))
        wish = job.payload
        mix = wish.get("mix", {})
        await job.fan_out(
            "leaf",
            (Document(f"{i:05}", mix.get(str(i), wish.get("child"))) for i in range(wish["n"])),
        )

    @engine.job
    async def report(job: Job[Any]) -> Any:
        calls.starts.append((job.id, job.attempt))
        return job.payload["outcome"]


@contextlib.asynccontextmanager
async def engine_on(dsn: str, calls: Calls | None = None, **changes: Any) -> AsyncIterator[Engine]:
    """A started engine with the handlers above; no worker yet."""
    engine = Engine(dsn, settings=quick(**changes))
    handlers(engine, calls if calls is not None else Calls())
    async with engine:
        yield engine


async def until(conn: asyncpg.Connection, sql: str, *arguments: object, seconds: float = 10) -> Any:
    """Wait until a query gives something that is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := await conn.fetchval(sql, *arguments)):
        if time.monotonic() > deadline:
            rows = await conn.fetch(
                "SELECT kind, status, attempt, failures, deaths, count(*) FROM fanout.job "
                "GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2"
            )
            raise AssertionError(f"not within {seconds} s: {sql}\n" + "\n".join(map(str, rows)))
        await asyncio.sleep(0.02)
    return value


async def until_true(fact: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something is true of this process."""
    async with asyncio.timeout(seconds):
        while not fact():  # noqa: ASYNC110 -- facts of all kinds, most without an event
            await asyncio.sleep(0.01)


async def counters(conn: asyncpg.Connection, job_id: int) -> tuple[str, int, int, int, int]:
    """(status, total, completed, failed, cancelled)."""
    row = await conn.fetchrow(
        "SELECT status, total, completed, failed, cancelled FROM fanout.job WHERE id = $1", job_id
    )
    assert row is not None
    return (*row,)


async def settle(conn: asyncpg.Connection, seconds: float = 5) -> None:
    """No session of the engine's is left inside a transaction, and no row is locked by one that
    is gone."""
    deadline = time.monotonic() + seconds
    while True:
        left = await conn.fetch(
            "SELECT application_name, state, query FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend' AND state <> 'idle'"
        )
        if not left:
            break
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.01)
    await conn.fetch("SELECT id FROM fanout.job ORDER BY id FOR UPDATE NOWAIT")


# -- a wire that can be spoiled ----------------------------------------------------------------


class Fault(Enum):
    """What happens to one await of the database."""

    CANCELLED_BEFORE = auto()
    """The task is cancelled before anything is sent."""
    CANCELLED_SENT = auto()
    """The task is cancelled when the statement is on its way."""
    CANCELLED_AFTER = auto()
    """The statement was carried out, then the task is cancelled."""
    LOST_BEFORE = auto()
    """The connection breaks, nothing was sent."""
    LOST_AFTER = auto()
    """The statement was carried out, its reply was lost with the connection."""
    TIMEOUT_BEFORE = auto()
    """Nothing was sent in time."""
    TIMEOUT_AFTER = auto()
    """The statement was carried out, its reply came too late."""

    @property
    def cancels(self) -> bool:
        return self.name.startswith("CANCELLED")

    @property
    def is_after(self) -> bool:
        return self.name.endswith("AFTER")


class Wire:
    """Numbers every await of the database from 0, and spoils those that `plan(number, query)`
    names."""

    def __init__(self, plan: Callable[[int, str], Fault | None] = lambda *_: None) -> None:
        self.plan = plan
        self.seen: list[str] = []

    async def through(
        self, connection: asyncpg.Connection, query: str, call: Callable[[], Awaitable[T]]
    ) -> T:
        fault = self.plan(len(self.seen), query)
        self.seen.append(query)
        if fault is None:
            return await call()
        task = asyncio.current_task()
        assert task is not None
        if fault is Fault.CANCELLED_SENT:
            task.cancel()  # raised where the call first waits, which is after it has sent
            return await call()
        if fault.is_after:
            await call()
        if fault.cancels:
            task.cancel()
            await asyncio.sleep(0)
        if fault in {Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER}:
            raise TimeoutError
        connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("the wire was cut")

    @contextlib.contextmanager
    def laid(self) -> Iterator[None]:
        """Pools that are opened meanwhile use this wire; BEGIN and COMMIT go through it too."""
        wire = self

        class Spoiled(fanout.pool.Connection):
            async def execute(self, query: str, *args: Any, **options: Any) -> Any:
                return await wire.through(
                    self, query, lambda: asyncpg.Connection.execute(self, query, *args, **options)
                )

            async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
                return await wire.through(
                    self, query, lambda: asyncpg.Connection.fetch(self, query, *args, **options)
                )

            async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
                return await wire.through(
                    self, query, lambda: asyncpg.Connection.fetchrow(self, query, *args, **options)
                )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fanout.pool, "Connection", Spoiled)
            yield


def name_of(query: str, schema: str = "fanout") -> str:
    """The name of one of the engine's statements; a word like BEGIN or COMMIT for what is not
    one."""
    for name, sql in load_statements(schema).items():
        if sql == query:
            return name
    return query.split(maxsplit=1)[0].rstrip(";")


class _Ended(Exception):
    """One side has closed."""


class Proxy:
    """A TCP proxy before the server that can stop forwarding without a FIN, or cut everything."""

    def __init__(self, dsn: str) -> None:
        self._parts = urlsplit(dsn)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.refuses = False
        self.connections = 0
        self.swallow_reply_to: bytes | None = None
        """After the client sent this, the server's reply is dropped and the connection cut,
        once."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.sleep(0.01)  # aborted transports close on the loop

    @property
    def dsn(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        user = self._parts.netloc.rpartition("@")[0]
        return f"postgresql://{user}@127.0.0.1:{port}{self._parts.path}?sslmode=disable"

    def stall(self) -> None:
        """Forward nothing, and tell nobody."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        both = [writer]
        self._writers |= set(both)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._open.wait()
            upstream = await self._connect()
            both.append(upstream[1])
            self._writers |= set(both)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream[1]))
                group.create_task(self._pump(upstream[0], writer))
        except* (OSError, _Ended):
            pass
        finally:
            self._tasks.discard(task)
            self._writers -= set(both)
            for one in both:
                one.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        query = parse_qs(self._parts.query)
        host = (query.get("host") or [self._parts.hostname or "127.0.0.1"])[0]
        port = int((query.get("port") or [str(self._parts.port or 5432)])[0])
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise _Ended


# -- processes ---------------------------------------------------------------------------------


class Pod:
    """A worker process, `python -m tests.cases.pod`, and what it wrote."""

    def __init__(self, dsn: str, folder: Path, **environment: str) -> None:
        self.log = folder / f"calls-{time.time_ns()}"
        self.errors = folder / f"errors-{time.time_ns()}"
        variables = {f"FANOUT_{name.upper()}": str(value) for name, value in QUICK.items()}
        with self.errors.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.cases.pod"],
                cwd=ROOT,
                env=os.environ
                | variables
                | {"DATABASE_URL": dsn, "POD_LOG": str(self.log)}
                | environment,
                stdout=out,
                stderr=out,
            )

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    async def up(self, seconds: float = 20) -> Pod:
        await self.line("up", seconds)
        return self

    async def line(self, start: str, seconds: float = 20) -> str:
        """Wait for a line that begins with `start`."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.lines:
                if line.startswith(start):
                    return line
            assert self.popen.poll() is None, self.errors.read_text()[-3000:]
            assert time.monotonic() < deadline, (start, self.lines, self.errors.read_text()[-3000:])
            await asyncio.sleep(0.02)

    async def ended(self, seconds: float = 10) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.popen.poll()) is None:
            assert time.monotonic() < deadline, self.errors.read_text()[-3000:]
            await asyncio.sleep(0.02)
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)
