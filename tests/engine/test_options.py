"""What a batch can be told, checked before it reaches the database, and there for other callers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from fanout import Engine, Job, UsageError
from fanout.options import encode_options
from tests.engine.running import running


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"closing": "count"}, None),
        ({"closing": "aggregate"}, {"closing": "aggregate"}),
        ({"fail_after": 20}, {"fail_after": 20}),
        ({"fail_after": "5 %"}, {"fail_after_percent": 5}),
        ({"fail_after": "2.5%"}, {"fail_after_percent": 2.5}),
        ({"deadline": 90}, {"deadline_seconds": 90}),
        ({"deadline": timedelta(hours=1)}, {"deadline_seconds": 3600}),
        (
            {"deadline": datetime(2030, 1, 1, tzinfo=UTC)},
            {"deadline": "2030-01-01T00:00:00+00:00"},
        ),
        ({"budget": {"cost": 50, "tokens": 1.5}}, {"budget": {"cost": 50, "tokens": 1.5}}),
        ({"budget": {"cost": Decimal("0.5")}}, {"budget": {"cost": 0.5}}),
        ({"partition": "acme", "concurrency": 2}, {"partition": "acme", "concurrency": 2}),
        ({"webhook": "billing", "concurrency": None}, {"webhook": "billing"}),
    ],
)
def test_options_are_json(options: Any, expected: dict[str, Any] | None) -> None:
    """What is left out, or is the default, is not said at all."""
    text = encode_options(options)
    assert (text and json.loads(text)) == expected


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"clsing": "aggregate"}, "clsing", "no such option"),
        ({"closing": "later"}, "closing", "'later'"),
        ({"fail_after": 0}, "fail_after", "0 is not a count"),
        ({"fail_after": True}, "fail_after", "True"),
        ({"fail_after": "5"}, "fail_after", "'5' is not a share"),
        ({"fail_after": "0 %"}, "fail_after", "'0 %'"),
        ({"fail_after": "101 %"}, "fail_after", "'101 %'"),
        ({"concurrency": -1}, "concurrency", "-1"),
        ({"concurrency": 2**31}, "concurrency", "2147483648"),
        ({"deadline": 0}, "deadline", "0 is not a time to come"),
        ({"deadline": float("nan")}, "deadline", "nan"),
        ({"deadline": datetime(2030, 1, 1)}, "deadline", "no time zone"),  # noqa: DTZ001 -- the case
        ({"budget": {}}, "budget", "{}"),
        ({"budget": {"cost": 0}}, "budget", "allow nothing"),
        ({"budget": {"the cost": 1}}, "budget", "'the cost'"),
        ({"budget": {"cost": float("inf")}}, "budget", "inf"),
        ({"budget": {f"n{n}": 1 for n in range(9)}}, "budget", "9 sums"),
        ({"partition": ""}, "partition", "''"),
        ({"partition": "x" * 129}, "partition", "129"),
        ({"webhook": 7}, "webhook", "7"),
    ],
)
def test_a_bad_option_is_named_with_a_remedy(options: Any, field: str, problem: str) -> None:
    """The field, what was wrong with it, and what would be right."""
    with pytest.raises(UsageError) as caught:
        encode_options(options)
    assert str(caught.value).startswith(field)
    assert problem in str(caught.value)


async def test_the_largest_budget_fits(engine: Engine, conn: asyncpg.Connection) -> None:
    """Eight names of 63 letters, with numbers as long as they get."""
    names = [f"{letter}" * 63 for letter in "abcdefgh"]
    async with engine:
        handle = await engine.submit("batch", budget=dict.fromkeys(names, 1 / 3))
        kept = await conn.fetchval("SELECT budget FROM fanout.job WHERE id = $1", handle.id)
    assert json.loads(kept) == dict.fromkeys(names, 1 / 3)


async def test_what_a_kind_is_told_is_the_default_of_its_batches(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """For callers of SQL as well; what is said at the submit wins."""

    @engine.job(closing="aggregate", fail_after=3)
    async def papers_batch(job: Job[None]) -> None: ...

    async with running(engine):
        ids = [
            await conn.fetchval("SELECT fanout.submit('papers_batch', delay => '1 h')"),
            await conn.fetchval(
                "SELECT fanout.submit('papers_batch', delay => '1 h', "
                "options => '{\"fail_after\": 9}')"
            ),
            (await engine.submit(papers_batch, delay=3600, fail_after=7)).id,
        ]
    rows = await conn.fetch(
        "SELECT closing, fail_after FROM fanout.job WHERE id = ANY ($1) ORDER BY id", ids
    )
    assert [tuple(row) for row in rows] == [("aggregate", 3), ("aggregate", 9), ("aggregate", 7)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("[1]", "options is a JSON array, not an object"),
        ('{"failafter": 1}', "options has no 'failafter'"),
        ('{"fail_after": "many"}', "invalid input syntax"),
        ('{"fail_after": 0}', "job_fail_after"),
        ('{"closing": "later"}', "job_closing"),
    ],
)
async def test_callers_of_sql_are_told_too(
    conn: asyncpg.Connection, options: str, message: str
) -> None:
    """Nothing is inserted."""
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute("SELECT fanout.submit('papers_batch', options => $1::jsonb)", options)
    assert message in str(caught.value)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0
