"""fanout-events.js in a browser, as any page would use it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from playwright.async_api import Page

from fanout import Engine
from tests.browser.app import Plan
from tests.browser.conftest import Opens
from tests.browser.driving import Site
from tests.browser.test_live import stored

pytestmark = pytest.mark.browser

LISTEN = """
async (options) => {
  const { FanoutEvents } = await import(`${location.pathname}static/fanout-events.js`);
  window.events = new FanoutEvents(options);
  window.got = {};
  window.states = [];
  for (const type of ["log", "step", "failed", "retry", "dropped", "end"]) {
    events.on(type, ({ stream, id }) => (got[stream] ??= []).push(id));
  }
  events.on("status", ({ state }) => states.push(state));
}
"""


async def listening(opened: Opens, **options: Any) -> Page:
    page = await opened("#/workers")
    await page.evaluate(LISTEN, options)
    return page


async def until(page: Page, condition: str) -> None:
    """Not Playwright's own wait: that needs eval in the page, which its CSP forbids."""
    async with asyncio.timeout(30):
        while not await page.evaluate(condition):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)


async def test_many_jobs_in_one_stream(opened: Opens, engine: Engine, site: Site) -> None:
    """Each event of each job comes once and in order, and the stream ends with the last of them."""
    jobs = [await engine.submit("papers_batch", Plan(papers=n, seconds=0.2)) for n in (3, 9, 20)]
    page = await listening(opened, jobs=[job.id for job in jobs])
    await until(page, "events.status.state === 'ended'")
    for job in jobs:
        assert (await page.evaluate("got"))[str(job.id)] == await stored(site, job.id)


async def test_two_objects_share_and_join_late(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """One that comes later gets everything from its own beginning, and the first nothing twice."""
    one = await engine.submit("papers_batch", Plan(papers=30, seconds=0.4, hold=True))
    other = await engine.submit("papers_batch", Plan(papers=30, seconds=0.4, hold=True))
    first = await listening(opened, jobs=[one.id])
    await until(first, "(got[1] ?? []).length > 0")
    gate.set()
    await until(first, "got[1].length > 30")
    second = await listening(opened, jobs=[one.id, other.id])
    for page in (first, second):
        await until(page, "events.status.state === 'ended'")
        assert (await page.evaluate("got"))[str(one.id)] == await stored(site, one.id)
    assert (await second.evaluate("got"))[str(other.id)] == await stored(site, other.id)


async def test_a_hidden_tab_lets_go_and_catches_up(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """It leaves the stream to others after a while, and lacks nothing when it is seen again."""
    job = await engine.submit("papers_batch", Plan(papers=40, seconds=0.4, hold=True))
    page = await listening(opened, jobs=[job.id], hidden=0.2)
    await until(page, "(got[1] ?? []).length > 0")
    await page.evaluate(
        "Object.defineProperty(document, 'hidden', { configurable: true, value: true }),"
        "document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))"
    )
    await until(page, "events.status.state === 'paused'")
    had = await page.evaluate("got[1].length")
    gate.set()
    await page.wait_for_timeout(1000)
    assert await page.evaluate("got[1].length") == had
    await page.evaluate(
        "delete document.hidden,"
        "document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))"
    )
    await until(page, "events.status.state === 'ended'")
    assert (await page.evaluate("got"))["1"] == await stored(site, job.id)


async def test_silence_is_noticed(opened: Opens, engine: Engine) -> None:
    """A connection that says nothing for long is given up, and made anew."""
    job = await engine.submit("papers_batch", Plan(papers=1, seconds=20))
    page = await listening(opened, jobs=[job.id], silence=1, share=False)
    await until(page, "states.includes('lost') && states.at(-1) === 'live'")
    await job.cancel()


async def test_what_is_refused_is_not_asked_for_ever(opened: Opens, engine: Engine) -> None:
    """A job that is not there is said to be so."""
    page = await listening(opened, jobs=[4711], share=False)
    await until(page, "events.status.state === 'refused' && events.status.status === 404")
