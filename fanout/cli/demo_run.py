"""One run of the demo: take stock, start workers, follow the batch, stop everything."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from fanout.demo.corpus import Corpus, take_stock
from fanout.demo.documents import BadPath
from fanout.demo.meter import Stats
from fanout.demo.outputs import Written
from fanout.demo.run import Batch, Plan, begin, written_before, written_by
from fanout.demo.terms import Access
from fanout.engine import Engine
from fanout.errors import FanoutError, PermanentError, UsageError
from fanout.handle import JobHandle
from fanout.options import Options
from fanout.states import Status
from fanout.values import FailureReason, Progress

from .database import say
from .demo_page import Page, page_beside
from .demo_service import paid_service, rules_for
from .live import View
from .logs import LogLevel
from .output import near
from .supervisor import Supervisor
from .watch import GROUPS, SLOWEST, Failures
from .worker import Fleet

__all__ = ["Ask", "DemoRun", "Outcome", "Parser"]

T = TypeVar("T")

APP: Final = "fanout.demo.app:engine"
PLAN: Final = Plan("demo_batch", "demo_report")
CONCURRENCY: Final = 3
"""Extraction uses a core each: more threads in a process only wait for each other."""
PARSER_APP: Final = "fanout.demo.parser_app:engine"
PARSER_CONCURRENCY: Final = 10
"""Handlers that wait for a service wait side by side."""
GRACE_SECONDS: Final = 3.0
COUNT_STEP: Final = 50


@dataclass(frozen=True, slots=True)
class Parser:
    """Through the paid service, instead of reading the documents here."""

    parse_seconds: float
    budget: float | None
    """Dollars after which the batch is ended; None: none."""

    @property
    def plan(self) -> Plan:
        """A batch that gives up when a quarter of its documents failed, or its budget is spent."""
        options = Options(fail_after="25 %")
        if self.budget is not None:
            options["budget"] = {"cost": self.budget}
        return Plan("demo_parser_batch", "demo_parser_report", options)


@dataclass(frozen=True, slots=True)
class Ask:
    """What the command line asked for."""

    paths: tuple[Path, ...]
    dsn: str | None
    workers: int
    folder: Path
    fresh: bool
    port: int | None
    """Of the page; None: the usual one, or any that is free."""
    keep_open: bool
    """Go on serving when the batch has closed."""
    most: int | None = None
    """Documents; None: all."""
    parser: Parser | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What there is to tell in the end."""

    corpus: Corpus
    batch: Batch
    progress: Progress
    written: Written
    seconds: float
    """Of this run, from its begin to the batch's close."""
    slowest: list[tuple[str, Status, float]]
    reasons: list[FailureReason]
    stats: Stats | None
    """What the paid service counted, if it was asked in this run."""


class DemoRun:
    """Runs once. The first Ctrl-C stops it gracefully, a second one its workers at once."""

    def __init__(self, ask: Ask, tell: Callable[[Outcome], int]) -> None:
        self._ask = ask
        self._tell = tell
        self._is_interrupted = False
        self._is_ready = False
        self._is_told = False
        self._leave = asyncio.Event()
        self._supervisor: Supervisor | None = None
        self._page: Page | None = None
        self._access: Access | None = None
        self._plan = ask.parser.plan if ask.parser is not None else PLAN

    async def run(self) -> int | None:
        """Run to the end; None: interrupted. Leaves nothing running either way."""
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, task)
        try:
            async with AsyncExitStack() as stack:
                return await self._work(stack)
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
            say("interrupted; run the same command again, and it goes on where it was")
            return None

    def _interrupt(self, task: asyncio.Task[Any] | None) -> None:
        if self._is_interrupted:
            if self._supervisor is not None:
                self._supervisor.kill()
            if self._page is not None:
                self._page.is_hasty = True
            return
        self._is_interrupted = True
        if self._is_told:
            self._leave.set()
        elif task is not None:
            say("stops; what runs is released (Ctrl-C again: at once)")
            task.cancel()

    def _ready(self) -> None:
        self._is_ready = True

    async def _work(self, stack: AsyncExitStack) -> int:
        """What is entered last ends first: workers, service, page, database."""
        ask = self._ask
        gone: asyncio.Future[int] | None = None
        with View("documents", near) as view:
            corpus = await self._take_stock(view)
            began_at = time.monotonic()
            view.note("starting PostgreSQL" if ask.dsn is None else "connecting")
            engine = Engine(ask.dsn) if ask.dsn else Engine.embedded()
            await stack.enter_async_context(engine)
            batch = await begin(engine, self._plan, corpus, ask.folder, fresh=ask.fresh)
            written = None
            if batch.was_closed:
                written = await written_before(engine, self._plan, batch.handle)
            memory = ask.folder / f".paid-{batch.handle.id}.jsonl"
            if written is None or ask.keep_open:
                self._page = await stack.enter_async_context(page_beside(engine, ask.port))
                if self._page is not None:
                    say(f"the page is at {self._page.of_job(batch.handle.id)}")
                if ask.parser is not None:
                    rules = rules_for(corpus.documents, ask.parser.parse_seconds)
                    self._access = await stack.enter_async_context(paid_service(rules, memory))
                    say(f"the paid service is at {self._access.address}")
                view.note(f"starting {ask.workers} workers")
                gone = await stack.enter_async_context(self._workers())
            if written is None and gone is not None:
                await _until(gone, self._followed(batch.handle, view))
                view.note("writing results and report", is_passing=True)
                written = await _until(gone, _written(engine, self._plan, batch.handle))
            assert written is not None  # noqa: S101 - either from before, or just now
            corpus.manifest.unlink(missing_ok=True)
            stats = None if self._access is None else await _books(self._access)
            if not ask.keep_open:
                memory.unlink(missing_ok=True)
            outcome = Outcome(
                corpus,
                batch,
                await batch.handle.progress(),
                written,
                time.monotonic() - began_at,
                await batch.handle.slowest(SLOWEST),
                await batch.handle.failure_reasons(GROUPS + 1),
                stats,
            )
        self._is_told = True
        code = self._tell(outcome)
        if ask.keep_open and gone is not None:
            place = self._page.address if self._page is not None else "without a page"
            say(f"stays open until Ctrl-C, with database and workers: {place}")
            await _until(gone, self._leave.wait())
        return code

    async def _followed(self, handle: JobHandle, view: View) -> None:
        failures = Failures(handle)
        async for progress in handle.watch():
            # Until the workers are up it waits for them, which is no news here.
            if self._is_ready or progress.is_closed:
                view.show(progress, await failures.new(progress))

    async def _take_stock(self, view: View) -> Corpus:
        try:
            return await asyncio.to_thread(
                take_stock,
                self._ask.paths,
                self._ask.folder,
                self._counting(view),
                self._ask.most,
            )
        except BadPath as error:
            raise UsageError(
                "path", str(error), "Name files and folders that exist, or none for the default"
            ) from None
        except OSError as error:
            raise UsageError(
                "results", f"{self._ask.folder}: {error.strerror}", "Name a folder of your own"
            ) from None

    def _counting(self, view: View) -> Callable[[int], None]:
        def seen(count: int) -> None:
            if self._is_interrupted:
                raise InterruptedError  # a thread cannot be cancelled, and would hold up the end
            if count % COUNT_STEP == 0:
                view.note(f"looking at documents: {count:,}", is_passing=True)

        return seen

    @asynccontextmanager
    async def _workers(self) -> AsyncIterator[asyncio.Future[int]]:
        """Worker processes while the body runs; the future is done when they end by themselves."""
        ask, access = self._ask, self._access
        fleet = Fleet(
            APP if access is None else PARSER_APP, ask.workers,
            CONCURRENCY if access is None else PARSER_CONCURRENCY,
            dsn=ask.dsn, is_embedded=ask.dsn is None,
            stop_grace=GRACE_SECONDS, log_level=LogLevel.ERROR,
        )  # fmt: skip
        environment = fleet.environment()
        if access is not None:
            # Ten seconds of a service that parses in a second are a hundred of one that takes ten.
            backoff = {"FANOUT_BACKOFF_BASE": str(access.rules.parse_seconds)}
            environment |= access.environment() | backoff
        supervisor = self._supervisor = Supervisor(
            fleet.processes, fleet.command, environment, self._ready
        )
        running = asyncio.ensure_future(supervisor.run())
        try:
            yield running
        finally:
            supervisor.stop()
            await asyncio.wait([running])


async def _until(gone: asyncio.Future[int], work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, unless all workers end before: nothing would ever move again.

    Raises:
        FanoutError: they did; each has said why on stderr.
    """
    task = asyncio.ensure_future(work)
    try:
        both: list[asyncio.Future[Any]] = [task, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise FanoutError(f"the worker processes ended, with exit code {gone.result()}")
        return task.result()
    finally:
        task.cancel()


async def _books(access: Access) -> Stats:
    from fanout.demo.paid import books  # noqa: PLC0415 - its client comes with an extra

    return await books(access)


async def _written(engine: Engine, plan: Plan, handle: JobHandle) -> Written:
    try:
        return await written_by(engine, plan, handle)
    except PermanentError as error:
        raise UsageError("results", str(error), "Name another folder with --results") from None
