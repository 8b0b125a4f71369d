"""Worker processes that are killed, frozen, told to stop and restarted, in the middle of work."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import asyncpg
import pytest

from fanout import Engine, Request
from tests.chaos.calls import settled
from tests.chaos.harness import Fleet, closed, until
from tests.machine.invariants import History

QUICK = {"FANOUT_LEASE": "1.5", "FANOUT_HEARTBEAT": "0.4"}


async def submit(engine: Engine, n: int, **wish: object) -> int:
    handle = await engine.submit("batch", {"n": n, **wish})
    return handle.id


async def outcome(conn: asyncpg.Connection, job_id: int) -> tuple[str, int, int, int]:
    row = await conn.fetchrow("SELECT * FROM fanout.job WHERE id = $1", job_id)
    assert row is not None
    return row["status"], row["total"], row["completed"], row["failed"]


async def costs(conn: asyncpg.Connection) -> tuple[int, int]:
    """(retries, deaths) of all jobs together."""
    row = await conn.fetchrow("SELECT sum(failures)::int, sum(deaths)::int FROM fanout.job")
    assert row is not None
    if any(row):  # to be seen in the report of the assertion that follows
        for one in await conn.fetch(
            "SELECT kind, failures, deaths, error, count(*) FROM fanout.job "
            "WHERE failures + deaths > 0 GROUP BY 1, 2, 3, 4"
        ):
            print(*one)
    return row[0], row[1]


async def kill_at_random(
    fleet: Fleet, engine: Engine, job_id: int, pause: tuple[float, float], seconds: float
) -> int:
    """Kill -9 a worker now and then, and start another in its place, until the batch is closed; how
    many.
    """
    done = asyncio.ensure_future(closed(engine, job_id, seconds))
    kills = 0
    while not done.done():
        await asyncio.wait([done], timeout=random.uniform(*pause))
        victim = random.choice([p for p in fleet.processes if p.is_alive])
        if not done.done() and any(True for _ in fleet.calls.lines("boot", victim.pid)):
            await victim.killed()
            kills += 1
            fleet.spawn(victim.name)
    await done
    return kills


async def test_a_batch_survives_the_death_of_its_workers(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Kill -9 of workers at random, in a batch of 2,000: each child is counted once, and the batch
    closes once.
    """
    await History.install(conn)
    await fleet.ups(2)
    mix = {str(i): {"do": "broken"} for i in range(0, 2000, 97)}
    mix |= {str(i): {"do": "flaky"} for i in range(5, 2000, 101)}
    job_id = await submit(engine, 2000, child={"do": "work", "seconds": 0.04}, mix=mix)
    kills = await kill_at_random(fleet, engine, job_id, (0.4, 1.2), 60)
    assert kills >= 1
    assert await outcome(conn, job_id) == ("completed", 2000, 1979, 21)
    await settled(conn, fleet.calls)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_a_batch_survives_many_deaths(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """The same for minutes: 20,000 children, three workers, a death a second."""
    await History.install(conn)
    await fleet.ups(3)
    job_id = await submit(engine, 20_000, child={"do": "work", "seconds": 0.05})
    kills = await kill_at_random(fleet, engine, job_id, (0.5, 2.0), 800)
    assert kills >= 20
    assert await outcome(conn, job_id) == ("completed", 20_000, 20_000, 0)
    await settled(conn, fleet.calls)


async def test_a_worker_that_was_asleep_past_its_lease_writes_nothing(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """SIGSTOP past the lease, SIGCONT after another worker has finished its jobs: the zombie's
    results are dropped.
    """
    sleeper = await fleet.up("sleeper", CHAOS_CONCURRENCY="4")
    job_id = await submit(engine, 4, child={"do": "work", "seconds": 0.6})
    await until(conn, "SELECT count(*) = 4 FROM fanout.job WHERE status = 'processing'")
    sleeper.send(signal.SIGSTOP)
    other = await fleet.up("other")
    await closed(engine, job_id)
    before = await conn.fetch("SELECT id, xmin::text, j::text FROM fanout.job j ORDER BY id")
    sleeper.send(signal.SIGCONT)
    # It beats, so it knows by then: its claims are gone.
    await until(
        conn,
        "SELECT last_beat_at > clock_timestamp() - interval '0.3 s' FROM fanout.worker "
        "WHERE name = 'sleeper'",
    )
    await asyncio.sleep(1)
    after = await conn.fetch("SELECT id, xmin::text, j::text FROM fanout.job j ORDER BY id")
    assert before == after
    assert await outcome(conn, job_id) == ("completed", 4, 4, 0)
    assert {line["pid"] for line in fleet.calls.ends() if line["kind"] == "leaf"} >= {other.pid}
    assert (await costs(conn))[0] == 0
    await settled(conn, fleet.calls)
    # And it is of use again.
    other.send(signal.SIGTERM)
    assert await other.ended(10) == 0
    again = await submit(engine, 4)
    await closed(engine, again)
    await settled(conn, fleet.calls)


async def test_all_workers_asleep_at_once_is_nobodys_death(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A host that is suspended for longer than a lease: when it wakes, nobody is declared dead."""
    workers = await fleet.ups(2, CHAOS_CONCURRENCY="3", FANOUT_SWEEP_INTERVAL="0.1")
    job_id = await submit(engine, 6, child={"do": "work", "seconds": 3})
    await until(conn, "SELECT count(*) = 6 FROM fanout.job WHERE status = 'processing'")
    await asyncio.sleep(2.2)  # longer than a lease in contact: sweepers may rescue
    for worker in workers:
        worker.send(signal.SIGSTOP)
    await asyncio.sleep(2.5)
    for worker in workers:
        worker.send(signal.SIGCONT)
        await asyncio.sleep(0.4)  # one wakes before the other, with time enough to sweep
    await closed(engine, job_id)
    assert await costs(conn) == (0, 0)
    await settled(conn, fleet.calls)


async def test_sigterm_lets_work_finish_and_releases_the_rest(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """SIGTERM: what ends within the grace is completed, the rest is released at no cost; nothing is
    claimed any more.
    """
    worker = await fleet.up("first", FANOUT_STOP_GRACE="1.5", CHAOS_CONCURRENCY="8")
    mix = {str(i): {"do": "work", "seconds": 0.8} for i in range(4)}
    job_id = await submit(engine, 20, child={"do": "work", "seconds": 6}, mix=mix)
    await until(conn, "SELECT count(*) = 8 FROM fanout.job WHERE status = 'processing'")
    worker.send(signal.SIGTERM)
    asked = await worker.line("signal")
    told = time.monotonic()
    assert await worker.ended(10) == 0
    assert time.monotonic() - told < 3.5
    assert await outcome(conn, job_id) == ("waiting", 20, 4, 0)
    assert await costs(conn) == (0, 0)
    assert not await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'processing'")
    assert not await conn.fetchval("SELECT count(*) FROM fanout.worker")
    late = [s for s in fleet.calls.starts() if s["pid"] == worker.pid and s["at"] > asked["at"]]
    assert late == []
    # The rest is somebody else's, in short: their seconds are not what is tested here.
    await conn.execute(
        """UPDATE fanout.job SET payload = '{"do": "work"}' WHERE status = 'pending'"""
    )
    await fleet.up("second")
    await closed(engine, job_id)
    assert await costs(conn) == (0, 0)
    await settled(conn, fleet.calls)


async def test_a_second_sigterm_exits_at_once(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """The second signal does not wait for the grace, also where a handler does not stop; nothing
    costs a retry.
    """
    worker = await fleet.up("hasty", FANOUT_STOP_GRACE="30", CHAOS_CONCURRENCY="4")
    mix = {"0": {"do": "stubborn", "seconds": 20}}
    job_id = await submit(engine, 4, child={"do": "work", "seconds": 20}, mix=mix)
    await until(conn, "SELECT count(*) = 4 FROM fanout.job WHERE status = 'processing'")
    worker.send(signal.SIGTERM)
    await worker.line("signal")
    await asyncio.sleep(0.3)
    assert worker.is_alive
    told = time.monotonic()
    worker.send(signal.SIGTERM)
    assert await worker.ended(10) == 0
    assert time.monotonic() - told < 2.5
    assert not await conn.fetchval("SELECT count(*) FROM fanout.job WHERE status = 'processing'")
    await conn.execute(
        """UPDATE fanout.job SET payload = '{"do": "work"}' WHERE status = 'pending'"""
    )
    await fleet.up("second")
    await closed(engine, job_id)
    assert await costs(conn) == (0, 0)
    await settled(conn, fleet.calls)


async def test_sigterm_in_a_storm_of_claims_costs_nothing(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Five deploys of a worker that claims as fast as it can: a claim in flight is neither lost nor
    a death.
    """
    job_id = await submit(engine, 2000, child={"do": "work", "seconds": 0.02})
    for _ in range(5):
        worker = await fleet.up("deployed", CHAOS_CONCURRENCY="20")
        await until(
            conn,
            "SELECT count(*) > 0 FROM fanout.job "
            "WHERE status = 'processing' OR finished_at > created_at",
        )
        await asyncio.sleep(random.uniform(0, 0.1))
        worker.send(signal.SIGTERM)
        assert await worker.ended(10) == 0
        assert not await conn.fetchval(
            "SELECT count(*) FROM fanout.job WHERE status = 'processing'"
        )
    await fleet.ups(2)
    await closed(engine, job_id)
    assert await costs(conn) == (0, 0)
    assert await outcome(conn, job_id) == ("completed", 2000, 2000, 0)
    await settled(conn, fleet.calls)


async def test_ten_restarts_during_one_child_use_up_no_retry(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A long child that meets ten rolling restarts is run eleven times, at no cost."""
    handle = await engine.submit("leaf", {"do": "work", "seconds": 30}, max_retries=0)
    for round_number in range(1, 11):
        worker = await fleet.up("rolling", FANOUT_STOP_GRACE="0.05")
        await until(
            conn,
            "SELECT status = 'processing' AND attempt = $2 FROM fanout.job WHERE id = $1",
            handle.id,
            round_number,
        )
        worker.send(signal.SIGTERM)
        assert await worker.ended(10) == 0
    await conn.execute("""UPDATE fanout.job SET payload = '{"do": "work"}'""")
    await fleet.up("last")
    await handle.result(10)
    assert await costs(conn) == (0, 0)
    assert (await handle.job()).attempt == 11
    await settled(conn, fleet.calls)


async def test_what_kills_its_worker_each_time_is_poison_and_its_neighbours_pay_nothing(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A handler that kills its process: failed as poison, counted; all others complete, none loses
    a retry.
    """
    fleet.environment |= {"FANOUT_MAX_DEATHS": "2", "FANOUT_LEASE": "1.5"}
    await fleet.ups(2)
    mix = {"3": {"do": "die"}}
    job_id = await submit(engine, 30, child={"do": "work", "seconds": 0.2}, mix=mix)
    done = asyncio.ensure_future(closed(engine, job_id, 60))
    while not done.done():
        for process in list(fleet.processes):
            if not process.is_alive and process.name != "buried":
                name, process.name = process.name, "buried"
                fleet.spawn(name)
        await asyncio.wait([done], timeout=0.1)
    await done
    assert await outcome(conn, job_id) == ("completed", 30, 29, 1)
    [poison] = await conn.fetch("SELECT * FROM fanout.job WHERE status = 'failed'")
    assert (poison["document_key"], poison["error_type"], poison["deaths"]) == (
        "000003",
        "Poison",
        3,
    )
    assert "poison" in poison["error"]
    assert len(fleet.calls.starts(poison["id"])) == 3  # in company, then max_deaths times alone
    assert await conn.fetchval(
        "SELECT count(*) = 0 FROM fanout.job WHERE failures > 0 AND status <> 'failed'"
    )
    await settled(conn, fleet.calls)


async def test_a_blocked_loop_loses_no_lease(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """`time.sleep` for three leases in an async handler: it runs once, for the heartbeat is not on
    that loop.
    """
    fleet.environment |= QUICK
    await fleet.ups(2, CHAOS_CONCURRENCY="2")
    handle = await engine.submit("leaf", {"do": "block", "seconds": 4.5})
    await handle.wait(20)
    assert len(fleet.calls.starts(handle.id)) == 1
    assert await costs(conn) == (0, 0)
    await settled(conn, fleet.calls)


@pytest.mark.parametrize("kind", ["hasty", "threaded", "blocked"])
async def test_what_cannot_be_stopped_is_let_go_and_its_process_ends(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection, kind: str
) -> None:
    """A handler that swallows its cancellation, a thread that hangs, a loop that is blocked, past
    timeout + grace: the lease is let go, the process ends in failure, and the job's next end is by
    rescue; its neighbours complete.
    """
    fleet.environment |= QUICK | {"FANOUT_MAX_DEATHS": "1", "FANOUT_STOP_GRACE": "0.3"}
    worker = await fleet.up("stuck")
    do = {"do": "block" if kind == "blocked" else "stubborn", "seconds": 600}
    stuck = await engine.submit("hasty" if kind == "blocked" else kind, do)
    await until(conn, "SELECT status = 'processing' FROM fanout.job WHERE id = $1", stuck.id)
    beside = [await engine.submit("leaf", {"do": "work", "seconds": 0.2}) for _ in range(3)]
    assert await worker.ended(15) == 70
    assert (await stuck.job()).status in ("processing", "pending")
    await fleet.up("second")
    for handle in beside:
        await handle.result(20)
    # It hangs the second one as well, alone by then: that death counts.
    await fleet.processes[1].ended(20)
    await fleet.up("third")
    await stuck.wait(20)
    row = await stuck.job()
    assert (row.status, row.error_type, row.deaths) == ("failed", "Poison", 2)
    await settled(conn, fleet.calls)


async def test_what_waits_behind_a_blocked_loop_is_run_elsewhere(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """A process that stays, its loop blocked for good: what it had claimed ahead is not renewed for
    ever.
    """
    await fleet.up("stuck", CHAOS_CONCURRENCY="1", CHAOS_EXIT_WHEN_STUCK="")
    first = await submit(engine, 100, child={"do": "nothing"})
    await closed(engine, first)  # handlers take no time: it claims ahead
    mark = str(tmp_path / "blocked")
    handles = await engine.submit_many(
        [
            Request("hasty", {"do": "block", "seconds": 600, "mark": mark}, priority=0),
            *(Request("leaf", {"do": "nothing"}) for _ in range(20)),
        ]
    )
    await until(
        conn,
        "SELECT bool_and(status = 'processing') FROM fanout.job WHERE id = ANY ($1)",
        [handles[0].id, handles[1].id],
    )
    await fleet.up("other")
    for handle in handles:
        await handle.result(20)
    assert fleet.processes[0].is_alive


async def test_threads_that_user_code_never_gives_back_do_not_hold_up_a_stop(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Handlers that wait for `asyncio.to_thread` have every thread of the loop's own executor:
    SIGTERM ends it still.
    """
    worker = await fleet.up("hog", CHAOS_CONCURRENCY="40", FANOUT_STOP_GRACE="0.3")
    job_id = await submit(engine, 40, child={"do": "hog", "seconds": 600})
    await until(conn, "SELECT count(*) = 40 FROM fanout.job WHERE status = 'processing'")
    worker.send(signal.SIGTERM)
    assert await worker.ended(5) == 0
    assert (
        await conn.fetchval(
            "SELECT count(*) FROM fanout.job WHERE parent_id = $1 AND status = 'pending'", job_id
        )
        == 40
    )
    assert await costs(conn) == (0, 0)


async def test_the_same_name_restarted_at_once_is_another_worker(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Kill -9, and a worker of the same name at once: it neither renews the dead one's leases nor
    writes for it.
    """
    fleet.environment |= QUICK
    first = await fleet.up("pod-0")
    job_id = await submit(engine, 5, child={"do": "work", "seconds": 0.5})
    await until(conn, "SELECT count(*) = 5 FROM fanout.job WHERE status = 'processing'")
    await first.killed()
    await fleet.up("pod-0")
    await closed(engine, job_id)
    assert (
        await conn.fetchval(
            "SELECT count(*) FROM fanout.job WHERE parent_id = $1 AND deaths = 1 AND attempt = 2",
            job_id,
        )
        == 5
    )
    await settled(conn, fleet.calls)


async def test_two_workers_of_one_loop_are_two_workers(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Two workers on one engine and event loop, in each of two processes: one count, one close."""
    await fleet.ups(2, CHAOS_WORKERS="2")
    job_id = await submit(engine, 600, child={"do": "work", "seconds": 0.01})
    await closed(engine, job_id)
    assert await outcome(conn, job_id) == ("completed", 600, 600, 0)
    assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 4
    for process in fleet.processes:
        process.send(signal.SIGTERM)
    assert [await process.ended(10) for process in fleet.processes] == [0, 0]
    assert await costs(conn) == (0, 0)
    await settled(conn, fleet.calls)
