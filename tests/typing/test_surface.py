"""The public surface as a type checker sees it; `make check` is what runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, assert_type

from pydantic import BaseModel

from fanout import (
    Child,
    Closed,
    Dispatched,
    Document,
    Engine,
    FailureReason,
    Handler,
    Job,
    JobHandle,
    JobRow,
    JobSummary,
    Progress,
    Request,
    Status,
    Worker,
    WorkerRow,
    testing,
)


class Paper(BaseModel):
    storage_key: str


class Extracted(BaseModel):
    words: int


class Other(BaseModel):
    pages: int


async def inline_and_at_set_times(engine: Engine, documents: AsyncIterator[Document]) -> None:
    """A handler stays what it is under a schedule; a run gives a handle, however it was run."""

    @engine.cron("0 7 * * 1-5", timezone="Europe/Berlin", payload=Paper(storage_key="a"))
    @engine.job
    async def nightly(job: Job[Paper]) -> Extracted:
        return Extracted(words=1)

    assert_type(nightly, Handler[Paper, Extracted])
    assert_type(await engine.run(nightly, documents), JobHandle)
    assert_type(await engine.run("elsewhere", [("a", 1)], inline_below=0), JobHandle)
    assert_type(testing.job(Paper(storage_key="a")), testing.RecordedJob[Paper])


def decorators(engine: Engine) -> None:
    """Bare or with options, async or plain: a Handler of what goes in and what comes out."""

    @engine.job
    async def bare(job: Job[Paper]) -> Extracted:
        assert_type(job.payload, Paper)
        assert_type(job.key, str)
        assert_type(job.document_key, str | None)
        return Extracted(words=1)

    assert_type(bare, Handler[Paper, Extracted])

    @engine.job(max_retries=1, timeout=5, permanent=(ValueError,))
    async def options(job: Job[Paper]) -> Extracted:
        return Extracted(words=1)

    assert_type(options, Handler[Paper, Extracted])

    @engine.job
    def plain(job: Job[list[int]]) -> dict[str, int]:
        return {"n": sum(job.payload)}

    assert_type(plain, Handler[list[int], dict[str, int]])

    @engine.job(on_closed="report")
    def plain_options(job: Job[None]) -> None: ...

    assert_type(plain_options, Handler[None, None])

    @engine.job(on_closed=bare)
    async def manager(job: Job[Closed]) -> None:
        assert_type(job.payload.outcome, Status)
        assert_type(await job.fan_out(bare, [Document("a", Paper(storage_key="x"))]), Dispatched)
        assert_type(await job.fan_out("bare", [("a", {})]), Dispatched)
        assert_type(await job.fan_out(bare, documents()), Dispatched)

    assert_type(manager, Handler[Closed, None])

    @engine.job
    def in_thread(job: Job[None]) -> int:
        return assert_type(job.from_thread(job.fan_out("bare", [])), Dispatched).created

    @engine.job  # type: ignore[arg-type]
    async def no_job(number: int) -> None: ...

    @engine.job(max_retries="three")  # type: ignore[call-overload, untyped-decorator]
    async def wrong_option(job: Job[None]) -> None: ...


async def documents() -> AsyncIterator[tuple[str, Paper]]:
    yield "a", Paper(storage_key="x")


async def submitting(engine: Engine, handler: Handler[Paper, Extracted]) -> None:
    """The payload is the handler's, a mapping that makes one, or anything for a kind's name."""
    assert_type(await engine.submit(handler, Paper(storage_key="x")), JobHandle)
    assert_type(await engine.submit(handler, {"storage_key": "x"}, key="k"), JobHandle)
    assert_type(await engine.submit("papers_extract", Paper(storage_key="x")), JobHandle)
    assert_type(await engine.submit_many([Request(handler), Request("other")]), list[JobHandle])
    assert_type(await engine.find("k"), JobHandle | None)
    assert_type(engine.handle(1), JobHandle)
    assert_type(engine.worker(), Worker)
    assert_type(await engine.workers(), list[WorkerRow])
    assert_type(await engine.jobs(status=Status.FAILED), list[JobSummary])

    await engine.submit(handler, Other(pages=1))  # type: ignore[misc]
    await engine.submit(handler, Paper(storage_key="x"), run_at="now")  # type: ignore[arg-type]
    engine.submit(handler, Paper(storage_key="x"))  # type: ignore[unused-coroutine]


async def reading(handle: JobHandle) -> None:
    """What a handle gives."""
    assert_type(handle.id, int)
    assert_type(handle.created, bool)
    assert_type(await handle.job(), JobRow)
    assert_type(await handle.progress(), Progress)
    assert_type(await handle.wait(5), Progress)
    assert_type(await handle.result(), Any)
    assert_type(handle.watch(), AsyncIterator[Progress])
    assert_type(handle.children(status="failed"), AsyncIterator[Child])
    assert_type(handle.failures(), AsyncIterator[Child])
    assert_type(handle.results(), AsyncIterator[tuple[str, Any]])
    assert_type(await handle.children_page(limit=5), list[Child])
    assert_type(await handle.failure_reasons(), list[FailureReason])
    assert_type(await handle.slowest(), list[tuple[str, Status, float]])
    assert_type(await handle.cancel(), bool)
    assert_type(await handle.retry(keys=["a"]), int)


async def living() -> None:
    """In a `with`, the engine and the worker are what they are."""
    async with Engine("postgresql://nowhere") as engine, engine.worker() as worker:
        assert_type(engine, Engine)
        assert_type(worker, Worker)
    assert_type(Engine.embedded(), Engine)
