"""A real Chromium, a real API process, and a worker in the test's own process.

Collected where there is a Chromium. FANOUT_BROWSER=1 or FANOUT_REQUIRE_BROWSER=1 collects in any
case, so that a missing browser is a failure and never a silence.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

IS_WANTED = bool(os.environ.get("FANOUT_BROWSER") or os.environ.get("FANOUT_REQUIRE_BROWSER"))
IS_THERE = bool(
    (os.environ.get("FANOUT_CHROMIUM") or shutil.which("chromium"))
    and importlib.util.find_spec("playwright")
)

if IS_WANTED or IS_THERE:
    from playwright.async_api import Browser, BrowserContext, Page

    from fanout import Engine
    from tests.browser.app import build
    from tests.browser.driving import Site, Witness, chromium
    from tests.engine.running import quick

    Opens = Callable[..., Awaitable[Page]]

    @pytest.fixture(scope="session")
    async def chrome() -> AsyncIterator[Browser]:
        """One for all tests: starting it takes seconds."""
        async with chromium() as browser:
            yield browser

    @pytest.fixture
    async def browser(chrome: Browser) -> AsyncIterator[BrowserContext]:
        """A browser that has seen nothing yet."""
        context = await chrome.new_context()
        try:
            yield context
        finally:
            await context.close()

    @pytest.fixture
    def gate() -> asyncio.Event:
        """Where papers of a batch with `hold` wait until the test has looked."""
        return asyncio.Event()

    @pytest.fixture
    async def engine(database: str, gate: asyncio.Event) -> AsyncIterator[Engine]:
        """The app's engine, started, with a worker."""
        engine = build(database, quick(), gate)
        async with engine, engine.worker(concurrency=4, name="pod-1"):
            yield engine

    @pytest.fixture
    async def site(database: str, engine: Engine) -> AsyncIterator[Site]:
        """An API process that does not work itself."""
        site = Site(database)
        await site.start()
        try:
            yield site
        finally:
            await site.stop()

    @pytest.fixture
    def witness() -> Witness:
        """What pages complained of; looked at when the test has ended."""
        return Witness()

    @pytest.fixture
    async def opened(browser: BrowserContext, site: Site, witness: Witness) -> AsyncIterator[Opens]:
        """Opens a new tab at an address of the page; in the end none has complained."""

        async def open_tab(address: str = "#/") -> Page:
            page = await witness.attend(await browser.new_page(), site.url)
            await page.goto(site.url + address)
            return page

        yield open_tab
        assert not witness.complaints
        assert not witness.foreign

else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Say what is left out."""
    return "browser: " + ("collected" if IS_WANTED or IS_THERE else "not collected, no Chromium")
