"""Fixtures of the machine's tests: a store, and a history of every move.

FANOUT_TEST_MUTANT names a break of `mutants.py`, to be put in before any test runs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import asyncpg
import pytest

from fanout.store import Store
from tests.factories import a_store
from tests.machine.invariants import History

if _mutant := os.environ.get("FANOUT_TEST_MUTANT"):
    from tests.machine import mutants

    mutants.put_in(_mutant)


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    """A store on the test's database."""
    async with a_store(database) as it:
        yield it


@pytest.fixture
async def history(conn: asyncpg.Connection) -> type[History]:
    """The history of every move from here on."""
    await History.install(conn)
    return History
