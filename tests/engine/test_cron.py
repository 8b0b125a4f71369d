"""Schedules: each time once over all pods, on the clock of their zone; missed times by rule."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from fanout import Engine, Job, UsageError
from fanout.cron import MOST_MISSED, Cron, Plan, Schedule, Schedules, Times, plan
from fanout.store import Store
from tests.cli.harness import Said, command
from tests.engine.running import closed, quick, running, until
from tests.factories import a_store, held, until_blocked

BERLIN = "Europe/Berlin"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def the_next(expression: str, zone: str, start: str, count: int) -> list[str]:
    times, at, found = Times(expression, zone), utc(start), []
    for _ in range(count):
        at = times.after(at)
        found.append(f"{at:%m-%d %H:%M}")
    return found


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    async with a_store(database) as store:
        yield store


@pytest.fixture
def schedules(store: Store) -> Schedules:
    return Schedules(store)


# -- times -----------------------------------------------------------------------------------------


def test_a_wall_clock_time_moves_with_the_clock() -> None:
    """Seven in Berlin is 06:00 UTC in winter and 05:00 in summer; weekends are left out."""
    assert the_next("0 7 * * 1-5", BERLIN, "2026-03-26 12:00", 3) == [
        "03-27 06:00",
        "03-30 05:00",
        "03-31 05:00",
    ]


@pytest.mark.parametrize(
    ("expression", "zone", "start", "expected"),
    [
        # 02:00 to 03:00 is left out on 29 March: what falls into it comes when it is over, once.
        ("30 2 * * *", BERLIN, "2026-03-28 00:00", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        ("0 2,3 * * *", BERLIN, "2026-03-28 12:00", ["03-29 01:00", "03-30 00:00", "03-30 01:00"]),
        ("*/30 * * * *", BERLIN, "2026-03-29 00:15", ["03-29 00:30", "03-29 01:00", "03-29 01:30"]),
        # 02:00 to 03:00 comes twice on 25 October: a set time once, what is hourly by real time.
        ("30 2 * * *", BERLIN, "2026-10-24 12:00", ["10-25 00:30", "10-26 01:30", "10-27 01:30"]),
        ("30 * * * *", BERLIN, "2026-10-24 23:45", ["10-25 00:30", "10-25 01:30", "10-25 02:30"]),
        # Begun within the hour that comes twice: never a time that has passed.
        ("30 2 * * *", BERLIN, "2026-10-25 01:15", ["10-26 01:30", "10-27 01:30", "10-28 01:30"]),
        # A zone that moves by half an hour, and one in the south.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 00:00", ["10-03 15:30", "10-04 15:15"]),
        ("30 2 * * *", "America/Santiago", "2026-04-04 00:00", ["04-04 05:30", "04-05 06:30"]),
        ("0 12 29 2 *", "UTC", "2026-01-01 00:00", ["02-29 12:00"]),
    ],
)
def test_gaps_and_overlaps(expression: str, zone: str, start: str, expected: list[str]) -> None:
    """As Debian's cron has it."""
    assert the_next(expression, zone, start, len(expected)) == expected


@pytest.mark.parametrize("expression", ["30 2 * * *", "*/20 * * * *", "5 1-3 * * *", "0 */2 * * *"])
@pytest.mark.parametrize("start", ["2026-03-28 18:00", "2026-10-24 18:00"])
def test_looking_back_finds_what_looking_ahead_found(expression: str, start: str) -> None:
    """Around both changes of the clock; and every time is later than the one before."""
    times, at = Times(expression, BERLIN), utc(start)
    ahead = []
    while at < utc(start) + timedelta(days=2):
        ahead.append(at := times.after(at))
    assert ahead == sorted(set(ahead))
    back = times.until(ahead[-1], len(ahead))
    assert back == ahead[::-1]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"expression": "0 7 * *"}, "expression"),
        ({"expression": "0 7 * * * *"}, "expression"),
        ({"expression": "@daily"}, "expression"),
        ({"expression": "60 7 * * *"}, "expression"),
        ({"expression": "0 7 * * mon-x"}, "expression"),
        ({"expression": "0 0 31 2 *"}, "expression"),
        ({"timezone": "Europe/Bärlin"}, "timezone"),
        ({"timezone": "../../etc/passwd"}, "timezone"),
        ({"timezone": ""}, "timezone"),
        ({"missed": "never"}, "missed"),
        ({"name": "a.b"}, "name"),
        ({"kind": "a:b"}, "kind"),
        ({"priority": 11}, "priority"),
        ({"options": '{"deadline":"2026-11-29T00:00:00+00:00"}'}, "deadline"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], field: str) -> None:
    """With the remedy, before anything is stored."""
    good: dict[str, Any] = {"name": "report", "kind": "report", "expression": "0 7 * * 1-5"}
    Schedule(**good).checked()
    with pytest.raises(UsageError) as error:
        Schedule(**(good | wrong)).checked()
    assert error.value.field == field
    assert error.value.remedy


# -- missed times ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "now", "run_at", "next_at"),
    [
        ("one", "2026-01-05 07:00:20", "2026-01-05 07:00", "2026-01-05 08:00"),
        ("skip", "2026-01-05 07:00:20", "2026-01-05 07:00", "2026-01-05 08:00"),
        ("all", "2026-01-05 07:00:20", "2026-01-05 07:00", "2026-01-05 08:00"),
        ("one", "2026-01-05 11:30", "2026-01-05 11:00", "2026-01-05 12:00"),
        ("skip", "2026-01-05 11:30", None, "2026-01-05 12:00"),
        ("skip", "2026-01-05 11:00:30", "2026-01-05 11:00", "2026-01-05 12:00"),
        ("all", "2026-01-05 11:30", "2026-01-05 07:00", "2026-01-05 08:00"),
        ("all", "2026-01-15 11:30", "2026-01-11 08:00", "2026-01-11 09:00"),
    ],
)
def test_the_rule_for_missed_times(missed: str, now: str, run_at: str | None, next_at: str) -> None:
    """One job for all, none, or each, the last hundred at most; an hourly schedule due at seven."""
    todo = plan(Times("0 * * * *", "UTC"), missed, utc("2026-01-05 07:00"), utc(now))
    assert todo == Plan(utc(run_at) if run_at else None, utc(next_at))


# -- ticks -----------------------------------------------------------------------------------------


async def due(conn: asyncpg.Connection, name: str, *, minutes: float) -> datetime:
    """As if its next time had been so many minutes ago; that time."""
    at: datetime = await conn.fetchval(
        """UPDATE fanout.cron
              SET next_at = date_trunc('minute', now()) - $2::float8 * interval '1 min'
            WHERE name = $1 RETURNING next_at""",
        name,
        minutes,
    )
    return at


async def jobs(conn: asyncpg.Connection) -> list[Any]:
    rows = await conn.fetch("SELECT idempotency_key FROM fanout.job ORDER BY id")
    return [row[0] for row in rows]


async def test_a_time_becomes_one_job_over_all_pods(
    store: Store, schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """Twenty pods look at once: one job, with what the schedule says, and its key."""
    await schedules.add(
        Schedule("nightly", "report", "* * * * *", payload='{"a": 1}', priority=2, tenant="t",
                 options='{"fail_after": 3}')
    )  # fmt: skip
    at = await due(conn, "nightly", minutes=0)
    submitted: list[str] = []

    await asyncio.gather(*(Cron(store, on_submitted=submitted.append).look() for _ in range(20)))

    row = await conn.fetchrow("SELECT * FROM fanout.job")
    assert await jobs(conn) == [f"cron:nightly:{at:%Y-%m-%dT%H:%M:%SZ}"]
    assert row is not None
    assert (row["kind"], row["payload"], row["priority"], row["tenant"], row["fail_after"]) == (
        "report", '{"a": 1}', 2, "t", 3
    )  # fmt: skip
    assert row["run_at"] == at
    assert submitted == ["report"]
    now = await schedules.get("nightly")
    assert (now.last_at, now.last_job_id, now.next_at) == (at, row["id"], at + timedelta(minutes=1))


async def test_who_comes_second_finds_another_time(
    schedules: Schedules, database: str, conn: asyncpg.Connection
) -> None:
    """It waits for the first one's commit, and does nothing; had that rolled back, it would."""
    await schedules.add(Schedule("nightly", "report", "* * * * *"))
    for ends in ("commit", "rollback"):
        await due(conn, "nightly", minutes=0)
        [row] = await schedules.soonest(1)
        todo = plan(Times("* * * * *", "UTC"), "one", row["next_at"], row["now"])
        async with held(database) as first:
            assert await Schedules(first.store).tick(row, todo) is not None
            second = asyncio.create_task(schedules.tick(row, todo))
            await until_blocked(conn, second)
            await getattr(first, ends)()
            assert (await second is None) == (ends == "commit")
    assert len(await jobs(conn)) in {1, 2}, "2 if a minute passed in between"


async def test_a_time_that_was_set_back_is_not_run_twice(
    store: Store, schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """The key holds where the comparison does not: after a restore, or a hand in the table."""
    await schedules.add(Schedule("nightly", "report", "* * * * *"))
    at = await due(conn, "nightly", minutes=0)
    await Cron(store).look()
    await conn.execute("UPDATE fanout.cron SET next_at = $1", at)
    await Cron(store).look()
    assert len(await jobs(conn)) <= 2
    assert len([key for key in await jobs(conn) if f"{at:%H:%M}" in key]) == 1


@pytest.mark.parametrize(("missed", "count"), [("one", 1), ("skip", 0), ("all", 3)])
async def test_missed_times_in_the_database(
    missed: Any, count: int, store: Store, schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """Nobody lived for three times of an hourly schedule; then many looks of many pods."""
    await schedules.add(Schedule("hourly", "report", "0 * * * *", missed=missed))
    now = await conn.fetchval("SELECT now()")
    first = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)
    await conn.execute("UPDATE fanout.cron SET next_at = $1", first)
    late = now.minute * 60 + now.second > 90
    for _ in range(5):
        await asyncio.gather(*(Cron(store).look() for _ in range(3)))
    assert len(await jobs(conn)) == (count if late or missed != "skip" else 1)
    assert (await schedules.get("hourly")).next_at == first + timedelta(hours=3)
    assert MOST_MISSED == 100


POD = """
import asyncio, sys
from fanout import Engine

engine = Engine(sys.argv[1])

@engine.job
async def other(job): ...

async def main():
    async with engine, engine.worker():
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_processes_that_die_lose_no_time_and_run_none_twice(
    database: str, schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """Three workers make up for half an hour of every minute; one is killed in the midst."""
    await schedules.add(Schedule("minutely", "report", "* * * * *", missed="all"))
    first = await due(conn, "minutely", minutes=30)
    pods = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", POD, database, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    try:
        await until(lambda: conn.fetchval("SELECT count(*) > 0 FROM fanout.job"))
        pods[0].kill()
        await until(lambda: conn.fetchval("SELECT next_at > now() FROM fanout.cron"))
    finally:
        for pod in pods:
            with contextlib.suppress(ProcessLookupError):
                pod.kill()
            await pod.communicate()
    rows = await conn.fetch("SELECT idempotency_key, run_at FROM fanout.job ORDER BY run_at")
    assert len(rows) in {31, 32}
    assert [row["run_at"] for row in rows] == [
        first + timedelta(minutes=n) for n in range(len(rows))
    ]


async def test_what_was_changed_meanwhile_is_not_ticked(
    schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """Each write repeats its conditions: paused, or another expression, since it was read."""
    await schedules.add(Schedule("nightly", "report", "* * * * *"))
    await due(conn, "nightly", minutes=0)
    [row] = await schedules.soonest(1)
    todo = plan(Times("* * * * *", "UTC"), "one", row["next_at"], row["now"])
    for change in ("enabled = false", "enabled = true, expression = '*/5 * * * *'"):
        await conn.execute(f"UPDATE fanout.cron SET {change}")
        assert await schedules.tick(row, todo) is None
    future = row["next_at"] + timedelta(hours=1)
    await conn.execute("UPDATE fanout.cron SET next_at = $1, expression = '* * * * *'", future)
    todo = Plan(future, future + timedelta(minutes=1))
    assert await schedules.tick({**row, "next_at": future}, todo) is None, "it is not due"
    assert await jobs(conn) == []


async def test_one_that_cannot_be_read_stops_no_other(
    store: Store, schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """A zone that this pod's data does not know, for example."""
    await schedules.add(Schedule("bad", "report", "* * * * *"))
    await schedules.add(Schedule("good", "report", "* * * * *"))
    await due(conn, "bad", minutes=1)
    await due(conn, "good", minutes=0)
    await conn.execute("UPDATE fanout.cron SET timezone = 'Nowhere' WHERE name = 'bad'")
    await Cron(store).look()
    assert [key.split(":")[1] for key in await jobs(conn)] == ["good"]
    assert [row.schedule.name for row in await schedules.all()] == ["bad", "good"]


# -- declared by code, steered by operators --------------------------------------------------------


async def test_code_declares_and_operators_decide(
    schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """Each start says it anew; what an operator paused stays paused, and what is an operator's
    own stays as it is."""
    one = Schedule("nightly", "report", "0 3 * * *", BERLIN)
    await schedules.declare([one])
    await schedules.pause("nightly")
    changed = Schedule("nightly", "report", "0 4 * * *", BERLIN, payload="7")
    await schedules.declare([changed])
    row = await schedules.get("nightly")
    assert (row.schedule, row.enabled, row.declared_by) == (changed, False, "code")
    assert row.next_at == changed.times().after(row.now)

    with pytest.raises(UsageError, match="declared in code"):
        await schedules.add(one)
    mine = Schedule("own", "report", "0 5 * * *")
    await schedules.add(mine)
    await schedules.declare([Schedule("own", "other", "0 6 * * *")])
    assert (await schedules.get("own")).schedule == mine


async def test_an_unchanged_schedule_keeps_a_time_that_is_due(
    schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """A start at seven must not lose the job of seven; nor does another payload."""
    await schedules.declare([Schedule("nightly", "report", "0 3 * * *")])
    at = await due(conn, "nightly", minutes=5)
    before = await conn.fetchval("SELECT xmin::text FROM fanout.cron")
    await schedules.declare([Schedule("nightly", "report", "0 3 * * *")])
    assert await conn.fetchval("SELECT xmin::text FROM fanout.cron") == before
    await schedules.declare([Schedule("nightly", "report", "0 3 * * *", payload="1")])
    assert (await schedules.get("nightly")).next_at == at


async def test_pause_resume_run_and_remove(
    store: Store, schedules: Schedules, conn: asyncpg.Connection
) -> None:
    """What passes while it is paused was not missed; run is beside its times; each names a
    schedule that is not there."""
    await schedules.add(Schedule("nightly", "report", "* * * * *", missed="all", payload="3"))
    await schedules.pause("nightly")
    await due(conn, "nightly", minutes=30)
    await Cron(store).look()
    resumed = await schedules.resume("nightly")
    assert resumed > (await schedules.get("nightly")).now - timedelta(seconds=1)
    assert await jobs(conn) == []
    assert await schedules.resume("nightly") == resumed, "again changes nothing"

    kind, job_id = await schedules.run("nightly")
    assert (kind, await jobs(conn)) == ("report", [None])
    row = await schedules.get("nightly")
    assert (row.last_job_id, row.last_at, row.next_at) == (job_id, None, resumed)

    assert await schedules.remove("nightly") == "operator"
    for call in (schedules.get, schedules.pause, schedules.resume, schedules.run, schedules.remove):
        with pytest.raises(UsageError, match="no schedule 'nightly'"):
            await call("nightly")


async def test_a_worker_declares_and_ticks(database: str, conn: asyncpg.Connection) -> None:
    """From the decorator to the job that ran: at its time, by a loop that sleeps until then."""
    engine = Engine(database, settings=quick())
    seen: list[dict[str, int]] = []

    @engine.cron("* * * * *", payload={"n": 1}, timezone=BERLIN)
    @engine.job
    async def report(job: Job[dict[str, int]]) -> None:
        seen.append(job.payload)

    engine.schedule("rarely", "elsewhere", "0 0 1 1 *")
    with pytest.raises(UsageError, match="there is a schedule 'report' already"):
        engine.schedule("report", report, "0 0 1 1 *", payload={})
    async with running(engine) as worker:
        assert [row.schedule.name for row in await engine.schedules.all()] == ["rarely", "report"]
        at = await conn.fetchval(
            "UPDATE fanout.cron SET next_at = now() + interval '0.3 s' WHERE name = 'report' "
            "RETURNING next_at"
        )
        await worker.cron.look()
        await until(lambda: seen)
        assert seen[0] == {"n": 1}
        row = await engine.schedules.get("report")
        assert row.last_at == at
        assert row.last_job_id is not None
        await closed(engine.handle(row.last_job_id))


def test_a_payload_that_its_handler_refuses_is_found_at_once() -> None:
    """Where it is declared, not at three at night."""
    engine = Engine("postgresql://nowhere")

    @engine.job
    async def report(job: Job[dict[str, int]]) -> None: ...

    with pytest.raises(UsageError, match="payload"):
        engine.schedule("nightly", report, "0 3 * * *")
    with pytest.raises(UsageError, match=r"Put @engine\.job below"):
        engine.cron("0 3 * * *")(lambda job: None)  # type: ignore[arg-type]


# -- the command -----------------------------------------------------------------------------------


async def test_the_command(database: str, capsys: Any, conn: asyncpg.Connection) -> None:
    """List, add, pause, resume, run, remove, in words and as JSON."""

    async def cron(*arguments: str) -> Said:
        return await command(capsys, "cron", *arguments, "--dsn", database)

    assert "no schedules" in (await cron()).out
    added = await cron(
        *("add", "nightly", "report", "0 7 * * 1-5", "--timezone", BERLIN, "--payload", '{"a": 1}')
    )
    assert added.code == 0, added.err
    assert added.out.count("07:00 Europe/Berlin") == 3
    [row] = (await cron("list", "--json")).lines()
    assert (row["name"], row["kind"], row["missed"], row["declared_by"]) == (
        *("nightly", "report", "one", "operator"),
    )
    assert row["next_at"] is not None

    assert (await cron("pause", "nightly")).code == 0
    assert "paused" in (await cron()).out
    assert "next" in (await cron("resume", "nightly")).out
    ran = await cron("run", "nightly")
    assert ran.out == f"job {await conn.fetchval('SELECT max(id) FROM fanout.job')}\n"
    assert await conn.fetchval("SELECT payload::text FROM fanout.job") in {'{"a":1}', '{"a": 1}'}

    wrong = await cron("add", "other", "report", "0 25 * * *")
    assert wrong.code == 2
    assert "bad hour" in wrong.err
    assert wrong.is_readable_error
    assert (await cron("remove", "nightly")).code == 0
    missing = await cron("run", "nightly")
    assert missing.code != 0
    assert "no schedule 'nightly'" in missing.err
