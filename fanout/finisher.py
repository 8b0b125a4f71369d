"""Writing: outcomes go to the database in batches that form by themselves.

One flush is in flight per process; outcomes that arrive meanwhile are the next one. Idle, that adds
no latency; busy, it is one commit and one lock of the parent's row for hundreds of children.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, assert_never

from .errors import DatabaseUnavailable
from .measures import COUNTS, STATEMENTS, Histogram
from .pool import described, is_data_error
from .values import Completed, Failed, Interrupted, Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from .states import Status
    from .store import Store
    from .values import Claim, Counted, Outcome

__all__ = ["Finisher"]

_log = logging.getLogger("fanout.finisher")

Item = tuple["Claim", "Outcome"]

FLUSH_CHARACTERS: Final = 8 << 20
"""Results in one flush: 500 of 1 MiB each, after an outage, would time out again and again."""
TRIES_BEFORE_SPLIT: Final = 8
"""Some ten seconds, for errors that are neither the database's absence nor the data's fault, like a
lost grant.
"""


class Finisher:
    """Takes outcomes, writes them, tells what was written.

    `on_written(claims)` is called when claims need no lease any more; `on_counted(counted)` after
    each commit that ended jobs; `on_failed(claim, outcome)` after the commit of a failure or of a
    retry. None of them may raise.
    """

    def __init__(
        self,
        store: Store,
        token: UUID,
        flush_limit: int,
        *,
        on_written: Callable[[Sequence[Claim]], None],
        on_counted: Callable[[Counted], None],
        on_failed: Callable[[Claim, Failed | Retry], None] = lambda _claim, _outcome: None,
    ) -> None:
        self._store = store
        self._token = token
        self._flush_limit = flush_limit
        self._on_written = on_written
        self._on_counted = on_counted
        self._on_failed = on_failed
        self._pending: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._task: asyncio.Task[None] | None = None
        self.flushes = 0
        self.written = 0
        self.lost = 0
        """Outcomes that were dropped because their claim was given away."""
        self.last_flush_seconds = 0.0
        self.seconds = Histogram(STATEMENTS)
        """Of flushes."""
        self.sizes = Histogram(COUNTS)
        """Outcomes of flushes."""
        self.ended: Counter[tuple[str, Status]] = Counter()
        """Jobs that ended with their handlers, by kind and state, counted after the commit."""
        self.closed: Counter[Status] = Counter()
        """Batches that their last child closed, by state."""

    def __len__(self) -> int:
        """Outcomes that are not written yet, those of the flush in flight not counted."""
        return len(self._pending)

    def add(self, claim: Claim, outcome: Outcome) -> None:
        """Have an outcome written. Returns at once."""
        self._pending.append((claim, outcome))
        self._empty.clear()
        self._arrived.set()

    def start(self) -> None:
        """Begin; again is fine."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="fanout finisher")

    async def drain(self, seconds: float) -> bool:
        """Wait until everything is written, `seconds` at most. False: something is not."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End. What is not written is left to rescue. Again is fine."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            while self._pending:
                batch = self._next_batch()
                started = time.perf_counter()
                await self._write(batch)
                self.last_flush_seconds = time.perf_counter() - started
                self.seconds.observe(self.last_flush_seconds)
                self.sizes.observe(len(batch))
                self.flushes += 1
            self._arrived.clear()
            self._empty.set()

    def _next_batch(self) -> list[Item]:
        batch: list[Item] = []
        size = 0
        while self._pending and len(batch) < self._flush_limit and size < FLUSH_CHARACTERS:
            item = self._pending.popleft()
            batch.append(item)
            if isinstance(item[1], Completed) and item[1].result:
                size += len(item[1].result)
        return batch

    async def _write(self, batch: list[Item]) -> None:
        """Write a batch whatever it takes: the database may be away for an hour."""
        tries = 0
        while True:
            try:
                await self._flush(batch, in_doubt=tries > 0)
                break
            except Exception as error:  # noqa: BLE001 - one bad outcome must not stop all others
                passes = isinstance(error, DatabaseUnavailable) or (
                    not is_data_error(error) and tries < TRIES_BEFORE_SPLIT
                )
                if not passes:
                    await self._split(batch, error)
                    break
                if tries == 0:
                    _log.warning(
                        "%d outcomes wait for the database: %s", len(batch), described(error)
                    )
                tries += 1
                await asyncio.sleep(random.uniform(0.5, 1) * min(5.0, 0.05 * 2.0 ** min(tries, 10)))
        self._on_written([claim for claim, _ in batch])

    async def _split(self, batch: list[Item], error: Exception) -> None:
        """Bisect a batch that the database refused, until the culprit is alone: it fails,
        permanently.
        """
        if len(batch) > 1:
            half = len(batch) // 2
            await self._write(batch[:half])
            await self._write(batch[half:])
            return
        [(claim, outcome)] = batch
        where = {"job_id": claim.id, "attempt": claim.attempt, "kind": claim.kind}
        _log.error(
            "the database refused the outcome of job %d: %s",
            claim.id,
            error,
            extra=where,
            exc_info=None if is_data_error(error) else error,
        )
        if isinstance(outcome, Failed) and outcome.error_type == "Unstorable":
            return  # even that was refused: its lease runs out, and rescue counts it
        await self._write(
            [
                (
                    claim,
                    Failed(
                        f"its outcome cannot be stored: {type(error).__name__}",
                        "Unstorable",
                        None if isinstance(outcome, Failed) else outcome.added,
                    ),
                )
            ]
        )

    async def _flush(self, batch: list[Item], *, in_doubt: bool) -> None:
        ended: list[tuple[Claim, Completed | Failed]] = []
        retries: list[tuple[Claim, Retry]] = []
        released: list[tuple[Claim, Interrupted]] = []
        for claim, outcome in batch:
            match outcome:
                case Completed() | Failed():
                    ended.append((claim, outcome))
                case Retry():
                    retries.append((claim, outcome))
                case Interrupted():
                    released.append((claim, outcome))
                case _:
                    assert_never(outcome)
        if released:
            await self._store.release(released, self._token)
        if retries:
            back = await self._store.retry(retries, self._token)
            for claim, retry in retries:
                if claim.id in back:
                    self._on_failed(claim, retry)
            # Not put back: the budget is used up, or the claim is lost. The next statement knows
            # which.
            ended += [
                (claim, Failed(retry.error, retry.error_type, retry.added))
                for claim, retry in retries
                if claim.id not in back
            ]
        if ended:
            counted = await self._store.finish(ended, self._token)
            await self._account(ended, counted, in_doubt=in_doubt)

    async def _account(
        self, ended: list[tuple[Claim, Completed | Failed]], counted: Counted, *, in_doubt: bool
    ) -> None:
        moved = counted.moved_ids
        self.written += len(moved)
        kinds = {claim.id: claim.kind for claim, _ in ended}
        for group in counted.groups:
            if group.status.is_terminal:
                self.ended.update((kinds[job_id], group.status) for job_id in group.ids)
        self.closed.update(batch.status for batch in counted.closed)
        self._on_counted(counted)
        for claim, outcome in ended:
            if isinstance(outcome, Failed) and claim.id in moved:
                self._on_failed(claim, outcome)
        missing = [claim for claim, _ in ended if claim.id not in moved]
        if missing and in_doubt:
            # The commit whose answer was lost may have happened: `ended_by` tells our end from a
            # rescue's.
            ours = await self._store.outcomes_of(missing, self._token)
            self.written += len(ours)
            missing = [claim for claim in missing if claim.id not in ours]
        self.lost += len(missing)
        for claim in missing:
            _log.info(
                "the claim on job %d was lost, its outcome is dropped",
                claim.id,
                extra={"job_id": claim.id, "attempt": claim.attempt, "kind": claim.kind},
            )
