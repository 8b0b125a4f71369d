"""The server under test: a private PostgreSQL with default durability, a fresh database a round."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import psutil

from fanout.embedded import EmbeddedServer, acquire
from fanout.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True, slots=True)
class Cluster:
    """A server, and a migrated template to copy databases from."""

    dsn: str
    """An administrator's address."""
    template: str
    """The name of a database with the schema and no job."""
    embedded: EmbeddedServer | None
    """None: somebody else's server."""

    @property
    def folder(self) -> Path | None:
        return self.embedded.data_dir if self.embedded else None

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """The DSN of a database of one's own, migrated and empty, dropped afterwards."""
        name = f"bench_{uuid4().hex[:12]}"
        await _execute(self.dsn, f"CREATE DATABASE {name} TEMPLATE {self.template}")
        try:
            yield _with_database(self.dsn, name)
        finally:
            await _execute(self.dsn, f"DROP DATABASE {name} WITH (FORCE)")

    def cpu_seconds(self) -> float | None:
        """Processor time of all the server's processes, ended ones too; None: it is elsewhere."""
        if self.embedded is None:
            return None
        pid_file = self.embedded.data_dir / "postmaster.pid"
        postmaster = psutil.Process(int(pid_file.read_text().split()[0]))
        spent = postmaster.cpu_times()
        total = spent.user + spent.system + spent.children_user + spent.children_system
        for child in postmaster.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                own = child.cpu_times()
                total += own.user + own.system
        return total


@asynccontextmanager
async def cluster(dsn: str | None) -> AsyncIterator[Cluster]:
    """A private server for the block, or the one at `dsn`, whose role may create databases."""
    if dsn is not None:
        async with _templated(dsn, None) as made:
            yield made
        return
    folder = await asyncio.to_thread(_folder)
    try:
        server = await asyncio.to_thread(acquire, folder / "pg")
        with server:
            try:
                async with _templated(server.dsn("postgres"), server) as made:
                    yield made
            finally:
                await asyncio.to_thread(server.stop, "immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _templated(dsn: str, server: EmbeddedServer | None) -> AsyncIterator[Cluster]:
    name = f"bench_template_{uuid4().hex[:12]}"
    await _execute(dsn, f"CREATE DATABASE {name}")
    try:
        await migrate(_with_database(dsn, name))
        yield Cluster(dsn, name, server)
    finally:
        await _execute(dsn, f"DROP DATABASE {name} WITH (FORCE)")


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fanout-bench-"))
    folder.chmod(0o711)  # under root the server is another user, who must reach its data
    return folder


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def _with_database(dsn: str, database: str) -> str:
    parts = urlsplit(dsn)
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}/{database}{query}"
