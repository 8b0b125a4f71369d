"""A thousand at once: submits of one key, migrations of one database."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter

import asyncpg
import pytest

from fanout import Engine, IdempotencyConflict, Request
from tests.chaos.app import SETTINGS
from tests.chaos.harness import ROOT, Fleet, settings_of


async def test_a_thousand_submits_of_one_key_make_one_job(
    fleet: Fleet, conn: asyncpg.Connection
) -> None:
    """Four engines, sixteen connections, at once: one job, and each caller gets its id."""
    engines = [fleet.engine(pool_size=4, database_timeout=30) for _ in range(4)]
    await asyncio.gather(*(engine.start() for engine in engines))
    try:
        handles = await asyncio.gather(
            *(
                engines[n % 4].submit("batch", {"n": 3, "x": 1}, key="import-2026-11")
                for n in range(1000)
            )
        )
        assert len({handle.id for handle in handles}) == 1
        assert Counter(handle.created for handle in handles) == {True: 1, False: 999}
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1
        # The order of keys is no content.
        again = await engines[0].submit("batch", {"x": 1, "n": 3}, key="import-2026-11")
        assert again.id == handles[0].id
        for kind, payload in (("batch", {"n": 4, "x": 1}), ("leaf", {"n": 3, "x": 1})):
            with pytest.raises(IdempotencyConflict):
                await engines[1].submit(kind, payload, key="import-2026-11")
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 1
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def test_submits_that_wait_for_a_winner_who_rolls_back(
    fleet: Fleet, conn: asyncpg.Connection
) -> None:
    """Two hundred wait behind a transaction that holds the key and is rolled back: one of them
    makes the job.
    """
    engines = [fleet.engine(pool_size=4, database_timeout=30) for _ in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    try:
        transaction = conn.transaction()
        await transaction.start()
        first = await engines[0].submit("leaf", {"a": 1}, key="k", connection=conn)
        assert first.created
        crowd = asyncio.gather(
            *(engines[n % 2].submit("leaf", {"a": 1}, key="k") for n in range(200))
        )
        await asyncio.sleep(0.5)
        assert not crowd.done()
        await transaction.rollback()
        handles = await crowd
        assert len({handle.id for handle in handles}) == 1
        assert first.id not in {handle.id for handle in handles}
        assert sum(handle.created for handle in handles) == 1
        assert await conn.fetchval("SELECT array_agg(id) FROM fanout.job") == [handles[0].id]
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def test_batches_of_overlapping_keys_do_not_deadlock(
    fleet: Fleet, conn: asyncpg.Connection
) -> None:
    """Fifty callers submit forty keys, all in one transaction, in any order: forty jobs."""
    engines = [fleet.engine(pool_size=6, database_timeout=30) for _ in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    keys = [f"key-{n}" for n in range(40)]
    try:
        answers = await asyncio.gather(
            *(
                engines[n % 2].submit_many(
                    [Request("leaf", {"k": key}, key=key) for key in random.sample(keys, 40)]
                )
                for n in range(50)
            )
        )
        assert len({handle.id for handles in answers for handle in handles}) == 40
        assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 40
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


MIGRATE = """
import asyncio, os, sys
from fanout import Settings, migrate
sys.stdin.readline()
settings = Settings(database_timeout=60)
print(asyncio.run(migrate(os.environ["DATABASE_URL"], settings=settings)).before)
"""


async def test_ten_processes_migrate_an_empty_database_at_once(empty_database: str) -> None:
    """One of them does it, nine find it done; one more is killed in the middle, and leaves nothing
    half made.
    """
    pods = [
        subprocess.Popen(  # noqa: ASYNC220 - nothing else runs here
            [sys.executable, "-c", MIGRATE],
            cwd=ROOT,
            env=os.environ | {"DATABASE_URL": empty_database},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(11)
    ]
    victim, *pods = pods
    await asyncio.sleep(1.5)  # all have imported, and wait for the word
    assert victim.stdin is not None
    # The victim goes first, and is killed while it holds the lock.
    holder = await asyncpg.connect(empty_database)
    try:
        victim.stdin.write(b"go\n")
        victim.stdin.flush()
        while not await holder.fetchval(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        ):
            if victim.poll() is not None:
                break  # it was too quick for us: then it did it all
            await asyncio.sleep(0)
        victim.kill()
        outcomes = await asyncio.gather(
            *(asyncio.to_thread(pod.communicate, b"go\n", 60) for pod in pods)
        )
        assert [pod.returncode for pod in pods] == [0] * 10, [err.decode() for _, err in outcomes]
        befores = sorted(int(out) for out, _ in outcomes)
        assert befores[1:] == [befores[-1]] * 9
        assert befores[-1] > 0
        versions = await holder.fetch("SELECT version FROM fanout.migration ORDER BY 1")
        assert [row[0] for row in versions] == list(range(1, befores[-1] + 1))
        assert await holder.fetchval("SELECT count(*) FROM fanout.installation") == 1
    finally:
        await holder.close()
        victim.communicate()


async def test_many_coroutines_of_two_pods_start_on_an_empty_database(empty_database: str) -> None:
    """An engine is started once, whole, whoever asks for it, and however many ask at once."""
    engines = [
        Engine(empty_database, settings=settings_of(SETTINGS, database_timeout=60))
        for _ in range(2)
    ]
    await asyncio.gather(*(engine.start() for engine in engines for _ in range(20)))
    try:
        for engine in engines:
            assert (await engine.submit("leaf", None)).created
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines for _ in range(3)))
