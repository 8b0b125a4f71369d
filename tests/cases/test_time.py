"""Whose clock decides: the database's, whatever a pod believes, and whatever zone anybody lives
in."""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from zoneinfo import ZoneInfo

import asyncpg
import pytest

import fanout
from fanout import Settings, UsageError
from fanout.backoff import retry_delay
from fanout.statements import load_migrations, load_statements
from tests.cases.lab import Calls, Pod, counters, engine_on, until

SOURCES = Path(fanout.__file__).parent


def test_no_statement_is_given_the_time_by_a_pod() -> None:
    """Krzysztof318/MailFathom #1989, wildanniam/koderea #102, mlflow/mlflow PR #25199, river PR
    #1213: no pod's clock decides anything: the engine's modules read the wall clock nowhere,
    except to read an HTTP date in a Retry-After; what they measure by themselves is monotonic."""
    clock = re.compile(r"datetime\.now|utcnow|time\.time\(|time\.time_ns|date\.today|localtime")
    found = {
        (path.name, line.strip())
        for path in SOURCES.glob("*.py")
        for line in path.read_text().splitlines()
        if clock.search(line)
    }
    allowed = {
        "failures.py",  # Retry-After: Sun, 29 Nov 2026 10:00:00 GMT
        "events.py",  # when a line was said, for people: it orders nothing
        "testing.py",  # a job made up without a database
        "sweeper.py",  # a leap of it says that the host slept: then nobody is rescued for a lease
    }
    said = {one for one in found if one[0] not in allowed and "Give an" not in one[1]}
    assert said == set()


def test_every_statement_asks_the_clock_that_fits() -> None:
    """mlflow/mlflow PR #25199: `now()` is the transaction's start and lags where it is long: no
    statement and no migration uses it, nor a time without a zone; what is written is
    clock_timestamp(), what an index is searched by statement_timestamp()."""
    texts = [*load_statements().values(), *(sql for _, _, sql in load_migrations())]
    for sql in texts:
        code = re.sub(r"--.*|AT TIME ZONE '[^']*'|'[^']*'", "", sql)
        assert not re.search(
            r"\bnow\(\)|current_timestamp|localtime|transaction_timestamp", code, re.IGNORECASE
        ), sql
        assert not re.search(
            r"\btimestamp\b(?!tz)|timestamp without|\bdate\b|\btime\b", code, re.IGNORECASE
        ), sql


async def test_every_time_in_the_tables_has_a_zone(conn: asyncpg.Connection) -> None:
    """kelektiv/node-cron #563, #881; citusdata/pg_cron #16: timestamptz and nothing else."""
    kinds = await conn.fetch(
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'fanout' AND (data_type LIKE 'time%' OR data_type = 'date')"
    )
    assert kinds
    assert {row["data_type"] for row in kinds} == {"timestamp with time zone"}


@pytest.fixture
def faketime() -> str:
    """The library that shifts a process's wall clock."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("libfaketime is not installed: this case was not run")
    return str(found[0])


async def test_pods_whose_clocks_differ_by_twenty_minutes_take_nothing_from_each_other(
    faketime: str,
    pods: Callable[..., Pod],
    database: str,
    conn: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    """Krzysztof318/MailFathom #1989, river PR #1213: one pod is ten minutes ahead, one ten
    minutes behind and then jumps an hour back in mid-run: no live claim is swept, every child is
    called once, no constraint breaks, and a delay is neither early nor late by any of it."""
    jumping = tmp_path / "offset"
    jumping.write_text("-10m\n")
    shared = {
        "LD_PRELOAD": faketime,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    ahead = pods(**shared, FAKETIME="+10m", POD_NAME="ahead")
    behind = pods(
        **shared, FAKETIME_TIMESTAMP_FILE=str(jumping), FAKETIME_NO_CACHE="1", POD_NAME="behind"
    )
    await ahead.up()
    await behind.up()
    async with engine_on(database) as engine:
        handle = await engine.submit("batch", {"n": 30, "child": {"seconds": 0.5}})
        later = await engine.submit("leaf", delay=2.0)
        began = time.monotonic()
        await until(conn, "SELECT count(*) > 5 FROM fanout.job WHERE finished_at IS NOT NULL")
        jumping.write_text("-70m\n")
        await handle.wait(30)
        await later.wait(30)
        assert time.monotonic() - began >= 1.9
    assert await counters(conn, handle.id) == ("completed", 30, 30, 0, 0)
    lines = ahead.lines + behind.lines
    starts = [line for line in lines if line.startswith("start")]
    assert len(starts) == len(set(starts)) == 31
    assert any(line.startswith("start") for line in ahead.lines)
    assert any(line.startswith("start") for line in behind.lines)
    assert await conn.fetchval("SELECT sum(failures + deaths) FROM fanout.job") == 0
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE claimed_at < run_at") == 0


async def test_the_zone_of_the_server_and_of_a_pod_shift_nothing(
    database: str, conn: asyncpg.Connection, pods: Callable[..., Pod]
) -> None:
    """tibordp/pyncette #10, temporalio/documentation PR #952: the server lives in Paris, a pod
    in New York: leases, delays and retries are off by no hour."""
    name = await conn.fetchval("SELECT current_database()")
    await conn.execute(f"ALTER DATABASE {name} SET TimeZone = 'Europe/Paris'")
    await pods(TZ="America/New_York").up()
    async with engine_on(database) as engine:
        handle = await engine.submit("leaf", {"seconds": 1}, delay=0.5)
        await until(conn, "SELECT status = 'processing' FROM fanout.job WHERE id = $1", handle.id)
        lease, waited = await conn.fetchrow(  # type: ignore[misc]
            "SELECT lease_expires_at - clock_timestamp(), claimed_at - created_at "
            "FROM fanout.job WHERE id = $1",
            handle.id,
        )
        assert timedelta() < lease <= timedelta(seconds=1.6)
        assert timedelta(seconds=0.5) <= waited < timedelta(seconds=5)
        await handle.wait(10)


@pytest.mark.parametrize(
    ("zone", "wall", "fold"),
    [
        ("Europe/Paris", datetime(2026, 3, 29, 2, 30), 0),  # noqa: DTZ001 -- an hour that is not
        ("Europe/Paris", datetime(2026, 10, 25, 2, 30), 0),  # noqa: DTZ001 -- an hour that is twice
        ("Europe/Paris", datetime(2026, 10, 25, 2, 30), 1),  # noqa: DTZ001 -- its second time
    ],
)
async def test_a_run_at_in_an_hour_that_is_missing_or_twice_is_one_instant(
    zone: str, wall: datetime, fold: int, database: str, conn: asyncpg.Connection
) -> None:
    """kelektiv/node-cron #563, #881; citusdata/pg_cron #16: an aware time is the instant that
    Python says it is, also at 02:30 on the nights when clocks change; a naive one is refused,
    for it would be read in the pod's own zone."""
    aware = wall.replace(tzinfo=ZoneInfo(zone), fold=fold)
    async with engine_on(database) as engine:
        handle = await engine.submit("leaf", run_at=aware)
        assert (await handle.job()).run_at == aware.astimezone(UTC)
        with pytest.raises(UsageError, match="run_at"):
            await engine.submit("leaf", run_at=wall)
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1


async def test_a_delay_counts_from_the_servers_clock(
    database: str, conn: asyncpg.Connection
) -> None:
    """wildanniam/koderea #102: a delay is a number of seconds when it reaches the database, not
    a time by the pod's clock."""
    async with engine_on(database) as engine:
        handle = await engine.submit("leaf", delay=30.0)
    ahead = await conn.fetchval(
        "SELECT run_at - created_at FROM fanout.job WHERE id = $1", handle.id
    )
    assert timedelta(seconds=29) < ahead < timedelta(seconds=31)
    assert "now" not in inspect.getsource(fanout.Engine.submit_many)


def test_backoff_is_a_number_of_seconds() -> None:
    """tibordp/pyncette #10: 10, 20, 40 s and so on, ± 20 %, at most 10 min: arithmetic on
    seconds, that no calendar enters."""
    settings = Settings()
    for failures, seconds in enumerate((10, 20, 40, 80, 160, 320, 600, 600)):
        delays = [retry_delay(failures, None, settings, Random(seed)) for seed in range(200)]
        assert min(delays) >= seconds * 0.8
        assert max(delays) <= min(seconds * 1.2, 600)


async def test_a_retry_waits_for_as_long_as_was_asked(database: str, calls: Calls) -> None:
    """kelektiv/node-cron #881: the next run of a job that failed lies its backoff after the
    failure by the server's clock, in whatever zone the session is."""
    async with (
        engine_on(database, calls, backoff_base=0.5, backoff_max=1, backoff_jitter=0) as engine,
        engine.worker(),
    ):
        handle = await engine.submit("leaf", {"flaky": 2})
        await handle.wait(10)
    gaps = [b - a for a, b in itertools.pairwise(calls.at)]
    assert 0.45 < gaps[0] < 2
    assert 0.95 < gaps[1] < 3
