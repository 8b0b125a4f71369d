"""Submitting: at once, once for each key, within the caller's transaction, or not at all."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pydantic
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic_core import to_json

from fanout import (
    ConfigurationError,
    Engine,
    Handler,
    IdempotencyConflict,
    Job,
    Request,
    Status,
    UsageError,
)
from tests.engine.running import closed, quick, running


class Selection(pydantic.BaseModel):
    ids: list[int]
    title: str = ""


async def papers_batch(job: Job[Selection]) -> None: ...


async def jobs(conn: asyncpg.Connection) -> int:
    count: int = await conn.fetchval("SELECT count(*) FROM fanout.job")
    return count


async def test_a_submit_returns_at_once(engine: Engine) -> None:
    """A batch of 2,000 documents is an id and a payload: well under 0.1 s."""
    async with engine:
        await engine.submit("papers_batch", {"selection": 0})
        took = []
        for n in range(5):
            began = time.perf_counter()
            await engine.submit("papers_batch", {"selection": n, "documents": 2000}, key=f"k{n}")
            took.append(time.perf_counter() - began)
    assert min(took) < 0.1
    assert max(took) < 5


async def test_a_payload_has_at_most_1024_bytes(engine: Engine, conn: asyncpg.Connection) -> None:
    """Bytes of UTF-8, not characters; the error names field, size and remedy."""
    async with engine:
        for fill in ("x" * 1022, "汉" * 340 + "xx"):
            handle = await engine.submit("papers_batch", fill)
            assert (await handle.job()).payload == fill
            with pytest.raises(UsageError, match=r"payload: has 1025 bytes.* 1024.*id") as caught:
                await engine.submit("papers_batch", fill + "x")
            assert caught.value.field == "payload"
    assert await jobs(conn) == 2


async def test_a_key_is_one_job(engine: Engine) -> None:
    """Same content, also with its keys in another order and other spacing: same job."""
    async with engine:
        first = await engine.submit("papers_batch", {"a": 1, "b": [1.0, None]}, key="import")
        again = await engine.submit("papers_batch", {"b": [1.0, None], "a": 1}, key="import")
        assert (first.created, again.created) == (True, False)
        assert first.id == again.id
        found = await engine.find("import")
        assert found is not None
        assert found.id == first.id
        assert await engine.find("other") is None


@pytest.mark.parametrize(
    ("kind", "payload"),
    [("papers_batch", {"a": 2}), ("papers_batch", None), ("other_batch", {"a": 1})],
)
async def test_other_content_under_a_key_is_a_conflict(
    engine: Engine, kind: str, payload: Any
) -> None:
    """The error has the key and the job that holds it; nothing was submitted."""
    async with engine:
        holder = await engine.submit("papers_batch", {"a": 1}, key="import")
        with pytest.raises(IdempotencyConflict, match="'import'") as caught:
            await engine.submit(kind, payload, key="import")
        assert (caught.value.key, caught.value.job_id) == ("import", holder.id)
        assert (await holder.job()).payload == {"a": 1}


async def test_a_key_stays_taken_when_its_job_has_ended(engine: Engine) -> None:
    """Not only while it is queued."""

    @engine.job
    async def quick_one(job: Job[int]) -> int:
        return job.payload

    async with running(engine):
        first = await engine.submit(quick_one, 1, key="once")
        await closed(first)
        again = await engine.submit(quick_one, 1, key="once")
        assert (again.id, again.created) == (first.id, False)
        assert await again.result(30) == 1


async def test_a_hundred_submits_of_a_key_at_once_are_one_job(engine: Engine) -> None:
    """And each gets its id."""
    async with engine:
        handles = await asyncio.gather(
            *(engine.submit("papers_batch", {"a": 1}, key="import") for _ in range(100))
        )
        assert len({handle.id for handle in handles}) == 1
        assert sum(handle.created for handle in handles) == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_job_lives_or_dies_with_the_callers_transaction(
    engine: Engine, conn: asyncpg.Connection, end: str
) -> None:
    """It is not seen before the commit, and never after a rollback."""
    async with engine:
        transaction = conn.transaction()
        await transaction.start()
        handle = await engine.submit("papers_batch", key="import", connection=conn)
        assert await engine.find("import") is None
        await getattr(transaction, end)()
        found = await engine.find("import")
        assert (found is not None) == (end == "commit")
        assert found is None or found.id == handle.id


async def test_a_savepoint_of_the_caller_takes_its_jobs_with_it(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Those before it stay."""
    async with engine:
        async with conn.transaction():
            await engine.submit("papers_batch", key="before", connection=conn)
            savepoint = conn.transaction()
            await savepoint.start()
            await engine.submit("papers_batch", key="within", connection=conn)
            await savepoint.rollback()
            await engine.submit("papers_batch", key="after", connection=conn)
        kept = [key for key in ("before", "within", "after") if await engine.find(key)]
        assert kept == ["before", "after"]


async def test_a_conflict_does_not_abort_the_callers_transaction(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """The caller may catch it and go on."""
    async with engine:
        await engine.submit("papers_batch", 1, key="import")
        async with conn.transaction():
            await conn.execute("CREATE TABLE own (n int)")
            with pytest.raises(IdempotencyConflict):
                await engine.submit("papers_batch", 2, key="import", connection=conn)
            with pytest.raises(UsageError):
                await engine.submit("papers_batch", "x" * 2000, connection=conn)
            await conn.execute("INSERT INTO own VALUES (1)")
        assert await conn.fetchval("SELECT count(*) FROM own") == 1


async def test_a_connection_without_a_transaction_will_do(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Then it is committed at once."""
    async with engine:
        await engine.submit("papers_batch", key="import", connection=conn)
        assert await engine.find("import") is not None
    assert not conn.is_in_transaction()


async def test_the_callers_connection_may_be_set_up_as_the_caller_likes(
    engine: Engine, database: str
) -> None:
    """Own codecs, own search_path, own time zone, from a pool, without prepared statements."""

    async def set_up(connection: asyncpg.Connection) -> None:
        for name in ("json", "jsonb"):
            await connection.set_type_codec(
                name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
            )
        await connection.execute("CREATE SCHEMA IF NOT EXISTS own")
        await connection.execute("CREATE TABLE IF NOT EXISTS own.job (id int)")
        await connection.execute("SET search_path = own; SET TimeZone = 'Asia/Tokyo'")

    run_at = datetime(2031, 1, 1, tzinfo=UTC)
    async with (
        engine,
        asyncpg.create_pool(
            database, min_size=1, max_size=2, init=set_up, statement_cache_size=0
        ) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        handle = await engine.submit(
            "papers_batch",
            {"a": "汉"},
            key="import",
            run_at=run_at,
            connection=connection,  # type: ignore[arg-type] # a pool's proxy is a connection in all but name
        )
        own = await connection.fetchval("SELECT payload FROM fanout.job WHERE id = $1", handle.id)
        assert own == {"a": "汉"}
        due = await connection.fetchval("SELECT run_at FROM fanout.job WHERE id = $1", handle.id)
        assert due == run_at


async def test_a_caller_may_be_in_repeatable_read(engine: Engine, conn: asyncpg.Connection) -> None:
    """A key that was taken before its snapshot is found, one that was taken since is a
    serialization failure, as for any other row; neither hangs."""
    async with engine:
        first = await engine.submit("papers_batch", 1, key="before")
        async with conn.transaction(isolation="repeatable_read"):
            assert await jobs(conn) == 1
            await engine.submit("papers_batch", 1, key="since")
            again = await engine.submit("papers_batch", 1, key="before", connection=conn)
            assert (again.id, again.created) == (first.id, False)
            assert (await engine.submit("papers_batch", key="own", connection=conn)).created
            with pytest.raises(asyncpg.SerializationError):
                async with asyncio.timeout(10):
                    await engine.submit("papers_batch", 1, key="since", connection=conn)
            assert (await engine.submit("papers_batch", key="more", connection=conn)).created
        assert await engine.find("more") is not None


async def test_many_are_submitted_in_the_order_given(engine: Engine) -> None:
    """Whatever their keys; a key twice is one job."""
    async with engine:
        assert await engine.submit_many([]) == []
        known = await engine.submit("papers_batch", 0, key="m")
        keys = ["z", None, "a", "m", "z", None]
        payloads = [1, 2, 3, 0, 1, 4]
        requests = [Request("papers_batch", p, key=k) for p, k in zip(payloads, keys, strict=True)]
        handles = await engine.submit_many(requests)
        assert [(await handle.job()).payload for handle in handles] == payloads
        assert [handle.created for handle in handles] == [True, True, True, False, False, True]
        assert handles[3].id == known.id
        assert handles[4].id == handles[0].id


@pytest.mark.parametrize("with_connection", [True, False])
async def test_many_are_submitted_all_or_none(
    engine: Engine, conn: asyncpg.Connection, with_connection: bool
) -> None:
    """A conflict of the last, or a mistake in it, is the end of all."""
    async with engine:
        await engine.submit("papers_batch", 1, key="taken")
        connection = conn if with_connection else None
        bad: list[tuple[Request, type[Exception]]] = [
            (Request("papers_batch", 2, key="taken"), IdempotencyConflict),
            (Request("papers_batch", 2, key="b"), IdempotencyConflict),
            (Request("papers_batch", "x" * 2000), UsageError),
            (Request("papers:batch"), UsageError),
        ]
        for request, error in bad:
            with pytest.raises(error):
                await engine.submit_many(
                    [Request("papers_batch"), Request("papers_batch", 1, key="b"), request],
                    connection=connection,
                )
            assert await jobs(conn) == 1


async def test_a_job_may_be_due_later(engine: Engine, conn: asyncpg.Connection) -> None:
    """At a time, or in so many seconds by the database's clock."""
    async with engine:
        when = datetime(2031, 1, 1, 12, tzinfo=UTC)
        assert (await (await engine.submit("a", run_at=when)).job()).run_at == when
        local = when.astimezone()
        assert (await (await engine.submit("a", run_at=local)).job()).run_at == when
        delayed = await engine.submit("a", delay=3600)
        seconds = await conn.fetchval(
            "SELECT extract(epoch FROM run_at - created_at) FROM fanout.job WHERE id = $1",
            delayed.id,
        )
        assert 3599 < seconds < 3601


NOON = datetime(2031, 1, 1, 12, tzinfo=UTC)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("run_at", {"run_at": NOON.replace(tzinfo=None)}),
    ("run_at", {"run_at": NOON, "delay": 1}),
    ("run_at", {"run_at": "2031-01-01"}),
    ("run_at", {"run_at": NOON.date()}),
    ("delay", {"delay": -1}),
    ("delay", {"delay": float("nan")}),
    ("delay", {"delay": float("inf")}),
    ("delay", {"delay": "1"}),
    ("priority", {"priority": 10}),
    ("priority", {"priority": -1}),
    ("priority", {"priority": True}),
    ("priority", {"priority": 5.0}),
    ("priority", {"priority": "5"}),
    ("max_retries", {"max_retries": -1}),
    ("max_retries", {"max_retries": 1.0}),
    ("max_retries", {"max_retries": 2**31}),
    ("key", {"key": ""}),
    ("key", {"key": "x" * 513}),
    ("key", {"key": "汉" * 171}),
    ("key", {"key": "a\0b"}),
    ("key", {"key": "\ud800"}),
    ("key", {"key": 7}),
    ("on_closed", {"on_closed": "a.b"}),
    ("on_closed", {"on_closed": 7}),
    ("kind", {"target": "papers:batch"}),
    ("kind", {"target": "papers.batch"}),
    ("kind", {"target": ""}),
    ("kind", {"target": None}),
    ("payload", {"payload": object()}),
]


def test_bad_input_is_refused_by_name() -> None:
    """Before anything reaches the database: field, what is wrong, what would be right."""
    engine = Engine("postgresql://nowhere", settings=quick())
    for field, options in BAD:
        with pytest.raises(UsageError) as caught:
            engine._checked(Request(**{"target": "papers_batch", **options}))
        assert caught.value.field == field, options
        assert caught.value.problem
        assert caught.value.remedy


def test_a_payload_is_checked_against_its_handler() -> None:
    """A model, or what makes one; also when the handler is given by its name."""
    engine = Engine("postgresql://nowhere", settings=quick())
    handler: Handler[Selection, None] = engine.job(papers_batch)
    for target in (handler, "papers_batch"):
        for payload in (Selection(ids=[1]), {"ids": [1]}, {"ids": ["1"], "title": ""}):
            checked = engine._checked(Request(target, payload))
            assert json.loads(checked.payload) == {"ids": [1], "title": ""}
        with pytest.raises(UsageError) as caught:
            engine._checked(Request(target, {"ids": [1, "two"]}))
        assert caught.value.field == "payload.ids.1"
        assert "'two'" in caught.value.problem
        with pytest.raises(UsageError, match="payload"):
            engine._checked(Request(target))


async def test_defaults_come_from_the_handler_or_from_whoever_registered_it(
    database: str,
) -> None:
    """Python that knows the handler, Python that knows its name only, and what is given wins."""
    serving, knowing = (Engine(database, settings=quick(pool_size=2)) for _ in range(2))
    serving.job(max_retries=7, on_closed="papers_report", name="papers_batch")(papers_batch)
    async with running(serving), knowing:
        one = await (await serving.submit("papers_batch", {"ids": []}, delay=60)).job()
        two = await (await knowing.submit("papers_batch", {"ids": []}, delay=60)).job()
        for job in (one, two):
            assert (job.max_retries, job.on_closed, job.priority) == (7, "papers_report", 5)
        own = await knowing.submit(
            "papers_batch", {}, delay=60, max_retries=0, on_closed="other", priority=0
        )
        job = await own.job()
        assert (job.max_retries, job.on_closed, job.priority) == (0, "other", 0)
        unknown = await (await knowing.submit("served_nowhere")).job()
        assert (unknown.max_retries, unknown.on_closed) == (3, None)


async def test_a_small_priority_number_goes_first(engine: Engine) -> None:
    """And among equals the first that came."""
    order: list[str] = []

    @engine.job
    async def note(job: Job[str]) -> None:
        order.append(job.payload)

    async with engine:
        requests = [
            Request(note, f"{str(priority)[0]}{n}", priority=priority)
            for n in "abc"
            for priority in (9, 0, 5, None)
        ]
        handles = await engine.submit_many(requests)
        async with engine.worker(concurrency=1):
            for handle in handles:
                await closed(handle)
    assert order == ["0a", "0b", "0c", "5a", "Na", "5b", "Nb", "5c", "Nc", "9a", "9b", "9c"]


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.fixture
async def started(engine: Engine) -> AsyncIterator[Engine]:
    async with engine:
        yield engine


@hypothesis_settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(payloads=st.lists(PLAIN, min_size=1, max_size=5))
async def test_what_json_can_say_comes_back_as_it_was(payloads: list[Any], started: Engine) -> None:
    """Through encode, the database and decode; submitted again it is the same content."""
    key = uuid.uuid4().hex
    fitting = [payload for payload in payloads if len(to_json(payload)) <= 1024]
    requests = [Request("any", payload, key=f"{key}{n}") for n, payload in enumerate(fitting)]
    handles = await started.submit_many(requests)
    again = await started.submit_many(requests)
    assert [handle.id for handle in again] == [handle.id for handle in handles]
    for handle, payload in zip(handles, fitting, strict=True):
        assert repr((await handle.job()).payload) == repr(payload)


def test_a_name_that_is_not_one_is_a_setting_of_the_program() -> None:
    """ConfigurationError, for the CLI to tell from a wrong payload."""
    engine = Engine("postgresql://nowhere", settings=quick())
    with pytest.raises(ConfigurationError):
        engine._checked(Request("a:b"))


async def test_lists_of_jobs_are_paged_newest_first(engine: Engine) -> None:
    """Roots only, by kind and status."""
    async with engine:
        handles = await engine.submit_many([Request("ab"[n % 2], n) for n in range(7)])
        ids = [handle.id for handle in reversed(handles)]
        first = await engine.jobs(limit=3)
        rest = await engine.jobs(limit=10, before_id=first[-1].id)
        assert [job.id for job in first + rest] == ids
        assert [job.id for job in await engine.jobs(kind="a")] == ids[::2]
        assert await engine.jobs(status=Status.FAILED) == []
        assert len(await engine.jobs(status="pending", kind="b")) == 3


async def test_a_delay_is_as_long_as_it_says(engine: Engine, conn: asyncpg.Connection) -> None:
    """A job is not claimed before it is due, and soon after."""

    @engine.job
    async def later(job: Job[None]) -> None: ...

    async with running(engine):
        handle = await engine.submit(later, delay=0.3)
        await closed(handle)
        early = await conn.fetchval(
            "SELECT claimed_at < run_at FROM fanout.job WHERE id = $1", handle.id
        )
        assert early is False
        job = await handle.job()
        assert job.claimed_at is not None
        assert job.claimed_at - job.created_at < timedelta(seconds=10)


async def test_what_commits_late_is_found_below_the_floor(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A worker's walk begins at the last row it took. A job whose transaction began before that row
    and commits after it lies below: a full look finds it."""

    @engine.job
    async def leaf(job: Job[None]) -> None: ...

    async with running(engine):
        transaction = conn.transaction()
        await transaction.start()
        late = await engine.submit(leaf, connection=conn)
        for _ in range(3):  # the floor rises above it
            await closed(await engine.submit(leaf))
        await transaction.commit()
        assert (await late.wait(30)).outcome == "completed"
