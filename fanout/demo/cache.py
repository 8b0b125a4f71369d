"""What was read before, by content: a small table of the demo's own beside the engine's.

A result depends on a document's bytes and on how they are read: it is kept under (sha256, kind).
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Final
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from fanout import Engine
from fanout.pool import Pool

from .documents import MediaKind, Snapshot
from .extract import Extracted

__all__ = ["keep", "look_up"]

TABLE: Final = """
CREATE SCHEMA IF NOT EXISTS fanout_demo;
CREATE TABLE IF NOT EXISTS fanout_demo.reading (
    sha256 text, kind text, result json NOT NULL,
    read_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (sha256, kind));
"""

_pools: WeakKeyDictionary[Engine, asyncio.Future[Pool]] = WeakKeyDictionary()


async def look_up(engine: Engine, document: Snapshot) -> tuple[Extracted, datetime] | None:
    """What was read in a document of this content, and when; None: it is new."""
    pool = await _opened(engine)
    rows = await pool.fetch(
        "SELECT result::text AS result, read_at FROM fanout_demo.reading"
        " WHERE sha256 = $1 AND kind = $2",
        document.sha256,
        str(document.kind),
    )
    try:
        for row in rows:
            return Extracted.model_validate_json(row["result"]), row["read_at"]
    except ValidationError:
        pass  # another version of the demo wrote it: read it again
    return None


async def keep(engine: Engine, kind: MediaKind, found: Extracted) -> None:
    """Remember what was read. Under the hash of what was read, not of what was to be."""
    pool = await _opened(engine)
    await pool.fetch(
        "INSERT INTO fanout_demo.reading (sha256, kind, result) VALUES ($1, $2, $3)"
        " ON CONFLICT (sha256, kind)"
        " DO UPDATE SET result = EXCLUDED.result, read_at = clock_timestamp()",
        found.sha256,
        str(kind),
        found.model_dump_json(),
    )


async def _opened(engine: Engine) -> Pool:
    """One pool for this process, opened by whoever comes first; after a failure by the next."""
    opening = _pools.get(engine)
    if opening is None or (opening.done() and opening.exception() is not None):
        opening = _pools[engine] = asyncio.ensure_future(_open(engine))
    return await asyncio.shield(opening)


async def _open(engine: Engine) -> Pool:
    pool = Pool(engine.dsn, engine.settings, "demo")
    await pool.open()
    async with pool.acquire() as connection, connection.transaction():
        # IF NOT EXISTS alone races in the catalog.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('fanout demo', 0))")
        await connection.execute(TABLE)
    return pool
