"""A PostgreSQL for the tests, and a database of its own for each test that asks for one.

Each test process starts a throw-away cluster, unless FANOUT_TEST_DSN names a server. A template is
migrated once and copied per test. FANOUT_TEST_BIN names the `bin` folder of another PostgreSQL than
the wheel's; `make test-matrix` sets it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from fanout import embedded

# A throw-away cluster need not survive the machine; a killed server loses nothing by it.
OPTIONS = {"fsync": "off", "max_connections": "200"}


def with_database(dsn: str, database: str) -> str:
    parts = urlsplit(dsn)
    return f"{parts.scheme}://{parts.netloc}/{database}" + (
        f"?{parts.query}" if parts.query else ""
    )


NEVER_AGAIN = ("machine", "contract", "typing")
"""Folders of tests that owe nothing to the wall clock.

On a machine that does something else as well, a test of real processes, sockets or browsers may
fail once in a thousand runs; one of the state machine may not.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With FANOUT_RERUN, as in `.ci/run`: a second try, which the report names."""
    if os.environ.get("FANOUT_RERUN"):
        for item in items:
            if item.path.parent.name not in NEVER_AGAIN:
                item.add_marker(pytest.mark.flaky(reruns=1))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Not pytest's tmp_path: too long for a socket, and closed to the server's user under root."""
    path = Path(tempfile.mkdtemp(prefix="fanout-test-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def _cluster(version_bin: Path | None) -> Iterator[embedded.EmbeddedServer]:
    with _folder() as folder:
        server = embedded.acquire(folder / "pg", version_bin=version_bin, options=OPTIONS)
        with server:
            yield server
            # Not left to the keeper: the folder goes now. Fast would wait for a checkpoint.
            server.stop("immediate")


@contextlib.asynccontextmanager
async def _database(server_dsn: str, template: str) -> AsyncIterator[str]:
    name = f"fanout_test_{uuid.uuid4().hex[:12]}"
    await _execute(server_dsn, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield with_database(server_dsn, name)
    finally:
        await _execute(server_dsn, f"DROP DATABASE {name} WITH (FORCE)")


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def version_bin() -> Path | None:
    """The PostgreSQL under test; None is the wheel's."""
    configured = os.environ.get("FANOUT_TEST_BIN")
    return Path(configured) if configured else None


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder that the server's user can reach."""
    with _folder() as path:
        yield path


@pytest.fixture(scope="session")
def server_dsn(version_bin: Path | None) -> Iterator[str]:
    """An administrator's DSN of the server that the tests share; do not restart that one."""
    if configured := os.environ.get("FANOUT_TEST_DSN"):
        yield configured
        return
    with _cluster(version_bin) as server:
        yield server.dsn("postgres")


@pytest.fixture(scope="session")
async def template(server_dsn: str) -> AsyncIterator[str]:
    """The name of a migrated database without a job, for `CREATE DATABASE ... TEMPLATE`."""
    from fanout.migrate import migrate  # noqa: PLC0415 -- most tests of the server need no schema

    async with _database(server_dsn, "template0") as dsn:
        await migrate(dsn)
        name = urlsplit(dsn).path[1:]
        # A copy is refused while anyone is connected to its template.
        await _execute(server_dsn, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        yield name


@pytest.fixture
async def database(server_dsn: str, template: str) -> AsyncIterator[str]:
    """The DSN of a migrated database that is this test's alone."""
    async with _database(server_dsn, template) as dsn:
        yield dsn


@pytest.fixture
async def empty_database(server_dsn: str) -> AsyncIterator[str]:
    """The DSN of a database without a schema."""
    async with _database(server_dsn, "template0") as dsn:
        yield dsn


@pytest.fixture
async def conn(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to `database`."""
    connection = await asyncpg.connect(database)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def postgres(version_bin: Path | None) -> Iterator[embedded.EmbeddedServer]:
    """A server of this test's own, to stop and restart; `postgres.dsn()` is not migrated."""
    with _cluster(version_bin) as server:
        yield server
