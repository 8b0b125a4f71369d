"""Connections that leak, hang, vanish, or are not what they seem."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import random
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from fanout import DatabaseUnavailable, FanoutError, Settings, wakeups
from fanout.embedded import EmbeddedServer
from fanout.pool import SESSION, Pool, connect
from tests.cases.lab import Calls, Pod, Proxy, counters, engine_on, quick, until, until_true
from tests.machine.invariants import check

pytestmark = pytest.mark.usefixtures("swept")


async def test_a_connection_that_breaks_under_a_statement_is_an_outage(
    database: str, conn: asyncpg.Connection
) -> None:
    """MagicStack/asyncpg #464: a connection that the server or the network ends in the middle of a
    statement, in a transaction or without, is DatabaseUnavailable and nothing else."""

    async def wound(connection: asyncpg.Connection) -> None:
        await connection.fetch("SELECT pg_sleep(5)")

    async with Proxy(database) as proxy:
        pool = Pool(proxy.dsn, Settings(pool_size=2))
        await pool.open()
        for end in ("the server", "the network"):
            for statement in (pool.fetch("SELECT pg_sleep(5)"), pool.transaction(wound)):
                task = asyncio.ensure_future(statement)
                await until(
                    conn,
                    "SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE '%pg_sleep(5)%' "
                    "AND state = 'active' AND pid <> pg_backend_pid()",
                )
                if end == "the server":
                    await conn.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE query LIKE '%pg_sleep(5)%' AND pid <> pg_backend_pid()"
                    )
                else:
                    proxy.cut()
                with pytest.raises(DatabaseUnavailable):
                    await task
                await conn.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE query LIKE '%pg_sleep(5)%' AND pid <> pg_backend_pid()"
                )
        await pool.close()


async def test_a_waiter_that_gives_up_takes_no_connection_with_it(
    database: str, conn: asyncpg.Connection
) -> None:
    """MagicStack/asyncpg #467, #464, #547: 500 uses of a pool of four, each cancelled or timed
    out at a random moment: afterwards all four can be had, the server knows no more of them, and
    the pool closes at once."""
    pool = Pool(database, Settings(pool_size=4, database_timeout=5), "leak")
    await pool.open()

    async def hasty() -> None:
        async with asyncio.timeout(random.uniform(0, 0.01)), pool.acquire() as connection:
            await connection.fetch("SELECT pg_sleep(0.002)")

    for _ in range(25):
        tasks = [asyncio.ensure_future(hasty()) for _ in range(20)]
        await asyncio.sleep(random.uniform(0, 0.005))
        for task in random.sample(tasks, 7):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    together = asyncio.Barrier(4)

    async def use() -> None:
        async with pool.acquire() as connection, asyncio.timeout(5):
            await together.wait()
            await connection.fetch("SELECT 1")

    await asyncio.gather(*(use() for _ in range(4)))
    assert (
        await conn.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fanout leak'"
        )
        <= 4
    )
    began = time.monotonic()
    await pool.close()
    assert time.monotonic() - began < 2


async def test_leases_outlive_a_pool_that_others_use_up(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """oban-bg/oban #1499, supabase/supavisor #85, graphile/worker #592: every connection of the
    pool is taken for longer than two leases: the heartbeat has a connection of its own, so no
    lease lapses and no child runs twice; the outcomes are written when there is a connection
    again."""
    async with (
        engine_on(database, calls, lease=0.9, pool_size=3, database_timeout=1) as engine,
        engine.worker() as worker,
    ):
        handle = await engine.submit("batch", {"n": 4, "child": {"seconds": 0.8}})
        await until_true(lambda: len(calls.starts) == 5)
        pool = engine._pool
        assert pool is not None

        async def sleeps() -> None:
            async with pool.acquire() as connection:
                await connection.fetch("SELECT 1")
                await asyncio.sleep(2)

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(sleeps())
            beats = worker.heartbeat.beats
        assert worker.heartbeat.beats >= beats + 4
        await handle.wait(10)
    assert {attempt for _, attempt in calls.starts} == {1}
    assert await counters(conn, handle.id) == ("completed", 4, 4, 0, 0)
    assert await conn.fetchval("SELECT sum(failures + deaths) FROM fanout.job") == 0


async def test_a_network_that_goes_silent_is_found_and_left(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """procrastinate-org/procrastinate #1513, PR #1596 (seven hours, silently): a proxy that stops
    forwarding without a FIN: statements end in the timeout, new connections are made, and work goes
    on as soon as the network does; leases that lapsed meanwhile are nobody's death."""
    async with (
        Proxy(database) as proxy,
        engine_on(proxy.dsn, calls, database_timeout=0.6) as engine,
        engine.worker() as worker,
    ):
        first = await engine.submit("leaf")
        await first.wait(10)
        before = proxy.connections
        proxy.stall()
        waiting = await _submitted_beside(database, "leaf")
        await asyncio.sleep(3)
        assert worker.heartbeat.last_beat_at < time.monotonic() - 2
        proxy.heal()
        healed = time.monotonic()
        await engine.handle(waiting).wait(10)
        assert time.monotonic() - healed < 6.5
        assert proxy.connections > before
        row = await engine.handle(waiting).job()
        assert (str(row.status), row.failures, row.deaths) == ("completed", 0, 0)


async def _submitted_beside(database: str, kind: str) -> int:
    async with engine_on(database) as other:
        return (await other.submit(kind)).id


async def test_a_listener_that_is_deaf_is_found(
    database: str, conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """timgit/pg-boss #850; graphile/worker #541; oban-bg/oban #493: the session is gone on the
    server while the socket looks fine: the listener's own probe finds it in well under 15 s and
    listens anew; until then workers poll."""
    assert wakeups.PROBE_SECONDS + wakeups.PROBE_TIMEOUT <= 15
    woken = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wakeups, "PROBE_SECONDS", 0.3)
        patch.setattr(wakeups, "PROBE_TIMEOUT", 0.3)
        async with Proxy(database) as proxy:
            listener = wakeups.Listener(proxy.dsn, quick(), lambda _: woken.set())
            listener.start()
            await asyncio.wait_for(woken.wait(), 5)
            proxy.stall()
            await asyncio.sleep(1)
            woken.clear()
            proxy.heal()
            await asyncio.wait_for(woken.wait(), 5)  # what came meanwhile
            woken.clear()
            await conn.execute("SELECT pg_notify('fanout_wake', '[\"leaf\"]')")
            await asyncio.wait_for(woken.wait(), 5)
            await listener.stop()


async def test_a_listener_that_the_server_ended_hears_again(
    database: str, conn: asyncpg.Connection
) -> None:
    """encode/broadcaster PR #66, graphile/crystal PR #2876, oban-bg/oban #1499: the listening
    session is terminated: whoever subscribed is told to look for itself, and hears the next hint
    again; the pool has nothing to do with it."""
    heard: list[set[str]] = []
    listener = wakeups.Listener(database, quick(), heard.append)
    listener.start()
    await until_true(lambda: heard == [set()])
    assert (
        await conn.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE application_name = 'fanout listen'"
        )
        == 1
    )
    await until_true(lambda: heard == [set(), set()])
    await conn.execute("SELECT pg_notify('fanout_wake', '[\"leaf\"]')")
    await until_true(lambda: heard[-1] == {"leaf"})
    await listener.stop()


async def test_workers_that_start_before_the_database_work_when_it_is_there(
    pods: Callable[..., Pod], postgres: EmbeddedServer
) -> None:
    """taskiq-python/taskiq #633: three pods start while the server is down; it comes up later: all
    three work within seconds."""
    dsn = postgres.dsn()
    await asyncio.to_thread(postgres.stop, "immediate")
    started = [pods(dsn, POD_NAME=f"pod-{n}") for n in range(3)]
    for pod in started:
        await pod.line("waits")
    await asyncio.to_thread(postgres.start)
    began = time.monotonic()
    for pod in started:
        await pod.line("up", 10)
    assert time.monotonic() - began < 10
    async with engine_on(dsn) as engine:
        handle = await engine.submit("batch", {"n": 30, "child": {"seconds": 0.2}})
        assert (await handle.wait(20)).completed == 30
    assert all(any(line.startswith("start") for line in pod.lines) for pod in started)


async def test_an_outage_ends_no_worker_and_floods_no_log(
    postgres: EmbeddedServer, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """graphile/worker #592, #307; contribsys/faktory #41; taskforcesh/bullmq #4601: eight children
    fail just as the database goes away: afterwards all slots are back, the children have their
    retries, and the outage cost few log lines and hardly any processor time."""
    caplog.set_level(logging.INFO, logger="fanout")
    dsn = postgres.dsn()
    async with engine_on(dsn, calls, lease=3) as engine, engine.worker(concurrency=8) as worker:
        handle = await engine.submit("batch", {"n": 8, "child": {"seconds": 0.5, "flaky": 1}})
        await until_true(lambda: len(calls.starts) == 9)
        caplog.clear()
        used = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.to_thread(postgres.stop, "immediate")
        await asyncio.sleep(4)
        await asyncio.to_thread(postgres.start)
        spent = resource.getrusage(resource.RUSAGE_SELF)
        lines = len([r for r in caplog.records if "ended in TransientError" not in r.getMessage()])
        came_back = time.monotonic()
        await handle.wait(20)
        assert time.monotonic() - came_back < 10
        assert worker.has_free_slot
        assert worker._claims.is_running
        assert worker.sweeper.sweeps.is_running
    assert lines <= 40
    assert spent.ru_utime - used.ru_utime < 1
    leaves = {job_id for job_id, attempt in calls.starts if attempt == 2}
    assert len(leaves) == 8
    assert {tuple(calls.of(job_id)) for job_id in leaves} == {(1, 2)}


# -- pgbouncer ---------------------------------------------------------------------------------


@contextmanager
def pgbouncer(dsn: str, mode: str) -> Iterator[str]:
    """A transaction pooler before the server; its DSN."""
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("pgbouncer is not installed: this case was not run")
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="bouncer-"))
    folder.chmod(0o777)
    host = (query.get("host") or [parts.hostname or "127.0.0.1"])[0]
    user = parts.username or getpass.getuser()
    upstream = (query.get("port") or [str(parts.port or 5432)])[0]
    (folder / "ini").write_text(
        f"""[databases]
* = host={host} port={upstream} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 4
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
"""
    )
    # It will not run as root; the server's socket is closed to everybody but root and its owner.
    process = subprocess.Popen(
        [program, *_as_owner_of(Path(host)), str(folder / "ini")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"postgresql://{user}@127.0.0.1:{port}{parts.path}?sslmode=disable"
    finally:
        process.kill()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _as_owner_of(socket_folder: Path) -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["-u", socket_folder.owner() if socket_folder.is_dir() else "nobody"]


async def test_through_a_transaction_pooler_everything_works_by_polling(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """MagicStack/asyncpg #339, #198; bensheldon/good_job #269, #52: through pgbouncer in
    transaction mode, with `transaction_pooler=True`: no prepared statement, session setting,
    advisory lock or LISTEN is needed, and two workers finish a batch with exact counters."""
    with pgbouncer(database, "transaction") as dsn:
        async with (
            engine_on(dsn, calls, transaction_pooler=True, chunk_size=20) as engine,
            engine.worker(),
            engine.worker(),
        ):
            handle = await engine.submit(
                "batch", {"n": 80, "mix": {"3": {"flaky": 1}, "5": {"broken": True}}}, key="k"
            )
            await handle.wait(30)
            again = await engine.submit(
                "batch", {"n": 80, "mix": {"3": {"flaky": 1}, "5": {"broken": True}}}, key="k"
            )
            assert again.id == handle.id
            await until(conn, "SELECT status = 'completed' FROM fanout.job WHERE kind = 'report'")
    assert await counters(conn, handle.id) == ("completed", 80, 79, 1, 0)
    assert calls.repeated == []
    assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 0
    assert await check(conn, quiet=False) == []


async def test_a_transaction_pooler_that_nobody_mentioned_is_refused(database: str) -> None:
    """MagicStack/asyncpg #339: without the setting the engine does not start at all through
    pgbouncer, and the one line that it raises says what is unsupported."""
    with (
        pgbouncer(database, "transaction") as dsn,
        pytest.raises(FanoutError, match=r"transaction_pooler"),
    ):
        async with engine_on(dsn):
            pass


async def test_a_session_whose_pod_is_gone_is_ended_by_the_server(database: str) -> None:
    """leo91000/graphile_worker_rs PR #456: sessions of a pod that vanished, or that stands still
    while the server has something to send, are ended within half a minute: they hold neither row
    locks nor vacuum back. By keepalives where the line is quiet, by the user timeout where it is
    not."""
    for name in ("engine", "listen", "heartbeat"):
        session = await connect(database, Settings(), name)  # the server takes them all
        await session.close()
    asked = SESSION
    assert (
        int(asked["tcp_keepalives_idle"])
        + int(asked["tcp_keepalives_interval"]) * int(asked["tcp_keepalives_count"])
        <= 30
    )
    assert 0 < int(asked["tcp_user_timeout"]) <= 30_000


# -- disk full ---------------------------------------------------------------------------------


@asynccontextmanager
async def full_disk(conn: asyncpg.Connection) -> AsyncIterator[None]:
    """Every write to the jobs fails as on a full disk."""
    await conn.execute(
        """CREATE OR REPLACE FUNCTION public.full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE SQLSTATE '53100' USING MESSAGE = 'could not extend file: No space left on device';
        END $$; CREATE TRIGGER disk_full BEFORE INSERT OR UPDATE ON fanout.job FOR EACH STATEMENT
        EXECUTE FUNCTION public.full()"""
    )
    try:
        yield
    finally:
        await conn.execute("DROP TRIGGER disk_full ON fanout.job")


async def test_a_full_disk_fails_no_child(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """patroni/patroni #2819: the disk is full for longer than a lease while children end: 53100
    is an outage, no child is failed by it, no retry used up, and when there is space again all
    finish."""
    async with engine_on(database, calls, lease=0.9) as engine, engine.worker():
        handle = await engine.submit("batch", {"n": 10, "child": {"seconds": 0.4}})
        await until_true(lambda: len(calls.starts) >= 8)
        async with full_disk(conn):
            with pytest.raises(DatabaseUnavailable, match="No space left"):
                await engine.submit("leaf")
            await asyncio.sleep(1.6)
        await handle.wait(20)
    assert await counters(conn, handle.id) == ("completed", 10, 10, 0, 0)
    assert await conn.fetchval("SELECT sum(failures) FROM fanout.job") == 0
    assert await check(conn, quiet=False) == []
