"""A whole batch in one call: run at once in this process if it is small, queued if it is not.

    documents ──fewer than inline_below──▶ one transaction: batch and children, sealed, claimed here
        │                                        └──▶ run here, as a worker runs them
        └──────more──▶ spooled ──▶ one transaction: batch and children, sealed ──▶ the queue

Either way nobody sees half a batch, the rows are the same, and so are the code that runs a child
and the statements that end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from .errors import DatabaseUnavailable, LostClaim
from .held import Stop
from .job import chunks, snapshot
from .settings import MAX_PAYLOAD_BYTES
from .values import Completed, Counted, Interrupted, Snapshot
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from .handle import JobHandle
    from .handlers import Handler
    from .held import Held
    from .settings import Settings
    from .store import Store
    from .values import Claim, Document, NewJob

__all__ = ["Batch", "InlineRunner", "Opened", "Selection", "open_batch"]

SPOOL_BYTES: Final = 8 << 20
"""Documents beyond it wait on disk: a million of them take no more memory than these."""
BREATHE: Final = 250
"""Documents that are read without a look at the event loop."""
LET_GO_SECONDS: Final = 5.0
"""How long a cancelled call waits until what it released is written."""


class Selection:
    """Documents, checked and encoded, as many times over as a transaction needs them."""

    def __init__(self, handler: Handler[Any, Any] | None, settings: Settings) -> None:
        self._handler = handler
        self._settings = settings
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by `close`
            SPOOL_BYTES, mode="w+", encoding="utf-8"
        )
        self._sum = 0
        self.count = 0

    async def read(self, documents: Iterable[Any] | AsyncIterable[Any]) -> None:
        """Read all of them. Raises UsageError, naming the first that cannot be stored."""
        async for chunk in chunks(documents, BREATHE):
            for document in chunk:
                self._add(document)
            await asyncio.sleep(0)

    def _add(self, document: Document) -> None:
        settings = self._settings
        one = snapshot(document, self._handler, MAX_PAYLOAD_BYTES, settings.max_error_bytes)
        line = json.dumps(one)
        self._file.write(f"{line}\n")
        # A sum knows no order: the same documents are the same request in any.
        self._sum += int.from_bytes(hashlib.sha256(line.encode()).digest())
        self.count += 1

    @property
    def digest(self) -> str:
        """The same for the same documents."""
        return f"{self._sum % 2**256:064x}"

    def chunks(self) -> Iterator[list[Snapshot]]:
        """All of them, a chunk at a time in memory."""
        self._file.seek(0)
        while lines := list(islice(self._file, self._settings.chunk_size)):
            yield [Snapshot(*json.loads(line)) for line in lines]

    def close(self) -> None:
        """Forget them."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Opened:
    """What became of a batch: one that is new, or the one that held the key already."""

    id: int
    created: bool
    counted: tuple[Counted, ...] = ()
    """What ended with its making: documents that were gone; the batch, if it was empty."""
    claims: tuple[Claim, ...] = ()
    """Its children, if they are run here."""


async def open_batch(
    store: Store,
    job: NewJob,
    selection: Selection,
    *,
    kind: str,
    max_retries: int | None,
    on_closed: str | None,
    token: UUID,
    lease_seconds: float,
    claim_kinds: Sequence[str] = (),
) -> Opened:
    """Make a batch and its children in one transaction, sealed; with `claim_kinds`, claimed.

    Raises:
        IdempotencyConflict: its key belongs to a job with other content.
        DatabaseUnavailable: it was made whole, or not at all.
    """

    async def body(store: Store) -> Opened:
        [submitted] = await store.submit([job])
        if not submitted.created:
            return Opened(submitted.id, created=False)
        claim = await store.claim_new(submitted.id, token, lease_seconds)
        counted: list[Counted] = []
        claims: list[Claim] = []
        try:
            for documents in selection.chunks():
                await store.fan_out(
                    claim,
                    token,
                    lease_seconds,
                    documents=documents,
                    kind=kind,
                    max_retries=max_retries,
                    priority=None,
                    on_closed=on_closed,
                    on_counted=counted.append,
                )
            counted.append(await store.finish([(claim, Completed(None))], token))
            if claim_kinds and selection.count:
                claims = await store.claim_children(
                    [submitted.id], claim_kinds, selection.count, token, lease_seconds
                )
        except LostClaim:
            pass  # it has failed by the documents that are gone, and is being ended
        return Opened(submitted.id, created=True, counted=tuple(counted), claims=tuple(claims))

    return await store.together(body)


@dataclass(slots=True)
class Batch:
    """A batch that calls of `run` in this process wait for."""

    parents: set[int]
    """It, and below it what fanned out here."""
    calls: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class InlineRunner(Worker):
    """Runs children of the batches that it is given, and nothing else: a worker without a queue.

    It stands in the list of workers, serving no kind.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.kinds = []
        self._batches: dict[int, Batch] = {}
        # A claim that is made and not yet held looks like one whose answer was lost.
        self._claiming = asyncio.Lock()

    def _start_loops(self) -> None:
        """Nothing for the queue: no listener, no schedules, no pruning."""
        self.publisher.start()
        self.finisher.start()
        self.heartbeat.start()
        self.sweeper.start()
        self._timeouts.start()
        self._claims.start()

    async def _stop(self, grace: float) -> None:
        # A batch that is being made is waited for, and given back: nobody else knows of its claims.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.database_timeout), self._claiming:
                pass
        await super()._stop(grace)

    @property
    def is_usable(self) -> bool:
        """Does it run what it is given?"""
        return not (self.is_stopped or self._stopping or self.failed.is_set())

    async def serve(self, handlers: Mapping[str, Handler[Any, Any]]) -> None:
        """Begin, and know these handlers too. Raises DatabaseUnavailable."""
        new = [one for name, one in handlers.items() if name not in self._handlers]
        self._handlers.update(handlers)
        if new:
            await self._declare(new)
        await self.start()

    async def begin(
        self,
        job: NewJob,
        selection: Selection,
        handler: Handler[Any, Any],
        max_retries: int,
    ) -> tuple[Opened, Batch]:
        """Make a batch and begin it; whoever did must `wait` for it, which also lets go of it.

        Raises DatabaseUnavailable: this stops; nothing was made.
        """
        async with self._claiming:
            if self._stopping:
                raise DatabaseUnavailable("the engine is being stopped; nothing was submitted")
            opened = await self._or_in_doubt(
                open_batch(
                    self._store,
                    job,
                    selection,
                    kind=handler.name,
                    max_retries=max_retries,
                    on_closed=handler.on_closed,
                    token=self.token,
                    lease_seconds=self._settings.lease,
                    claim_kinds=list(self._handlers),
                )
            )
            batch = self._batches.setdefault(opened.id, Batch({opened.id}))
            batch.calls += 1
            self._accept(opened.claims)
        for counted in opened.counted:
            self._on_counted(counted)
        self._claims.nudge()
        return opened, batch

    async def wait(self, handle: JobHandle, batch: Batch) -> None:
        """Wait until the batch is closed, here or elsewhere.

        Cancelled, it lets go of what runs, at no cost: it goes on elsewhere.

        Raises:
            DatabaseUnavailable: the engine was stopped.
        """
        # What ends elsewhere, or by a cancel, is seen in the table.
        looking = asyncio.ensure_future(handle.wait())
        told = asyncio.ensure_future(batch.closed.wait())
        try:
            await asyncio.wait({looking, told}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
        finally:
            looking.cancel()
            told.cancel()
            batch.calls -= 1
            if not batch.calls:
                self._batches.pop(handle.id, None)
                await self._let_go_of(batch)

    async def _let_go_of(self, batch: Batch) -> None:
        held = [one for one in self._held.values() if one.claim.parent_id in batch.parents]
        for one in held:
            self._give_back(one)
        tasks = [one.task for one in held if one.task is not None]
        if not held:
            return
        with contextlib.suppress(asyncio.CancelledError):  # told to stop again: then at once
            if tasks:
                await asyncio.wait(tasks, timeout=self._settings.timeout_grace)
            await self.finisher.drain(LET_GO_SECONDS)
        for kind in {one.claim.kind for one in held}:
            self._waker.wake(kind)

    def _give_back(self, held: Held) -> None:
        if held in self._buffer:
            self._buffer.remove(held)
            self.finisher.add(held.claim, Interrupted())
        elif held.task is not None and not held.task.done():
            held.stop = held.stop or Stop.SHUTDOWN
            self._cancel(held)

    # -- claiming ---------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """One look: children that are due again, that others let fall, or that had no room."""
        async with self._claiming:
            await self._release_orphans()
            while self._batches and self.has_free_slot:
                free = self.concurrency - self._running - len(self._buffer)
                claims = await self._or_in_doubt(self._due(free))
                self._accept(claims)
                if len(claims) < free:
                    break
            if self._batches and not self._held and not self._stopping:
                self._run_suspect(await self._or_in_doubt(self._due(1, alone=True)))

    async def _due(self, limit: int, *, alone: bool = False) -> list[Claim]:
        self._follow_nested()
        parents = sorted({one for batch in self._batches.values() for one in batch.parents})
        return await self._store.claim_children(
            parents, list(self._handlers), limit, self.token, self._settings.lease, alone=alone
        )

    def _follow_nested(self) -> None:
        """What fans out here is a parent of what is to be run here."""
        for one in self._held.values():
            if one.fans_out:
                for batch in self._batches.values():
                    if one.claim.parent_id in batch.parents:
                        batch.parents.add(one.claim.id)

    def _run_suspect(self, claims: Sequence[Claim]) -> None:
        if claims:
            self._alone = True
            self._accept(claims)

    # -- what others tell -------------------------------------------------------------------------

    def _on_written(self, claims: Sequence[Claim]) -> None:
        self._follow_nested()
        super()._on_written(claims)
        if self._batches and not self._stopping:
            self._claims.nudge()  # a slot of a limit may be free

    def _on_counted(self, counted: Counted) -> None:
        super()._on_counted(counted)
        ended = {job.id for job in counted.closed}
        ended |= {one for group in counted.groups if group.is_ended_root for one in group.ids}
        for job_id in ended & self._batches.keys():
            self._batches[job_id].closed.set()
