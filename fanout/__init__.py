"""fanout: a fan-out engine on PostgreSQL alone.

engine = Engine("postgresql://…")          # or Engine.embedded()

@engine.job
async def papers_extract(job: Job[Paper]) -> Extracted: ...

@engine.job(on_closed="papers_report")
async def papers_batch(job: Job[Selection]) -> None:
    await job.fan_out(papers_extract, (Document(p.id, p) for p in papers))

async with engine, engine.worker():
    handle = await engine.submit(papers_batch, Selection(...), key="import-2026-11")
    print(await handle.wait())
"""

from __future__ import annotations

from .alerts import Alert, AlertKind
from .engine import Engine, Request
from .errors import (
    ConfigurationError,
    DatabaseUnavailable,
    FanoutError,
    IdempotencyConflict,
    JobFailed,
    JobNotFound,
    LostClaim,
    PermanentError,
    Refused,
    SchemaMismatch,
    TransientError,
    UsageError,
)
from .events import Event
from .handle import JobHandle
from .handlers import Handler
from .job import Closed, Job
from .migrate import migrate
from .options import Options
from .settings import Settings
from .states import Status
from .tree import Relation, Tree, TreeNode
from .values import (
    Attempt,
    Child,
    Dispatched,
    Document,
    FailureReason,
    JobRow,
    JobSummary,
    Progress,
    WorkerRow,
)
from .worker import Worker

__all__ = [
    "Alert",
    "AlertKind",
    "Attempt",
    "Child",
    "Closed",
    "ConfigurationError",
    "DatabaseUnavailable",
    "Dispatched",
    "Document",
    "Engine",
    "Event",
    "FailureReason",
    "FanoutError",
    "Handler",
    "IdempotencyConflict",
    "Job",
    "JobFailed",
    "JobHandle",
    "JobNotFound",
    "JobRow",
    "JobSummary",
    "LostClaim",
    "Options",
    "PermanentError",
    "Progress",
    "Refused",
    "Relation",
    "Request",
    "SchemaMismatch",
    "Settings",
    "Status",
    "TransientError",
    "Tree",
    "TreeNode",
    "UsageError",
    "Worker",
    "WorkerRow",
    "migrate",
]
