"""The demo seen from the engine: which batch a corpus is, and what its follow-up wrote.

The batch's key is made of the documents' contents and the results' folder, so the same again is the
same batch: closed already, or one that was interrupted and now goes on. A batch that failed as a
whole, and `fresh`, make a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fanout import Closed, Engine, JobHandle, JobRow, Options, PermanentError, Status

from .corpus import Corpus
from .outputs import Written

__all__ = ["Batch", "Plan", "begin", "written_before", "written_by"]

PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with a corpus: by name, for this process has no handler of it, and on a new
    database no worker has told of one yet.
    """

    batch: str
    """Kind of the batch."""
    report: str
    """Kind of its follow-up."""
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a corpus."""

    handle: JobHandle
    is_new: bool
    was_closed: bool
    """Everything had been done before this run."""
    had_ended: int
    """Children that an interrupted run had ended."""


async def begin(engine: Engine, plan: Plan, corpus: Corpus, results: Path, *, fresh: bool) -> Batch:
    """The batch of `corpus`: the one there is, or a new one."""
    digest = hashlib.sha256(f"{corpus.digest} {results}".encode()).hexdigest()
    name = f"{plan.batch}:{digest[:16]}"
    round_number, row = await _last(engine, name)
    if row is None or fresh or row.status in {Status.FAILED, Status.CANCELLED}:
        payload = {"manifest": str(corpus.manifest), "results": str(results), "fresh": fresh}
        handle = await engine.submit(
            plan.batch,
            payload,
            key=f"{name}:{round_number + 1}",
            on_closed=plan.report,
            **plan.options,
        )
        return Batch(handle, is_new=True, was_closed=False, had_ended=0)
    ended = row.completed + row.failed + row.cancelled
    return Batch(
        engine.handle(row.id), is_new=False, was_closed=row.status.is_terminal, had_ended=ended
    )


async def _last(engine: Engine, name: str) -> tuple[int, JobRow | None]:
    """The newest batch of this name, and how many there were."""
    round_number, last = 0, None
    while handle := await engine.find(f"{name}:{round_number + 1}"):
        round_number, last = round_number + 1, handle
    return round_number, await last.job() if last else None


async def written_by(engine: Engine, plan: Plan, batch: JobHandle) -> Written:
    """Wait for the batch's follow-up, and return what it wrote. Missing files are written again.

    Raises:
        PermanentError: the follow-up failed; says why.
    """
    written = await _result(await _follow_up(engine, plan, batch.id))
    if await asyncio.to_thread(_is_there, written):
        return written
    row = await batch.job()
    closed = Closed(
        job_id=row.id, kind=row.kind, generation=row.generation, outcome=row.status,
        total=row.total, completed=row.completed, failed=row.failed, cancelled=row.cancelled,
    )  # fmt: skip
    return await _result(await engine.submit(plan.report, closed.model_dump(mode="json")))


async def written_before(engine: Engine, plan: Plan, batch: JobHandle) -> Written | None:
    """What the follow-up of a closed batch wrote, if it is all there still; needs no worker."""
    row = await (await _follow_up(engine, plan, batch.id)).job()
    if row.status is not Status.COMPLETED:
        return None
    written = Written.model_validate(row.result)
    return written if await asyncio.to_thread(_is_there, written) else None


async def _result(follow_up: JobHandle) -> Written:
    await follow_up.wait()
    row = await follow_up.job()
    if row.status is not Status.COMPLETED:
        raise PermanentError(f"the report could not be written: {row.error or row.reason}")
    return Written.model_validate(row.result)


def _is_there(written: Written) -> bool:
    return Path(written.results).is_file() and Path(written.report).is_file()


async def _follow_up(engine: Engine, plan: Plan, batch_id: int) -> JobHandle:
    """It came with the transaction that closed the batch; the newest is of the last generation."""
    before: int | None = None
    while page := await engine.jobs(kind=plan.report, before_id=before, limit=PAGE):
        for job in page:
            if job.follows_id == batch_id:
                return engine.handle(job.id)
        before = page[-1].id
    raise PermanentError(f"batch {batch_id} has no follow-up: it was submitted without on_closed")
