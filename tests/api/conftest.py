"""A server for a whole file of tests that only ask; one of its own for a test that needs one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.api.harness import House, a_database, house


@pytest.fixture(scope="module")
async def shared(server_dsn: str, template: str) -> AsyncIterator[House]:
    """One server without auth for all tests of a file."""
    async with a_database(server_dsn, template) as dsn, house(dsn) as it:
        yield it


@pytest.fixture
async def own(database: str) -> AsyncIterator[House]:
    """A server without auth for this test."""
    async with house(database) as it:
        yield it
