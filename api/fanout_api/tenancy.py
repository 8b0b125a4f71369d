"""The one place through which every read and write passes the caller's tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fanout import Engine, JobHandle, JobRow, JobSummary, Status

__all__ = ["Reach"]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a caller can reach of an engine.

    A job of another tenant is not found, by the same statement and with the same error as one that
    never was: the tenant is part of the statement's conditions.
    """

    engine: Engine
    tenant: str | None
    """None: every tenant."""

    async def job(self, job_id: int) -> JobRow:
        """One job. Raises JobNotFound."""
        return await self.engine.store.job(job_id, self.tenant)

    async def handle(self, job_id: int) -> JobHandle:
        """A handle on a job that can be reached. Raises JobNotFound."""
        await self.job(job_id)
        return self.engine.handle(job_id)

    async def jobs(
        self, kind: str | None, status: Status | None, before: int | None, limit: int
    ) -> list[JobSummary]:
        """A page of root jobs, newest first. Raises as `Engine.jobs` does."""
        return await self.engine.jobs(
            kind=kind, status=status, before_id=before, limit=limit, tenant=self.tenant
        )

    async def submit(self, kind: str, payload: Any, **options: Any) -> JobHandle:
        """Submit a job, as the caller's tenant's. Raises as `Engine.submit` does."""
        return await self.engine.submit(kind, payload, tenant=self.tenant or "", **options)
