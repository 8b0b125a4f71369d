"""Submitting from any language: the same guarantees, in SQL."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.types.json import Jsonb

from fanout import Engine, Job
from tests.engine.running import quick, running
from tests.factories import until_blocked


async def test_psycopg_submits_within_its_own_transaction(engine: Engine, database: str) -> None:
    """By name or position; the job lives or dies with the transaction, and Python finds it."""

    @engine.job
    async def papers_batch(job: Job[Any]) -> Any:
        return job.payload

    async with running(engine):
        async with await psycopg.AsyncConnection.connect(database) as client:
            cursor = await client.execute(
                "SELECT fanout.submit('papers_batch', %s, key => %s)",
                [Jsonb({"ids": [1, 2]}), "import"],
            )
            [job_id] = await cursor.fetchone() or [0]
            assert await engine.find("import") is None
            await client.commit()
            await client.execute("SELECT fanout.submit('papers_batch', key => 'gone')")
            await client.rollback()
        assert await engine.handle(job_id).result(30) == {"ids": [1, 2]}
        assert await engine.find("gone") is None
        again = await engine.submit(papers_batch, {"ids": [1, 2]}, key="import")
        assert (again.id, again.created) == (job_id, False)


async def test_a_conflict_has_a_state_and_a_hint_of_its_own(conn: asyncpg.Connection) -> None:
    """FO409, for callers to tell from any other error."""
    first = await conn.fetchval("SELECT fanout.submit('a', '{\"n\": 1, \"m\": 2}', key => 'k')")
    same = "SELECT fanout.submit('a', '{\"m\": 2, \"n\":1}', key => 'k')"
    assert await conn.fetchval(same) == first
    for other in (
        "SELECT fanout.submit('a', '{\"n\": 2}', key => 'k')",
        "SELECT fanout.submit('a', key => 'k')",
        "SELECT fanout.submit('b', '{\"n\": 1, \"m\": 2}', key => 'k')",
    ):
        with pytest.raises(asyncpg.PostgresError) as caught:
            await conn.execute(other)
        assert caught.value.sqlstate == "FO409"
        assert f"'k' belongs to job {first}" in str(caught.value)
        assert caught.value.hint == (
            "Use a new key for a new request, or submit exactly what was submitted with this one."
        )
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'papers:batch'", "kind 'papers:batch' is not a valid name"),
        ("'papers.batch'", "is not a valid name"),
        ("''", "is not a valid name"),
        ("NULL", "kind NULL is not a valid name"),
        ("'a', to_jsonb(repeat('x', 1023))", "payload has 1025 bytes, the limit is 1024"),
        ("'a', to_jsonb(repeat('汉', 341))", "payload has 1025 bytes, the limit is 1024"),
        ("'a', priority => 10", "priority 10 is out of range"),
        ("'a', priority => -1", "priority -1 is out of range"),
        ("'a', key => ''", "the idempotency key is empty"),
        ("'a', key => repeat('x', 513)", "longer than 512"),
    ],
)
async def test_bad_input_is_refused_with_a_hint(
    conn: asyncpg.Connection, arguments: str, message: str
) -> None:
    """Invalid parameter value, what was wrong, and what would be right."""
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await conn.execute(f"SELECT fanout.submit({arguments})")
    assert message in str(caught.value)
    assert caught.value.hint
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            "'a', max_retries => -1",
        ),
        "'a', on_closed => 'b.c'",
    ],
)
async def test_what_is_not_told_kindly_is_refused_all_the_same(
    conn: asyncpg.Connection, arguments: str
) -> None:
    """The table's own CHECKs are behind the function."""
    with pytest.raises(asyncpg.PostgresError):
        await conn.execute(f"SELECT fanout.submit({arguments})")
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0


async def test_1024_bytes_and_what_jsonb_writes_between_them_are_fine(
    conn: asyncpg.Connection,
) -> None:
    """The limit is on the text as it is stored."""
    for text in ("repeat('x', 1022)", "repeat('汉', 340) || 'xx'"):
        assert await conn.fetchval(f"SELECT fanout.submit('a', to_jsonb({text}))")


async def test_defaults_are_those_that_a_worker_registered(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Retries and follow-up; what is given wins, and an unknown kind has the engine's."""

    @engine.job(max_retries=7, on_closed="papers_report")
    async def papers_batch(job: Job[None]) -> None: ...

    async with running(engine):
        for sql, expected in (
            ("'papers_batch', run_at => 'infinity'", (7, "papers_report", 5)),
            ("'papers_batch', delay => '1 h', max_retries => 0", (0, "papers_report", 5)),
            ("'papers_batch', delay => '1 h', on_closed => 'x', priority => 1", (7, "x", 1)),
            ("'served_nowhere'", (3, None, 5)),
        ):
            job_id = await conn.fetchval(f"SELECT fanout.submit({sql})")
            row = await conn.fetchrow("SELECT * FROM fanout.job WHERE id = $1", job_id)
            assert row is not None
            assert (row["max_retries"], row["on_closed"], row["priority"]) == expected


async def test_only_who_may_submit_may_submit(conn: asyncpg.Connection) -> None:
    """PUBLIC may not; a role that was granted it needs nothing else on the tables... but what the
    function itself does is done as the caller, so it needs INSERT and SELECT too."""
    await conn.execute("CREATE ROLE app; GRANT USAGE ON SCHEMA fanout TO app; SET ROLE app")
    try:
        for function in (
            "fanout.submit('a')",
            "fanout.submit_job('a', 'null', NULL, NULL, NULL, NULL, NULL, NULL)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="function"):
                await conn.execute(f"SELECT {function}")
        await conn.execute(
            "RESET ROLE; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fanout TO app;"
            "GRANT SELECT, INSERT ON fanout.job TO app; GRANT SELECT ON fanout.kind TO app;"
            "SET ROLE app"
        )
        assert await conn.fetchval("SELECT fanout.submit('a', key => 'k')")
    finally:
        await conn.execute("RESET ROLE; DROP OWNED BY app; DROP ROLE app")


async def test_a_rivals_rollback_leaves_the_key_to_the_next(
    conn: asyncpg.Connection, database: str
) -> None:
    """Who waits for a key gets the rival's job if it commits, and one of its own if it does not:
    never the id of a job that is not there."""
    rival = await asyncpg.connect(database)
    watcher = await asyncpg.connect(database)
    try:
        for end in ("ROLLBACK", "COMMIT"):
            key = f"k{end}"
            await rival.execute("BEGIN")
            theirs = await rival.fetchval("SELECT fanout.submit('a', key => $1)", key)
            mine = asyncio.create_task(conn.fetchval("SELECT fanout.submit('a', key => $1)", key))
            await until_blocked(watcher, mine)
            await rival.execute(end)
            assert (await mine == theirs) == (end == "COMMIT")
            assert await watcher.fetchval("SELECT 1 FROM fanout.job WHERE id = $1", await mine)
    finally:
        await rival.close()
        await watcher.close()


async def test_whatever_json_comes_in_by_sql_ends(engine: Engine, conn: asyncpg.Connection) -> None:
    """Deeper than Python's parser likes, numbers that only jsonb knows: the job ends, can be read,
    and hides no other."""

    @engine.job(max_retries=0)
    async def anything(job: Job[Any]) -> Any:
        return None

    @engine.job(max_retries=0)
    async def numbers(job: Job[list[float]]) -> None: ...

    payloads = {
        "deep": "[" * 400 + "]" * 400,
        "huge": "1e300",
        "long": "9" * 900,
        "exact": "9007199254740993",
        "digits": "0." + "1" * 900,
        "twice": '{"a": 1, "a": 2}',
        "text": '"汉\\ud83d\\ude00"',
    }
    async with running(engine):
        for kind in ("anything", "numbers"):
            for payload in payloads.values():
                job_id = await conn.fetchval(
                    "SELECT fanout.submit($1, $2::text::jsonb)", kind, payload
                )
                progress = await engine.handle(job_id).wait(30)
                assert progress.is_closed
                assert (await engine.handle(job_id).job()).id == job_id
        exact = await conn.fetchval("SELECT fanout.submit('anything', '9007199254740993')")
        assert (await engine.handle(exact).job()).payload == 9007199254740993


async def test_another_schema_has_functions_of_its_own(empty_database: str) -> None:
    """`elsewhere.submit` puts into `elsewhere.job`."""
    engine = Engine(empty_database, settings=quick(schema_name="elsewhere"))
    async with engine:
        conn = await asyncpg.connect(empty_database)
        job_id = await conn.fetchval("SELECT elsewhere.submit('a', key => 'k')")
        found = await engine.find("k")
        assert found is not None
        assert found.id == job_id
        await conn.close()
