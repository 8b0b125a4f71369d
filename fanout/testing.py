"""For the tests of programs that use the engine: a real database, and time that a test moves.

    async with testing.engine(app.engine) as bench:
        handle = await bench.run(app.papers_extract, [("a", {"pages": 3})])
        await bench.drain()                       # everything that is due, follow-ups too
        await bench.advance(3600)                 # what was to come within the hour is due now
        assert [event.type for event in await bench.events(handle)] == ["log", "end"]

A handler can also be called by itself, without a database: `await handler(testing.job(payload))`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg

from . import embedded
from .engine import Engine
from .errors import ConfigurationError, UsageError
from .handlers import Handler
from .job import Job, chunks
from .migrate import migrate
from .settings import Settings
from .statements import load_statements
from .values import Claim, Dispatched, Document

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from .events import Event
    from .handle import JobHandle
    from .runtime import Runtime

__all__ = ["Bench", "RecordedJob", "database", "engine", "job"]

P = TypeVar("P")

SERVER_VARIABLE: Final = "FANOUT_TEST_DSN"
QUICK: Final = {
    "poll_interval": 0.05,
    "sweep_interval": 0.1,
    "stop_grace": 2.0,
    "backoff_jitter": 0.0,
    "migrate_on_start": False,
}
"""Where a test would wait, or would not know for how long."""
LOOK_SECONDS: Final = 0.005
RUN_LOOK_SECONDS: Final = 0.02
SHOWN: Final = 10


# -- a database ------------------------------------------------------------------------------------


class _Server:
    """A throw-away server of this process, with a migrated template for each schema name.

    Started on first use; gone when the process ends. FANOUT_TEST_DSN names another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dsn: str | None = None
        self._templates: dict[str, str] = {}
        self._undo = contextlib.ExitStack()

    def template(self, schema: str) -> tuple[str, str]:
        """An administrator's DSN, and the name of a template. Blocks: call it in a thread."""
        with self._lock:
            if self._dsn is None:
                self._dsn = os.environ.get(SERVER_VARIABLE) or self._start()
                atexit.register(self._undo.close)
            if schema not in self._templates:
                self._templates[schema] = asyncio.run(self._migrated(self._dsn, schema))
            return self._dsn, self._templates[schema]

    def _start(self) -> str:
        # Short, for the socket's path; open, for the server's own user under root.
        folder = Path(tempfile.mkdtemp(prefix="fanout-testing-"))
        folder.chmod(0o711)
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        server = embedded.acquire(folder / "pg", options={"fsync": "off", "max_connections": "200"})
        self._undo.callback(server.release)
        self._undo.callback(server.stop, "immediate")
        return server.dsn("postgres")

    async def _migrated(self, dsn: str, schema: str) -> str:
        name = f"fanout_template_{uuid4().hex[:12]}"
        await _execute(dsn, f"CREATE DATABASE {name}")
        self._undo.callback(_drop, dsn, name)
        await migrate(_with_database(dsn, name), schema=schema)
        # A copy is refused while anybody is connected to its template.
        await _execute(dsn, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        return name


_server = _Server()


def _drop(dsn: str, name: str) -> None:
    with contextlib.suppress(OSError, asyncpg.PostgresError):
        asyncio.run(_execute(dsn, f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def _with_database(dsn: str, name: str) -> str:
    parts = urlsplit(dsn)
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}/{name}{query}"


@asynccontextmanager
async def database(schema: str = "fanout") -> AsyncIterator[str]:
    """The DSN of a database with the engine's tables, empty, and dropped afterwards.

    The first one of a process takes two seconds, the others some hundredths. The server is an
    embedded one (`pip install "pgfanout[embedded]"`), or that of FANOUT_TEST_DSN.
    """
    dsn, template = await asyncio.to_thread(_server.template, schema)
    name = f"fanout_test_{uuid4().hex[:12]}"
    await _execute(dsn, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield _with_database(dsn, name)
    finally:
        await _execute(dsn, f"DROP DATABASE {name} WITH (FORCE)")


# -- an engine on it -------------------------------------------------------------------------------


@asynccontextmanager
async def engine(
    *source: Engine | Handler[Any, Any], settings: Settings | None = None
) -> AsyncIterator[Bench]:
    """The engine of a program, or one of some handlers, started on a database of the test's own.

    The engine itself is moved there for the time of the block, so what calls `app.engine.submit`
    works as well. Nothing runs before `run` or `drain`. Its settings stay, but for pauses that a
    test would only wait for; with `settings` those are taken as they are.

    Raises:
        ConfigurationError: neither one engine nor handlers, or the engine is started already.
    """
    it = _engine_of(source)
    before = it._dsn, it._is_embedded, it.settings  # noqa: SLF001 - moved, and moved back
    used = settings or it.settings.model_copy(update=QUICK)
    async with database(used.schema_name) as dsn:
        it._dsn, it._is_embedded, it.settings = dsn, False, used  # noqa: SLF001 - the same
        try:
            async with it:
                connection = await asyncpg.connect(dsn)
                try:
                    yield Bench(it, connection)
                finally:
                    await connection.close()
        finally:
            it._dsn, it._is_embedded, it.settings = before  # noqa: SLF001 - the same


def _engine_of(source: tuple[Engine | Handler[Any, Any], ...]) -> Engine:
    handlers = [one for one in source if isinstance(one, Handler)]
    engines = [one for one in source if isinstance(one, Engine)]
    if len(handlers) + len(engines) != len(source) or not source or len(engines) > 1:
        raise ConfigurationError(
            "engine", f"{source!r} is neither an engine nor handlers", "Give one, or those"
        )
    it = engines[0] if engines else Engine("moved")
    if it._store is not None:  # noqa: SLF001 - its own package
        raise ConfigurationError(
            "engine", "it is started already", "Give it before `async with engine`"
        )
    it.handlers.update({handler.name: handler for handler in handlers})
    return it


class Bench:
    """An engine under test. `connection` is an administrator's, to look at or change rows."""

    def __init__(self, engine: Engine, connection: asyncpg.Connection) -> None:
        self.engine = engine
        self.connection = connection
        self._sql = load_statements(engine.settings.schema_name)

    async def submit(
        self, target: Handler[Any, Any] | str, payload: Any = None, **more: Any
    ) -> JobHandle:
        """As `Engine.submit`; it waits for a `drain`."""
        return await self.engine.submit(target, payload, **more)

    async def run(
        self,
        target: Handler[P, Any],
        documents: Iterable[Document | tuple[str, Any]] | AsyncIterable[Any],
        *,
        name: str = "fanout_run",
        **more: Any,
    ) -> JobHandle:
        """As `Engine.run`, here and now, however many there are. Retries are not waited for: when
        nothing else is left to do, time is moved on to the next one, as by `advance`.
        """
        running = asyncio.ensure_future(
            self.engine.run(target, documents, inline_below=1 << 31, name=name, **more)
        )
        try:
            while not (await asyncio.wait([running], timeout=RUN_LOOK_SECONDS))[0]:
                if await self._next_retry(name) is not None:
                    await self._go_to_next_retry(name)
        finally:
            if running.cancel():
                await asyncio.wait([running])
        return running.result()

    async def _next_retry(self, name: str) -> float | None:
        rows = await self.connection.fetch(self._sql["next_retry"], name)
        return rows[0]["seconds"] if rows else None

    async def _go_to_next_retry(self, name: str) -> None:
        async with self.connection.transaction():
            # Or a job that is claimed just now would lose its lease.
            await self.connection.fetch(self._sql["hold"])
            seconds = await self._next_retry(name)
            if seconds is not None:
                await self.advance(max(0.0, seconds))

    async def drain(self, *, most: int = 10_000, seconds: float = 30) -> int:
        """Run everything that is due, and what becomes of it, until nothing is: children, their
        follow-ups, schedules. Not what is due later: `advance` first. Returns how many runs of
        handlers that took.

        Raises:
            AssertionError: it took more than `most` runs, or `seconds`; names what is left.
        """
        kinds = sorted(self.engine.handlers)
        try:
            async with asyncio.timeout(seconds), self.engine.worker() as worker:
                while await self._undrained(kinds, 1):
                    if worker.executed > most:
                        raise AssertionError(f"it goes on: {worker.executed} handlers were run")
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            left = "; ".join(await self._undrained(kinds, SHOWN))
            raise AssertionError(f"not drained after {seconds:g} s: {left}") from None
        return worker.executed

    async def _undrained(self, kinds: list[str], limit: int) -> list[str]:
        rows = await self.connection.fetch(self._sql["undrained"], kinds, limit)
        return [
            " ".join(str(row[name]) for name in row.keys() if row[name] is not None)  # noqa: SIM118
            for row in rows
        ]

    async def advance(self, by: float | timedelta) -> None:
        """Let time pass, in seconds: everything that the tables remember happened that much
        earlier, and what was to happen then is due: retries, `run_at`, deadlines, leases,
        schedules, retention. The clock itself stands where it stood.

        Raises:
            UsageError: time does not run backwards.
        """
        interval = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if interval < timedelta(0):
            raise UsageError("by", f"{by!r} is before now", "Give seconds, or a timedelta")
        schema = self.engine.settings.schema_name
        async with self.connection.transaction():
            for row in await self.connection.fetch(self._sql["advance"], schema):
                await self.connection.execute(row["statement"], interval)

    async def events(self, handle: JobHandle) -> list[Event]:
        """The events of a job so far; of one that is closed all of them, with its end."""
        row = await handle.job()
        root = self.engine.handle(row.root_id or row.id)
        if (await root.progress()).is_closed:
            return [event async for event in handle.events()]
        heads = await self.engine.events.heads([root.id])
        last = heads[root.id].last_number if root.id in heads else 0
        found: list[Event] = []
        if not last:
            return found
        async for event in root.events():
            if row.root_id is None or event.data.get("job") == row.id:
                found.append(event)
            if int(event.id.split(".")[1]) >= last:
                break
        return found


# -- a job without one -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One `job.log`."""

    message: str
    level: str
    fields: dict[str, Any]


@dataclass(slots=True)
class Record:
    """What a handler did with its job."""

    logs: list[Line] = field(default_factory=list)
    progress: list[tuple[int, int | None, str | None]] = field(default_factory=list)
    added: dict[str, float] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    """Names, in the order in which they were asked for."""
    checkpoints: list[Any] = field(default_factory=list)
    children: dict[str, list[Document]] = field(default_factory=dict)
    """Kind → documents that were fanned out."""


class _Slot:
    """A slot of a limit that nobody else wants."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def correct(self, weight: float) -> None:
        """Say that the use weighed otherwise."""


class RecordedJob(Job[P]):
    """A job for calling a handler directly: nothing is stored, `record` has what it did."""

    __slots__ = ("record",)

    def __init__(self, claim: Claim, payload: P, checkpoint: Any) -> None:
        super().__init__(claim, payload, cast("Runtime", None))
        self.checkpoint = checkpoint
        self.record = Record()

    @property
    def key(self) -> str:
        """Some key, the same for the same id."""
        return f"test-{self.id}"

    @property
    def batch(self) -> JobHandle:
        """Needs a database."""
        raise UsageError("batch", "this job is a made-up one", "Use testing.engine for follow-ups")

    def log(self, message: object, *, level: str = "info", **fields: Any) -> None:
        """Recorded in `record.logs`."""
        self.record.logs.append(Line(str(message), level, fields))

    def progress(self, done: int, of: int | None = None, message: str | None = None) -> None:
        """Recorded in `record.progress`."""
        self.record.progress.append((done, of, message))

    def add(self, **amounts: Any) -> None:
        """Summed in `record.added`."""
        super().add(**amounts)
        for name, amount in amounts.items():
            self.record.added[name] = self.record.added.get(name, 0) + amount

    def limit(self, name: str, *_: Any, **__: Any) -> Any:
        """A slot at once, recorded in `record.limits`."""
        self.record.limits.append(name)
        return _Slot()

    async def save_checkpoint(self, value: Any) -> None:
        """Recorded in `record.checkpoints`."""
        self.record.checkpoints.append(value)
        self.checkpoint = value

    async def fan_out(
        self,
        target: Handler[Any, Any] | str,
        documents: Any,
        **_: Any,
    ) -> Dispatched:
        """Recorded in `record.children`, by kind; a document that is known is passed over."""
        kind = target.name if isinstance(target, Handler) else target
        there = {one.key: one for one in self.record.children.get(kind, [])}
        before, seen = len(there), 0
        async for chunk in chunks(documents, 1000):
            for document in chunk:
                seen += 1
                there.setdefault(document.key, document)
        self.record.children[kind] = list(there.values())
        return Dispatched(len(there) - before, seen - (len(there) - before))


def job(
    payload: P,
    *,
    attempt: int = 1,
    failures: int = 0,
    document_key: str | None = None,
    checkpoint: Any = None,
    kind: str = "test",
) -> RecordedJob[P]:
    """A made-up job, to call a handler with: `await papers_extract(testing.job(paper))`.

    `payload` is what the handler would get, a model for example, or None. `job.record` says what
    the handler did with its job.
    """
    claim = Claim(
        id=1,
        attempt=attempt,
        kind=kind,
        depth=0 if document_key is None else 1,
        parent_id=None if document_key is None else 2,
        root_id=None if document_key is None else 2,
        document_key=document_key,
        deaths=0,
        failures=failures,
        max_retries=3,
        total=0,
        priority=5,
        run_at=datetime.now(UTC),
        payload="null",
        checkpoint=None,
    )
    return RecordedJob(claim, payload, checkpoint)
