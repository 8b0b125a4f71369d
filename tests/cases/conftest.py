"""Fixtures of the cases: a store on the test's database, a log of calls, worker processes that
are gone afterwards."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from fanout.store import Store
from tests.cases.lab import Calls, Pod
from tests.factories import a_store


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    """A store on the test's database."""
    async with a_store(database) as it:
        yield it


@pytest.fixture
def swept() -> Iterator[None]:
    """The driver warns of a connection whose making was cut short, whenever it is collected: here,
    and not in somebody else's test.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def calls() -> Calls:
    """What handlers of this process really did."""
    return Calls()


@pytest.fixture
def pods(database: str, tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Starts worker processes on the test's database."""
    started: list[Pod] = []

    def start(dsn: str = database, **environment: str) -> Pod:
        started.append(Pod(dsn, tmp_path, **environment))
        return started[-1]

    yield start
    for pod in started:
        pod.close()
