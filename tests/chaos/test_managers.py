"""A manager that dies while it dispatches: no document twice, none forgotten, one close."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest

from fanout import Engine
from tests.chaos.calls import settled
from tests.chaos.harness import Fleet, closed, until
from tests.machine.invariants import History


async def revive(fleet: Fleet) -> None:
    """Start another process in the place of each that died, as a supervisor does."""
    for process in list(fleet.processes):
        if not process.is_alive and process.name != "buried":
            name, process.name = process.name, "buried"
            fleet.spawn(name)


async def test_a_manager_killed_at_each_chunk_edge_dispatches_each_document_once(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """One batch for each edge of three chunks, and one for a place inside each: the process is
    killed there, once; the next run goes on, and each document has one child.
    """
    await History.install(conn)
    fleet.environment |= {
        "FANOUT_CHUNK_SIZE": "40",
        "FANOUT_LEASE": "1.5",
        "FANOUT_MAX_DEATHS": "6",
    }
    edges = (0, 17, 40, 57, 80, 97, 120)
    handles = [
        await engine.submit("batch", {"n": 120, "die_at": edge, "mark": str(tmp_path / f"m{edge}")})
        for edge in edges
    ]
    await fleet.ups(2)
    done = asyncio.gather(*(closed(engine, handle.id, 60) for handle in handles))
    while not done.done():
        await revive(fleet)
        await asyncio.wait([done], timeout=0.1)
    for progress in await done:
        assert (progress.total, progress.completed, progress.outcome) == (120, 120, "completed")
    assert all((tmp_path / f"m{edge}").exists() for edge in edges)
    assert [
        row[0]
        for row in await conn.fetch(
            "SELECT count(DISTINCT document_key) FROM fanout.job WHERE parent_id IS NOT NULL "
            "GROUP BY parent_id"
        )
    ] == [120] * len(edges)
    assert await conn.fetchval("SELECT sum(failures)::int FROM fanout.job") == 0
    await settled(conn, fleet.calls)


async def test_a_manager_that_kills_its_process_each_time_fails_its_batch(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """Poison: what it dispatched is cancelled or counted, the batch closes as failed, once, and its
    follow-up runs.
    """
    fleet.environment |= {
        "FANOUT_LEASE": "1.5",
        "FANOUT_MAX_DEATHS": "1",
        "FANOUT_CHUNK_SIZE": "40",
    }
    handle = await engine.submit(
        "batch", {"n": 200, "die_at": 80, "child": {"do": "work", "seconds": 0.5}}
    )
    await fleet.ups(2)
    done = asyncio.ensure_future(closed(engine, handle.id, 60))
    while not done.done():
        await revive(fleet)
        await asyncio.wait([done], timeout=0.1)
    progress = await done
    assert progress.outcome == "failed"
    assert progress.reason is not None
    assert "poison" in progress.reason
    # It dies at the edge of two chunks, with the second one on its way.
    assert progress.total in {40, 80}
    assert progress.completed + progress.cancelled == progress.total
    await settled(conn, fleet.calls)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_batch_is_cancelled_in_mid_dispatch(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection, killed: bool
) -> None:
    """While the manager dispatches and children run: all are counted, those that run are told, the
    batch closes once; also if the workers are killed in the same moment.
    """
    await History.install(conn)
    fleet.environment |= {"FANOUT_LEASE": "1.5", "FANOUT_CHUNK_SIZE": "20"}
    await fleet.ups(2)
    handle = await engine.submit(
        "batch", {"n": 2000, "pause": 0.002, "child": {"do": "work", "seconds": 60}}
    )
    await until(conn, "SELECT total >= 100 FROM fanout.job WHERE id = $1", handle.id)
    await until(conn, "SELECT count(*) >= 15 FROM fanout.job WHERE status = 'processing'")
    cancelling = asyncio.create_task(handle.cancel("enough"))
    if killed:
        await asyncio.gather(*(process.killed() for process in list(fleet.processes)))
        await fleet.ups(2)
    assert await cancelling
    progress = await closed(engine, handle.id, 20)
    assert progress.outcome == "cancelled"
    assert progress.cancelled == progress.total < 2000
    if not killed:  # they are free again, long before their handlers' minute is over
        await (await engine.submit("leaf")).result(10)
    assert not await handle.cancel()
    await settled(conn, fleet.calls)


async def test_seventy_thousand_children_in_flat_memory(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A batch of 70,000 from an iterator: counted exactly, closed once, and its manager's process
    stays small.
    """
    fleet.environment |= {
        "FANOUT_CHUNK_SIZE": "1000",
        "FANOUT_LEASE": "30",
        "FANOUT_HEARTBEAT": "5",
        "FANOUT_DATABASE_TIMEOUT": "20",
    }
    await fleet.ups(2)
    handle = await engine.submit("batch", {"n": 70_000, "child": {"do": "nothing"}})
    progress = await closed(engine, handle.id, 100)
    assert (progress.total, progress.completed) == (70_000, 70_000)
    for process in fleet.processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        [peak] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        assert int(peak) < 150 * 1024, f"{process.name}: {int(peak) // 1024} MiB at its peak"
    assert (
        await conn.fetchval("SELECT count(*) FROM fanout.job WHERE follows_id = $1", handle.id) == 1
    )
    assert await conn.fetchval("SELECT sum(failures + deaths)::int FROM fanout.job") == 0
    await settled(conn, fleet.calls)
