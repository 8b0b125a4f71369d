"""Everything that goes in and out, as pydantic models: the OpenAPI document is made of these.

Answers have no defaults: every field is always there. Requests are strict and take no field that
they do not name, so that nobody sets a status, an attempt or a tenant.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, RootModel

from fanout import Status
from fanout.access import Scope

__all__ = [
    "About",
    "AddBody",
    "Added",
    "AlertView",
    "Alerts",
    "AlertsFilter",
    "Attempts",
    "Bucket",
    "CancelBody",
    "Cancelled",
    "ChildKeys",
    "ChildView",
    "ChildrenPage",
    "ConcurrencyBody",
    "Failures",
    "GridView",
    "HistoryView",
    "JobSummaryView",
    "JobView",
    "JobsPage",
    "KindView",
    "Kinds",
    "Paused",
    "PriorityBody",
    "ProgressView",
    "Ready",
    "Resumed",
    "Retried",
    "RetryBody",
    "SessionBody",
    "Stuck",
    "SubmitBody",
    "TreeView",
    "VerbBody",
    "WorkerView",
    "Workers",
]

MAX_ID: Final = 2**53 - 1
"""What every JSON parser reads exactly."""
KIND: Final = r"^[A-Za-z][A-Za-z0-9_]{0,62}$"
PERCENT: Final = r"^[0-9]{1,3}(\.[0-9]{1,6})? ?%$"
SUM: Final = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"
ENDPOINT: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
TEN_YEARS: Final = 10 * 366 * 86_400
MAX_KEYS: Final = 1000

Count = Annotated[int, Field(ge=0)]


class Answer(BaseModel):
    """Something that is told."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class Asked(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Filter(BaseModel):
    """The parameters in an address."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# -- jobs ------------------------------------------------------------------------------------------


class ProgressView(Answer):
    """What is true of a job now, from committed counters."""

    id: int
    kind: str
    status: Status
    outcome: str = Field(
        description="The status, or 'completed with failures' for a batch with failed children."
    )
    total: Count = Field(description="Children dispatched; final when the job is closed.")
    completed: Count
    failed: Count
    cancelled: Count
    processing: Count = Field(description="Children that run now.")
    pending: Count = Field(description="Children that wait to run.")
    percent: Annotated[int, Field(ge=0, le=100)] = Field(
        description="Rounded down; 100 only when closed."
    )
    rate_per_second: float | None = Field(
        description="Children that ended per second of late; of a closed batch, over its run."
    )
    eta_seconds: tuple[float, float] | None = Field(
        description="Least and most seconds until the last child ends; null: nobody can say."
    )
    elapsed_seconds: float
    generation: int
    waits_for: list[str] = Field(description="Why nothing moves, in sentences.")
    paused: bool = Field(description="Nothing more of it starts until it is resumed.")
    sums: dict[str, float] | None = Field(description="What it and its children added up.")
    reason: str | None


class JobView(Answer):
    """One job, whole."""

    id: int
    kind: str
    status: Status
    outcome: str
    parent_id: int | None
    root_id: int | None = Field(description="The job whose stream this one's events are in.")
    follows_id: int | None = Field(description="The job whose close enqueued this one.")
    document_key: str | None
    tenant: str = Field(description="Whose it is; empty: nobody's in particular.")
    key: str | None = Field(description="The idempotency key it was submitted with.")
    verdict: str | None
    reason: str | None
    error: str | None
    error_type: str | None
    attempt: Count
    failures: Count = Field(description="Retries used up.")
    deaths: Count
    max_retries: Count
    generation: int
    priority: int
    total: Count
    completed: Count
    failed: Count
    cancelled: Count
    on_closed: str | None
    paused: bool = Field(description="Nothing more of it starts until it is resumed.")
    concurrency: int | None = Field(description="Children that may run at once; null: any number.")
    deadline: datetime | None = Field(description="What is open then ends as failed.")
    closing: str | None = Field(description="aggregate: a sweep counts its children.")
    fail_after: int | None = Field(description="So many failed children end it as failed.")
    fail_after_percent: float | None = Field(description="Such a share of total does.")
    sums: dict[str, float] | None = Field(description="What it and its children added up.")
    budget: dict[str, float] | None = Field(
        description="The sums that end it as failed when they are reached."
    )
    payload: Any
    result: Any
    run_at: datetime
    created_at: datetime
    claimed_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    progress: ProgressView


class JobSummaryView(Answer):
    """One line of a list of jobs."""

    id: int
    kind: str
    status: Status
    outcome: str
    verdict: str | None
    key: str | None
    total: Count
    completed: Count
    failed: Count
    cancelled: Count
    generation: int
    follows_id: int | None
    paused: bool
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    error: str | None
    reason: str | None


class JobsPage(Answer):
    """Root jobs, newest first."""

    jobs: list[JobSummaryView]
    next: int | None = Field(description="`before` of the next page; null: this is the last.")


class JobsFilter(Filter):
    """Which jobs."""

    kind: Annotated[str, Field(pattern=KIND)] | None = None
    status: Status | None = None
    before: Annotated[int, Field(ge=1, le=MAX_ID)] | None = Field(
        None, description="Jobs with ids below this one."
    )
    limit: Annotated[int, Field(ge=1, le=1000)] = 50


class SubmitBody(Asked):
    """A job to submit."""

    kind: Annotated[str, Field(pattern=KIND)] = Field(examples=["papers_batch"])
    payload: Any = Field(None, description="At most 1 KB of JSON: ids, not bodies.")
    priority: Annotated[int, Field(ge=0, le=9)] | None = Field(
        None, description="0 first, 9 last; default 5."
    )
    delay: Annotated[float, Field(ge=0, le=TEN_YEARS, allow_inf_nan=False)] | None = Field(
        None, description="Not before so many seconds have passed."
    )
    run_at: AwareDatetime | None = Field(None, description="Not before this time.")
    max_retries: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    on_closed: Annotated[str, Field(pattern=KIND)] | None = Field(
        None, description="The kind of its follow-up job."
    )
    partition: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="Whose share of a limit it uses, a customer's for example."
    )
    closing: Literal["count", "aggregate"] | None = Field(
        None,
        description="count: the last child closes the batch, at once. aggregate: a sweep counts "
        "its children, every 10 s.",
    )
    concurrency: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Children that may run at once, over all workers."
    )
    fail_after: (
        Annotated[int, Field(ge=1, lt=2**31)] | Annotated[str, Field(pattern=PERCENT)] | None
    ) = Field(
        None,
        description="So many failed children, or such a share of all, like 5 %, end the batch as "
        "failed.",
        examples=[20, "5 %"],
    )
    deadline: AwareDatetime | None = Field(
        None, description="What is open then ends as failed. Instead: deadline_seconds from now."
    )
    deadline_seconds: Annotated[float, Field(gt=0, le=TEN_YEARS, allow_inf_nan=False)] | None = None
    budget: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=SUM)],
                Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)],
            ],
            Field(min_length=1, max_length=8),
        ]
        | None
    ) = Field(
        None,
        description="What its handlers may add up: a batch that reaches one ends as failed.",
        examples=[{"cost": 50}],
    )
    webhook: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="The endpoint that is told of its close."
    )


# -- children --------------------------------------------------------------------------------------


class ChildView(Answer):
    """One child of a batch, with its snapshot and its result."""

    id: int
    parent_id: int
    document_key: str
    kind: str
    status: Status
    attempt: Count
    failures: Count
    deaths: Count
    run_at: datetime
    claimed_at: datetime | None
    finished_at: datetime | None
    took_seconds: float | None = Field(description="How long its last attempt took.")
    error_type: str | None
    error: str | None
    reason: str | None
    payload: Any
    result: Any


class ChildrenPage(Answer):
    """Children by document key."""

    children: list[ChildView]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class ChildrenFilter(Filter):
    """Which children."""

    status: Status | None = None
    error: Annotated[str, Field(min_length=1, max_length=8192)] | None = Field(
        None, description="Those that failed with exactly this one."
    )
    after: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None, description="Children with keys above this one."
    )
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class AttemptView(Answer):
    """One run of a job."""

    attempt: Count
    started_at: datetime | None
    ended_at: datetime | None = Field(description="null: it runs.")
    took_seconds: float | None
    worker_id: UUID | None
    outcome: Literal["running", "completed", "retry", "failed", "released", "lost", "cancelled"] = (
        Field(
            description="released: put back at no cost, at a shutdown for example; lost: its "
            "worker died, or fell silent; cancelled: somebody, or the end of its batch, ended it."
        )
    )
    error_type: str | None
    error: str | None


class Attempts(Answer):
    """The runs of a job, the first one first."""

    attempts: list[AttemptView]


class Limit(Filter):
    """How many."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 50


class ReasonView(Answer):
    """How many children failed for one reason."""

    error: str
    error_type: str | None
    count: Count
    example: str = Field(description="The key of one of them.")


class Failures(Answer):
    """Failures by reason, most frequent first."""

    reasons: list[ReasonView]


class DensityBucket(Answer):
    """Some neighbouring children, counted by state."""

    first_key: str
    p: Count = Field(description="pending")
    r: Count = Field(description="processing")
    w: Count = Field(description="waiting")
    c: Count = Field(description="completed")
    f: Count = Field(description="failed")
    x: Count = Field(description="cancelled")


class Squares(Answer):
    """A letter for each child, in the order of keys."""

    total: Count
    kind: Literal["squares"]
    states: str = Field(
        description="p pending, r processing, w waiting, c completed, f failed, x cancelled"
    )


class Density(Answer):
    """Counts for so many children at a time, in the order of keys."""

    total: Count
    kind: Literal["density"]
    buckets: list[DensityBucket]


class GridView(RootModel[Annotated[Squares | Density, Field(discriminator="kind")]]):
    """All children at one look."""


class Bucket(Answer):
    """What ended within one bucket of time."""

    completed: Count
    failed: Count
    cancelled: Count


class ChildKey(Answer):
    """Which child a square is."""

    id: int
    key: str


class ChildKeys(Answer):
    """Children by document key, as they stand in the grid."""

    keys: list[ChildKey]


class KeysFilter(Filter):
    """Which squares of the grid."""

    first: Annotated[int, Field(ge=0, lt=5000)] = Field(0, description="Squares before the first.")
    limit: Annotated[int, Field(ge=1, le=1000)] = 200


class TreeNodeView(Answer):
    """One job of a chain, with its own children counted."""

    id: int
    kind: str
    relation: Literal["top", "child", "follow_up"] = Field(
        description="How it hangs on the job it stands under: dispatched by it, or by its close."
    )
    level: Count = Field(description="0: the top. It stands under the last one of a level less.")
    under_id: int | None
    of_generation: int | None = Field(description="Of a follow-up: which close it followed.")
    key: str | None
    status: Status
    outcome: str
    generation: int
    total: Count
    completed: Count
    failed: Count
    cancelled: Count
    why: str | None = Field(description="The reason or error it ended with.")
    created_at: datetime
    finished_at: datetime | None


class TreeView(Answer):
    """What a job came from, the batches inside it, and what followed their closes."""

    id: int
    nodes: list[TreeNodeView] = Field(description="In reading order; leaves are counted only.")
    cut_above: bool = Field(description="The chain begins before the first node.")
    cut_below: bool = Field(description="There are more jobs than these.")


class HistoryView(Answer):
    """How many children ended when."""

    bucket_seconds: float
    from_: datetime = Field(alias="from", description="Where the first bucket begins.")
    buckets: list[Bucket]


class ExportFilter(Filter):
    """What to download."""

    what: Literal["children", "results", "failures"] = "results"
    format: Literal["csv", "jsonl"] = "csv"


# -- steering --------------------------------------------------------------------------------------


class CancelBody(Asked):
    """Why."""

    reason: Annotated[str, Field(min_length=1, max_length=1000)] | None = None


class Cancelled(Answer):
    """False: it had ended already."""

    cancelled: bool


class RetryBody(Asked):
    """Which failed children: all, those of `keys`, or those with exactly this `error`."""

    keys: Annotated[list[str], Field(max_length=MAX_KEYS)] | None = None
    error: str | None = None


class Retried(Answer):
    """How many run again."""

    retried: Count


class VerbBody(Asked):
    """Nothing more is to be said."""


class Paused(Answer):
    """False: it was paused already."""

    paused: bool


class Resumed(Answer):
    """False: it was not paused."""

    resumed: bool


class PriorityBody(Asked):
    """For the batch, its children that have not ended, and those to come."""

    priority: Annotated[int, Field(ge=0, le=9)] = Field(description="0 first, 9 last.")


class ConcurrencyBody(Asked):
    """How many children may run at once, over all workers; null: as many as may."""

    concurrency: Annotated[int, Field(ge=1, lt=2**31)] | None


class AddedDocument(Asked):
    """A document: its key, unique in the batch, and the snapshot that its child will read."""

    key: Annotated[str, Field(min_length=1, max_length=512)]
    payload: Any = Field(None, description="At most 1 KB of JSON.")
    gone: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None, description="Why it is no longer there: its child is born failed, and counted."
    )


class AddBody(Asked):
    """Documents to add."""

    kind: Annotated[str, Field(pattern=KIND)] = Field(examples=["papers_extract"])
    documents: Annotated[list[AddedDocument], Field(min_length=1, max_length=MAX_KEYS)]
    priority: Annotated[int, Field(ge=0, le=9)] | None = None
    max_retries: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    on_closed: Annotated[str, Field(pattern=KIND)] | None = None


class Added(Answer):
    """Children that were made, and documents that had one already."""

    created: Count
    known: Count


# -- streams ---------------------------------------------------------------------------------------


class EventsFilter(Filter):
    """From where on."""

    after: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Events after this id; a Last-Event-ID header comes first."
    )


class LogFilter(Filter):
    """Which lines."""

    contains: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="In the message, whatever the case of its letters."
    )
    level: Literal["debug", "info", "warning", "error"] | None = None
    after: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Lines after this id; one that is none begins at the first line."
    )
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class LogLine(Answer):
    """One line, as it was said; a long message is cut."""

    id: str = Field(description="generation.number, as in the stream.")
    event: dict[str, Any]


class LogPage(Answer):
    """Lines that fit, in order."""

    lines: list[LogLine]
    next: str | None = Field(
        description="`after` of the next page, which may have no line at all: one look is bounded. "
        "null: everything that is stored was looked at."
    )


class StreamsFilter(Filter):
    """Which streams, and from where on."""

    s: Annotated[list[str], Field(min_length=1, max_length=32)] = Field(
        description="A root job's id, or id:cursor."
    )
    after: Annotated[str, Field(max_length=2048)] | None = Field(
        None, description="The id of the last event, whose cursors come before those in `s`."
    )


# -- limits and schedules --------------------------------------------------------------------------


class LimitView(Answer):
    """One limit, global over all pods. null in a bound: there is none."""

    name: str = Field(description="kind:NAME for a kind; else what handlers ask for.")
    concurrency: Count | None = Field(description="How many at once.")
    per_partition: Count | None = Field(description="How many at once of one partition.")
    requests_per_minute: float | None
    weight_per_minute: float | None = Field(description="Tokens, for an LLM.")
    burst: float | None = Field(
        description="Seconds of an unused rate that may be used at once; null: 1."
    )
    in_use: Count
    waiting: Count = Field(description="Up to 10,000.")
    next_seconds: float | None = Field(description="Until the rates allow the next one.")
    set_by: Literal["code", "operator", "nobody"] = Field(
        description="Whose word holds in some field: an operator's wins, until it is reset."
    )


class LimitsView(Answer):
    """All limits, by name."""

    limits: list[LimitView]


class LimitBody(Asked):
    """What to bound, over what the code says. null lifts a bound; what is left out stays."""

    concurrency: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="0: none for now."
    )
    per_partition: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    requests_per_minute: Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)] | None = (
        None
    )
    weight_per_minute: Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)] | None = None
    burst: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] | None = None


class ScheduleView(Answer):
    """One schedule."""

    name: str
    kind: str
    expression: str = Field(description="Minute, hour, day, month, day of the week.")
    timezone: str = Field(description="Whose wall clock the expression speaks of.")
    missed: Literal["skip", "one", "all"] = Field(
        description="What becomes of times at which no worker lived."
    )
    payload: Any
    priority: int | None
    max_retries: int | None
    tenant: str
    options: Any
    declared_by: Literal["code", "operator"]
    enabled: bool
    next_at: datetime
    last_at: datetime | None = Field(description="The time that its last job was for.")
    last_job_id: int | None


class SchedulesView(Answer):
    """All schedules, by name."""

    schedules: list[ScheduleView]


class Ran(Answer):
    """A job that was submitted."""

    kind: str
    job_id: int


# -- webhooks --------------------------------------------------------------------------------------


class EndpointView(Answer):
    """Where webhooks are sent, without its secret."""

    name: str
    url: str
    events: list[str]
    tenant: str | None = Field(description="The one tenant whose batches it is told of; null: all.")
    enabled: bool
    disabled_reason: str | None
    created_at: datetime
    old_secret_until: datetime | None = Field(
        description="Until when the secret before the last rotation signs as well."
    )


class EndpointsView(Answer):
    """All endpoints, by name."""

    endpoints: list[EndpointView]


class EndpointBody(Asked):
    """An endpoint to add."""

    name: Annotated[str, Field(pattern=ENDPOINT)]
    url: Annotated[str, Field(min_length=1, max_length=2000)] = Field(
        examples=["https://example.com/hooks/fanout"]
    )
    events: Annotated[
        list[Literal["batch.closed", "alert.opened", "alert.closed"]],
        Field(min_length=1, max_length=3),
    ] = ["batch.closed"]
    tenant: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class Secret(Answer):
    """A secret, for this once."""

    name: str
    secret: str = Field(description="whsec_…, as Standard Webhooks has it. It is not shown again.")


class RotateBody(Asked):
    """How long the old secret signs as well."""

    keep_seconds: Annotated[float, Field(ge=0, le=90 * 86_400, allow_inf_nan=False)] = 86_400


class DisableBody(Asked):
    """Why."""

    reason: Annotated[str, Field(min_length=1, max_length=500)] | None = None


# -- the installation ------------------------------------------------------------------------------


class KindView(Answer):
    """What workers said of a kind."""

    name: str
    max_retries: Count
    timeout_seconds: float
    on_closed: str | None
    payload_schema: Any = Field(description="JSON schema of the payload; null: anything goes.")
    workers: Count = Field(description="Workers that live and serve it.")


class Kinds(Answer):
    """The kinds that workers registered."""

    kinds: list[KindView]


class WorkerView(Answer):
    """One worker process."""

    id: UUID
    name: str
    host: str
    pid: int
    version: str
    kinds: list[str]
    concurrency: Count
    running: Count
    free: Count
    started_at: datetime
    last_beat_at: datetime
    beat_age_seconds: float
    free_since: datetime | None
    state: Literal["running", "stopping", "lost"]


class Workers(Answer):
    """Workers that live, or were lost within the last day."""

    workers: list[WorkerView]


class StuckView(Answer):
    """Something that does not move."""

    id: int
    parent_id: int | None
    kind: str
    why: str
    since: datetime


class Stuck(Answer):
    """What does not move, and why; empty: nothing is stuck."""

    stuck: list[StuckView]


class AlertsFilter(Filter):
    """Which incidents."""

    open: bool = Field(default=False, description="Only those that last.")
    limit: Annotated[int, Field(ge=1, le=1000)] = 50


class AlertView(Answer):
    """Something that is, or was, wrong."""

    id: int
    kind: str
    subject: str = Field(description="A job's id, a kind of job, a loop of a worker, or nothing.")
    job_id: int | None
    message: str
    opened_at: datetime
    closed_at: datetime | None = Field(description="null: it lasts.")


class Alerts(Answer):
    """Incidents, newest first."""

    alerts: list[AlertView]


class About(Answer):
    """What this is, and what the caller may."""

    version: str
    server_version: str
    schema_version: int
    live_workers: Count
    scopes: list[Scope]
    auth: Literal["none", "key", "own"]


class SessionBody(Asked):
    """A key, in exchange for a cookie."""

    key: Annotated[str, Field(min_length=1, max_length=256)]


class Alive(Answer):
    """The process answers."""

    alive: Literal[True]


class Check(Answer):
    """One thing that must be so."""

    name: str
    ok: bool
    detail: str


class Ready(Answer):
    """Can this process do its work?"""

    ready: bool
    checks: list[Check]
