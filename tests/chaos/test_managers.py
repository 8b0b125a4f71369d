"""A manager that dies while it dispatches: no document twice, none forgotten, one close."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg

from fanout import Engine
from tests.chaos.calls import settled
from tests.chaos.harness import Fleet, closed
from tests.machine.invariants import History


async def test_a_manager_killed_at_each_chunk_edge_dispatches_each_document_once(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """One batch for each edge of three chunks, and one for a place inside each: the process is killed there, once; the
    next run goes on, and each document has one child."""
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
        for process in list(fleet.processes):
            if not process.is_alive and process.name != "buried":
                name, process.name = process.name, "buried"
                fleet.spawn(name)
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


async def test_seventy_thousand_children_in_flat_memory(
    fleet: Fleet, engine: Engine, conn: asyncpg.Connection
) -> None:
    """A batch of 70,000 from an iterator: counted exactly, closed once, and its manager's process stays small."""
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
