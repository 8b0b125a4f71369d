"""A job, a batch, a batch of batches: dispatched once, counted exactly, closed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from fanout import (
    Closed,
    Dispatched,
    Document,
    Engine,
    Job,
    JobFailed,
    PermanentError,
    Status,
    UsageError,
)
from tests.engine.running import (
    assert_true_to_its_children,
    closed,
    counts,
    quick,
    running,
    statuses,
)


class Paper(BaseModel):
    pages: int


async def test_a_single_job_gives_its_result(engine: Engine) -> None:
    """Level 1: a model in, a model out, plain JSON for the reader."""

    @engine.job
    async def papers_extract(job: Job[Paper]) -> Paper:
        return Paper(pages=job.payload.pages * 2)

    async with running(engine):
        handle = await engine.submit(papers_extract, Paper(pages=3))
        assert await handle.result(30) == {"pages": 6}
        job = await handle.job()
        assert (job.status, job.attempt, job.failures) == (Status.COMPLETED, 1, 0)
        assert job.finished_at is not None


async def test_a_job_without_a_result_has_none(engine: Engine) -> None:
    """Which is not the same as a JSON null in a list."""

    @engine.job
    async def nothing(job: Job[Any]) -> Any:
        return job.payload

    async with running(engine):
        assert await (await engine.submit(nothing)).result(30) is None
        assert await (await engine.submit(nothing, [None])).result(30) == [None]


async def test_a_failed_job_tells_why(engine: Engine) -> None:
    """Its result raises, with the message that the handler gave."""

    @engine.job
    async def corrupt(job: Job[None]) -> None:
        raise PermanentError("page 3 cannot be read")

    async with running(engine):
        handle = await engine.submit(corrupt)
        with pytest.raises(JobFailed, match="page 3 cannot be read") as caught:
            await handle.result(30)
        assert (caught.value.job_id, caught.value.status) == (handle.id, "failed")
        job = await handle.job()
        assert (job.attempt, job.error_type) == (1, "PermanentError")


@pytest.mark.parametrize(("size", "chunk"), [(0, 10), (1, 10), (2, 10), (30, 10), (2503, 1000)])
async def test_a_batch_of_any_size_closes_exact(
    database: str, conn: asyncpg.Connection, size: int, chunk: int
) -> None:
    """Also the empty one, at the edges of a chunk, and over several."""
    engine = Engine(database, settings=quick(chunk_size=chunk))

    @engine.job
    async def leaf(job: Job[int]) -> int:
        return job.payload

    @engine.job
    async def batch(job: Job[None]) -> int:
        done = await job.fan_out(leaf, ((f"d{n:05}", n) for n in range(size)))
        assert done == Dispatched(created=size, known=0)
        return 7

    async with running(engine):
        handle = await engine.submit(batch)
        progress = await closed(handle)
        assert counts(progress) == (size, size, 0, 0)
        assert (progress.percent, progress.outcome) == (100, "completed")
        assert await handle.result() == 7
        results = [item async for item in handle.results()]
        assert results == [(f"d{n:05}", n) for n in range(size)]
    await assert_true_to_its_children(conn)


async def test_documents_come_from_whatever_yields_them(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A list, a generator, an async generator; a Document or a pair; one at a time."""

    def sync() -> Iterator[tuple[str, int]]:
        yield from ((f"sync{n}", n) for n in range(3))

    async def slow() -> AsyncIterator[Document]:
        for n in range(3):
            await asyncio.sleep(0)
            yield Document(f"async{n}", n)

    @engine.job
    async def leaf(job: Job[int]) -> int:
        return job.payload

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, [Document("list0", 0), ("list1", 1)])
        await job.fan_out(leaf, sync())
        await job.fan_out(leaf, slow())
        await job.fan_out(leaf, [])

    async with running(engine):
        handle = await engine.submit(batch)
        assert counts(await closed(handle)) == (8, 8, 0, 0)
        assert [key async for key, _ in handle.results()] == [
            *(f"async{n}" for n in range(3)),
            "list0",
            "list1",
            *(f"sync{n}" for n in range(3)),
        ]


async def test_a_document_has_one_child(engine: Engine) -> None:
    """Within a chunk, between calls, and over attempts of the manager; the first one stands."""
    dispatched: list[Dispatched] = []

    @engine.job
    async def leaf(job: Job[int]) -> int:
        return job.payload

    @engine.job(max_retries=2)
    async def batch(job: Job[None]) -> None:
        dispatched.append(await job.fan_out(leaf, [("a", 1), ("b", 2), ("a", 3)]))
        dispatched.append(await job.fan_out(leaf, [("b", 4), ("c", 5)]))
        if job.failures == 0:
            raise ConnectionError

    async with running(engine):
        handle = await engine.submit(batch)
        assert counts(await closed(handle)) == (3, 3, 0, 0)
        assert {key: result async for key, result in handle.results()} == {"a": 1, "b": 2, "c": 5}
    assert dispatched == [Dispatched(2, 1), Dispatched(1, 1), Dispatched(0, 3), Dispatched(0, 2)]


async def test_a_document_that_is_both_there_and_gone_has_one_child(engine: Engine) -> None:
    """A source that lists it twice: the first mention stands, whatever the second says."""

    @engine.job
    async def leaf(job: Job[None]) -> None: ...

    @engine.job(max_retries=0)
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, [Document("a"), Document("a", gone="it was deleted")])

    async with running(engine):
        assert counts(await closed(await engine.submit(batch))) == (1, 1, 0, 0)


async def test_a_document_that_is_gone_is_a_failed_child(engine: Engine) -> None:
    """With its reason, in the middle of others; a batch of nothing else closes too."""

    @engine.job
    async def leaf(job: Job[int]) -> int:
        return job.payload

    @engine.job
    async def batch(job: Job[bool]) -> None:
        await job.fan_out(leaf, [Document("b", gone="deleted on Monday"), Document("c", gone="")])
        if job.payload:
            await job.fan_out(leaf, [("a", 1)])

    async with running(engine):
        some = await engine.submit(batch, payload=True)
        progress = await closed(some)
        assert counts(progress) == (3, 1, 2, 0)
        assert progress.outcome == "completed with failures"
        errors = {child.document_key: child.error async for child in some.failures()}
        assert errors == {"b": "deleted on Monday", "c": "the document is gone"}
        assert counts(await closed(await engine.submit(batch, payload=False))) == (2, 0, 2, 0)


async def test_a_bad_document_ends_the_batch_but_not_the_chunks_before_it(
    database: str, conn: asyncpg.Connection
) -> None:
    """The manager fails for good, with a reason that names the document; what is open below it is
    cancelled, and counters and children agree."""
    engine = Engine(database, settings=quick(chunk_size=2))

    @engine.job
    async def leaf(job: Job[int]) -> None: ...

    @engine.job(on_closed="report")
    async def batch(job: Job[None]) -> None:
        documents = [("a", 1), ("b", 2), ("c", 3), ("d", "x" * 2000), ("e", 5)]
        await job.fan_out("served_nowhere", documents)

    @engine.job
    async def report(job: Job[Closed]) -> Closed:
        return job.payload

    async with running(engine):
        handle = await engine.submit(batch)
        progress = await closed(handle)
        assert progress.status is Status.FAILED
        assert counts(progress) == (2, 0, 0, 2)
        assert progress.reason is not None
        assert "document 'd': has 2002 bytes of JSON, the limit is 1024" in progress.reason
        assert {child.reason async for child in handle.children()} == {"its batch ended"}
        assert (await handle.job()).attempt == 1
        [follow_up] = await engine.jobs(kind="report")
        told = await engine.handle(follow_up.id).result(30)
        assert (told["outcome"], told["total"], told["cancelled"]) == ("failed", 2, 2)
    await assert_true_to_its_children(conn)


@pytest.mark.parametrize(
    ("documents", "options", "names"),
    [
        ([("", 1)], {}, "document key"),
        ([("a\0", 1)], {}, "document key"),
        ([("\ud800", 1)], {}, "document key"),
        ([("x" * 513, 1)], {}, "document key"),
        ([(7, 1)], {}, "document key"),
        ([("a", float("nan"))], {}, "document 'a'"),
        (["a"], {}, "documents"),
        ([("a", 1, 2)], {}, "documents"),
        ([("a", 1)], {"priority": 10}, "priority"),
        ([("a", 1)], {"max_retries": -1}, "max_retries"),
        ([("a", 1)], {"on_closed": "a.b"}, "on_closed"),
        ([("a", 1)], {"target": "a:b"}, "kind"),
    ],
    ids=[
        "empty",
        "NUL",
        "surrogate",
        "long",
        "int",
        "NaN",
        "text",
        "triple",
        "priority",
        "retries",
        "on_closed",
        "kind",
    ],
)
async def test_what_cannot_be_dispatched_is_no_matter_for_a_retry(
    engine: Engine, documents: Any, options: Any, names: str
) -> None:
    """The manager ends at once, and its reason names what was wrong."""

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(**{"target": "leaf", "documents": documents, **options})

    async with running(engine):
        handle = await engine.submit(batch)
        progress = await closed(handle)
        assert (progress.status, progress.total) == (Status.FAILED, 0)
        assert progress.reason is not None
        assert progress.reason.startswith(f"{names}:")
        assert (await handle.job()).attempt == 1


async def test_a_batch_of_batches_closes_upwards(engine: Engine, conn: asyncpg.Connection) -> None:
    """Three levels, some leaves failing: each level counts its own children and no others."""

    @engine.job
    async def leaf(job: Job[int]) -> None:
        if job.payload == 1:
            raise PermanentError("one")

    @engine.job(on_closed="note")
    async def folder(job: Job[int]) -> None:
        if job.payload == 2:
            raise PermanentError("two")
        await job.fan_out(leaf, ((f"l{n}", n) for n in range(3)))

    @engine.job(on_closed="note")
    async def shelf(job: Job[int]) -> None:
        await job.fan_out(folder, ((f"f{n}", n) for n in range(3)))

    @engine.job(on_closed="note")
    async def library(job: Job[None]) -> None:
        await job.fan_out(shelf, ((f"s{n}", n) for n in range(3)))

    @engine.job
    async def note(job: Job[Closed]) -> None: ...

    async with running(engine):
        handle = await engine.submit(library)
        progress = await closed(handle)
        assert counts(progress) == (3, 3, 0, 0)
        assert progress.outcome == "completed"
        async for shelf_ in handle.children():
            below = engine.handle(shelf_.id)
            assert counts(await below.progress()) == (3, 2, 1, 0)
            assert await statuses(below) == {
                "f0": Status.COMPLETED,
                "f1": Status.COMPLETED,
                "f2": Status.FAILED,
            }
            [first, *_] = await below.children_page()
            assert counts(await engine.handle(first.id).progress()) == (3, 2, 1, 0)
        assert len(await engine.jobs(kind="note", limit=100)) == 1 + 3 + 9
    await assert_true_to_its_children(conn)


async def test_children_may_be_served_elsewhere(database: str) -> None:
    """By a program that registered their kind; here it is a name."""
    here, there = (Engine(database, settings=quick(pool_size=2)) for _ in range(2))

    @there.job
    async def leaf(job: Job[Paper]) -> int:
        return job.payload.pages

    @here.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out("leaf", [("a", {"pages": 1}), ("b", {"pages": "many"})])

    async with running(here), running(there):
        handle = await here.submit(batch)
        assert counts(await closed(handle)) == (2, 1, 1, 0)
        [failure] = [child async for child in handle.failures()]
        assert failure.error is not None
        assert failure.error.startswith("payload.pages: Input should be a valid integer")


async def test_children_served_elsewhere_have_the_defaults_of_their_kind(database: str) -> None:
    """Retries and follow-up as they were registered there, as for a submit by name."""
    here, there = (Engine(database, settings=quick(pool_size=2)) for _ in range(2))

    @there.job(max_retries=7, on_closed="report")
    async def leaf(job: Job[None]) -> None: ...

    @here.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out("leaf", [("a", None)])

    async with running(there), running(here):
        handle = await here.submit(batch)
        await closed(handle)
        [child] = [child async for child in handle.children()]
        job = await here.handle(child.id).job()
        assert (job.max_retries, job.on_closed) == (7, "report")


async def test_a_child_inherits_its_managers_priority(engine: Engine) -> None:
    """Unless it is given one; retries come from its own handler."""

    @engine.job(max_retries=9)
    async def leaf(job: Job[None]) -> None: ...

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, [("a", None)])
        await job.fan_out(leaf, [("b", None)], priority=8, max_retries=0)

    async with running(engine):
        handle = await engine.submit(batch, priority=2)
        await closed(handle)
        jobs = [await engine.handle(child.id).job() async for child in handle.children()]
        assert [(job.priority, job.max_retries) for job in jobs] == [(2, 9), (8, 0)]


async def test_a_leaf_may_have_a_follow_up_too(engine: Engine) -> None:
    """Exactly one, with what closed; it names no batch of its own."""
    seen: list[Closed] = []

    @engine.job
    async def report(job: Job[Closed]) -> None:
        seen.append(job.payload)

    @engine.job(on_closed=report)
    async def leaf(job: Job[bool]) -> None:
        if job.payload:
            raise PermanentError("no")

    async with running(engine):
        for fails, outcome in ((False, Status.COMPLETED), (True, Status.FAILED)):
            handle = await engine.submit(leaf, fails)
            await closed(handle)
            [row, *_] = await engine.jobs(kind="report")
            assert row.follows_id == handle.id
            await closed(engine.handle(row.id))
            assert seen[-1] == Closed(
                job_id=handle.id,
                kind="leaf",
                generation=1,
                outcome=outcome,
                total=0,
                completed=0,
                failed=0,
                cancelled=0,
            )
    assert len(seen) == 2


async def test_a_plain_function_runs_in_a_thread(engine: Engine) -> None:
    """It can block, and use what the job can do through `from_thread`."""
    here = threading.get_ident()

    @engine.job
    def leaf(job: Job[int]) -> bool:
        job.from_thread(job.save_checkpoint({"n": job.payload}))
        return threading.get_ident() != here

    @engine.job
    def batch(job: Job[None]) -> int:
        return job.from_thread(job.fan_out(leaf, ((str(n), n) for n in range(20)))).created

    async with running(engine):
        handle = await engine.submit(batch)
        assert counts(await closed(handle)) == (20, 20, 0, 0)
        assert await handle.result() == 20
        assert {result async for _, result in handle.results()} == {True}


async def test_an_async_handler_cannot_wait_for_itself(engine: Engine) -> None:
    """`from_thread` in the loop would hang the whole process: it is refused, with the remedy."""

    @engine.job
    async def confused(job: Job[None]) -> str:
        with pytest.raises(UsageError, match="Use await instead"):
            job.from_thread(job.save_checkpoint(1))
        return "told"

    async with running(engine):
        assert await (await engine.submit(confused)).result(30) == "told"


async def test_what_a_job_knows_of_itself(engine: Engine) -> None:
    """Ids, kind, key of the document, and a key like no other job's."""
    seen: list[tuple[Any, ...]] = []

    @engine.job
    async def leaf(job: Job[None]) -> None:
        seen.append((job.id, job.kind, job.parent_id, job.document_key, job.attempt, job.key))

    @engine.job
    async def batch(job: Job[None]) -> None:
        assert (job.parent_id, job.document_key) == (None, None)
        await job.fan_out(leaf, [(name, None) for name in "abc"])

    async with running(engine):
        handle = await engine.submit(batch)
        await closed(handle)
        children = [child async for child in handle.children()]
    assert sorted(row[:5] for row in seen) == sorted(
        (child.id, "leaf", handle.id, child.document_key, 1) for child in children
    )
    assert len({row[5] for row in seen}) == 3
