"""The backstop, on every worker, safe to run on all at once: it mends what crashes left, before it
gives anything up.

    every sweep_interval     rescue expired leases; end what is past its deadline; go on ending the
                             children of doomed batches, and with pauses that a crash left half
                             done; recount and close batches that have no open child left
    every give_up_interval   recount batches without a sign of life; give up those that stay without
    one

Every write repeats its conditions under its lock, in SQL; what is read here only says where to
look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from .errors import DatabaseUnavailable
from .loop import Loop
from .states import Status
from .steering import pause_below, resume_children

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from .settings import Settings
    from .store import Store
    from .values import Counted

__all__ = ["Sweeper"]

_log = logging.getLogger("fanout.sweeper")

PAGE = 100
"""Rows that one statement rescues: a lock held for milliseconds."""
PAUSE_SHARE: Final = 50
"""Looking for what a pause left out takes at most one part in so many of the time: it reads every
child of a paused batch."""


class Sweeper:
    """`on_counted(counted)` is called after each commit that ended jobs, `on_rescued()` when jobs
    became pending, `on_ended(job_ids)` when running children of these were ended, and
    `on_resumed(kind)` when jobs of a kind can be claimed again.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        on_counted: Callable[[Counted], None] = lambda _: None,
        on_rescued: Callable[[], None] = lambda: None,
        on_ended: Callable[[Sequence[int]], None] = lambda _: None,
        on_resumed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._on_counted = on_counted
        self._on_rescued = on_rescued
        self._on_ended = on_ended
        self._on_resumed = on_resumed
        self._pauses_due = 0.0  # time.monotonic()
        self._contact_since = time.monotonic()
        self._swept_at = _clocks()
        self.sweeps = Loop("sweeper", self.sweep, settings.sweep_interval)
        self.give_ups = Loop("give up", self.give_up, settings.give_up_interval)
        self.rescued = 0
        self.drifts = 0
        """Batches whose counters had to be mended."""
        self.given_up = 0

    def start(self) -> None:
        """Begin; again is fine."""
        self.sweeps.start()
        self.give_ups.start()

    async def stop(self) -> None:
        """End. Again is fine."""
        await self.sweeps.stop()
        await self.give_ups.stop()

    def lost_contact(self) -> None:
        """Start to count anew how long this process has been in contact with the database.

        Any thread may call it.
        """
        self._contact_since = time.monotonic()

    async def sweep(self) -> None:
        """One round of mending."""
        if self._was_asleep():
            self.lost_contact()
        try:
            if time.monotonic() - self._contact_since >= self._settings.lease:
                await self.rescue()
            await self.end_late()
            await self.end_doomed()
            await self.converge_pauses()
            await self.close_complete()
        except DatabaseUnavailable:
            self.lost_contact()
            raise
        finally:
            self._swept_at = _clocks()

    def _was_asleep(self) -> bool:
        """Was this process frozen, or its host suspended?

        Then so were others, perhaps, whose leases ran out meanwhile: they beat before they die.
        """
        longest = max(self._settings.lease / 2, 2 * self._settings.sweep_interval)
        return any(
            now - then > longest for now, then in zip(_clocks(), self._swept_at, strict=True)
        )

    async def rescue(self) -> int:
        """Put back what workers let fall, and end what keeps killing them.

        An outage is nobody's death, so this is for callers who have been in contact with the
        database for a lease. Returns how many jobs were moved.
        """
        before = self.rescued
        for depth in await self._store.expired_depths():
            after_id = 0
            while (last_id := await self._rescue_page(depth, after_id)) is not None:
                after_id = last_id
        if self.rescued > before:
            self._on_rescued()
        return self.rescued - before

    async def _rescue_page(self, depth: int, after_id: int) -> int | None:
        """Rescue some jobs with ids above `after_id`; the last one's id, or None: no more."""
        try:
            ids = await self._rescue(depth, PAGE, after_id)
        except DatabaseUnavailable:
            raise
        except Exception:  # noqa: BLE001 - one by one, and then it is logged
            ids = await self._store.expired(depth, after_id, PAGE)
            for job_id in ids:
                await self._one(job_id, partial(self._rescue_one, depth))
        return max(ids) if len(ids) >= PAGE else None

    async def _rescue_one(self, depth: int, job_id: int) -> None:
        await self._rescue(depth, 1, job_id - 1)

    async def _rescue(self, depth: int, limit: int, after_id: int) -> list[int]:
        counted = await self._store.rescue(
            depth, limit, self._settings.max_deaths, after_id, self._settings.lease
        )
        for job in counted.moved:
            _log.log(
                logging.WARNING if job.status is Status.PENDING else logging.ERROR,
                "job %d lost its worker, it is %s now",
                job.id,
                job.status,
                extra={"job_id": job.id},
            )
        self.rescued += len(counted.moved)
        self._on_counted(counted)
        return [job.id for job in counted.moved]

    async def end_late(self) -> None:
        """End what is past its deadline as failed, with all that is below it."""
        async for job_id in _pages(self._store.late):
            await self._one(job_id, self._end_late_one)

    async def _end_late_one(self, job_id: int) -> None:
        counted = await self._store.doom_late(job_id)
        self._on_counted(counted)
        for job in counted.moved:
            _log.error("job %d is past its deadline", job.id, extra={"job_id": job.id})
            self._on_ended([job.id])
            if job.status is Status.WAITING:
                await self.end_children(job.id)

    async def converge_pauses(self) -> None:
        """Make children be paused, or not, as their roots are: where whoever paused or resumed one
        was ended half-way, or where one was being put back in that moment.
        """
        async for batch in _pages(self._store.left_paused):
            await self._one(batch, self._resume_children)
        if time.monotonic() < self._pauses_due:
            return
        began = time.monotonic()
        async for root_id in _pages(self._store.paused_batches):
            await self._one(root_id, self._pause_below)
        now = time.monotonic()
        self._pauses_due = now + PAUSE_SHARE * (now - began)

    async def _resume_children(self, batch: int) -> None:
        root_id = (await self._store.job(batch)).root_id or batch
        for kind in await resume_children(self._store, root_id, batch):
            self._on_resumed(kind)

    async def _pause_below(self, root_id: int) -> None:
        await pause_below(self._store, root_id)

    async def end_doomed(self) -> None:
        """Cancel, in chunks, the open children of every job that has a verdict."""
        async for job_id in _pages(self._store.doomed):
            await self._one(job_id, self.end_children)

    async def end_children(self, job_id: int) -> None:
        """Cancel, in chunks, the open children of one doomed job.

        Children that are locked right now are left to the next round.
        """
        while True:
            counted = await self._store.doom_chunk(job_id, self._settings.doom_chunk)
            self._on_counted(counted)
            if counted.moved:
                self._on_ended([job_id])
            for child in counted.moved:
                if child.status is Status.WAITING:  # a batch itself, doomed now
                    await self.end_children(child.id)
            if len(counted.moved) < self._settings.doom_chunk:
                return

    async def close_complete(self) -> None:
        """Recount, and so close, waiting jobs that have no open child. Count those batches whose
        children do not (closing "aggregate"), and judge their limits, which nobody else can.
        """
        async for job_id in _pages(self._store.incomplete_without_open):
            await self._one(job_id, self.recount)
        async for job_id in _pages(self._store.open_aggregates):
            await self._one(job_id, self._count)

    async def recount(self, job_id: int) -> None:
        """Mend one job's counters, and say so: it should never be needed. Count those of one whose
        children do not.
        """
        counted = await self._store.recount(job_id)
        if counted.mended:
            self.drifts += 1
            _log.error(
                "the counters of job %d disagreed with its children and were mended",
                job_id,
                extra={"job_id": job_id},
            )
        if counted.moved:
            self._on_counted(counted)

    async def _count(self, job_id: int) -> None:
        counted = await self._store.recount(job_id)
        if any(job.status.is_terminal for job in counted.moved):
            self._on_counted(counted)
        elif counted.moved:
            await self.end_children(job_id)  # of one that has failed; of any other it ends nothing

    async def give_up(self) -> None:
        """Mend, then give up, batches without a sign of life; forget workers that were lost a day
        ago.
        """
        after = self._settings.give_up_after

        async def candidates(limit: int, after_id: int) -> list[int]:
            return await self._store.give_up_candidates(limit, after, after_id)

        async for job_id in _pages(candidates):
            await self._one(job_id, self._give_up_one)
        await self._store.prune_workers()

    async def _give_up_one(self, job_id: int) -> None:
        await self.recount(job_id)
        after = self._settings.give_up_after
        reason = (
            f"closed by the sweeper: no sign of life for {_in_words(after)} "
            "while a worker had free slots"
        )
        if await self._store.give_up(job_id, after, reason):
            self.given_up += 1
            _log.error("job %d was given up: %s", job_id, reason, extra={"job_id": job_id})
            await self.end_children(job_id)

    async def _one(self, job_id: int, step: Callable[[int], Awaitable[None]]) -> None:
        """One bad row never hides the rest."""
        try:
            await step(job_id)
        except DatabaseUnavailable:
            raise
        except Exception:  # noqa: BLE001 - logged, with its traceback
            _log.exception(
                "sweeping job %d failed, the others go on", job_id, extra={"job_id": job_id}
            )


def _clocks() -> tuple[float, float]:
    """Two, for the monotonic one stands still while a host is suspended."""
    return time.monotonic(), time.time()


async def _pages(read: Callable[[int, int], Awaitable[list[int]]]) -> AsyncIterator[int]:
    """Every id that `read(limit, after_id)` finds, ascending, by keyset: rows that stay cannot hide
    those behind them.
    """
    after_id = 0
    while ids := await read(PAGE, after_id):
        for job_id in ids:
            yield job_id
        if len(ids) < PAGE:
            return
        after_id = ids[-1]
        await asyncio.sleep(0)


def _in_words(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
