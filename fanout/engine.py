"""The engine: what a program holds.

Handlers are registered on it, jobs are submitted to it, workers run on it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar, Unpack, overload
from uuid import uuid4

from .alerts import Alert, Hook, alert_of
from .checks import check_kind, check_limit, check_max_retries, check_priority, check_status
from .cron import Missed, Schedule, Schedules
from .embedded import acquire
from .errors import ConfigurationError, DatabaseUnavailable, JobNotFound, UsageError
from .event_store import EventStore
from .handle import JobHandle
from .handlers import Handler, make_handler
from .inline import InlineRunner, Selection, open_batch
from .limits import Limits
from .migrate import check_schema, migrate
from .options import Options, encode_options
from .pool import Pool
from .settings import MAX_PAYLOAD_BYTES, Settings
from .states import Status
from .store import Store
from .sweeper import Sweeper
from .values import NewJob
from .wakeups import Waker
from .webhooks import KIND as WEBHOOK
from .webhooks import MAX_RETRIES as WEBHOOK_RETRIES
from .webhooks import Webhooks, sending
from .wire import checked_text, encode
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterable,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        Sequence,
    )
    from pathlib import Path
    from types import TracebackType
    from uuid import UUID

    import asyncpg

    from .embedded import EmbeddedServer
    from .job import Job
    from .values import Counted, Document, JobSummary, WorkerRow

__all__ = ["Engine", "Request"]

P = TypeVar("P")
R = TypeVar("R")
W = TypeVar("W", bound=Worker)

MAX_DELAY_SECONDS: Final = 10 * 366 * 86_400
LARGEST_ID: Final = 2**63 - 1


class _Register(Protocol):
    """What `@engine.job(…)` returns."""

    @overload
    def __call__(self, function: Callable[[Job[P]], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[[Job[P]], R], /) -> Handler[P, R]: ...


class Request:
    """One job of `Engine.submit_many`: the arguments of `Engine.submit`."""

    __slots__ = (
        "delay",
        "key",
        "max_retries",
        "on_closed",
        "options",
        "payload",
        "priority",
        "run_at",
        "target",
        "tenant",
    )

    def __init__(
        self,
        target: Handler[Any, Any] | str,
        payload: Any = None,
        *,
        key: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        delay: float | None = None,
        max_retries: int | None = None,
        on_closed: str | None = None,
        tenant: str = "",
        **options: Unpack[Options],
    ) -> None:
        self.target = target
        self.payload = payload
        self.key = key
        self.priority = priority
        self.run_at = run_at
        self.delay = delay
        self.max_retries = max_retries
        self.on_closed = on_closed
        self.tenant = tenant
        self.options = options


class Engine:
    """A fan-out engine over one PostgreSQL schema.

    `Engine(dsn)`, or `Engine()` with DATABASE_URL set, or `Engine.embedded()`. Nothing happens
    before `async with engine:` or `start()`; two engines in one process, and any event loop, are
    fine.

    Raises:
        ConfigurationError: neither a DSN nor DATABASE_URL: a pod that lost its setting must not
            take work into a
            private database.
    """

    def __init__(self, dsn: str | None = None, *, settings: Settings | None = None) -> None:
        self._dsn = dsn or os.environ.get("DATABASE_URL") or ""
        if not self._dsn:
            raise ConfigurationError(
                "dsn",
                "neither a DSN nor DATABASE_URL is given",
                "Use Engine('postgresql://…'), set DATABASE_URL, or ask for Engine.embedded()",
            )
        self.settings = settings or Settings()
        self.handlers: dict[str, Handler[Any, Any]] = {}
        """Kind → handler."""
        self.declared: dict[str, Schedule] = {}
        """Name → schedule, as this program's code declares it."""
        self._embedded_home: Path | None = None
        self._is_embedded = False
        self._server: EmbeddedServer | None = None
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._pool: Pool | None = None
        self._store: Store | None = None
        self._waker: Waker | None = None
        self._events: EventStore | None = None
        self._installation_id: UUID | None = None
        self._workers: list[Worker] = []
        self._inline: InlineRunner | None = None
        self._alert_hooks: list[Hook] = []
        if self.settings.webhooks:
            self.job(
                name=WEBHOOK,
                max_retries=WEBHOOK_RETRIES,
                timeout=self.settings.webhook_timeout * 2,
            )(sending(self.settings, lambda: self.store))

    @classmethod
    def embedded(cls, home: Path | None = None, *, settings: Settings | None = None) -> Self:
        """An engine on a real PostgreSQL of this user's own, started on first use and stopped with
        its last user.

        `home` is the folder of its data (None: the user's data folder). Needs `pip install
        "pgfanout[embedded]"`.
        """
        engine = cls("embedded", settings=settings)
        engine._is_embedded = True
        engine._embedded_home = home
        return engine

    # -- handlers ---------------------------------------------------------------------------------

    @overload
    def job(self, function: Callable[[Job[P]], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def job(self, function: Callable[[Job[P]], R], /) -> Handler[P, R]: ...
    @overload
    def job(
        self,
        *,
        name: str | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        on_closed: str | Handler[Any, Any] | None = None,
        permanent: tuple[type[BaseException], ...] = (),
        transient: tuple[type[BaseException], ...] = (),
        limit: int | None = None,
        limit_per_partition: int | None = None,
        **options: Unpack[Options],
    ) -> _Register: ...

    def job(
        self,
        function: Callable[[Job[Any]], Any] | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        on_closed: str | Handler[Any, Any] | None = None,
        permanent: tuple[type[BaseException], ...] = (),
        transient: tuple[type[BaseException], ...] = (),
        limit: int | None = None,
        limit_per_partition: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Register a handler: `@engine.job` or `@engine.job(max_retries=3, timeout=1800)`.

        Args:
            name: the kind; default: the function's name.
            timeout: seconds one run may take; default 30 min, with `on_closed` 60 min.
            max_retries: retries after transient errors; default 3, with `on_closed` 2.
            on_closed: the kind of the follow-up job that is enqueued, exactly once, when a job of
                this kind closes.
            permanent, transient: exceptions to be judged so, before the table in `fanout.failures`.
            limit: how many of its jobs run at once, over all pods, until `fanout limit set` says
                otherwise.
            limit_per_partition: and how many of one partition.
            options: defaults of batches of this kind, see `Options`.

        Raises:
            ConfigurationError: the name cannot be a kind or is taken, or the function is not a
                handler.
        """

        def register(function: Callable[[Job[Any]], Any]) -> Handler[Any, Any]:
            handler = make_handler(
                function,
                self.settings,
                name=name,
                timeout=timeout,
                max_retries=max_retries,
                on_closed=on_closed,
                permanent=permanent,
                transient=transient,
                options=options,
                limit=limit,
                limit_per_partition=limit_per_partition,
            )
            if handler.name in self.handlers:
                raise ConfigurationError(
                    "name",
                    f"there is a handler for {handler.name!r} already",
                    "Give each handler a name of its own",
                )
            self.handlers[handler.name] = handler
            return handler

        return register if function is None else register(function)

    # -- schedules --------------------------------------------------------------------------------

    def cron(
        self,
        expression: str,
        *,
        payload: Any = None,
        name: str | None = None,
        timezone: str = "UTC",
        missed: Missed = "one",
        priority: int | None = None,
        max_retries: int | None = None,
        tenant: str = "",
        **options: Unpack[Options],
    ) -> Callable[[Handler[P, R]], Handler[P, R]]:
        """Submit a job of a handler at set times: `@engine.cron("0 7 * * 1-5")` above
        `@engine.job`. The arguments are those of `schedule`; the name is the kind.
        """

        def declare(handler: Handler[P, R]) -> Handler[P, R]:
            if not isinstance(handler, Handler):
                raise ConfigurationError(
                    "cron", f"{handler!r} is no handler", "Put @engine.job below @engine.cron"
                )
            self.schedule(
                name or handler.name,
                handler,
                expression,
                payload=payload,
                timezone=timezone,
                missed=missed,
                priority=priority,
                max_retries=max_retries,
                tenant=tenant,
                **options,
            )
            return handler

        return declare

    def schedule(
        self,
        name: str,
        target: Handler[P, R] | str,
        expression: str,
        *,
        payload: P | Mapping[str, Any] | None = None,
        timezone: str = "UTC",
        missed: Missed = "one",
        priority: int | None = None,
        max_retries: int | None = None,
        tenant: str = "",
        **options: Unpack[Options],
    ) -> None:
        """Declare that jobs are submitted at set times, each once over all workers. Written to the
        database when a worker starts; whether it is enabled is the operators' alone.

        Args:
            name: of the schedule; letters, digits and underscores.
            target, payload, priority, max_retries, tenant, options: as of `submit`.
            expression: minute, hour, day of the month, month, day of the week.
            timezone: whose wall clock that is, like Europe/Berlin.
            missed: what becomes of times at which no worker lived: `one` job for all of them,
                `skip` them, or `all`, the last hundred at most.

        Raises:
            UsageError: names the field and the remedy.
        """
        if name in self.declared:
            raise ConfigurationError(
                "name", f"there is a schedule {name!r} already", "Give each a name of its own"
            )
        job = self._checked(
            Request(
                target,
                payload,
                priority=priority,
                max_retries=max_retries,
                tenant=tenant,
                **options,
            )
        )
        self.declared[name] = Schedule(
            name=name,
            kind=job.kind,
            expression=expression,
            timezone=timezone,
            missed=missed,
            payload=job.payload,
            priority=job.priority,
            max_retries=job.max_retries,
            tenant=job.tenant,
            options=job.options,
        ).checked()

    @property
    def schedules(self) -> Schedules:
        """The schedules in the database: list, add, pause, resume, remove, run."""
        return Schedules(self.store)

    # -- limits -----------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What may run at once, and how often, over all pods: list, get, set, reset."""
        return Limits(self.store)

    # -- alerts -----------------------------------------------------------------------------------

    def on_alert(self, hook: Hook) -> Hook:
        """Register a function that is told when an incident begins and when it has ended:
        `@engine.on_alert`.

        It gets an `Alert`, on one of the workers that have such a hook, once; it may be async, a
        plain one runs in a thread. What it raises is logged.
        """
        self._alert_hooks.append(hook)
        return hook

    async def alerts(self, *, open_only: bool = False, limit: int = 50) -> list[Alert]:
        """Incidents, newest first."""
        rows = await self.store.rows("incidents", open_only, check_limit(limit))
        return [alert_of(row) for row in rows]

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and bring the schema up to date.

        Again, and from many coroutines at once, is fine: an engine is started once, whole, or not
        at all.

        Raises:
            DatabaseUnavailable, SchemaMismatch.
        """
        async with self._alone():
            if self._store is not None:
                return
            if self._is_embedded:
                self._server = await asyncio.to_thread(acquire, self._embedded_home)
                self._dsn = self._server.dsn()
            try:
                await self._open()
            except BaseException:
                await self._close()
                raise

    def _alone(self) -> asyncio.Lock:
        """One start or stop at a time.

        A lock belongs to the loop that first waited for it; an engine to no loop.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = loop, asyncio.Lock()
        return self._lock[1]

    async def _open(self) -> None:
        schema = self.settings.schema_name
        if self.settings.migrate_on_start:
            await migrate(self._dsn, schema=schema, settings=self.settings)
        self._pool = Pool(self._dsn, self.settings)
        await self._pool.open()
        await check_schema(self._pool, schema)
        store = Store(self._pool, schema)
        self._installation_id = await store.installation_id()
        self._waker = Waker(store, self.settings)
        self._events = EventStore(self._pool, schema)
        self._store = store

    async def stop(self) -> None:
        """Stop this engine's workers, then disconnect. Again is fine."""
        async with self._alone():
            inline = [] if self._inline is None else [self._inline]
            await asyncio.gather(*(worker.stop() for worker in [*self._workers, *inline]))
            self._workers.clear()
            self._inline = None
            await self._close()

    async def _close(self) -> None:
        if self._waker is not None:
            await self._waker.close()
        if self._pool is not None:
            await self._pool.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.release)
        self._store = self._waker = self._events = self._pool = self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def dsn(self) -> str:
        """Where this engine's database is. May hold a password: never print it."""
        return self._dsn

    @property
    def store(self) -> Store:
        """The statements. Raises DatabaseUnavailable before `start()`."""
        if self._store is None:
            raise DatabaseUnavailable(
                "the engine is not started: use `async with engine:` or `await engine.start()`"
            )
        return self._store

    @property
    def events(self) -> EventStore:
        """The statements of streams. Raises DatabaseUnavailable before `start()`."""
        if self._events is None:
            raise DatabaseUnavailable("the engine is not started: `async with engine:`")
        return self._events

    @property
    def webhooks(self) -> Webhooks:
        """Where webhooks are sent: add, list, rotate, test. Settings(webhooks=True) sends them."""
        return Webhooks(self.store, self.settings, self.submit)

    def worker(
        self,
        *,
        concurrency: int | None = None,
        name: str | None = None,
        exit_when_stuck: bool = False,
    ) -> Worker:
        """A worker for this engine's handlers.

        `async with engine.worker():`. It installs no signal handlers.

        Args:
            concurrency: handlers that run at once; default: the settings'.
            name: shown in lists; default host and pid. Two workers of one name are two workers.
            exit_when_stuck: end the process when a handler blocks the event loop beyond its
                timeout.
        """
        worker = self._made(
            Worker,
            concurrency=concurrency,
            name=name,
            exit_when_stuck=exit_when_stuck,
            schedules=list(self.declared.values()),
            alert_hooks=self._alert_hooks,
        )
        self._workers = [one for one in self._workers if not one.is_stopped]
        self._workers.append(worker)
        return worker

    def _made(self, what: type[W], *, name: str | None, **options: Any) -> W:
        store = self.store
        if name:
            checked_text(name, "name", 255)
        assert self._installation_id is not None  # noqa: S101 - set together with the store
        assert self._waker is not None  # noqa: S101 - set together with the store
        assert self._events is not None  # noqa: S101 - set together with the store
        return what(
            store,
            self.settings,
            self._dsn,
            self.handlers,
            self._installation_id,
            self._waker,
            self._events,
            name=name,
            **options,
        )

    @property
    def local_workers(self) -> list[Worker]:
        """The workers of this engine in this process, for health checks and metrics."""
        return list(self._workers)

    def sweeper(self) -> Sweeper:
        """A sweeper that does not run, for a round by hand: `await engine.sweeper().sweep()`."""

        def wake(counted: Counted) -> None:
            for kind in counted.follow_ups:
                self.wake(kind)

        return Sweeper(
            self.store,
            self.settings,
            on_counted=wake,
            on_ended=self._tell_ended,
            on_resumed=self.wake,
        )

    # -- submitting -------------------------------------------------------------------------------

    async def submit(
        self,
        target: Handler[P, R] | str,
        payload: P | Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        delay: float | None = None,
        max_retries: int | None = None,
        on_closed: str | None = None,
        tenant: str = "",
        connection: asyncpg.Connection | None = None,
        **options: Unpack[Options],
    ) -> JobHandle:
        """Enqueue one job and return at once.

        Args:
            target: a handler, or the kind of one that is served elsewhere.
            payload: at most 1 KB of JSON: ids, not bodies. Checked against the handler's
                annotation.
            key: idempotency key. The same key with the same content gives the same job, whoever
                submits, however often.
            priority: 0 (first) to 9 (last); default 5.
            run_at, delay: not before this time (with a time zone), or in so many seconds.
            tenant: whose job it is; idempotency keys are a tenant's own.
            connection: the caller's own asyncpg connection: the job lives or dies with the caller's
                transaction, and
                workers find it within `poll_interval` of the commit, or at once after
                `engine.wake(kind)`.
            options: about a batch, see `Options`: partition, closing, concurrency, fail_after,
                deadline, budget, webhook.

        Raises:
            UsageError: names the field and the remedy; nothing was submitted.
            IdempotencyConflict: the key belongs to a job with other content.
            DatabaseUnavailable: with a key, simply submit again.
        """
        request = Request(
            target,
            payload,
            key=key,
            priority=priority,
            run_at=run_at,
            delay=delay,
            max_retries=max_retries,
            on_closed=on_closed,
            tenant=tenant,
            **options,
        )
        return (await self.submit_many([request], connection=connection))[0]

    async def submit_many(
        self, requests: Sequence[Request], *, connection: asyncpg.Connection | None = None
    ) -> list[JobHandle]:
        """Enqueue many jobs in one round trip, all or none. Raises as `submit` does."""
        if not requests:
            return []
        jobs = [self._checked(request) for request in requests]
        submitted = await self.store.submit(jobs, connection)
        if connection is None:
            for kind in {
                job.kind for job, done in zip(jobs, submitted, strict=True) if done.created
            }:
                self.wake(kind)
        return [self._handle(done.id, created=done.created) for done in submitted]

    async def run(
        self,
        target: Handler[P, R] | str,
        documents: Iterable[Document | tuple[str, Any]] | AsyncIterable[Document | tuple[str, Any]],
        *,
        inline_below: int = 50,
        name: str = "fanout_run",
        key: str | None = None,
        priority: int | None = None,
        max_retries: int | None = None,
        on_closed: str | None = None,
        tenant: str = "",
        **options: Unpack[Options],
    ) -> JobHandle:
        """One batch without a manager of your own: a child of `target` for each document.

        A small one, of work that takes seconds, is run in this process, at once, and this returns
        when it is closed; a large one is queued, and this returns when that is committed. The
        handler, the rows, counters, events, retries, limits and the follow-up are the same, and
        nobody ever sees half a batch. Cancelled, this lets go of what runs here, at no cost, and
        workers go on with it; so they do when this process dies.

        Args:
            target: a handler, or the kind of one. One that is served elsewhere is always queued.
            documents: a list or an (async) iterator of `Document`s or (key, payload) pairs; all
                are read, and then the batch is made.
            inline_below: fewer documents than this are run here; 0: none ever.
            name: the kind of the batch itself.
            key: idempotency key, of the same documents in any order. One that runs already is
                joined.
            max_retries: of the children; default: the handler's.
            priority, on_closed, tenant, options: of the batch, as of `submit`.

        Raises:
            UsageError: names the field, or the document, and the remedy; nothing was submitted.
            IdempotencyConflict: the key belongs to a job with other content.
            DatabaseUnavailable: the batch was made whole, or not at all; with a key, call again.
        """
        handler = target if isinstance(target, Handler) else self.handlers.get(target)
        kind = handler.name if handler is not None else check_kind(target)
        check_max_retries(max_retries)
        if inline_below < 0:
            raise UsageError(
                "inline_below", f"{inline_below!r} is not a count", "Give 0 (never) or more"
            )
        if name in self.handlers:
            raise UsageError(
                "name", f"{name!r} is a handler's", "Give the batch a name of its own, or none"
            )
        selection = Selection(handler, self.settings)
        try:
            await selection.read(documents)
            job = self._checked(
                Request(
                    name,
                    {"kind": kind, "documents": selection.count, "sha256": selection.digest},
                    key=key,
                    priority=priority,
                    on_closed=on_closed,
                    tenant=tenant,
                    **options,
                )
            )
            if handler is not None and selection.count < inline_below:
                return await self._run_inline(job, selection, handler, max_retries)
            opened = await open_batch(
                self.store,
                job,
                selection,
                kind=kind,
                max_retries=max_retries
                if max_retries is not None or handler is None
                else handler.max_retries,
                on_closed=None if handler is None else handler.on_closed,
                token=uuid4(),
                lease_seconds=self.settings.lease,
            )
        finally:
            selection.close()
        for woken in {kind, *(one for counted in opened.counted for one in counted.follow_ups)}:
            self.wake(woken)
        return self._handle(opened.id, created=opened.created)

    async def _run_inline(
        self,
        job: NewJob,
        selection: Selection,
        handler: Handler[Any, Any],
        max_retries: int | None,
    ) -> JobHandle:
        runner = await self._runner(handler)
        retries = handler.max_retries if max_retries is None else max_retries
        opened, batch = await runner.begin(job, selection, handler, retries)
        handle = self._handle(opened.id, created=opened.created)
        await runner.wait(handle, batch)
        return handle

    async def _runner(self, handler: Handler[Any, Any]) -> InlineRunner:
        """What runs small batches, one of these an engine, from the first one on."""
        async with self._alone():
            handlers = {**self.handlers, handler.name: handler}
            if self._inline is not None and not self._inline.is_usable:
                self._workers.append(self._inline)  # to be stopped, and seen as failed
                self._inline = None
            if self._inline is None:
                name = f"{socket.gethostname()}-{os.getpid()} inline"
                self._inline = self._made(InlineRunner, name=name)
            await self._inline.serve(handlers)
            return self._inline

    def _checked(self, request: Request) -> NewJob:
        handler = (
            request.target
            if isinstance(request.target, Handler)
            else self.handlers.get(request.target)
        )
        kind = handler.name if handler is not None else check_kind(request.target)
        if handler is None:
            payload = encode(request.payload, "payload", MAX_PAYLOAD_BYTES)
        else:
            payload = handler.encode_payload(request.payload, "payload", MAX_PAYLOAD_BYTES)
        check_priority(request.priority)
        check_max_retries(request.max_retries)
        _check_due(request.run_at, request.delay)
        on_closed = request.on_closed or (handler.on_closed if handler else None)
        return NewJob(
            kind=kind,
            payload=payload,
            tenant=checked_text(request.tenant, "tenant", 128) if request.tenant else "",
            key=None if request.key is None else checked_text(request.key, "key", 512),
            priority=request.priority,
            run_at=request.run_at,
            delay=request.delay,
            max_retries=request.max_retries
            if request.max_retries is not None
            else handler.max_retries
            if handler
            else None,
            on_closed=None if on_closed is None else check_kind(on_closed, "on_closed"),
            options=encode_options(request.options),
        )

    def wake(self, kind: str) -> None:
        """Hint to idle workers that jobs of `kind` are due: after the commit of a submit on a
        connection of one's own.
        """
        if self._waker is not None:
            self._waker.wake(kind)

    # -- reading and steering ---------------------------------------------------------------------

    def handle(self, job_id: int) -> JobHandle:
        """A handle on a job, which is not looked up before it is used.

        Raises:
            JobNotFound: no job can have that id.
        """
        if job_id not in range(1, LARGEST_ID + 1):
            raise JobNotFound(job_id)
        return self._handle(job_id)

    def _handle(self, job_id: int, *, created: bool = False) -> JobHandle:
        return JobHandle(
            job_id,
            self.store,
            self.events,
            created=created,
            retries=self.wake,
            ended=self._tell_ended,
            handlers=self.handlers,
            settings=self.settings,
        )

    def _tell_ended(self, job_ids: Sequence[int]) -> None:
        """Hint to workers that claims on these jobs, or on children of them, were taken away."""
        if self._waker is not None:
            self._waker.ended(job_ids)

    async def find(self, key: str, *, tenant: str = "") -> JobHandle | None:
        """The job that was submitted with an idempotency key; None: there is none."""
        job_id = await self.store.find_by_key(checked_text(key, "key", 512), tenant)
        return None if job_id is None else self.handle(job_id)

    async def jobs(
        self,
        *,
        kind: str | None = None,
        status: Status | str | None = None,
        before_id: int | None = None,
        limit: int = 50,
        tenant: str | None = None,
    ) -> list[JobSummary]:
        """A page of root jobs, newest first, of one tenant or (None) of all; the next page begins
        `before_id` the last one's id.
        """
        if before_id is not None and before_id not in range(LARGEST_ID + 1):
            raise UsageError("before_id", f"{before_id!r} is no id", "Give the last job's id")
        return await self.store.jobs(
            None if kind is None else check_kind(kind),
            check_status(status),
            before_id,
            check_limit(limit),
            checked_text(tenant, "tenant", 128) if tenant else tenant,
        )

    async def workers(self) -> list[WorkerRow]:
        """Worker processes that live, or were lost within the last day."""
        return await self.store.workers()


def _check_due(run_at: object, delay: object) -> None:
    if run_at is not None and delay is not None:
        raise UsageError("run_at", "is given together with delay", "Give one of the two")
    if run_at is not None and (not isinstance(run_at, datetime) or run_at.tzinfo is None):
        raise UsageError(
            "run_at",
            "has no time zone" if isinstance(run_at, datetime) else f"is {run_at!r}",
            "Give an aware datetime, like datetime.now(UTC) + timedelta(hours=1)",
        )
    if delay is not None and not (
        isinstance(delay, int | float) and 0 <= delay <= MAX_DELAY_SECONDS
    ):
        raise UsageError(
            "delay", f"{delay!r} s is out of range", "Give seconds from 0 to ten years"
        )
