"""A worker: claims what it serves, runs it, hands outcomes to the finisher. One of these a process.

    claim loop ──▶ buffer ──▶ a task a job ──▶ finisher ──▶ committed
                 (only while handlers take milliseconds)

Beside it run the heartbeat (a thread), the sweeper, and the listener for wake-ups.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import uuid4

from .alerts import Alerts
from .cron import Cron
from .errors import ConfigurationError
from .events import event_text
from .execution import execute
from .finisher import Finisher
from .handle import JobHandle
from .heartbeat import Heartbeat
from .held import Held, Stop
from .limits import KIND_PREFIX
from .loop import Loop
from .measures import RUNS, STATEMENTS, Histogram
from .publisher import Publisher
from .retention import Retention
from .runtime import Runtime
from .slots import HINT, Slots
from .states import Status
from .sweeper import Sweeper
from .values import Interrupted, Retry
from .wakeups import Listener
from .webhooks import KIND as WEBHOOK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from types import TracebackType
    from uuid import UUID

    from .alerts import Hook
    from .cron import Schedule
    from .event_store import EventStore
    from .handlers import Handler
    from .settings import Settings
    from .store import Store
    from .values import Claim, Counted, Failed
    from .wakeups import Waker

__all__ = ["Worker"]

T = TypeVar("T")

_log = logging.getLogger("fanout.worker")

PRIORITIES: Final = range(10)
FULL_LOOK_SECONDS: Final = 1.0
"""How long floors may hide a row that was committed late with an early run_at."""
FULL_LOOK_SHARE: Final = 20
"""Full looks take at most one part in so many of the time, however long each of them is."""
LIMITED_DEPTH: Final = 2000
"""Jobs of one partition and priority that a claim under limits looks at: a millisecond."""
DEEP_LOOK_SECONDS: Final = 1.0
"""How long those of a batch that is full may hide what stands behind so many of them."""
DEEP_LOOK_SHARE: Final = 100
"""Looks at all of them are made under everybody's lock."""
AGED_ONE_IN: Final = 10
"""Of so many claims, one goes to a job that has been due for longer than its priority allows."""
LONGEST_HOARD_SECONDS: Final = 1.0
"""How long a claim may wait in the buffer behind slow handlers before it is given back."""
DRAIN_SECONDS: Final = 10.0
"""How long a busy worker first stops claiming so that a job can run alone; doubled until it could.
"""
PRUNE_SECONDS: Final = 60.0
PRUNE_STEP: Final = 100
"""Batches of events that one statement deletes: a few MiB."""
PRUNE_PAUSE_SECONDS: Final = 0.2
_ALWAYS: Final = datetime.min.replace(tzinfo=UTC)


def _version() -> str:
    try:
        return version("pgfanout")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _is_used_up(room: Mapping[str, int], claims: Sequence[Claim]) -> bool:
    """Did a kind come as often as it might? Then there is likely more of it."""
    taken = Counter(claim.kind for claim in claims)
    return any(taken[kind] >= most for kind, most in room.items())


class Worker:
    """Runs jobs of `handlers`, at most `concurrency` at once.

    `async with worker:` or `start()` and `stop()`. `failed` is set when a handler could not be
    stopped: the process should then exit and be started again; with `exit_when_stuck` it does so by
    itself when its loop is blocked.
    """

    def __init__(  # noqa: PLR0915 - the parts of a worker, put together
        self,
        store: Store,
        settings: Settings,
        dsn: str,
        handlers: Mapping[str, Handler[Any, Any]],
        installation_id: UUID,
        waker: Waker,
        events: EventStore,
        *,
        concurrency: int | None = None,
        name: str | None = None,
        exit_when_stuck: bool = False,
        schedules: Sequence[Schedule] = (),
        alert_hooks: Sequence[Hook] = (),
        on_counted: Callable[[Counted], None] | None = None,
    ) -> None:
        if not handlers:
            raise ConfigurationError(
                "handlers", "this engine has no handler", "Register one with @engine.job"
            )
        self.token = uuid4()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.concurrency = concurrency if concurrency is not None else settings.concurrency
        if self.concurrency < 1:
            raise ConfigurationError(
                "concurrency", f"{self.concurrency} is too few", "Give 1 or more"
            )
        self.failed = asyncio.Event()
        self.executed = 0
        """Handlers that were run."""
        self.claim_seconds = Histogram(STATEMENTS)
        self.handler_seconds: dict[str, Histogram] = {}
        """By kind."""
        self._store = store
        self._settings = settings
        self._handlers = dict(handlers)
        self._waker = waker
        self._exit_when_stuck = exit_when_stuck
        self._also_on_counted = on_counted
        self._random = random.Random()
        self._held: dict[int, Held] = {}
        self._buffer: deque[Held] = deque()
        self._running = 0
        self._alone = False
        self._stopping = False
        self._more = False  # the last claim came back full: there is likely more
        self._typical: dict[str, float] = {}  # kind: seconds that its handlers take
        self._running_slow = 0
        self._floors: dict[tuple[str, int], datetime] = {}
        self._full_look_due = 0.0  # time.monotonic()
        self._deep_look_due = 0.0
        self._turn = 0
        self._limited: frozenset[str] = frozenset()  # kinds of which some are due under a limit
        self._limited_due = 0.0  # time.monotonic() until when there is likely no more of them
        self._behind: dict[str, str] = {}  # kind: the last partition that was looked at, of many
        self._was_woken = False
        self._since_aged = AGED_ONE_IN  # claims since those that waited longest came first
        self._suspect_since: float | None = (
            None  # time.monotonic() since when a job waits to run alone
        )
        self._drain_seconds = DRAIN_SECONDS
        self._in_doubt_until = (
            0.0  # time.monotonic() until when a claim whose answer was lost may turn up
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self._dsn = dsn
        self.kinds = sorted(self._handlers)
        """The kinds it serves."""
        self._low_water = 0  # claim again when no more than this waits in the buffer
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="fanout handler")
        # One look at all deadlines instead of a timer a job: a timer costs as much as running a
        # small handler.
        tick = min(0.25, min(handler.timeout for handler in self._handlers.values()) / 10)
        self._timeouts = Loop("timeouts", self._stop_overdue, max(0.01, tick), jitter=0)
        # An outage must not outlast the lease of a claim whose answer it swallowed.
        self._claims = Loop(
            "claims",
            self._fill,
            settings.poll_interval,
            jitter=0.1,
            longest_pause=settings.lease / 5,
        )
        self._events = events
        self._prunes = Loop("prune", self._prune, PRUNE_SECONDS, jitter=0.5)
        self._schedules = schedules
        self.cron = Cron(store, on_submitted=self._wake_others)
        self.retention = Retention(store, settings)
        self.alerts = Alerts(
            store,
            settings,
            self.token,
            self.name,
            hooks=alert_hooks,
            failing=self._failing,
            on_enqueued=partial(self._wake_others, WEBHOOK),
        )
        self.finisher = Finisher(
            store,
            self.token,
            settings.flush_limit,
            on_written=self._on_written,
            on_counted=self._on_counted,
            on_failed=self._on_failed,
        )
        self.publisher = Publisher(events, self.token, settings)
        self.sweeper = Sweeper(
            store,
            settings,
            on_counted=self._on_counted,
            on_rescued=self._claims.nudge,
            on_ended=waker.ended,
            on_resumed=self._wake_others,
        )
        self.listener = Listener(dsn, settings, self._on_wake, self._on_ended)
        self._loop = asyncio.get_running_loop()
        self.heartbeat = Heartbeat(
            dsn,
            settings,
            self.token,
            self.name,
            _version(),
            self,
            self._held,
            on_lost=self._on_lost_in_thread,
            on_silence=self.sweeper.lost_contact,
            on_overdue=self._on_overdue,
        )
        self.slots = Slots(store, settings, self.token, self._loop, waker.wake)
        self._runtime = Runtime(
            store=store,
            settings=settings,
            token=self.token,
            worker_name=self.name,
            installation_id=installation_id,
            loop=self._loop,
            handlers=self._handlers,
            held=self._held,
            wake=self._wake_others,
            publisher=self.publisher,
            slots=self.slots,
            handle=partial(
                JobHandle,
                store=store,
                events=events,
                retries=self._wake_others,
                ended=waker.ended,
                handlers=self._handlers,
                settings=settings,
            ),
            counted=self._on_counted,
        )
        self._state = "new"
        self._ending: asyncio.Task[None] | None = None
        # time.monotonic() of the heartbeat's first question that the loop has not answered
        self._asked_at: float | None = None

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register kinds and begin. Again is fine. Raises DatabaseUnavailable."""
        if self._state != "new":
            return
        self._state = "running"
        try:
            await self._declare(self._handlers.values())
            await self.cron.schedules.declare(self._schedules)
        except BaseException:
            self._state = "new"  # so that the next start does all of it
            raise
        if self._stopping:
            return  # told to stop meanwhile
        self.sweeper.lost_contact()
        self._start_loops()

    async def _declare(self, handlers: Collection[Handler[Any, Any]]) -> None:
        """Tell the database of these kinds, and of their limits."""
        await self._store.register_kinds(
            [
                (
                    h.name,
                    h.max_retries,
                    h.timeout,
                    h.on_closed,
                    h.payload_schema(),
                    h.options,
                )
                for h in handlers
            ]
        )
        await self._store.declare_limits([(KIND_PREFIX + h.name, h.limit) for h in handlers])

    def _start_loops(self) -> None:
        self.publisher.start()
        self.finisher.start()
        self.heartbeat.start()
        self.sweeper.start()
        self.listener.start()
        self._timeouts.start()
        self._prunes.start()
        self.cron.start()
        self.retention.start()
        self.alerts.start()
        self._claims.start()

    async def stop(self, grace: float | None = None) -> None:
        """Claim nothing more, give running handlers `grace` seconds, release the rest at no cost,
        end.

        Again is fine.

        Returns when all outcomes are written, or, with the database away, after `database_timeout`
        seconds. Whoever calls it again waits for the same end.
        """
        if self._ending is None:
            grace = self._settings.stop_grace if grace is None else grace
            self._stopping = True
            if self._state == "new":
                self._state = "stopped"
                return
            self._state = "stopped"
            self._ending = self._loop.create_task(self._stop(grace), name="fanout stop")
        # A caller that is cancelled leaves; the end goes on.
        await asyncio.shield(self._ending)

    async def _stop(self, grace: float) -> None:
        until = self._loop.time() + grace
        # A claim in flight is waited for: cancelled, it might be made all the same, and nobody
        # would know.
        await self._claims.stop(patience=min(self._settings.database_timeout, max(grace, 1.0)))
        self._give_back_buffer()
        try:
            async with asyncio.timeout_at(until):
                await self._idle.wait()
        except TimeoutError:
            await self._interrupt()
        await self._timeouts.stop()
        await self._prunes.stop()
        await self.cron.stop()
        await self.retention.stop()
        await self.alerts.stop()
        # With the database away, one `database_timeout` for all of the rest.
        until = self._loop.time() + self._settings.database_timeout
        await self.finisher.drain(self._settings.database_timeout)
        await self.finisher.stop()
        await self.slots.stop(max(0.1, min(1.0, until - self._loop.time())))
        await self.publisher.stop()
        await self.sweeper.stop()
        await self.listener.stop()
        await self.heartbeat.stop(max(0.1, until - self._loop.time()))
        # A thread that hangs in user code cannot be joined; the process that owns it decides when
        # to die.
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def kill(self) -> None:
        """Stop now: running handlers are cancelled and released at once.

        Also while `stop` waits for them.
        """
        self._stopping = True
        await self._interrupt()
        self._idle.set()  # a `stop` that waits need not wait for what does not stop
        await self.stop(0)

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
    def running(self) -> int:
        """Handlers that run now."""
        return self._running

    @property
    def is_stopped(self) -> bool:
        """Has it been stopped, for good?"""
        return self._state == "stopped"

    @property
    def has_free_slot(self) -> bool:
        """Would it start a job now, if there were one?"""
        return (
            not self._stopping
            and not self._alone
            and self._running + len(self._buffer) < self.concurrency
        )

    @property
    def state(self) -> str:
        """One of: running, stopping."""
        return "stopping" if self._stopping else "running"

    @property
    def is_idle(self) -> bool:
        """Does nothing run, and is everything written?"""
        return not self._held

    async def _interrupt(self) -> None:
        """Cancel what runs, and release it; also what does not stop when it is told to."""
        running = [
            held for held in self._held.values() if held.task is not None and not held.task.done()
        ]
        for held in running:
            held.stop = held.stop or Stop.SHUTDOWN
            self._cancel(held)
        if not running:
            return
        tasks = [held.task for held in running if held.task is not None]
        _, stubborn = await asyncio.wait(tasks, timeout=min(1.0, self._settings.timeout_grace))
        for held in running:
            if held.task not in stubborn:
                continue
            self.failed.set()
            if held.is_overdue:
                # Left to rescue: at no cost, it would hang one process after the other for ever.
                continue
            if held.stop is not Stop.LOST:
                _log.error(
                    "job %d does not stop, its claim is released while it runs",
                    held.claim.id,
                    extra=self._extra(held.claim),
                )
                self.finisher.add(held.claim, Interrupted())
                held.stop = Stop.LOST

    def _cancel(self, held: Held) -> None:
        """Cancel a running handler.

        One whose task has not taken its first step sees `held.stop` there: a task that is cancelled
        before it never runs, not even its `finally`.
        """
        if held.task is not None and held.deadline is not None:
            held.task.cancel()

    # -- claiming ---------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """One look: claim as much as can run soon. Goes on at once while claims come back full."""
        self._give_back_hoard()
        await self._release_orphans()
        while not self._stopping and not self._alone:
            if self._suspect_since is not None and await self._run_alone():
                return
            if self._drains_now():
                return
            if not self._room():
                return
            await self._claim()
            if not self._more:
                break
        if self._suspect_since is not None and not self._stopping and not self._alone:
            await self._run_alone()

    async def _release_orphans(self) -> None:
        """Put back what was claimed here by a statement whose answer was lost."""
        if self._in_doubt_until > time.monotonic():
            await self._store.release_orphans(self.token, list(self._held))
            # From the first answer on, a lease: for as long as a backend may be late.
            self._in_doubt_until = min(
                self._in_doubt_until, time.monotonic() + self._settings.lease
            )

    def _room(self) -> dict[str, int]:
        """How many jobs of each kind to claim now; empty: none.

        Free slots, and ahead of them only what runs within `prefetch_seconds`: kinds whose handlers
        are slow, or were never seen, are not held ahead at all.
        """
        backlog = max(0, len(self.finisher) - 2 * self._settings.flush_limit)
        free = self.concurrency - self._running - len(self._buffer) - backlog
        quick_slots = self.concurrency - self._running_slow
        ahead: dict[str, int] = {}
        for kind in self.kinds:
            seconds = self._typical.get(kind, float("inf"))
            in_time = quick_slots * self._settings.prefetch_seconds / max(seconds, 1e-6)
            ahead[kind] = int(min(self._settings.prefetch, in_time))
        # A claim costs a round trip however many it brings: go when half of what is held ahead has
        # run.
        self._low_water = max(ahead.values()) // 2
        if len(self._buffer) > self._low_water:
            return {}
        limit = self._settings.flush_limit
        return {kind: min(free + n, limit) for kind, n in ahead.items() if free + n > 0}

    async def _claim(self) -> None:
        """Claim, and begin what was claimed; also what is under a limit, if any is due.

        The two in turns, so that a flood of one does not starve the other.
        """
        now = time.monotonic()
        full_look = now >= self._full_look_due
        self._turn += 1
        self._more = False
        aged = self._since_aged // AGED_ONE_IN if full_look else 0
        if aged:
            self._since_aged = 0
        limited_first = self._turn % 2 == 0
        if limited_first:
            await self._claim_limited(aged, full_look=full_look)
        if room := self._room():
            claiming = self._claim_unlimited(room, aged, full_look=full_look)
            self._accept(await self._or_in_doubt(claiming))
        if not limited_first:
            await self._claim_limited(aged, full_look=full_look)
        self.claim_seconds.observe(time.monotonic() - now)
        if full_look:
            # Long where somebody's open transaction keeps a long dead prefix: then seldom.
            took = time.monotonic() - now
            self._full_look_due = now + max(FULL_LOOK_SECONDS, took * FULL_LOOK_SHARE)

    async def _claim_unlimited(
        self, room: dict[str, int], aged: int, *, full_look: bool
    ) -> list[Claim]:
        """Claim, by priority, and within one priority each kind in its turn."""
        now = time.monotonic()
        wanted = self._wanted(room, full_look=full_look)
        look = await self._store.claim(
            wanted,
            max(room.values()),
            self.token,
            self._settings.lease,
            [room[kind] for kind, _, _ in wanted],
            aged=aged,
            ageing_seconds=self._settings.ageing,
            partitions=full_look or self._was_woken or bool(self._limited),
        )
        self._was_woken = False
        self._limited = look.limited
        self._more = self._more or _is_used_up(room, look.claims)
        self._raise_floors(look.claims)
        if look.suspect_age is None:
            self._suspect_since = None
            self._drain_seconds = DRAIN_SECONDS
        elif self._suspect_since is None:
            # Not all workers at once: the idle ones come first, then one of the busy ones.
            self._suspect_since = now + self._random.uniform(0, self._settings.heartbeat)
        return look.claims

    async def _claim_limited(self, aged: int, *, full_look: bool) -> None:
        """Claim and begin what is under a limit: beyond free slots only while the limit is far.

        Where the last look found no more, not before a slot was given back here, or half a poll.
        """
        if time.monotonic() < self._limited_due:
            return
        room = {kind: most for kind, most in self._room().items() if kind in self._limited}
        if not room or self._stopping:
            return
        free = max(0, self.concurrency - self._running - len(self._buffer))
        limit = max(room.values())
        asked_at = self._limited_due = time.monotonic()
        is_deep = asked_at >= self._deep_look_due
        look = await self._or_in_doubt(
            self._store.claim_limited(
                self._wanted(room, full_look=full_look),
                limit,
                self.token,
                self._settings.lease,
                free=min(free, limit),
                ahead={kind: max(0, most - free) for kind, most in room.items()},
                behind=self._behind,
                aged=aged,
                ageing_seconds=self._settings.ageing,
                depth=None if is_deep else LIMITED_DEPTH,
            )
        )
        if is_deep:
            now = time.monotonic()
            self._deep_look_due = now + max(DEEP_LOOK_SECONDS, (now - asked_at) * DEEP_LOOK_SHARE)
        for kind in room:
            self._behind[kind] = look.behind.get(kind, "")
        is_used_up = len(look.claims) < limit
        if is_used_up and self._limited_due == asked_at:  # no slot was given back meanwhile
            self._limited_due = time.monotonic() + self._settings.poll_interval / 2
        self._more = self._more or not is_used_up
        self._raise_floors([one for one in look.claims if one.id not in look.of_partitions])
        self._accept(look.claims)

    async def _or_in_doubt(self, claiming: Awaitable[T]) -> T:
        """A claim whose answer is lost may have been made, or be made yet by a backend that has not
        noticed.
        """
        try:
            return await claiming
        except BaseException:
            self._in_doubt_until = float("inf")
            raise

    def _wanted(
        self, room: Mapping[str, int], *, full_look: bool
    ) -> list[tuple[str, int, datetime]]:
        """(kind, priority, floor), the best first; within one priority each kind in its turn."""
        kinds = list(room)
        first = self._turn % len(kinds)
        kinds = kinds[first:] + kinds[:first]
        floors: Mapping[tuple[str, int], datetime] = {} if full_look else self._floors
        return [
            (kind, priority, floors.get((kind, priority), _ALWAYS))
            for priority in PRIORITIES
            for kind in kinds
        ]

    def _raise_floors(self, claims: Sequence[Claim]) -> None:
        """Where the next walk may begin: at the last row of each kind and priority that this one
        took.
        """
        for claim in claims:
            slot = (claim.kind, claim.priority)
            if claim.run_at > self._floors.get(slot, _ALWAYS):
                self._floors[slot] = claim.run_at

    def _accept(self, claims: Sequence[Claim]) -> None:
        now = time.monotonic()
        self._since_aged += len(claims)
        for claim in claims:
            held = Held(claim, now, fans_out=claim.total > 0)
            self._held[claim.id] = held
            self._buffer.append(held)
        if claims:
            self._idle.clear()
            self._start_buffered()

    def _start_buffered(self) -> None:
        while self._buffer and self._running < self.concurrency and not self._stopping:
            self._begin(self._buffer.popleft())

    # -- jobs that run alone ----------------------------------------------------------------------

    async def _run_alone(self) -> bool:
        """If nothing else runs here, claim and begin a job that must run alone. True: it runs."""
        if self._held:
            return False
        claim = await self._or_in_doubt(
            self._store.claim_alone(self.kinds, self.token, self._settings.lease)
        )
        if claim is None:
            self._suspect_since = None
            return False
        self._drain_seconds = DRAIN_SECONDS
        held = Held(claim, time.monotonic(), fans_out=claim.total > 0)
        self._held[claim.id] = held
        if self._stopping:
            self._buffer.append(held)  # to be given back
        else:
            self._alone = True
            self._idle.clear()
            self._begin(held)
        return True

    def _drains_now(self) -> bool:
        """Should this busy worker claim nothing for a while, so that a job can run alone?

        For as long as it then claims again, and twice as long each time, so that neither side is
        starved.
        """
        if self._suspect_since is None or not self._held:
            return False
        waited = time.monotonic() - self._suspect_since
        if waited < 0:
            return False
        if waited < self._drain_seconds:
            return True
        if waited > 2 * self._drain_seconds:
            self._suspect_since += 2 * self._drain_seconds
            self._drain_seconds *= 2
        return False

    # -- running ----------------------------------------------------------------------------------

    def _begin(self, held: Held) -> None:
        self._running += 1
        held.is_slow = self._is_slow(held.claim.kind)
        self._running_slow += held.is_slow
        held.task = self._loop.create_task(self._run(held))

    async def _run(self, held: Held) -> None:
        claim = held.claim
        handler = self._handlers[claim.kind]
        started = time.monotonic()
        held.deadline = started + handler.timeout
        held.let_go_at = held.deadline + self._settings.timeout_grace
        try:
            outcome = (
                await execute(held, handler, self._runtime, self._threads, self._random)
                if held.stop is None
                else Interrupted()
            )
        except BaseException:  # noqa: BLE001 - logged, with its traceback
            _log.exception(
                "running job %d failed outside its handler", claim.id, extra=self._extra(claim)
            )
            outcome = Interrupted()
        held.deadline = held.let_go_at = None
        self._running -= 1
        self._running_slow -= held.is_slow
        self.executed += 1
        took = time.monotonic() - started
        self.handler_seconds.setdefault(claim.kind, Histogram(RUNS)).observe(took)
        self._learn(claim.kind, took)
        if outcome is not None and held.stop is not Stop.LOST:
            self.finisher.add(claim, outcome)
        elif self._held.get(claim.id) is held:
            del self._held[claim.id]
        if claim.deaths:
            self._alone = False
        self._go_on()

    def _learn(self, kind: str, took: float) -> None:
        """A slow run counts at once, quick ones slowly."""
        typical = self._typical.get(kind, took)
        self._typical[kind] = max(took, typical * 0.98 + took * 0.02)

    def _is_slow(self, kind: str) -> bool:
        """Will a slot that runs this be taken for longer than work is held ahead?"""
        return self._typical.get(kind, float("inf")) > self._settings.prefetch_seconds

    async def _stop_overdue(self) -> None:
        """Tell every handler whose time is up to stop."""
        now = time.monotonic()
        for held in self._held.values():
            if (
                held.deadline is not None
                and held.deadline < now
                and not held.timed_out
                and held.task is not None
            ):
                held.timed_out = True
                held.task.cancel()

    def _go_on(self) -> None:
        """A slot is free."""
        if not self._stopping:
            self._start_buffered()
            if len(self._buffer) <= self._low_water and (
                self._more or self._suspect_since is not None
            ):
                self._claims.nudge()
        if not self._running and not self._buffer:
            self._idle.set()

    def _give_back_hoard(self) -> None:
        """Handlers turned out slow: what waits in the buffer behind them may run elsewhere."""
        if self._buffer and time.monotonic() - self._buffer[0].claimed_at > LONGEST_HOARD_SECONDS:
            self._give_back_buffer()

    def _give_back_buffer(self) -> None:
        while self._buffer:
            self.finisher.add(self._buffer.popleft().claim, Interrupted())
        if not self._running:
            self._idle.set()

    def _extra(self, claim: Claim) -> dict[str, object]:
        return {
            "job_id": claim.id,
            "attempt": claim.attempt,
            "kind": claim.kind,
            "worker": self.name,
        }

    # -- what others tell -------------------------------------------------------------------------

    def _on_written(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            held = self._held.get(claim.id)
            # The same job may have been claimed here again already, as another attempt.
            if held is not None and held.claim.attempt == claim.attempt:
                del self._held[claim.id]
        if not self._stopping and any(claim.kind in self._limited for claim in claims):
            self._limited_due = 0.0  # what was written gave back its slot
            self._claims.nudge()
        if not self._held and self._suspect_since is not None and not self._stopping:
            self._claims.nudge()

    def _on_counted(self, counted: Counted) -> None:
        for kind in counted.follow_ups:
            self._wake_others(kind)
        closed = [job.id for job in counted.closed if job.is_ended_root]
        closed += [
            job_id for group in counted.groups if group.is_ended_root for job_id in group.ids
        ]
        if closed:
            self.publisher.end(closed)
        if counted.doomed or any(group.status is Status.WAITING for group in counted.groups):
            # Perhaps a manager that failed for good, or too many children did: the open ones are to
            # be ended.
            self.sweeper.sweeps.nudge()
        if self._also_on_counted is not None:
            self._also_on_counted(counted)

    async def _prune(self) -> None:
        """Delete events beyond their retention, in steps of which none holds a lock for long."""
        gone = PRUNE_STEP
        while gone == PRUNE_STEP:
            gone = await self._events.prune(self._settings.event_retention, PRUNE_STEP)
            await asyncio.sleep(PRUNE_PAUSE_SECONDS)

    def _failing(self) -> list[tuple[str, int, str]]:
        """(name, errors in a row, the last one) of the loops that fail now."""
        loops = (
            self._claims,
            self._prunes,
            self.sweeper.sweeps,
            self.sweeper.give_ups,
            self.cron.looks,
            self.retention.looks,
        )
        return [(one.name, one.failures, one.last_error) for one in loops if one.failures]

    def _on_failed(self, claim: Claim, outcome: Failed | Retry) -> None:
        """Tell the watchers, once it is committed."""
        kind, delay = (
            ("retry", round(outcome.delay, 1)) if isinstance(outcome, Retry) else ("failed", None)
        )
        text = event_text(kind, claim, outcome.error, error_type=outcome.error_type, delay=delay)
        self._runtime.publish(claim, text, lifecycle=True)

    def _wake_others(self, kind: str) -> None:
        self._waker.wake(kind)
        if kind in self._handlers:
            self._claims.nudge()

    def _on_wake(self, kinds: set[str]) -> None:
        if not kinds or f"{HINT}{self.token}" in kinds:
            self.slots.nudge()
        if (not kinds or not kinds.isdisjoint(self._handlers)) and not self._stopping:
            self._was_woken = True
            self._limited_due = 0.0
            self._more = True
            self._claims.nudge()

    def _on_ended(self, job_ids: set[int]) -> None:
        """Somebody ended these jobs, or children of them: learn at once if any is held here."""
        if any(
            held.claim.id in job_ids or held.claim.parent_id in job_ids
            for held in self._held.values()
        ):
            self.heartbeat.beat_now()

    def _on_lost_in_thread(self, claims: list[Claim]) -> None:
        self._loop.call_soon_threadsafe(self._on_lost, claims)

    def _on_lost(self, claims: list[Claim]) -> None:
        for claim in claims:
            held = self._held.get(claim.id)
            if held is None or held.claim is not claim or held.stop is Stop.LOST:
                continue  # written meanwhile, and perhaps claimed here again
            if held.task is not None and held.task.done():
                continue  # its outcome is with the finisher, whose fence says the same
            held.stop = Stop.LOST
            _log.info(
                "the claim on job %d was given away or cancelled",
                claim.id,
                extra=self._extra(claim),
            )
            self._cancel(held)
            if held in self._buffer:
                self._buffer.remove(held)
                del self._held[claim.id]

    def _on_overdue(self, ids: list[int]) -> bool:
        """Ask the loop to let go of what does not stop. Runs in the heartbeat's thread.

        True: the loop itself is what is stuck, it does not answer.
        """
        now = time.monotonic()
        asked_at = self._asked_at
        if asked_at is None:
            asked_at = self._asked_at = now
        self._loop.call_soon_threadsafe(self._let_go, ids)
        if now - asked_at <= self._settings.timeout_grace:
            return False
        _log.critical("jobs %s block the event loop of this process", ids)
        if self._exit_when_stuck:
            os._exit(os.EX_SOFTWARE)
        return True

    def _let_go(self, ids: list[int]) -> None:
        """The loop lives, a handler does not stop: claim nothing more, and have the process started
        again.
        """
        self._asked_at = None
        if not self.failed.is_set():
            _log.critical("jobs %s did not stop after their timeout; their leases are let go", ids)
            self.failed.set()
        self._stopping = True
        self._give_back_buffer()
