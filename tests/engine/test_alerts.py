"""An incident is told once, however many workers see it, and told again when it is over."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import asyncpg
import pytest

from fanout import Alert, AlertKind, Engine, Job, UsageError
from fanout import alerts as module
from fanout.alerts import FAILURES_IN_A_ROW, Alerts, Hook
from fanout.store import Store
from tests.cli.harness import command
from tests.engine.receiver import receiver
from tests.engine.running import quick, running, until
from tests.factories import (
    a_store,
    held,
    insert_batch,
    insert_job,
    live_worker,
    until_blocked,
)

LONG = "clock_timestamp() - interval '1 h'"


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    async with a_store(database) as it:
        yield it


def looker(
    store: Store,
    *hooks: Hook,
    failing: Callable[[], Sequence[tuple[str, int, str]]] = lambda: (),
    token: uuid.UUID | None = None,
    **settings: Any,
) -> Alerts:
    """One worker's look, which a test takes by hand."""
    return Alerts(
        store, quick(**settings), token or uuid.uuid4(), "w1", hooks=hooks, failing=failing
    )


async def look_twice(*lookers: Alerts) -> None:
    """What is seen twice in a row is an incident, or the end of one."""
    for one in lookers:
        await one.check()
    for one in lookers:
        await one.check()


async def incidents(conn: asyncpg.Connection) -> list[tuple[str, str, bool]]:
    rows = await conn.fetch(
        "SELECT kind, subject, closed_at IS NULL FROM fanout.incident ORDER BY id"
    )
    return [tuple(row) for row in rows]


async def a_failing_batch(conn: asyncpg.Connection, failed: int = 12, **columns: Any) -> int:
    batch, _ = await insert_batch(
        conn, "waiting", ["failed"] * failed + ["completed"] * 12 + ["pending"], **columns
    )
    await live_worker(conn, ["leaf"])
    return batch


class Told:
    """A hook that remembers; `events` ends with what the last call brought."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []

    async def __call__(self, alert: Alert) -> None:
        self.alerts.append(alert)

    @property
    def lines(self) -> list[str]:
        return [f"{'begins' if one.is_open else 'over'} {one.kind}" for one in self.alerts]

    async def has(self, count: int) -> list[str]:
        await until(lambda: len(self.alerts) >= count)
        return self.lines


async def test_two_workers_tell_one_alert(store: Store, conn: asyncpg.Connection) -> None:
    """Both see it, both have the hook, one tells; also of its end, and a next time is a new one."""
    batch = await a_failing_batch(conn)
    told = Told()
    one, two = looker(store, told), looker(store, told)
    await look_twice(one, two)
    await look_twice(two, one)
    assert await told.has(1) == ["begins failure_rate"]
    assert told.alerts[0].job_id == batch
    assert told.alerts[0].message == f"12 of 24 documents of batch {batch} (manager) failed"

    await conn.execute("UPDATE fanout.job SET failed = 0, completed = 24 WHERE id = $1", batch)
    await look_twice(two, one)
    assert await told.has(2) == ["begins failure_rate", "over failure_rate"]

    await conn.execute("UPDATE fanout.job SET failed = 12, completed = 12 WHERE id = $1", batch)
    await look_twice(one, two)
    assert (await told.has(3))[2] == "begins failure_rate"
    assert told.alerts[2].id != told.alerts[0].id
    assert await incidents(conn) == [
        ("failure_rate", str(batch), False),
        ("failure_rate", str(batch), True),
    ]


async def test_who_comes_second_in_the_same_moment_opens_none(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Both decided to open it before either did: the index lets one, and one job is enqueued."""
    await a_failing_batch(conn)
    await conn.execute(
        """INSERT INTO fanout.webhook (name, url, events, secret)
           VALUES ('ops', 'https://hooks.example.com/', '{alert.opened}', $1)""",
        bytes(32),
    )
    late = looker(store)
    await late.check()
    async with held(database) as first:
        early = looker(first.store)
        await look_twice(early)
        second = asyncio.create_task(late.check())
        await until_blocked(conn, second)
        await first.commit()
        await second
    assert len(await incidents(conn)) == 1
    assert await conn.fetchval("SELECT count(*) FROM fanout.job WHERE kind = 'fanout_webhook'") == 1


async def test_the_end_is_told_by_one_too(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """One closes it while the other has decided to: that one passes over a row that is locked."""
    batch = await a_failing_batch(conn)
    late = looker(store)
    await look_twice(late)
    await conn.execute("UPDATE fanout.job SET failed = 0, completed = 24 WHERE id = $1", batch)
    await conn.execute(
        """INSERT INTO fanout.webhook (name, url, events, secret)
           VALUES ('ops', 'https://hooks.example.com/', '{alert.closed}', $1)""",
        bytes(32),
    )
    await late.check()
    async with held(database) as first:
        await look_twice(looker(first.store))
        await asyncio.wait_for(late.check(), 20)
        await first.commit()
    assert await incidents(conn) == [("failure_rate", str(batch), False)]
    payloads = await conn.fetch("SELECT payload FROM fanout.job WHERE kind = 'fanout_webhook'")
    assert [json.loads(row[0])["type"] for row in payloads] == ["alert.closed"]


async def test_a_crowd_of_workers_tells_each_incident_once(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Six of them, looking all at once, while three troubles come and go."""
    told = Told()
    crowd = [looker(store, told) for _ in range(6)]
    batches = [await a_failing_batch(conn) for _ in range(3)]
    for turn in range(8):
        await conn.execute(
            """UPDATE fanout.job SET failed = 12 * (id % 2 = $2)::int,
                      completed = 24 - 12 * (id % 2 = $2)::int
                WHERE id = ANY ($1)""",
            batches,
            turn // 2 % 2,
        )
        for _ in range(2):
            await asyncio.gather(*(one.check() for one in crowd))
    await conn.execute(
        "UPDATE fanout.job SET failed = 0, completed = 24 WHERE id = ANY ($1)", batches
    )
    for _ in range(3):
        await asyncio.gather(*(one.check() for one in crowd))
    for one in crowd:
        await one.stop()
    rows = await conn.fetch("SELECT id, closed_at FROM fanout.incident ORDER BY id")
    assert len(rows) >= 6
    assert all(row["closed_at"] is not None for row in rows)
    begun = sorted(one.id for one in told.alerts if one.is_open)
    over = sorted(one.id for one in told.alerts if not one.is_open)
    assert begun == over == [row["id"] for row in rows]


async def test_a_hook_that_fails_or_hangs_stops_nobody(
    store: Store,
    conn: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is logged; others are told, plain functions in a thread; a look does not wait."""
    monkeypatch.setattr(module, "HOOK_SECONDS", 0.1)
    told, plain = Told(), list[Alert]()

    async def fails(alert: Alert) -> None:
        raise RuntimeError("the pager is down")

    def fails_plainly(alert: Alert) -> None:
        raise RuntimeError("so is the mail")

    async def hangs(alert: Alert) -> None:
        await asyncio.Event().wait()

    await a_failing_batch(conn)
    one = looker(store, fails, fails_plainly, hangs, plain.append, told)
    await look_twice(one)
    await told.has(1)
    await until(lambda: len(plain) == 1)
    for text in ("the pager is down", "so is the mail", "TimeoutError"):
        await until(partial(lambda it: it in caplog.text, text))
    await one.check()
    assert len(told.alerts) == 1
    monkeypatch.setattr(module, "HOOK_SECONDS", 60)
    monkeypatch.setattr(module, "HOOK_GRACE_SECONDS", 0.05)
    await conn.execute("UPDATE fanout.incident SET told = 0")
    await one.check()
    await asyncio.wait_for(one.stop(), 20)  # with a hook that hangs


async def test_a_worker_without_hooks_swallows_nothing(
    store: Store, conn: asyncpg.Connection
) -> None:
    """It opens the incident, one that has a hook tells; what is an hour old is no news."""
    await a_failing_batch(conn)
    await look_twice(looker(store))
    told = Told()
    await looker(store, told).check()
    assert await told.has(1) == ["begins failure_rate"]
    await conn.execute(f"UPDATE fanout.incident SET told = 0, opened_at = {LONG} - interval '1 s'")
    late = Told()
    await looker(store, late).check()
    await conn.execute("UPDATE fanout.incident SET closed_at = clock_timestamp()")
    await looker(store, late).check()
    assert await late.has(2) == ["begins failure_rate", "over failure_rate"]
    assert late.alerts[1].closed_at is not None


async def test_what_one_worker_is_telling_no_other_tells(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Neither while the first has taken it on, nor after; it does not wait for that one either."""
    await a_failing_batch(conn)
    await look_twice(looker(store))
    told, late = Told(), Told()
    async with held(database) as first:
        await looker(first.store, told).check()
        await asyncio.wait_for(looker(store, late).check(), 20)
        await first.commit()
    await looker(store, late).check()
    assert await told.has(1) == ["begins failure_rate"]
    assert late.alerts == []


async def test_a_rate_at_its_threshold_is_one_incident(
    store: Store, conn: asyncpg.Connection
) -> None:
    """It opens at 20 %, and stays open down to 16."""
    batch = await a_failing_batch(conn)
    one = looker(store)

    async def share(failed: int) -> list[bool]:
        await conn.execute(
            "UPDATE fanout.job SET total = 201, failed = $2, completed = 200 - $2 WHERE id = $1",
            batch,
            failed,
        )
        await look_twice(one)
        return [is_open for _, _, is_open in await incidents(conn)]

    assert await share(39) == []
    assert await share(40) == [True]
    assert await share(33) == [True]
    assert await share(31) == [False]
    assert await share(39) == [False]
    assert await share(40) == [False, True]


async def test_few_failures_say_nothing_and_a_batch_that_ended_is_told_of_for_a_while(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Also one that ended between two looks."""
    await insert_batch(conn, "waiting", ["failed"] * 9 + ["pending"])
    quickly, _ = await insert_batch(conn, "completed", ["failed"] * 10)
    running_one, _ = await insert_batch(conn, "processing", ["failed"] * 10 + ["pending"])
    await insert_batch(conn, "completed", ["failed"] * 10, finished_at=await long_ago(conn))
    await live_worker(conn, ["leaf"])
    one = looker(store)
    await look_twice(one)
    assert {subject for _, subject, _ in await incidents(conn)} == {str(quickly), str(running_one)}
    await conn.execute(f"UPDATE fanout.job SET finished_at = {LONG} WHERE id = $1", quickly)
    await look_twice(one)
    assert ("failure_rate", str(quickly), False) in await incidents(conn)


async def long_ago(conn: asyncpg.Connection) -> Any:
    return await conn.fetchval(f"SELECT {LONG}")


async def test_a_kind_without_a_worker(store: Store, conn: asyncpg.Connection) -> None:
    """Due for longer than the setting; over when a worker that serves it lives."""
    due = await long_ago(conn)
    await insert_job(conn, kind="papers_extract", run_at=due)
    await insert_job(conn, kind="of_a_tenant", run_at=due, partition="acme")
    await insert_job(conn, kind="suspect", run_at=due, deaths=1)
    await insert_job(conn, kind="served", run_at=due, priority=9)
    await insert_job(conn, kind="just_now")
    await insert_job(conn, kind="held_back", run_at=due, paused=True)
    await insert_job(conn, "completed", kind="done", run_at=due)
    await live_worker(conn, ["served"])
    one = looker(store)
    await one.check()
    assert await incidents(conn) == []  # a restart, perhaps
    await one.check()
    assert [(kind, subject) for kind, subject, _ in await incidents(conn)] == [
        ("no_worker", "of_a_tenant"),
        ("no_worker", "papers_extract"),
        ("no_worker", "suspect"),
    ]
    worker = await live_worker(conn, ["papers_extract", "of_a_tenant", "suspect", "just_now"])
    await look_twice(one)
    assert not any(is_open for *_, is_open in await incidents(conn))
    await conn.execute(
        f"UPDATE fanout.worker SET last_beat_at = {LONG} - interval '1 h' WHERE id = $1", worker
    )
    await one.check()
    await conn.execute("UPDATE fanout.worker SET last_beat_at = clock_timestamp()")
    await one.check()
    assert not any(is_open for *_, is_open in await incidents(conn))


async def test_a_batch_without_life_and_one_that_was_given_up(
    store: Store, conn: asyncpg.Connection
) -> None:
    """The sweeper's excuses hold here too: a batch that waits for a backoff is not stuck."""
    old = await long_ago(conn)
    columns = {"kind": "leaf", "status": "pending", "run_at": old}
    stuck, _ = await insert_batch(conn, "waiting", [columns], updated_at=old)
    await insert_batch(conn, "waiting", ["pending"], updated_at=old)
    await live_worker(conn, ["leaf"])
    gone, _ = await insert_batch(
        conn, "failed", ["cancelled"], reason="closed by the sweeper: no sign of life for 2 h"
    )
    await insert_batch(conn, "failed", ["cancelled"], reason="cancelled by hand")
    one = looker(store)
    await look_twice(one)
    assert set(await incidents(conn)) == {
        ("batch_stuck", str(stuck), True),
        ("batch_stuck", str(gone), True),
    }
    await conn.execute("UPDATE fanout.job SET updated_at = clock_timestamp() WHERE id = $1", stuck)
    await look_twice(one)
    assert ("batch_stuck", str(stuck), False) in await incidents(conn)


async def test_a_loop_that_fails_again_and_again(store: Store, conn: asyncpg.Connection) -> None:
    """Its own worker says when it is over; if that one is lost, any other does."""
    mine, failures = await live_worker(conn, ["leaf"]), [FAILURES_IN_A_ROW - 1]
    own = looker(
        store, failing=lambda: [("sweeper", failures[0], "no such column")] if failures[0] else [],
        token=mine,
    )  # fmt: skip
    other = looker(store)
    await look_twice(own)
    assert await incidents(conn) == []
    failures[0] += 1
    await look_twice(own)
    [alert] = await all_of(conn)
    assert alert.message == "sweeper on w1 failed 5 times in a row: no such column"
    await look_twice(other)
    assert await incidents(conn) == [("engine_error", "sweeper on w1", True)]
    failures[0] = 0
    await look_twice(own)
    assert await incidents(conn) == [("engine_error", "sweeper on w1", False)]
    failures[0] = 7
    await look_twice(own)
    await conn.execute(f"UPDATE fanout.worker SET last_beat_at = {LONG} - interval '1 h'")
    await look_twice(other)
    assert await incidents(conn) == [("engine_error", "sweeper on w1", False)] * 2


async def all_of(conn: asyncpg.Connection) -> list[Alert]:
    rows = await conn.fetch(
        "SELECT id, kind, subject, job_id, message, opened_at, closed_at FROM fanout.incident"
    )
    return [module.alert_of(row) for row in rows]


async def test_a_notification_queue_that_fills(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A session that listens and sits in a transaction holds all of it back."""
    sitter = await asyncpg.connect(database)
    try:
        await sitter.add_listener("held", lambda *_: None)
        await sitter.execute("BEGIN; SELECT 1")
        await conn.execute(
            "SELECT pg_notify('held', n || repeat('x', 7000)) FROM generate_series(1, 300) n"
        )
        one = looker(store, alert_queue_percent=0.001)
        await look_twice(one)
        assert await incidents(conn) == [("notification_queue", "", True)]
        assert await conn.fetchval("SELECT count(*) FROM fanout.incident") == 1
    finally:
        await sitter.close()
    await look_twice(one)
    assert await incidents(conn) == [("notification_queue", "", False)]


async def test_it_is_told_to_a_signed_webhook(database: str, conn: asyncpg.Connection) -> None:
    """Its beginning and its end, by a worker that does all of it by itself."""
    engine = Engine(
        database,
        settings=quick(
            alert_interval=0.05,
            webhooks=True,
            webhook_http=True,
            webhook_networks="127.0.0.0/8",
        ),
    )
    told = Told()
    engine.on_alert(told)

    @engine.job
    async def leaf(job: Job[None]) -> None: ...

    batch = await a_failing_batch(conn)
    await conn.execute("DELETE FROM fanout.job WHERE parent_id = $1 AND status = 'pending'", batch)
    async with receiver() as hook, running(engine):
        secret = await engine.webhooks.add(
            "ops", hook.url(), events=["alert.opened", "alert.closed"]
        )
        await engine.webhooks.add("billing", hook.url())
        await until(lambda: len(hook.received) == 1)
        await conn.execute("UPDATE fanout.job SET failed = 0, completed = 24 WHERE id = $1", batch)
        await until(lambda: len(hook.received) == 2)
        assert await told.has(2) == ["begins failure_rate", "over failure_rate"]
        [alert] = await engine.alerts()
        assert await engine.alerts(open_only=True) == []
    assert [one.json["type"] for one in hook.received] == ["alert.opened", "alert.closed"]
    assert all(one.is_signed_with(secret) for one in hook.received)
    data = hook.received[0].json["data"]
    assert (data["id"], data["kind"], data["job_id"]) == (alert.id, "failure_rate", batch)
    assert data["message"] == alert.message


async def test_incidents_that_ended_long_ago_are_forgotten(
    store: Store, conn: asyncpg.Connection
) -> None:
    """What is open stays, however old."""
    for closed in ("clock_timestamp() - interval '91 days'", "clock_timestamp()", "NULL"):
        await conn.execute(
            f"""INSERT INTO fanout.incident (kind, subject, message, opened_at, closed_at)
                VALUES ('no_worker', 'x', 'm', clock_timestamp() - interval '92 days', {closed})"""
        )
    await looker(store).check()
    assert [is_open for *_, is_open in await incidents(conn)] == [False, True]


async def test_the_command_lists_them(
    database: str, store: Store, conn: asyncpg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newest first; with --open it is a check for a script."""
    said = await command(capsys, "alerts", "--open", "--dsn", database)
    assert (said.code, said.out) == (0, "no alerts\n")
    batch = await a_failing_batch(conn)
    await look_twice(looker(store))
    said = await command(capsys, "alerts", "--open", "--dsn", database)
    assert said.code == 1
    assert f"12 of 24 documents of batch {batch}" in said.out
    assert "open for" in said.out
    await conn.execute("UPDATE fanout.incident SET closed_at = clock_timestamp()")
    said = await command(capsys, "alerts", "--dsn", database)
    assert (said.code, "over after" in said.out) == (0, True)
    [row] = (await command(capsys, "alerts", "--json", "--dsn", database)).lines()
    assert (row["kind"], row["job_id"]) == ("failure_rate", batch)
    async with Engine(database, settings=quick()) as engine:
        with pytest.raises(UsageError, match="limit"):
            await engine.alerts(limit=0)
        assert (await engine.alerts())[0].kind is AlertKind.FAILURE_RATE
