"""Fixtures for pytest: `pytest_plugins = ["fanout.pytest_plugin"]` in the top conftest.py.

`fanout_dsn` is the DSN of a database with the engine's tables that is one test's own. It needs no
plugin for async tests, and works with any.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from . import testing

__all__ = ["fanout_dsn"]


@pytest.fixture
def fanout_dsn() -> Iterator[str]:
    """The DSN of an empty database with the engine's tables, dropped after the test."""
    ready, done = threading.Event(), threading.Event()
    found: list[str | BaseException] = []

    async def hold() -> None:
        try:
            async with testing.database() as dsn:
                found.append(dsn)
                ready.set()
                await asyncio.to_thread(done.wait)
        except BaseException as error:
            found.append(error)
            ready.set()
            raise

    # A thread of its own: the test's loop may run already, or not yet.
    thread = threading.Thread(target=asyncio.run, args=(hold(),), daemon=True)
    thread.start()
    ready.wait()
    if isinstance(found[0], BaseException):
        raise found[0]
    yield found[0]
    done.set()
    thread.join()
