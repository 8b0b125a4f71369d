"""The database restarts, is away, cuts connections, has none left, or answers nothing: trouble of
the engine, that costs no child a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from fanout import Engine
from fanout.embedded import EmbeddedServer
from tests.chaos.calls import settled
from tests.chaos.harness import Fleet, closed, until
from tests.chaos.proxy import proxied

CHILD = {"do": "work", "seconds": 0.02}


@pytest.fixture
async def own(postgres: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet on a server that the test may restart; the database is empty."""
    fleet = Fleet(postgres.dsn(), tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()


async def ended(fleet: Fleet, job_id: int, seconds: float = 60) -> None:
    """The batch is closed, its follow-up ran, nothing failed, and the two stories agree."""
    async with fleet.engine() as engine:
        progress = await closed(engine, job_id, seconds)
    assert progress.outcome == "completed"
    assert progress.completed == progress.total
    conn = await asyncpg.connect(fleet.dsn)
    try:
        assert await conn.fetchval("SELECT sum(failures)::int FROM fanout.job") == 0
        assert (
            await conn.fetchval("SELECT count(*) FROM fanout.job WHERE follows_id = $1", job_id)
            == 1
        )
        await settled(conn, fleet.calls)
    finally:
        await conn.close()


async def deaths(fleet: Fleet) -> int:
    conn = await asyncpg.connect(fleet.dsn)
    try:
        return int(await conn.fetchval("SELECT sum(deaths)::int FROM fanout.job"))
    finally:
        await conn.close()


async def counted(fleet: Fleet, at_least: int) -> None:
    conn = await asyncpg.connect(fleet.dsn)
    try:
        await until(
            conn, "SELECT max(completed) >= $1 FROM fanout.job WHERE kind = 'batch'", at_least
        )
    finally:
        await conn.close()


async def start(fleet: Fleet, n: int, **wish: object) -> int:
    async with fleet.engine() as engine:
        return (await engine.submit("batch", {"n": n, "child": CHILD, **wish})).id


async def test_two_crashes_of_the_server_in_mid_batch(own: Fleet, postgres: EmbeddedServer) -> None:
    """`-m immediate`, twice, each shorter than a lease: all complete, nobody died."""
    await own.ups(2)
    job_id = await start(own, 1500)
    for at_least in (200, 700):
        await counted(own, at_least)
        await asyncio.to_thread(postgres.restart, "immediate")
    await ended(own, job_id)
    assert await deaths(own) == 0


async def test_an_outage_longer_than_a_lease_is_nobodys_death(
    own: Fleet, postgres: EmbeddedServer
) -> None:
    """All leases run out while the server is down; when it is back, workers renew before anyone may
    be rescued.
    """
    await own.ups(2)
    job_id = await start(own, 200, child={"do": "work", "seconds": 0.3})
    await counted(own, 20)
    await asyncio.to_thread(postgres.stop, "immediate")
    await asyncio.sleep(3)
    await asyncio.to_thread(postgres.start)
    await ended(own, job_id)
    assert await deaths(own) == 0
    assert all(process.is_alive for process in own.processes)


async def test_workers_may_be_there_before_the_database(
    own: Fleet, postgres: EmbeddedServer
) -> None:
    """Workers wait for a server that is not up, then migrate its empty database, and work."""
    await asyncio.to_thread(postgres.stop, "fast")
    for n in range(3):
        own.spawn(f"w{n}")
    await asyncio.sleep(1.5)
    assert all(process.is_alive for process in own.processes)
    await asyncio.to_thread(postgres.start)
    await asyncio.gather(*(process.line("boot", 20) for process in own.processes))
    await ended(own, await start(own, 200))


async def test_connections_that_are_cut_all_the_time(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """pg_terminate_backend on everything of the engine, three times a second: exact all the same,
    nobody dies.
    """
    await fleet.ups(2)
    job_id = await start(fleet, 1000)
    done = asyncio.ensure_future(closed(engine, job_id, 60))
    cut = 0
    while not done.done():
        cut += await conn.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'fanout%'"
        )
        await asyncio.wait([done], timeout=0.3)
    await done
    assert cut >= 10
    assert all(process.is_alive for process in fleet.processes)
    assert await deaths(fleet) == 0
    await ended(fleet, job_id)


async def test_user_code_that_takes_every_connection_of_the_server(own: Fleet) -> None:
    """No connection is left for a new session for longer than a lease: what the engine has is
    enough.
    """
    conn = await asyncpg.connect(own.dsn)
    await own.ups(2)
    job_id = await start(own, 200, child={"do": "work", "seconds": 0.2})
    await counted(own, 10)
    taken: list[asyncpg.Connection] = []
    with contextlib.suppress(asyncpg.TooManyConnectionsError):
        while True:
            taken.append(await asyncpg.connect(own.dsn))
    try:
        # Those it has are cut, too, and then taken: now it has nothing at all.
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'fanout engine%'"
        )
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                taken.append(await asyncpg.connect(own.dsn))
        await asyncio.sleep(3)
    finally:
        await asyncio.gather(*(one.close() for one in taken))
        await conn.close()
    await ended(own, job_id)


async def test_a_network_that_swallows_everything(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A black hole for less than a lease, in both directions, then of the answers alone: it
    recovers within the database timeout, and what was committed unheard is neither done twice nor
    anyone's death.
    """
    fleet.environment |= {"FANOUT_DATABASE_TIMEOUT": "0.5", "FANOUT_LEASE": "4"}
    async with proxied(fleet.dsn) as (proxy, dsn):
        await fleet.ups(2, DATABASE_URL=dsn)
        job_id = await start(fleet, 1500)
        for number, what in enumerate((("requests", "answers"), ("answers",), ("answers",))):
            await counted(fleet, 100 + 300 * number)
            proxy.freeze(requests="requests" in what, answers=True)
            await asyncio.sleep(1.5)
            proxy.thaw()
            thawed = time.monotonic()
            before = await conn.fetchval("SELECT max(completed) FROM fanout.job")
            await until(conn, "SELECT max(completed) > $1 FROM fanout.job", before)
            assert time.monotonic() - thawed < 3
        await closed(engine, job_id)
        assert await deaths(fleet) == 0
        await ended(fleet, job_id)


async def test_sigterm_in_a_network_that_swallows_everything(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A worker that cannot reach its database still ends: within its grace and one database
    timeout, not three.
    """
    fleet.environment |= {"FANOUT_STOP_GRACE": "1", "FANOUT_DATABASE_TIMEOUT": "2"}
    async with proxied(fleet.dsn) as (proxy, dsn):
        worker = await fleet.up("cut off", DATABASE_URL=dsn)
        job_id = await start(fleet, 30, child={"do": "work", "seconds": 0.2})
        await until(conn, "SELECT max(completed) > 5 FROM fanout.job")
        proxy.freeze()
        await asyncio.sleep(0.3)
        worker.send(signal.SIGTERM)
        told = time.monotonic()
        assert await worker.ended(15) == 0
        assert time.monotonic() - told < 1 + 2 + 2
    await fleet.up("other")
    await closed(engine, job_id)
    await ended(fleet, job_id)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_an_hour_of_accidents_in_minutes(own: Fleet, postgres: EmbeddedServer) -> None:
    """Crashes of the server, outages longer than a lease, killed workers, one after the other."""
    await own.ups(3)
    job_id = await start(own, 10_000, child={"do": "work", "seconds": 0.1})
    for round_number in range(8):
        await asyncio.sleep(4)
        await asyncio.to_thread(postgres.stop, "immediate")
        await asyncio.sleep(round_number % 4)
        victim = own.processes[-1]
        await victim.killed()
        await asyncio.to_thread(postgres.start)
        own.spawn(victim.name)
    await ended(own, job_id, 400)
