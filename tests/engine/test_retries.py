"""What becomes of a job whose handler raises."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, NoReturn

import asyncpg
import pytest

from fanout import (
    DatabaseUnavailable,
    Engine,
    Job,
    PermanentError,
    Status,
    TransientError,
)
from tests.engine.running import closed, counts, quick, running, until


async def test_a_transient_error_is_tried_again_later(engine: Engine) -> None:
    """The next attempt is due after the backoff, is the same job, and its error is forgotten when
    it goes well."""
    seen: list[tuple[int, int, str]] = []

    @engine.job
    async def flaky(job: Job[None]) -> str:
        seen.append((job.attempt, job.failures, job.key))
        if job.failures < 2:
            raise ConnectionResetError("by peer")
        return "done"

    async with running(engine):
        handle = await engine.submit(flaky)
        assert await handle.result(30) == "done"
        job = await handle.job()
        assert (job.attempt, job.failures, job.error) == (3, 2, None)
    key = seen[0][2]
    assert seen == [(1, 0, key), (2, 1, key), (3, 2, key)]


async def test_between_attempts_it_is_pending_with_its_error(database: str) -> None:
    """So that a person can see why it waits, and until when."""
    engine = Engine(database, settings=quick(backoff_base=100, backoff_max=1000))

    @engine.job
    async def flaky(job: Job[None]) -> None:
        raise TimeoutError("parser did not answer")

    async with running(engine):
        handle = await engine.submit(flaky)
        await until(lambda: is_put_back(handle))
        job = await handle.job()
        assert (job.error, job.error_type) == ("parser did not answer", "TimeoutError")
        assert 70 < (job.run_at - job.created_at).total_seconds() < 130
        assert (await handle.progress()).waits_for[0].startswith("it waits until")


async def is_put_back(handle: Any) -> bool:
    job = await handle.job()
    return bool(job.status is Status.PENDING and job.failures)


@pytest.mark.parametrize("budget", [0, 1, 3])
async def test_a_budget_that_is_used_up_is_a_failure_and_is_counted(
    engine: Engine, budget: int
) -> None:
    """After 1 + max_retries runs, with the last error."""
    runs: list[int] = []

    @engine.job(max_retries=budget)
    async def leaf(job: Job[None]) -> None:
        runs.append(job.attempt)
        raise ConnectionError(f"no {job.attempt}")

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, [("a", None)])

    async with running(engine):
        handle = await engine.submit(batch)
        assert counts(await closed(handle)) == (1, 0, 1, 0)
        [child] = [child async for child in handle.failures()]
        assert (child.error, child.error_type) == (f"no {budget + 1}", "ConnectionError")
        assert child.failures == budget + 1
    assert runs == list(range(1, budget + 2))


async def test_a_permanent_error_fails_at_once(engine: Engine) -> None:
    """Whatever the budget; its message is kept, and the handler's own table counts."""
    runs: list[str] = []

    class NotAPdfError(Exception):
        pass

    @engine.job(max_retries=9, permanent=(NotAPdfError,), transient=(FileNotFoundError,))
    async def leaf(job: Job[str]) -> None:
        runs.append(job.payload)
        if job.payload == "permanent":
            raise PermanentError("corrupt: bad xref")
        if job.payload == "own":
            raise NotAPdfError("it is a picture")
        if runs.count(job.payload) == 1:
            raise FileNotFoundError("not there yet")

    async with running(engine):
        handles = [await engine.submit(leaf, name) for name in ("permanent", "own", "file")]
        for handle in handles:
            await closed(handle)
        jobs = [await handle.job() for handle in handles]
        assert [job.error for job in jobs] == ["corrupt: bad xref", "it is a picture", None]
        assert [job.error_type for job in jobs] == ["PermanentError", "NotAPdfError", None]
    assert sorted(runs) == ["file", "file", "own", "permanent"]


async def test_a_services_retry_after_is_waited_for(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """From an HTTP error's header or from TransientError, and longer than the backoff's most."""

    class HttpError(Exception):
        status = 429
        headers = {"Retry-After": "500"}  # noqa: RUF012 - as a client has it

    @engine.job
    async def leaf(job: Job[bool]) -> None:
        raise TransientError("busy", retry_after=500) if job.payload else HttpError

    async with running(engine):
        for payload in (True, False):
            handle = await engine.submit(leaf, payload)
            await until(partial(is_put_back, handle))
            wait = await conn.fetchval(
                "SELECT extract(epoch FROM run_at - clock_timestamp()) FROM fanout.job"
                " WHERE id = $1",
                handle.id,
            )
            assert 480 < wait <= 600


async def test_the_engines_own_trouble_costs_no_retry(engine: Engine) -> None:
    """A handler that met DatabaseUnavailable runs again, with no budget at all."""
    attempts: list[int] = []

    @engine.job(max_retries=0)
    async def leaf(job: Job[None]) -> str:
        attempts.append(job.attempt)
        if len(attempts) < 4:
            raise DatabaseUnavailable("the server closed the connection")
        return "done"

    async with running(engine):
        handle = await engine.submit(leaf)
        assert await handle.result(30) == "done"
        job = await handle.job()
        assert (job.failures, job.deaths) == (0, 0)
    assert attempts == [1, 2, 3, 4]


async def test_a_checkpoint_outlives_its_attempt(engine: Engine) -> None:
    """The retry does not pay again for what was paid; the checkpoint can be replaced."""
    parsed: list[int] = []

    @engine.job
    async def leaf(job: Job[None]) -> Any:
        if job.checkpoint is None:
            parsed.append(job.attempt)
            await job.save_checkpoint({"text": "汉" * 10})
            await job.save_checkpoint({"text": "parsed", "pages": 9007199254740993})
        if job.failures == 0:
            raise TransientError("the LLM is busy")
        return job.checkpoint

    async with running(engine):
        handle = await engine.submit(leaf)
        assert await handle.result(30) == {"text": "parsed", "pages": 9007199254740993}
    assert parsed == [1]


class Broken(Exception):
    """One that cannot even be printed."""

    def __str__(self) -> NoReturn:
        raise RuntimeError("not even that")

    @property
    def response(self) -> NoReturn:
        raise RuntimeError("nor that")


class NoText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307 - the point of it


ERRORS: dict[str, tuple[Any, str]] = {
    "broken": (Broken, "Broken"),
    "no text": (NoText, "NoText"),
    "empty": (ValueError, "ValueError"),
    "nul": (lambda: ValueError("a\0b"), "a\u2400b"),
    "surrogate": (lambda: ValueError("a\ud800b\udfffc"), "a\ufffdb\ufffdc"),
    "pair": (lambda: ValueError("\ud83d\ude00"), "\U0001f600"),
    "exit": (lambda: SystemExit(3), "the handler called exit(3)"),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "sql": (lambda: ValueError("'; DROP TABLE fanout.job; --"), "'; DROP TABLE fanout.job; --"),
    "cancel": (asyncio.CancelledError, "the handler was cancelled from within"),
    "stop": (lambda: StopIteration(1), "coroutine raised StopIteration"),
    "generator": (GeneratorExit, "GeneratorExit"),
    "group": (lambda: ExceptionGroup("two", [ValueError(1), KeyError(2)]), "two (2 sub-except"),
    "wrong retry_after": (lambda: TransientError("busy", retry_after=object()), "busy"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("in_thread", [False, True])
async def test_every_error_ends_its_child(engine: Engine, in_thread: bool) -> None:
    """However the exception is made; it is told as well as it can be, and the batch closes."""

    def fail(job: Job[str]) -> NoReturn:
        error: BaseException = ERRORS[job.payload][0]()
        raise error

    if in_thread:
        engine.job(name="leaf", max_retries=0)(fail)
    else:

        @engine.job(max_retries=0)
        async def leaf(job: Job[str]) -> None:
            fail(job)

    @engine.job
    async def batch(job: Job[None]) -> None:
        names = [n for n in ERRORS if not (in_thread and n in {"cancel", "stop"})]
        await job.fan_out("leaf", ((name, name) for name in names))

    async with running(engine):
        handle = await engine.submit(batch)
        progress = await closed(handle)
        assert progress.failed == progress.total > 10
        async for child in handle.failures():
            assert child.error is not None
            assert child.error.startswith(ERRORS[child.document_key][1]), child.document_key


async def test_a_long_error_is_cut_and_says_so(engine: Engine) -> None:
    """8 KiB of UTF-8, at a character, with how long it was."""

    @engine.job(max_retries=0)
    async def leaf(job: Job[None]) -> None:
        raise ValueError("汉" * 350_000)

    async with running(engine):
        handle = await engine.submit(leaf)
        await closed(handle)
        error = (await handle.job()).error
    assert error is not None
    assert len(error.encode()) <= 8192
    assert error.startswith("汉" * 2000)
    assert error.endswith("(cut, 1050000 bytes in all)")


async def test_a_manager_that_runs_out_of_retries_ends_its_batch(engine: Engine) -> None:
    """Its children are cancelled, those that run are told, and it closes with its reason."""
    began, told = asyncio.Event(), asyncio.Event()

    @engine.job
    async def leaf(job: Job[None]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()

    @engine.job(max_retries=1)
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, [("a", None), ("b", None)])
        await began.wait()
        raise ConnectionError("the library is away")

    async with running(engine, concurrency=3):
        handle = await engine.submit(batch)
        progress = await closed(handle)
        assert (progress.status, counts(progress)) == (Status.FAILED, (2, 0, 0, 2))
        assert progress.reason == "the library is away"
        assert (await handle.job()).attempt == 2
        async with asyncio.timeout(30):
            await told.wait()


async def test_every_line_of_a_job_says_whose_it_is(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Job, attempt, kind and worker, on the handler's own lines and on the engine's about it."""

    @engine.job(max_retries=0)
    async def leaf(job: Job[None]) -> None:
        job.logger.info("hello", extra={"page": 3})
        raise PermanentError("no")

    with caplog.at_level(logging.INFO, "fanout"):
        async with running(engine, name="pod-7"):
            handle = await engine.submit(leaf)
            await closed(handle)
    lines = [record for record in caplog.records if hasattr(record, "attempt")]
    assert {record.name for record in lines} == {"fanout.job", "fanout.execution"}
    for record in lines:
        about = (record.__dict__[name] for name in ("job_id", "attempt", "kind", "worker"))
        assert tuple(about) == (handle.id, 1, "leaf", "pod-7")
    assert lines[0].__dict__["page"] == 3
