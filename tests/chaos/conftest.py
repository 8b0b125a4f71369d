"""Fixtures of the chaos tests: a fleet of worker processes that is gone when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fanout import Engine
from tests.chaos.harness import Fleet


@pytest.fixture
def fleet(database: str, tmp_path: Path) -> Iterator[Fleet]:
    """Worker processes on the test's database; none yet."""
    it = Fleet(database, tmp_path)
    try:
        yield it
    finally:
        it.close()


@pytest.fixture
async def engine(fleet: Fleet) -> AsyncIterator[Engine]:
    """An engine in this process, to submit to the fleet's database."""
    async with fleet.engine() as it:
        yield it
