"""Slots of named limits: `async with job.limit("parser"):` inside a handler.

A slot is a row, given under the lock of its limit, over all pods. Who waits holds no connection:
one loop a process asks for all of its waiters at once, and sleeps. What is asked and left meanwhile
goes with the next question; a hint tells of slots that another process was the one to give.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from concurrent.futures import CancelledError as ThreadCancelled
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from .errors import DatabaseUnavailable, LostClaim, UsageError
from .values import SlotKey

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from uuid import UUID

    from .held import Held
    from .settings import Settings
    from .store import Store

__all__ = ["HINT", "Limited", "Slot", "Slots"]

_log = logging.getLogger("fanout.limits")

HINT: Final = "limit:"
"""Before the token of a worker that was given a slot, among the kinds of a wake-up."""
LOOK_SECONDS: Final = 0.2
"""How often a thread that waits looks whether its job was told to stop."""
SHORTEST_PAUSE: Final = 0.005
MOST: Final = 1e12
"""A weight; beyond it, seconds are no times any more."""

_inside: ContextVar[frozenset[str]] = ContextVar("fanout_limits", default=frozenset())


@dataclass(slots=True, eq=False)
class Slot:
    """A slot that is held."""

    key: SlotKey
    weight: float
    """What it was counted with."""
    slots: Slots

    def correct(self, weight: float) -> None:
        """Say what it really weighed, once it is known: the next ones come later, or sooner.

        From any thread; returns at once.
        """
        _check_weight(weight)
        difference, self.weight = weight - self.weight, weight
        self.slots.correct(self.key.name, difference)


class Slots:
    """The slots of one worker, and those who wait for one. `nudge()` after a hint."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        token: UUID,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[str], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._token = token
        self._wake = wake
        self.loop = loop
        self._thread_id = threading.get_ident()
        self._numbers = count()
        self._waiting: dict[SlotKey, tuple[float, asyncio.Future[None]]] = {}
        self._left: set[SlotKey] = set()
        self._corrected: dict[str, float] = {}
        self._declared: dict[str, str | None] = {}  # what this process has told the database
        self._to_declare: dict[str, str | None] = {}
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.rounds = 0
        """Questions that were answered."""

    def __len__(self) -> int:
        """How many handlers wait."""
        return len(self._waiting)

    async def take(
        self, name: str, declared: str | None, weight: float, held: Held, patience: float
    ) -> Slot:
        """Wait for a slot. The handler's timeout does not run meanwhile.

        `declared`: what the code says of the limit, as JSON text. `patience`: after half to all of
        these seconds a job that holds other slots has waited too long: two may wait for each other.

        Raises:
            LostClaim: the claim was given away.
            TimeoutError: see `patience`.
        """
        claim = held.claim
        key = SlotKey(name, claim.id, claim.attempt, next(self._numbers) & 0x7FFFFFFF)
        if name not in self._declared or (declared and self._declared[name] != declared):
            self._to_declare[name] = declared
        future: asyncio.Future[None] = self.loop.create_future()
        self._waiting[key] = weight, future
        held.begin_wait()
        is_taken = False
        try:
            self._kick()
            # Not both of two in the same moment: the first to give up lets the other one go on.
            until = patience * random.uniform(0.5, 1) if held.slots else None
            async with asyncio.timeout(until):
                await future
            is_taken = True
        except TimeoutError:
            raise TimeoutError(
                f"waited for limit {name!r} for too long, while it held another one"
            ) from None
        finally:
            held.end_wait()
            self._waiting.pop(key, None)
            if not is_taken:
                self._leave(key)  # it may have been given in the same moment
        held.slots += 1
        return Slot(key, weight, self)

    def give_back(self, slot: Slot, held: Held) -> None:
        """Leave a slot. Returns at once."""
        held.slots -= 1
        self._leave(slot.key)

    def correct(self, name: str, difference: float) -> None:
        """Add to the weight that a limit has counted."""
        if threading.get_ident() != self._thread_id:
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.correct, name, difference)
            return
        if difference:
            self._corrected[name] = self._corrected.get(name, 0.0) + difference
            self._kick()

    def nudge(self) -> None:
        """Slots may have become free."""
        if self._waiting:
            self._kick()

    async def stop(self, patience: float) -> None:
        """Write what was left, for `patience` seconds at most. Again is fine."""
        if self._task is not None and not self._task.done():
            self._nudged.set()
            await asyncio.wait([self._task], timeout=patience)
            self._task.cancel()
            await asyncio.wait([self._task])

    def _leave(self, key: SlotKey) -> None:
        self._left.add(key)
        self._kick()

    def _kick(self) -> None:
        self._nudged.set()
        if self._task is None or self._task.done():
            # A context of its own: not that of the job that happens to be the first to wait.
            self._task = self.loop.create_task(self._run(), name="fanout slots", context=Context())

    async def _run(self) -> None:
        failures = 0
        while self._waiting or self._left or self._corrected:
            self._nudged.clear()
            try:
                pause = await self._round()
                failures = 0
            except Exception as error:  # noqa: BLE001 - those who wait, wait for the database too
                if not failures:
                    _log.warning(
                        "%d wait for a limit, the database did not answer: %s",
                        len(self._waiting),
                        error,
                        exc_info=None if isinstance(error, DatabaseUnavailable) else error,
                    )
                failures += 1
                await asyncio.sleep(
                    random.uniform(0.5, 1) * min(5.0, 0.05 * 2.0 ** min(failures, 9))
                )
                continue
            if not self._waiting:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._nudged.wait()

    async def _round(self) -> float:
        """Ask once, for all. Returns how many seconds to wait until it is asked again."""
        await self._declare()
        asked = [(key, weight) for key, (weight, _) in self._waiting.items()]
        left, corrected = list(self._left), self._corrected
        self._corrected = {}
        try:
            settled = await self._store.settle_slots(
                self._token, asked=asked, left=left, corrected=corrected
            )
        except BaseException:
            # If it was committed all the same, a correction is counted twice: late by so much.
            for name, difference in corrected.items():
                self._corrected[name] = self._corrected.get(name, 0.0) + difference
            raise
        self.rounds += 1
        self._left.difference_update(left)
        for name in settled.missing:
            self._to_declare[name] = self._declared.pop(name, None)
        for key, _ in asked:
            self._answer(key, key in settled.granted, key in settled.waiting)
        for token in settled.others:
            self._wake(f"{HINT}{token}")
        if settled.missing:
            return SHORTEST_PAUSE
        poll = self._settings.poll_interval
        wait = poll if settled.wait_seconds is None else min(poll, settled.wait_seconds)
        return max(SHORTEST_PAUSE, wait * random.uniform(1, 1.1))

    async def _declare(self) -> None:
        """Have a row for each limit, with what the code says of it: once a process and limit."""
        if not self._to_declare:
            return
        declaring = dict(self._to_declare)
        await self._store.open_limits(list(declaring.items()))
        self._declared |= declaring
        for name, declared in declaring.items():
            if self._to_declare.get(name) == declared:
                del self._to_declare[name]

    def _answer(self, key: SlotKey, is_granted: bool, is_waiting: bool) -> None:  # noqa: FBT001 - two facts of one key
        waiter = self._waiting.get(key)
        if waiter is None or waiter[1].done():
            return  # it has left meanwhile, and said so
        if is_granted:
            del self._waiting[key]
            waiter[1].set_result(None)
        elif not is_waiting and key.name in self._declared:
            waiter[1].set_exception(LostClaim(key.job_id, key.attempt))


class Limited:
    """`async with job.limit("parser"):`, or `with` in a handler that runs in a thread.

    Each gives one slot, or waits for one. Within the block the same job cannot ask for the same
    limit once more: it would wait for itself.
    """

    def __init__(
        self,
        slots: Slots,
        held: Held,
        name: str,
        declared: str | None,
        weight: float,
        patience: float,
        must_stop: Callable[[], bool],
    ) -> None:
        _check_weight(weight)
        self._slots = slots
        self._held = held
        self._name = name
        self._declared = declared
        self._weight = weight
        self._patience = patience
        self._must_stop = must_stop
        self._slot: Slot | None = None

    async def _take(self) -> Slot:
        return await self._slots.take(
            self._name, self._declared, self._weight, self._held, self._patience
        )

    def _enter(self) -> None:
        if self._slot is not None or self._name in _inside.get():
            raise UsageError(
                "limit",
                f"{self._name!r} is asked for within its own block",
                "Leave the block first: the job would wait for itself",
            )

    def _entered(self, slot: Slot) -> Slot:
        self._slot = slot
        _inside.set(_inside.get() | {self._name})
        return slot

    def _left(self) -> Slot | None:
        _inside.set(_inside.get() - {self._name})
        slot, self._slot = self._slot, None
        return slot

    async def __aenter__(self) -> Slot:
        self._enter()
        return self._entered(await self._take())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (slot := self._left()) is not None:
            self._slots.give_back(slot, self._held)

    def __enter__(self) -> Slot:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise UsageError(
                "limit", "`with` would block the event loop", "Write `async with job.limit(…)`"
            )
        self._enter()
        taking = asyncio.run_coroutine_threadsafe(self._take(), self._slots.loop)
        while True:
            try:
                return self._entered(taking.result(LOOK_SECONDS))
            except ThreadCancelled:
                raise InterruptedError("the job was told to stop") from None
            except TimeoutError:
                if taking.done():
                    raise
                if self._must_stop() and taking.cancel():
                    raise InterruptedError("the job was told to stop") from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (slot := self._left()) is not None:
            with suppress(RuntimeError):  # the loop has ended: the claim ends, and the slot with it
                self._slots.loop.call_soon_threadsafe(self._slots.give_back, slot, self._held)


def _check_weight(weight: object) -> None:
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= MOST:
        raise UsageError("weight", f"{weight!r} is not one", "Give 0 or more, tokens for example")
