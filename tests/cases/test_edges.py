"""What user code and callers can hand over without meaning to: judged once, never a loop, never
a raw driver error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from fanout import DatabaseUnavailable, Engine, FanoutError, Job, TransientError, UsageError
from tests.cases.lab import Calls, engine_on, until


class Treacherous(Exception):
    """Like a client library's error whose attributes are properties that raise."""

    @property
    def response(self) -> object:
        raise RuntimeError("the response has not been read")

    @property
    def headers(self) -> object:
        raise RuntimeError("nor its headers")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


RAISED: dict[str, Callable[[], BaseException]] = {
    "attributes that raise": Treacherous,
    "a text that raises": Mute,
    "retry_after as text": lambda: TransientError("busy", retry_after="0.05"),  # type: ignore[arg-type]
    "retry_after as timedelta": lambda: TransientError("busy", retry_after=timedelta(seconds=0.05)),  # type: ignore[arg-type]
    "retry_after NaN": lambda: TransientError("busy", retry_after=float("nan")),
    "exit": lambda: SystemExit(3),
    "an empty group of groups": lambda: BaseExceptionGroup("g", [ExceptionGroup("h", [Mute()])]),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
}


@pytest.mark.parametrize("threaded", [False, True], ids=["async", "thread"])
async def test_whatever_a_handler_raises_is_judged_and_counted(
    threaded: bool, database: str, conn: asyncpg.Connection
) -> None:
    """taskforcesh/bullmq #3362 (a failed child that never released its parent),
    contribsys/faktory #41 (a hot loop): an error that cannot even be looked at is transient: its
    retries are used up, it is counted, and it is called no more often than that."""
    calls = Calls()
    async with engine_on(database, calls, backoff_max=0.05, backoff_base=0.02) as engine:

        def raises(job: Job[Any]) -> None:
            calls.starts.append((job.id, job.attempt))
            raise RAISED[job.payload]()  # noqa: RSE102 -- a factory, not the class alone

        async def raises_async(job: Job[Any]) -> None:
            await asyncio.sleep(0)
            raises(job)

        handler = engine.job(name="odd", max_retries=1)(raises if threaded else raises_async)
        async with engine.worker():
            jobs = {what: await engine.submit(handler, what) for what in RAISED}
            for handle in jobs.values():
                await handle.wait(10)
            rows = {what: await handle.job() for what, handle in jobs.items()}
    ends = {what: (str(row.status), row.failures, bool(row.error)) for what, row in rows.items()}
    assert ends == dict.fromkeys(RAISED, ("failed", 2, True))
    assert {tuple(calls.of(handle.id)) for handle in jobs.values()} == {(1, 2)}


async def test_trouble_with_another_database_is_not_a_hot_loop(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """contribsys/faktory #41, bensheldon/good_job #296: a handler that meets an engine whose
    database is away, again and again: it uses up no retry, and is run again with a pause, not as
    fast as the claim can."""
    async with engine_on(database, calls) as engine:

        @engine.job(max_retries=0)
        async def elsewhere(job: Job[Any]) -> None:
            calls.starts.append((job.id, job.attempt))
            raise DatabaseUnavailable("the other database does not answer")

        async with engine.worker():
            handle = await engine.submit(elsewhere)
            await asyncio.sleep(1.5)
            assert 1 <= len(calls.starts) <= 20
            row = await handle.job()
    assert (row.failures, row.deaths) == (0, 0)


ASKED: dict[str, Callable[[Engine, int], Awaitable[object]]] = {
    "job 2^63": lambda e, _: e.handle(2**63).job(),
    "job 2^70": lambda e, _: e.handle(2**70).progress(),
    "job -1": lambda e, _: e.handle(-1).wait(1),
    "cancel 2^63": lambda e, _: e.handle(2**63).cancel(),
    "cancel NUL": lambda e, j: e.handle(j).cancel("a\x00\ud800"),
    "retry 2^63": lambda e, _: e.handle(2**63).retry(),
    "retry error NUL": lambda e, j: e.handle(j).retry(error="a\x00"),
    "retry error surrogate": lambda e, j: e.handle(j).retry(error="\ud800"),
    "retry keys NUL": lambda e, j: e.handle(j).retry(keys=["\x00"]),
    "find NUL": lambda e, _: e.find("a\x00"),
    "find surrogate": lambda e, _: e.find("\ud800"),
    "jobs kind NUL": lambda e, _: e.jobs(kind="\x00"),
    "jobs status": lambda e, _: e.jobs(status="nonsense"),
    "jobs before 2^63": lambda e, _: e.jobs(before_id=2**63),
    "jobs limit -1": lambda e, _: e.jobs(limit=-1),
    "jobs limit 2^70": lambda e, _: e.jobs(limit=2**70),
    "children after NUL": lambda e, j: e.handle(j).children_page(after_key="\x00"),
    "children limit -1": lambda e, j: e.handle(j).children_page(limit=-1),
    "children status": lambda e, j: e.handle(j).children_page(status="nonsense"),
    "priority": lambda e, _: e.submit("leaf", priority=10),
    "priority text": lambda e, _: e.submit("leaf", priority="5"),  # type: ignore[arg-type]
    "max_retries 2^31": lambda e, _: e.submit("leaf", max_retries=2**31),
    "delay inf": lambda e, _: e.submit("leaf", delay=float("inf")),
    "delay NaN": lambda e, _: e.submit("leaf", delay=float("nan")),
    "delay 1e300": lambda e, _: e.submit("leaf", delay=1e300),
    "kind with a colon": lambda e, _: e.submit("a:b"),
    "kind NUL": lambda e, _: e.submit("a\x00b"),
    "key 513 bytes": lambda e, _: e.submit("leaf", key="k" * 513),
    "on_closed": lambda e, _: e.submit("leaf", on_closed="a.b"),
}


async def test_no_question_ends_in_an_error_of_the_driver(
    database: str, conn: asyncpg.Connection
) -> None:
    """dunglas/mercure #586 (2^63, 2^70, NUL as an id), hatchet-dev/hatchet #2573: bad input is an
    error of ours that names the field, or an empty answer; it is never a raw error of the driver,
    and leaves no row."""
    answers: dict[str, object] = {}
    async with engine_on(database) as engine:
        handle = await engine.submit("batch", {"n": 1}, key="there")
        for what, ask in ASKED.items():
            try:
                answers[what] = await ask(engine, handle.id)
            except FanoutError:
                answers[what] = None
            except Exception as error:  # noqa: BLE001 -- reported by name below
                answers[what] = error
        # A cancel that went well has a follow-up.
        assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE follows_id IS NULL") == 1
    assert {w: a for w, a in answers.items() if a not in ([], None, True, False)} == {}


@pytest.mark.parametrize(
    "name", ["a\x00b", "\ud800", "", "x" * 10_000], ids=["NUL", "surrogate", "empty", "long"]
)
async def test_a_worker_whose_name_cannot_be_stored_is_refused_or_mended(
    name: str, database: str, conn: asyncpg.Connection
) -> None:
    """open-webui/open-webui PR #27084: a name that PostgreSQL cannot hold must not be found out
    by the heartbeat, whose leases would lapse while everything looks well."""
    async with engine_on(database) as engine:
        try:
            worker = engine.worker(name=name)
        except UsageError as error:
            assert "name" in str(error)  # noqa: PT017 -- one of two good ends
            return
        async with worker:
            await until(conn, "SELECT count(*) = 1 FROM fanout.worker", seconds=3)
