"""An engine on the test's own database, and relays over it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fanout import Engine
from fanout_streaming import Relay
from tests.streaming.harness import engine_on, quick, slow


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
