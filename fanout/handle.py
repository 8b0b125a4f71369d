"""A handle on one job: wait for it, watch it, read its children, cancel it, retry what failed."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import TypeAdapter

from .checks import check_limit, check_status
from .errors import DatabaseUnavailable, JobFailed, JobNotFound, Refused
from .following import follow
from .pool import NotStarted
from .states import Status
from .tree import MOST_NODES, MOST_STEPS_UP
from .wire import checked_text, clipped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from .event_store import EventStore
    from .events import Event
    from .store import Store
    from .tree import Tree
    from .values import Child, FailureReason, JobRow, Progress

__all__ = ["JobHandle"]

T = TypeVar("T")

FIRST_LOOK_SECONDS = 0.01
LONGEST_LOOK_SECONDS = 0.5
PAGE = 500


class JobHandle:
    """A job by its id. Every method asks the database; nothing is cached."""

    __slots__ = ("_events", "_store", "_wake", "created", "id")

    def __init__(
        self,
        job_id: int,
        store: Store,
        events: EventStore,
        *,
        created: bool = False,
        retries: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.id = job_id
        self.created = created
        """Of a submit: False if the idempotency key had this job already."""
        self._store = store
        self._events = events
        self._wake = retries

    def __repr__(self) -> str:
        return f"JobHandle({self.id})"

    async def job(self) -> JobRow:
        """The whole row. Raises JobNotFound."""
        return await self._store.job(self.id)

    async def progress(self) -> Progress:
        """Exact counts, percent, rate, ETA, elapsed, and what it waits for. Raises JobNotFound."""
        return await self._store.progress(self.id)

    async def wait(self, timeout: float | None = None) -> Progress:
        """Wait until the job is closed.

        Raises:
            TimeoutError: `timeout` seconds have passed; the job goes on.
            JobNotFound: there is none, or it was deleted meanwhile.
        """
        async with asyncio.timeout(timeout):
            async for progress in self.watch():
                if progress.is_closed:
                    return progress
        raise JobNotFound(self.id)

    async def watch(self, interval: float | None = None) -> AsyncIterator[Progress]:
        """The progress, again and again until the job is closed: each `interval` seconds, or, by
        default, after 10 ms at first and less and less often, down to twice a second.

        Outages are waited out, but not the end of the engine: that raises DatabaseUnavailable.
        """
        pause = FIRST_LOOK_SECONDS
        while True:
            try:
                progress = await self.progress()
            except NotStarted:
                raise
            except DatabaseUnavailable:
                await asyncio.sleep(random.uniform(0.5, 1.0))
                continue
            yield progress
            if progress.is_closed:
                return
            await asyncio.sleep(interval if interval is not None else pause)
            pause = min(LONGEST_LOOK_SECONDS, pause * 1.3)

    async def events(self, after: str | None = None) -> AsyncIterator[Event]:
        """The job's events, `after` the id of one that was seen or from the first that is kept,
        then those that come: log lines, retries, failures, until its end.

        Of a child only its own, until its batch has ended. One of type `reset` says that events
        were lost there. Outages are waited out, but not the end of the engine: that raises
        DatabaseUnavailable.

        Raises:
            JobNotFound.
            UsageError: `after` is not an event's id.
        """
        async for event in follow(self._store, self._events, self.id, after):
            yield event

    async def result(self, timeout: float | None = None) -> Any:
        """What the job's handler returned, as plain JSON, once it is closed.

        Raises:
            JobFailed: it ended as failed or cancelled.
            TimeoutError, JobNotFound: as `wait`.
        """
        await self.wait(timeout)
        row = await self.job()
        if row.status is not Status.COMPLETED:
            raise JobFailed(self.id, str(row.status), row.reason or row.error)
        return row.result

    async def children_page(
        self, *, status: Status | str | None = None, after_key: str | None = None, limit: int = 100
    ) -> list[Child]:
        """A page of children by document key; the next one begins after the last one's key."""
        if after_key is not None:
            checked_text(after_key, "after_key", 512)
        return await self._store.children(
            self.id, check_status(status), after_key, check_limit(limit)
        )

    async def children(self, *, status: Status | str | None = None) -> AsyncIterator[Child]:
        """All children by document key, a page at a time in memory."""
        after_key: str | None = None
        while page := await self.children_page(status=status, after_key=after_key, limit=PAGE):
            for child in page:
                yield child
            after_key = page[-1].document_key

    async def failures(self) -> AsyncIterator[Child]:
        """The children that failed, each with its reason, a page at a time in memory."""
        async for child in self.children(status=Status.FAILED):
            yield child

    async def failure_reasons(self, limit: int = 50) -> list[FailureReason]:
        """The failures grouped by reason, most frequent first."""
        return await self._store.failure_reasons(self.id, limit)

    @overload
    def results(self) -> AsyncIterator[tuple[str, Any]]: ...
    @overload
    def results(self, result_type: type[T]) -> AsyncIterator[tuple[str, T]]: ...

    async def results(self, result_type: Any = None) -> AsyncIterator[tuple[str, Any]]:
        """(document key, result) of the children that completed, a page at a time in memory.

        A result is plain JSON, or, with `result_type`, read into that type: a pydantic model, a
        dataclass, or whatever the children's handler is annotated to return.

        Raises:
            pydantic.ValidationError: a result is no such thing.
        """
        read = None if result_type is None else TypeAdapter(result_type).validate_python
        async for child in self.children(status=Status.COMPLETED):
            yield child.document_key, child.result if read is None else read(child.result)

    async def tree(self, limit: int = MOST_NODES) -> Tree:
        """The whole that this job is part of: from the batch it goes back to, over the batches
        inside, to what followed their closes. Leaves are counted, not listed.

        At most `limit` jobs, those nearest to the top, and the way from there to this one.

        Raises JobNotFound.
        """
        return await self._store.tree(self.id, check_limit(limit), MOST_STEPS_UP)

    async def slowest(self, limit: int = 5) -> list[tuple[str, Status, float]]:
        """(document key, status, seconds) of the children whose last attempt took longest."""
        return await self._store.slowest(self.id, limit)

    async def cancel(self, reason: str = "cancelled on request") -> bool:
        """Cancel the job and everything below it that has not ended.

        Children that run are told with their next heartbeat and counted as cancelled now; whatever
        they return is dropped.

        Returns False if it had closed, or was being ended, already. Raises JobNotFound.
        """
        counted = await self._store.doom(self.id, Status.CANCELLED, clipped(reason, 1024))
        if not counted.moved:
            await self.job()  # raises for an id that never was
            return False
        for kind in counted.follow_ups:
            self._wake(kind)
        await self._end_children(self.id)
        return True

    async def _end_children(self, job_id: int) -> None:
        """In chunks.

        What is locked right now is ended by a sweeper, which also goes on where a crash stopped
        this.
        """
        while True:
            counted = await self._store.doom_chunk(job_id, PAGE)
            for kind in counted.follow_ups:
                self._wake(kind)
            for child in counted.moved:
                if child.status is Status.WAITING:
                    await self._end_children(child.id)
            if len(counted.moved) < PAGE:
                return

    async def retry(self, *, keys: Sequence[str] | None = None, error: str | None = None) -> int:
        """Run what failed again, as a new generation: a batch's failed children (all, those of
        `keys`, or those with exactly this `error`), or a failed single job.

        Returns how many.

        Raises:
            JobNotFound.
            Refused: nothing to retry, or it was cancelled or failed as a whole; nothing was
                changed.
        """
        row = await self.job()
        if row.total == 0:
            if keys is None and error is None and await self._store.retry_job(self.id):
                self._wake(row.kind)
                return 1
            if row.parent_id is not None:
                raise Refused(
                    self.id,
                    f"it is a child: retry it through its batch, job {row.parent_id}, "
                    f"with keys=[{row.document_key!r}]",
                )
            raise Refused(
                self.id,
                f"it is {row.outcome}, and only a failed job, or a batch with failed children, "
                "can be retried",
            )
        picked = None if keys is None else [checked_text(key, "keys", 512) for key in keys]
        if error is not None:
            checked_text(error, "error", 1 << 20)
        count = await self._store.retry_failed(self.id, picked, error)
        first = await self.children_page(status=Status.PENDING, limit=1)
        for child in first:
            self._wake(child.kind)
        return count
