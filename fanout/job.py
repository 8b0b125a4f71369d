"""What a handler gets: its payload, its fence, and the few things it can do while it runs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterable, Iterable
from decimal import Context, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid5

from pydantic import BaseModel, ConfigDict, ValidationError

from .checks import check_kind, check_max_retries, check_priority
from .errors import DatabaseUnavailable, LostClaim, UsageError
from .events import LEVELS, event_text, str_of
from .limits import KIND_PREFIX, check_limit_name, encode_bounds
from .options import check_amount
from .pool import NotStarted
from .slots import Limited
from .states import Status
from .values import Dispatched, Document, Snapshot
from .wire import checked_text, clipped, decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping

    from .handle import JobHandle
    from .handlers import Handler
    from .runtime import Runtime
    from .values import Claim

__all__ = ["Closed", "Job", "added_by"]

P = TypeVar("P")
T = TypeVar("T")

_log = logging.getLogger("fanout.job")
PAIR = 2
MOST_SUMS = 16
"""Names that one job may sum; the column has room for 32 of the longest."""
DECIMALS = Decimal("1e-12")
_ARITHMETIC = Context(prec=60)
FIRST_CHUNK = 250


class Closed(BaseModel):
    """The payload of a follow-up job: what closed, and with which counts."""

    model_config = ConfigDict(frozen=True)

    job_id: int
    kind: str
    generation: int
    outcome: Status
    total: int
    completed: int
    failed: int
    cancelled: int


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    """Puts job id, attempt and worker on every line."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


class Job(Generic[P]):
    """One run of a handler. `payload` is checked against the handler's annotation."""

    __slots__ = ("_added", "_claim", "_runtime", "cancel_requested", "checkpoint", "payload")

    def __init__(self, claim: Claim, payload: P, runtime: Runtime) -> None:
        self._claim = claim
        self._runtime = runtime
        self._added: dict[str, Decimal] | None = None
        self.payload = payload
        self.checkpoint: Any = decode(claim.checkpoint)
        """What the last `save_checkpoint` of an earlier attempt kept; None: nothing."""
        self.cancel_requested = False
        """For handlers in a thread, which cannot be interrupted: stop when this is True."""

    @property
    def id(self) -> int:
        """The job's id."""
        return self._claim.id

    @property
    def kind(self) -> str:
        """The kind it was submitted as."""
        return self._claim.kind

    @property
    def attempt(self) -> int:
        """1 for the first claim; also counts claims that were released or lost."""
        return self._claim.attempt

    @property
    def failures(self) -> int:
        """Transient failures so far, of `max_retries` allowed."""
        return self._claim.failures

    @property
    def parent_id(self) -> int | None:
        """The manager that dispatched it; None for a root."""
        return self._claim.parent_id

    @property
    def document_key(self) -> str | None:
        """The document's key, unique in its batch; None for a root."""
        return self._claim.document_key

    @property
    def key(self) -> str:
        """The same on every attempt and like no other job's anywhere: the idempotency key for a
        paid service.
        """
        return str(
            uuid5(
                self._runtime.installation_id,
                f"{self._runtime.settings.schema_name}:{self._claim.id}",
            )
        )

    @property
    def batch(self) -> JobHandle:
        """Of a follow-up: the batch whose close it follows, as it is now.

        `async for key, paper in job.batch.results(Extracted)`, `job.batch.failures()`: a page at a
        time in memory.

        Raises:
            UsageError: this job follows no close.
        """
        try:
            closed = Closed.model_validate_json(self._claim.payload)
        except ValidationError:
            raise UsageError(
                "batch",
                f"job {self.id} follows no close",
                "Ask for it in the handler of a follow-up, the kind that on_closed names",
            ) from None
        return self._runtime.handle(closed.job_id)

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that puts job id, attempt and worker on every line."""
        return _JobLog(
            _log,
            {
                "job_id": self.id,
                "attempt": self.attempt,
                "kind": self.kind,
                "worker": self._runtime.worker_name,
            },
        )

    def log(self, message: object, *, level: str = "info", **fields: Any) -> None:
        """Say something to everybody who watches: one line of the job's stream.

        It is put into a buffer and this returns at once; it never blocks and never raises. A line
        may have 256 KiB; `fields` are what JSON can say. From a thread it works as well.
        """
        name = level if level in LEVELS else "info"
        text = event_text("log", self._claim, str_of(message), level=name, fields=fields)
        self._runtime.publish(self._claim, text)

    def progress(self, done: int, of: int | None = None, message: str | None = None) -> None:
        """Say how far this job is by its own measure, pages for example; the latest wins.

        What a batch shows as progress is its committed counters, never this.
        """
        text = event_text("progress", self._claim, message, done=done, of=of)
        self._runtime.publish(self._claim, text, latest=True)

    def add(self, **amounts: float | Decimal) -> None:
        """Add up what this job uses: `job.add(tokens=1200, cost=0.042, pages=7)`.

        The amounts are summed per job, and go up to the batch, its batch, and so to the root, when
        the job ends: `progress.sums` of a root are those of the whole. What an attempt added before
        it failed, was retried or was interrupted counts too, for it was paid; only what an attempt
        added whose claim was lost (its worker died, or was too slow to renew the lease) is lost. A
        `budget` that is reached ends the batch. Sums are exact, to 12 decimals; a job has at most
        16 names of its own, and shows at most 32 with those of its children. From a thread it works
        as well.

        Raises:
            UsageError: names the amount that is not one; nothing was added.
        """
        added = dict(self._added or {})
        for name, amount in amounts.items():
            check_amount(name, amount, "add")
            added[name] = _ARITHMETIC.add(added.get(name, Decimal(0)), _exact(amount))
        if len(added) > MOST_SUMS:
            raise UsageError(
                "add",
                f"{len(added)} names are too many",
                f"At most {MOST_SUMS} for one job; put what differs per document into its result",
            )
        self._added = added

    def timeout(self, seconds: float) -> asyncio.Timeout:
        """`async with job.timeout(90):` around a network call; a call that takes longer is a
        transient failure.
        """
        return asyncio.timeout(seconds)

    def limit(
        self,
        name: str,
        concurrency: int | None = None,
        *,
        per_partition: int | None = None,
        requests_per_minute: float | None = None,
        weight_per_minute: float | None = None,
        burst: float | None = None,
        weight: float = 1,
    ) -> Limited:
        """`async with job.limit("parser", 2):` around the use of something scarce: a slot of a
        limit that holds over all pods. In a handler that runs in a thread: `with`.

        The handler's timeout does not run while it waits. A slot comes back when the block is left,
        or when the lease of a worker that died is over. One job may use several slots of a limit,
        for calls side by side, but not one within the block of another.

        Args:
            name: of the limit, the same in all programs.
            concurrency, per_partition, requests_per_minute, weight_per_minute, burst: what the code
                says of it, see `Bounds`; what `fanout limit set` says wins. Say it in one place.
            weight: what this use counts for `weight_per_minute`, like tokens; `slot.correct(1534)`
                when it is known better: `async with job.limit("llm", weight=1000) as slot`.

        Raises:
            UsageError: names the field and the remedy.
            LostClaim: this claim was given away.
            TimeoutError: it waited for longer than the handler's timeout while it held another
                slot: two jobs that wait for each other end so, and are tried again.
        """
        runtime = self._runtime
        check_limit_name(name)
        if name.startswith(KIND_PREFIX):
            raise UsageError(
                "name",
                f"{name!r} is the limit of a kind",
                "A job of the kind stands under it already",
            )
        held = runtime.held.get(self.id)
        # A thread may outlive its claim, and the job have been claimed here again.
        if held is None or held.claim.attempt != self.attempt:
            raise LostClaim(self.id, self.attempt)
        handler = runtime.handlers.get(self.kind)
        declared = encode_bounds(
            {
                "concurrency": concurrency,
                "per_partition": per_partition,
                "requests_per_minute": requests_per_minute,
                "weight_per_minute": weight_per_minute,
                "burst": burst,
            }
        )
        return Limited(
            runtime.slots,
            held,
            name,
            declared,
            weight,
            handler.timeout if handler is not None else runtime.settings.timeout,
            lambda: self.cancel_requested,
        )

    async def save_checkpoint(self, value: Any) -> None:
        """Keep `value` (JSON, at most 64 KiB by default) for later attempts: what this one has
        already paid for.

        Raises:
            LostClaim: this claim was given away.
            UsageError: it cannot be stored.
        """
        text = encode(value, "checkpoint", self._runtime.settings.max_checkpoint_bytes)
        await self._through_blips(
            lambda: self._runtime.store.save_checkpoint(self._claim, self._runtime.token, text)
        )
        self.checkpoint = value

    async def fan_out(
        self,
        target: Handler[Any, Any] | str,
        documents: Iterable[Document | tuple[str, Any]] | AsyncIterable[Document | tuple[str, Any]],
        *,
        max_retries: int | None = None,
        priority: int | None = None,
        on_closed: str | None = None,
    ) -> Dispatched:
        """Make one child of kind `target` for each document, in chunks; a chunk's children can be
        claimed as it commits.

        `documents` is a list or an (async) iterator of `Document`s or (key, payload) pairs, and is
        never held whole. A document whose key has a child in this batch already, from an earlier
        attempt or call, is passed over.

        Raises:
            LostClaim: this claim was given away, or the batch was cancelled. Chunks before it
                stand.
            UsageError: a document cannot be stored; names it. Chunks before it stand.
        """
        runtime = self._runtime
        handler = runtime.handler_of(target)
        kind = handler.name if handler is not None else runtime.kind_name(target)
        check_priority(priority)
        check_max_retries(max_retries)
        if on_closed is not None:
            check_kind(on_closed, "on_closed")
        self._runtime.fans_out(self._claim)
        created = seen = 0
        sending: asyncio.Task[int] | None = None
        try:
            async for chunk in chunks(documents, runtime.settings.chunk_size):
                dispatch = partial(
                    runtime.store.fan_out,
                    self._claim,
                    runtime.token,
                    runtime.settings.lease,
                    documents=[runtime.snapshot(document, handler) for document in chunk],
                    kind=kind,
                    max_retries=max_retries
                    if max_retries is not None or handler is None
                    else handler.max_retries,
                    priority=priority if priority is not None else self._claim.priority,
                    on_closed=on_closed
                    if on_closed is not None or handler is None
                    else handler.on_closed,
                    on_counted=runtime.counted,
                )
                seen += len(chunk)
                if sending is not None:
                    created += await sending
                # One chunk is on its way while the next one is encoded.
                sending = asyncio.create_task(self._dispatch(dispatch, kind))
                await asyncio.sleep(0)
        except BaseException as error:
            if sending is not None:
                if isinstance(error, asyncio.CancelledError):
                    sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)  # the chunk before stands
            raise
        if sending is not None:
            created += await sending
        return Dispatched(created, seen - created)

    async def _dispatch(self, dispatch: Callable[[], Awaitable[tuple[int, int]]], kind: str) -> int:
        born, _ = await self._through_blips(dispatch)
        self._runtime.wake(kind)
        return born

    async def _through_blips(self, call: Callable[[], Awaitable[T]]) -> T:
        """Again for a lease, if the database does not answer.

        What is asked is fenced, and done twice is done once; to run the handler again could mean an
        hour of fetching documents, or paying twice. Longer, and the outage would be taken for the
        handler's timeout.
        """
        tries, until = 0, time.monotonic() + self._runtime.settings.lease
        while True:
            try:
                return await call()
            except NotStarted:
                raise
            except DatabaseUnavailable:
                tries += 1
                pause = random.uniform(0.5, 1) * min(5.0, 0.05 * 2.0 ** min(tries, 10))
                if time.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause)

    def from_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one of this job's coroutines from a handler that runs in a thread, and wait for it.

        Raises:
            UsageError: this is an async handler, which would wait for itself; it can await the
                coroutine.
        """
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._runtime.loop:
            coroutine.close()
            raise UsageError(
                "from_thread", "was called in the event loop's own thread", "Use await instead"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._runtime.loop).result()


async def chunks(
    documents: Iterable[Document | tuple[str, Any]] | AsyncIterable[Document | tuple[str, Any]],
    size: int,
) -> AsyncIterator[list[Document]]:
    """Chunks of at most `size`; the first ones smaller, so that the first children start soon."""
    chunk: list[Document] = []
    limit = min(size, FIRST_CHUNK)
    async for document in _each(documents):
        chunk.append(_document(document))
        if len(chunk) >= limit:
            yield chunk
            chunk, limit = [], min(size, limit * 2)
    if chunk:
        yield chunk


async def _each(documents: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(documents, AsyncIterable):
        async for document in documents:
            yield document
    else:
        for document in documents:
            yield document


def _document(item: object) -> Document:
    if isinstance(item, Document):
        return item
    pair: Any = item
    if isinstance(item, tuple) and len(pair) == PAIR:
        return Document(*pair)
    raise UsageError(
        "documents",
        f"holds a {type(item).__name__}",
        "Give Document(key, payload) or (key, payload)",
    )


def snapshot(
    document: Document, handler: Handler[Any, Any] | None, limit: int, error_limit: int
) -> Snapshot:
    """A document, checked. Raises UsageError, naming it."""
    key = checked_text(document.key, "document key", 512)
    partition = document.partition
    if partition is not None:
        if partition == "":
            raise UsageError(
                "partition", f"of document {key!r} is empty", "Give some text, or leave it out"
            )
        partition = checked_text(partition, "partition", 128)
    if document.gone is not None:
        payload = (
            "null"
            if document.payload is None
            else encode(document.payload, f"document {key!r}", limit)
        )
        gone = clipped(document.gone or "the document is gone", error_limit)
        return Snapshot(key, payload, gone, partition)
    if handler is None:
        text = encode(document.payload, f"document {key!r}", limit)
    else:
        text = handler.encode_payload(document.payload, f"document {key!r}", limit)
    return Snapshot(key, text, None, partition)


def _exact(amount: float | Decimal) -> Decimal:
    """What was written, 0.1 for 0.1, to 12 decimals."""
    return _ARITHMETIC.quantize(Decimal(str(amount)), DECIMALS)


def added_by(job: Job[Any] | None) -> str | None:
    """What a run added up, as JSON text; None: nothing."""
    added = job and job._added  # noqa: SLF001 - the one reader
    if not added:
        return None
    return "{" + ", ".join(f'"{name}": {_plain(added[name])}' for name in sorted(added)) + "}"


def _plain(amount: Decimal) -> str:
    text = f"{amount:f}".rstrip("0").rstrip(".")
    return "0" if text in {"", "-0", "-"} else text
