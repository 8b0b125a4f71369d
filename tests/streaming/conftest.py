"""An engine on the test's own database, and relays over it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from fanout_streaming import Relay

from fanout import Engine
from tests.streaming.harness import engine_on, quick, slow


@pytest.fixture(scope="module")
async def database(server_dsn: str, template: str) -> AsyncIterator[str]:
    """One for each file: every test has streams of its own."""
    name = f"fanout_test_{uuid.uuid4().hex[:12]}"
    server = await asyncpg.connect(server_dsn)
    await server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    parts = urlsplit(server_dsn)
    yield urlunsplit(parts._replace(path=f"/{name}"))
    await server.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await server.close()


@pytest.fixture
async def engine(database: str) -> AsyncIterator[Engine]:
    """An engine without handlers, started."""
    async with engine_on(database) as engine:
        yield engine


@pytest.fixture
async def relay(engine: Engine) -> AsyncIterator[Relay]:
    """A relay, quick in everything."""
    async with Relay(engine, quick()) as relay:
        yield relay


@pytest.fixture
async def still(engine: Engine) -> AsyncIterator[Relay]:
    """A relay of which nothing happens by itself."""
    async with Relay(engine, slow()) as relay:
        yield relay
