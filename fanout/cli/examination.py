"""What the doctor asks of the database."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from fanout.migrate import expected_version, schema_version
from fanout.pool import Pool, connect
from fanout.store import Store
from fanout.values import WorkerRow

from .database import Database

__all__ = ["Facts", "examined"]

LISTEN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the database answered."""

    health: dict[str, Any]
    skew_seconds: float
    listen_seconds: float | None
    """How long a notification took; None: it did not come."""
    schema_version: int
    stuck: list[dict[str, Any]] = field(default_factory=list)
    workers: list[WorkerRow] = field(default_factory=list)


async def examined(database: Database) -> Facts:
    """Ask. Raises what a connection raises."""
    settings = database.settings
    pool = Pool(database.dsn, settings, "doctor")
    await pool.open()
    try:
        store = Store(pool, settings.schema_name)
        asked_at = time.time()
        health = await store.health()
        skew = (asked_at + time.time()) / 2 - health["server_epoch"]
        version = await schema_version(pool, settings.schema_name)
        is_usable = version == expected_version()
        return Facts(
            health,
            skew,
            await _listen(database, store),
            version,
            await store.stuck(100) if is_usable else [],
            await store.workers() if is_usable else [],
        )
    finally:
        await pool.close()


async def _listen(database: Database, store: Store) -> float | None:
    """Seconds from a NOTIFY to its arrival, on a channel that nobody else listens to."""
    channel = f"fanout_doctor_{uuid4().hex}"
    arrived = asyncio.Event()
    connection = await connect(database.dsn, database.settings, "doctor listen")
    try:
        await connection.add_listener(channel, lambda *_: arrived.set())
        sent_at = time.monotonic()
        await store.wake(channel, "[]")
        async with asyncio.timeout(LISTEN_SECONDS):
            await arrived.wait()
        return time.monotonic() - sent_at
    except TimeoutError:
        return None
    finally:
        connection.terminate()
