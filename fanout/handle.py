"""A handle on one job: wait for it, watch it, read its children, steer it, retry what failed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import TypeAdapter

from .checks import (
    check_concurrency,
    check_kind,
    check_limit,
    check_max_retries,
    check_priority,
    check_status,
)
from .errors import DatabaseUnavailable, JobFailed, JobNotFound, Refused, UsageError
from .following import follow
from .handlers import Handler
from .job import chunks, snapshot
from .pool import NotStarted
from .settings import MAX_PAYLOAD_BYTES, Settings
from .states import Status
from .steering import (
    pause_below,
    resume_below,
    spread_concurrency,
    spread_priority,
)
from .tree import MOST_NODES, MOST_STEPS_UP
from .values import Dispatched
from .wire import checked_text, clipped

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterable,
        AsyncIterator,
        Callable,
        Iterable,
        Mapping,
        Sequence,
    )

    from .event_store import EventStore
    from .events import Event
    from .store import Store
    from .tree import Tree
    from .values import Attempt, Child, Counted, Document, FailureReason, JobRow, Progress

__all__ = ["JobHandle"]

T = TypeVar("T")

FIRST_LOOK_SECONDS = 0.01
LONGEST_LOOK_SECONDS = 0.5
PAGE = 500


class JobHandle:
    """A job by its id. Every method asks the database; nothing is cached."""

    __slots__ = (
        "_events",
        "_handlers",
        "_settings",
        "_store",
        "_tell_ended",
        "_wake",
        "created",
        "id",
    )

    def __init__(
        self,
        job_id: int,
        store: Store,
        events: EventStore,
        *,
        created: bool = False,
        retries: Callable[[str], None] = lambda _: None,
        ended: Callable[[Sequence[int]], None] = lambda _: None,
        handlers: Mapping[str, Handler[Any, Any]] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.id = job_id
        self.created = created
        """Of a submit: False if the idempotency key had this job already."""
        self._store = store
        self._events = events
        self._wake = retries
        self._tell_ended = ended
        self._handlers = handlers or {}
        self._settings = settings or Settings()

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
            if progress.status is Status.WAITING and progress.ended >= progress.total:
                # Its children leave its row alone (closing "aggregate"), and all have ended.
                with contextlib.suppress(JobNotFound, DatabaseUnavailable):
                    if await self.settle():
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
        self,
        *,
        status: Status | str | None = None,
        error: str | None = None,
        after_key: str | None = None,
        limit: int = 100,
    ) -> list[Child]:
        """A page of children by document key; the next one begins after the last one's key.

        `error`: those that failed with exactly this one.

        Raises:
            UsageError: an error is asked for together with another status than failed.
        """
        if after_key is not None:
            checked_text(after_key, "after_key", 512)
        known = check_status(status)
        if error is not None:
            checked_text(error, "error", 1 << 20)
            if known not in (None, Status.FAILED):
                raise UsageError("error", f"is asked for with status {known}", "Leave status out")
            known = Status.FAILED
        return await self._store.children(self.id, known, after_key, check_limit(limit), error)

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

    async def attempts(self) -> list[Attempt]:
        """The runs of the job as a timeline, the first one first: when, on which worker, how it
        ended and why; the one that runs now is the last. A job that was never run has none.

        Raises JobNotFound.
        """
        found = await self._store.attempts(self.id)
        if not found:
            await self.job()  # raises for an id that never was
        return found

    async def slowest(self, limit: int = 5) -> list[tuple[str, Status, float]]:
        """(document key, status, seconds) of the children whose last attempt took longest."""
        return await self._store.slowest(self.id, limit)

    async def cancel(self, reason: str = "cancelled on request") -> bool:
        """Cancel the job and everything below it that has not ended.

        Children that run are counted as cancelled now, and told at once by a hint, or else with
        their next heartbeat: their handlers get `CancelledError`, and whatever they return is
        dropped.

        Returns False if it had closed, or was being ended, already. Raises JobNotFound.
        """
        counted = await self._store.doom(self.id, Status.CANCELLED, clipped(reason, 1024))
        if not counted.moved:
            await self.job()  # raises for an id that never was
            return False
        self._tell_ended([self.id])
        self._wake_follow_ups(counted)
        await self._end_children(self.id)
        if (await self.job()).closing is not None:
            await self.settle()
        return True

    async def _end_children(self, job_id: int) -> None:
        """In chunks.

        What is locked right now is ended by a sweeper, which also goes on where a crash stopped
        this.
        """
        while True:
            counted = await self._store.doom_chunk(job_id, PAGE)
            if counted.moved:
                self._tell_ended([job_id])
            self._wake_follow_ups(counted)
            for child in counted.moved:
                if child.status is Status.WAITING:
                    await self._end_children(child.id)
            if len(counted.moved) < PAGE:
                return

    def _wake_follow_ups(self, counted: Counted) -> None:
        for kind in counted.follow_ups:
            self._wake(kind)

    async def settle(self) -> bool:
        """Count a batch of closing "aggregate" now, and close it if all its children have ended,
        without waiting for the next sweep; `wait` does so by itself. Any other job, unless its
        counters are wrong, it leaves as it is.

        Returns whether it has closed by this. Raises JobNotFound.
        """
        counted = await self._store.recount(self.id)
        self._wake_follow_ups(counted)
        if not counted.moved:
            await self.job()  # raises for an id that never was
        return any(job.status.is_terminal for job in counted.moved)

    async def pause(self) -> bool:
        """Start nothing more of this batch, or single job, until it is resumed.

        What runs goes on to its end, and counts; a deadline goes on too.

        When this returns, none of its children can be claimed any more, except those that were
        being put back in that moment: the next sweep gets them. Cancelled half-way, it is paused,
        and the sweep does the rest.

        Returns False if it was paused already.

        Raises:
            JobNotFound.
            Refused: it has closed, is being ended, or is a child; nothing was changed.
        """
        changed = await self._store.pause(self.id)
        if not changed:
            await self._check_is_open_root("paused")
        await pause_below(self._store, self.id)
        return changed

    async def resume(self) -> bool:
        """Let a paused batch, or single job, go on: it joins the queue anew.

        Returns False if it was not paused.

        Raises:
            JobNotFound.
            Refused: it has closed, is being ended, or is a child; nothing was changed.
        """
        kind = await self._store.resume(self.id)
        if kind is None:
            await self._check_is_open_root("resumed")
        kinds = await resume_below(self._store, self.id)
        for each in kinds | ({kind} if kind is not None else set()):
            self._wake(each)
        return kind is not None

    async def set_priority(self, priority: int) -> None:
        """From 0 (first) to 9 (last): for this batch, or single job, all children that have not
        ended, and those it dispatches from now on without a priority of their own.

        Cancelled half-way, some children keep the old one: say it again.

        Raises:
            UsageError: it is no priority.
            JobNotFound.
            Refused: it has closed, is being ended, or is a child; nothing was changed.
        """
        check_priority(priority)
        while (kind := await self._store.set_priority(self.id, priority)) is None:
            await self._check_is_open_root("given a priority")  # or it was opened meanwhile
        for each in {kind} | await spread_priority(self._store, self.id):
            self._wake(each)

    async def set_concurrency(self, concurrency: int | None) -> None:
        """How many children of this batch may run at once, over all workers; None: as many as may.

        With fewer than run now, those go on to their ends, and no other begins meanwhile. Cancelled
        half-way, some children keep to no limit: say it again.

        Raises:
            UsageError: it is no count.
            JobNotFound.
            Refused: it has closed, or is being ended; nothing was changed.
        """
        check_concurrency(concurrency)
        if not await self._store.set_concurrency(self.id, concurrency):
            raise Refused(self.id, _not_open(await self.job()))
        await spread_concurrency(self._store, self.id)
        for child in await self.children_page(status=Status.PENDING, limit=1):
            self._wake(child.kind)

    async def add(
        self,
        target: Handler[Any, Any] | str,
        documents: Iterable[Document | tuple[str, Any]] | AsyncIterable[Document | tuple[str, Any]],
        *,
        max_retries: int | None = None,
        priority: int | None = None,
        on_closed: str | None = None,
    ) -> Dispatched:
        """Add documents to this batch while it is open, from outside its handler; arguments and
        result are those of `job.fan_out`.

        A job that has not begun takes them too: they may run before its handler does. A document
        whose key has a child already is passed over, so to add again after an unknown outcome is
        safe.

        Raises:
            JobNotFound.
            Refused: it has closed, or is being ended. Chunks before that stand.
            UsageError: a document cannot be stored; names it. Chunks before it stand.
        """
        handler = target if isinstance(target, Handler) else self._handlers.get(target)
        kind = handler.name if handler is not None else check_kind(target)
        check_priority(priority)
        check_max_retries(max_retries)
        if on_closed is not None:
            check_kind(on_closed, "on_closed")
        elif handler is not None:
            on_closed = handler.on_closed
        if max_retries is None and handler is not None:
            max_retries = handler.max_retries
        created = seen = 0
        async for chunk in chunks(documents, self._settings.chunk_size):
            born, _ = await self._store.add_children(
                self.id,
                documents=[
                    snapshot(document, handler, MAX_PAYLOAD_BYTES, self._settings.max_error_bytes)
                    for document in chunk
                ],
                kind=kind,
                max_retries=max_retries,
                priority=priority,
                on_closed=on_closed,
                on_counted=self._wake_follow_ups,
            )
            created, seen = created + born, seen + len(chunk)
            if born:
                self._wake(kind)
        return Dispatched(created, seen - created)

    async def _check_is_open_root(self, verb: str) -> None:
        """Raises JobNotFound, and Refused with the reason."""
        row = await self.job()
        if row.root_id is not None:
            raise Refused(
                self.id, f"it is a child, and only a whole can be {verb}: job {row.root_id}"
            )
        if row.finished_at is not None or row.verdict is not None:
            raise Refused(self.id, _not_open(row))

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


def _not_open(row: JobRow) -> str:
    if row.finished_at is None:
        return f"it is being ended: {row.reason or 'no reason was kept'}"
    return f"it has closed: {row.outcome}"
