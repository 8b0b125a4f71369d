"""What goes in and out of the store: frozen rows, each field with its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .states import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

__all__ = [
    "Attempt",
    "Child",
    "Chunk",
    "Claim",
    "Completed",
    "Counted",
    "Dispatched",
    "Document",
    "Failed",
    "FailureReason",
    "Group",
    "Interrupted",
    "JobRow",
    "JobSummary",
    "LimitRow",
    "LimitedLook",
    "Look",
    "Moved",
    "NewJob",
    "Outcome",
    "Progress",
    "Retry",
    "Settled",
    "SlotKey",
    "Snapshot",
    "Submitted",
    "WorkerRow",
]

WEBHOOK_KIND: Final = "fanout_webhook"
"""The kind of the follow-up that tells a webhook."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit, checked and encoded."""

    kind: str
    payload: str
    """JSON text, at most 1,024 bytes."""
    tenant: str = ""
    """Whose it is; empty: nobody's in particular."""
    key: str | None = None
    priority: int | None = None
    """0 (first) to 9 (last); None: 5."""
    run_at: datetime | None = None
    delay: float | None = None
    """Seconds from the insert, by the database's clock."""
    max_retries: int | None = None
    on_closed: str | None = None
    options: str | None = None
    """JSON text, see `fanout.options`."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a submit: the job's id, and whether it is new or held the key already."""

    id: int
    created: bool
    same: bool
    """False: the holder of the key has other content."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a fan-out: the child's key, unique in its batch, and the snapshot it will
    read.

    `gone` says why the document was no longer there when the snapshot was taken: its child is born
    failed, and counted.
    """

    key: str
    payload: Any = None
    gone: str | None = None
    partition: str | None = None
    """Whose share of a limit the child uses, at most 128 bytes; None: as its batch."""


class Snapshot(NamedTuple):
    """A document, checked and encoded."""

    key: str
    payload: str
    """JSON text."""
    error: str | None = None
    """Why it is gone."""
    partition: str | None = None


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What one `fan_out` call did: children it made, and documents that had a child already."""

    created: int
    known: int


class Claim(NamedTuple):
    """One claim of one job: the fence of everything that is written on its behalf."""

    id: int
    attempt: int
    """The fencing number."""
    kind: str
    depth: int
    parent_id: int | None
    root_id: int | None
    document_key: str | None
    deaths: int
    """More than 0: it runs alone."""
    failures: int
    max_retries: int
    total: int
    """Children that earlier attempts dispatched."""
    priority: int
    run_at: datetime
    payload: str
    """JSON text."""
    checkpoint: str | None
    """JSON text, or None."""


class Look(NamedTuple):
    """What a claim found."""

    claims: list[Claim]
    suspect_age: float | None
    """For how many seconds one that must run alone has been due; None: there is none."""
    limited: frozenset[str] = frozenset()
    """Kinds of which more is due, under a limit or with a partition: for `claim_limited`."""


class LimitedLook(NamedTuple):
    """What a claim under limits found."""

    claims: list[Claim]
    of_partitions: frozenset[int]
    """Ids of those that have a partition."""
    behind: Mapping[str, str]
    """Kind → the last partition that was looked at, where there are more."""


class SlotKey(NamedTuple):
    """One handler within, or before, one `job.limit`."""

    name: str
    """Of the limit."""
    job_id: int
    attempt: int
    number: int
    """Tells apart what one job uses at once."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of the slots of one worker."""

    granted: frozenset[SlotKey]
    waiting: frozenset[SlotKey]
    """What was asked for and is in neither belongs to a lost claim, or to a missing limit."""
    missing: frozenset[str]
    """Limits without a row."""
    others: frozenset[UUID]
    """Other workers that were given a slot, by their claim tokens."""
    wait_seconds: float | None
    """Until a rate allows the next one; None: it is no rate that is waited for."""


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit, as `fanout limit` shows it. None in a field: no such limit."""

    name: str
    """`kind:papers_extract` for a kind; any other name is a resource that handlers ask for."""
    concurrency: int | None
    """How many at once, over all pods."""
    per_partition: int | None
    """How many at once of one partition; jobs without one are one."""
    requests_per_minute: float | None
    weight_per_minute: float | None
    """Tokens, for an LLM."""
    burst: float | None
    """Seconds of an unused rate that may be used at once; None: 1."""
    in_use: int
    waiting: int
    """Up to 10,000."""
    next_seconds: float | None
    """Until the rates allow the next one; None: it has no rate."""
    set_by: Literal["code", "operator", "nobody"]
    """Whose word holds in some field: an operator's wins, until it is reset."""


class Completed(NamedTuple):
    """The handler returned. `result` is JSON text, or None."""

    result: str | None
    added: str | None = None
    """What it added up, as JSON text; None: nothing. Of the other outcomes too."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A permanent failure: no retry can help."""

    error: str
    error_type: str
    added: str | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """A transient failure: again in `delay` seconds, if the budget lasts, else failed."""

    error: str
    error_type: str
    delay: float
    added: str | None = None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Stopped through no fault of its own (shutdown, the engine's database): back to pending, at no
    cost.
    """

    added: str | None = None


Outcome = Completed | Failed | Retry | Interrupted


@dataclass(frozen=True, slots=True)
class Moved:
    """A job that a statement moved."""

    id: int
    parent_id: int | None
    depth: int
    status: Status
    on_closed: str | None
    has_webhook: bool = False

    @property
    def is_ended_root(self) -> bool:
        """Is it the root of a stream, which ends with it?"""
        return self.parent_id is None and self.status.is_terminal


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that one statement moved alike."""

    ids: tuple[int, ...]
    parent_id: int | None
    depth: int
    status: Status
    on_closed: str | None
    has_webhook: bool = False

    @property
    def is_ended_root(self) -> bool:
        """Are they roots of streams, which end with them?"""
        return self.parent_id is None and self.status.is_terminal

    def each(self) -> Iterator[Moved]:
        """The jobs, one by one."""
        for job_id in self.ids:
            yield Moved(
                job_id, self.parent_id, self.depth, self.status, self.on_closed, self.has_webhook
            )


@dataclass(frozen=True, slots=True)
class Counted:
    """What a counting statement did: the jobs it moved, and the batches that closed by it."""

    groups: tuple[Group, ...] = ()
    closed: tuple[Moved, ...] = ()
    locked_at: datetime | None = None
    """When the parents' rows were locked, by the database's clock; None: there were none."""
    doomed: tuple[int, ...] = ()
    """Batches that failed by it, by a limit of theirs: their open children are to be ended."""
    mended: bool = False
    """Of a recount: the counters were wrong, and should not have been."""

    @property
    def moved(self) -> tuple[Moved, ...]:
        """The jobs that were moved, one by one."""
        return tuple(job for group in self.groups for job in group.each())

    @property
    def moved_ids(self) -> set[int]:
        """Their ids."""
        return {job_id for group in self.groups for job_id in group.ids}

    @property
    def follow_ups(self) -> frozenset[str]:
        """Kinds of the follow-up jobs that were enqueued."""
        every: list[Group | Moved] = [*self.groups, *self.closed]
        ended = [one for one in every if one.status.is_terminal]
        webhooks = {WEBHOOK_KIND for one in ended if one.has_webhook}
        return frozenset(webhooks.union(one.on_closed for one in ended if one.on_closed))


class Chunk(NamedTuple):
    """What one statement over some children did."""

    changed: int
    kinds: frozenset[str]
    """Of those it changed."""
    last_id: int | None
    """Where the next one begins; None: there is no more."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job, whole."""

    id: int
    tenant: str
    kind: str
    status: Status
    parent_id: int | None
    root_id: int | None
    follows_id: int | None
    document_key: str | None
    key: str | None
    """The idempotency key it was submitted with."""
    verdict: str | None
    reason: str | None
    error: str | None
    error_type: str | None
    attempt: int
    failures: int
    deaths: int
    max_retries: int
    generation: int
    priority: int
    total: int
    completed: int
    failed: int
    cancelled: int
    on_closed: str | None
    paused: bool
    """Of a root: nothing more of it starts. A child of one that is paused need not say so while it
    runs."""
    concurrency: int | None
    """How many of its children may run at once; None: as many as may."""
    deadline: datetime | None
    payload: Any
    result: Any
    run_at: datetime
    created_at: datetime
    claimed_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    sums: Mapping[str, float] | None = None
    """What it, and its children that have ended, added up (`job.add`); None: nothing."""
    budget: Mapping[str, float] | None = None
    """The sums that end it as failed when they are reached."""
    fail_after: int | None = None
    """So many failed children end it as failed."""
    fail_after_percent: float | None = None
    """Such a share of `total`, once that stands."""
    closing: str | None = None
    """`aggregate`: a sweep counts its children; None: they do, one by one."""

    @property
    def outcome(self) -> str:
        """The status, and "completed with failures" for a batch in which children failed."""
        return outcome_of(self.status, self.failed)


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One line of a list of jobs."""

    id: int
    kind: str
    status: Status
    verdict: str | None
    key: str | None
    total: int
    completed: int
    failed: int
    cancelled: int
    generation: int
    follows_id: int | None
    paused: bool
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    error: str | None
    reason: str | None

    @property
    def outcome(self) -> str:
        """The status, and "completed with failures" for a batch in which children failed."""
        return outcome_of(self.status, self.failed)


@dataclass(frozen=True, slots=True)
class Child:
    """One child of a batch, with its snapshot and its result."""

    id: int
    parent_id: int
    document_key: str
    kind: str
    status: Status
    attempt: int
    failures: int
    deaths: int
    run_at: datetime
    claimed_at: datetime | None
    finished_at: datetime | None
    error_type: str | None
    error: str | None
    reason: str | None
    payload: Any
    result: Any
    sums: Mapping[str, float] | None = None
    """What its attempts added up (`job.add`); None: nothing."""

    @property
    def took(self) -> timedelta | None:
        """How long its last attempt took; None while it has not ended."""
        return self.finished_at - self.claimed_at if self.finished_at and self.claimed_at else None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job: a line of its timeline."""

    attempt: int
    started_at: datetime | None
    ended_at: datetime | None
    """None while it runs."""
    worker_id: UUID | None
    outcome: Literal["running", "completed", "retry", "failed", "released", "lost", "cancelled"]
    """`released`: put back at no cost, at a shutdown for example; `lost`: its worker died, or fell
    silent; `cancelled`: somebody, or the end of its batch, ended it.
    """
    error_type: str | None
    error: str | None

    @property
    def took(self) -> timedelta | None:
        """How long it ran; None while it runs."""
        return self.ended_at - self.started_at if self.ended_at and self.started_at else None


@dataclass(frozen=True, slots=True)
class FailureReason:
    """How many children failed for one reason, and the key of one of them."""

    error: str
    error_type: str | None
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker process."""

    id: UUID
    name: str
    host: str
    pid: int
    version: str
    kinds: tuple[str, ...]
    concurrency: int
    running: int
    free: int
    started_at: datetime
    last_beat_at: datetime
    beat_age_seconds: float
    free_since: datetime | None
    state: Literal["running", "stopping", "lost"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What is true of a job now, from one snapshot of committed rows."""

    id: int
    kind: str
    status: Status
    total: int
    """Children dispatched; final when the job is closed."""
    completed: int
    failed: int
    cancelled: int
    processing: int
    """Children that run now."""
    pending: int
    """Children that wait to run."""
    percent: int
    """Rounded down; 100 only when closed."""
    rate_per_second: float | None
    """Children that ended per second over the last 15 to 30 s; of a closed batch, over its whole
    run.
    """
    eta_seconds: tuple[float, float] | None
    """Least and most seconds until the last child ends, at that rate; None: nobody can say."""
    elapsed_seconds: float
    outcome: str
    generation: int
    waits_for: tuple[str, ...] = field(default=())
    """Why nothing moves, in sentences; empty while all is well, or closed."""
    reason: str | None = None
    sums: Mapping[str, float] | None = None
    """What its handler and its children added up (`job.add`); None: nothing."""
    paused: bool = False
    """Nothing more of it starts until it, or the batch it belongs to, is resumed."""

    @property
    def ended(self) -> int:
        """Children that have ended."""
        return self.completed + self.failed + self.cancelled

    @property
    def is_closed(self) -> bool:
        """Has the job ended for good?"""
        return self.status.is_terminal


def outcome_of(status: Status, failed: int) -> str:
    """The status, and "completed with failures" for a batch in which children failed."""
    return "completed with failures" if status is Status.COMPLETED and failed else str(status)
