"""A batch that is watched: from start to end, reloaded, its server restarted, in many tabs."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from typing import Any

import pytest
from playwright.async_api import Page

from fanout import Engine, JobHandle
from tests.browser.app import Plan
from tests.browser.conftest import Opens
from tests.browser.driving import Site, expect

pytestmark = pytest.mark.browser

WINDOW = 300
"""Lines that the document holds at most."""
LOAD_SECONDS = 60
"""Half a second where nothing else runs; without sharing the seventh tab would wait for ever."""

NOTIFY = """
() => {
  window.told = [];
  window.Notification = class {
    static permission = "default";
    static async requestPermission() { return this.permission = "granted"; }
    constructor(title, { body }) { told.push(`${title}; ${body}`); }
  };
}
"""
RECORD = """
() => {
  window.seen = [];
  const look = () => {
    const percent = document.querySelector(".percent")?.textContent;
    const state = document.querySelector("header.job .badge")?.textContent;
    const last = window.seen.at(-1);
    if (percent && `${last}` !== `${[percent, state]}`) window.seen.push([percent, state]);
  };
  look();
  new MutationObserver(look).observe(document.getElementById("main"),
    { subtree: true, childList: true, characterData: true });
}
"""
NUMBERS = """
() => [...document.querySelectorAll(".line .at")].map((a) => a.hash.split("line=")[1])
"""


async def submitted(engine: Engine, **plan: Any) -> JobHandle:
    return await engine.submit("papers_batch", Plan(**plan), key=f"import-{time.time_ns()}")


async def stored(site: Site, job: int) -> list[str]:
    """The ids of the events that are stored, as the API tells them to a script."""

    def read() -> list[str]:
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{site.url}v1/jobs/{job}/events", headers={"Accept": "application/x-ndjson"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return [json.loads(line)["id"] for line in answer.read().splitlines()]

    return await asyncio.to_thread(read)


async def shown(page: Page, handle: JobHandle, site: Site) -> None:
    """The log ends up with every stored event, once, in order."""
    await handle.wait(60)
    await expect(page.locator("#state")).to_have_text("ended: nothing more will come")
    await page.get_by_label("Level").select_option("0")
    expected = (await stored(site, handle.id))[-WINDOW:]
    await expect(page.locator(".line")).to_have_count(len(expected))
    assert await page.evaluate(NUMBERS) == expected


def check_bar(seen: list[list[str]], least: int = 5) -> None:
    """It never goes back, and is at 100 only when the batch is closed."""
    percents = [int(percent.split()[0]) for percent, _ in seen]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    for percent, state in seen:
        if percent.startswith("100"):
            assert state.startswith("completed")
    assert len(percents) >= least, "it did not move"


async def test_a_batch_is_watched_from_start_to_end(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """The bar moves with the counters and is full only at the close; each line is shown once."""
    handle = await submitted(engine, papers=40, seconds=0.4, fail_every=7, hold=True)
    page = await opened(f"#/jobs/{handle.id}?level=0")
    await page.evaluate(RECORD)
    await page.evaluate(NOTIFY)
    await expect(page.locator("#state")).to_have_text("live")
    await page.get_by_role("button", name="Tell me when it ends").click()
    gate.set()
    await shown(page, handle, site)
    await expect(page.locator(".job .badge")).to_have_text("completed with failures")
    check_bar(await page.evaluate("seen"))
    (told,) = await page.evaluate("told")
    assert told.startswith("import-")
    assert told.endswith("completed with failures; 35 of 40 completed, 5 failed")
    await expect(page.locator(".counts")).to_contain_text("40 of 40")
    await expect(page.locator(".counts")).to_contain_text("5 failed")
    await expect(page.locator(".reasons b")).to_have_count(3)
    assert sorted(await page.locator(".reasons b").all_inner_texts()) == ["1", "2", "2"]


async def test_bars_of_the_list_move_by_one_stream(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """Though every look at the list gives what it gave at first; none takes a bar back."""
    handles = [await submitted(engine, papers=n, seconds=0.2, hold=True) for n in (9, 12, 15)]
    page = await opened()
    rows = page.locator(".jobs li")
    await expect(rows).to_have_count(3)
    await expect(rows.first).to_contain_text("0 of 15")
    first = await page.evaluate("fetch('v1/jobs?limit=25').then((answer) => answer.text())")
    await page.route("**/v1/jobs?*", lambda route: route.fulfill(body=first))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await expect(page.locator("#state")).to_have_text("live")
    gate.set()
    for handle in handles:
        await handle.wait(60)
    await expect(page.locator(".jobs .badge")).to_have_text(["completed"] * 3)
    await expect(rows.first).to_contain_text("15 of 15 · 100 %")
    streams = [url for url in asked if "/streams?" in url]
    assert all(url.count("progress") == url.count("s=") for url in streams), streams
    late = await submitted(engine, papers=3, seconds=0)
    await late.wait(60)
    await page.unroute("**/v1/jobs?*")
    await expect(rows).to_have_count(4)


async def test_a_page_is_reloaded_in_mid_run(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """What was there before is there again, and nothing is missing or twice."""
    handle = await submitted(engine, papers=60, seconds=0.5, hold=True)
    page = await opened(f"#/jobs/{handle.id}")
    await expect(page.locator("#state")).to_have_text("live")
    gate.set()
    async for progress in handle.watch(0.05):
        if progress.percent >= 30:
            break
    await page.reload()
    await expect(page.locator(".percent")).to_be_visible()
    await page.evaluate(RECORD)
    await shown(page, handle, site)
    seen = await page.evaluate("seen")
    check_bar(seen, least=1)
    assert int(seen[0][0].split()[0]) >= 30


async def test_the_api_restarts_in_mid_run(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """The page says that it is lost and since when, comes back by itself, and lacks nothing."""
    handle = await submitted(engine, papers=60, seconds=0.5, hold=True)
    page = await opened(f"#/jobs/{handle.id}")
    await page.evaluate(RECORD)
    await expect(page.locator("#state")).to_have_text("live")
    gate.set()
    await expect(page.locator(".counts")).to_contain_text(re.compile(r"[12]\d completed"))
    gate.clear()
    await site.stop()
    await expect(page.locator("#state")).to_contain_text("lost since")
    await expect(page.locator("body.stale")).to_have_count(1)
    await site.start()
    await expect(page.locator("#state")).to_have_text("live")
    await expect(page.locator("body.stale")).to_have_count(0)
    gate.set()
    await shown(page, handle, site)
    check_bar(await page.evaluate("seen"))


async def test_seven_tabs_over_plain_http(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """R79: each loads, for they share one stream; when the tab that holds it goes, another does."""
    handle = await submitted(engine, papers=60, seconds=0.3, hold=True)
    pages = []
    for number in range(7):
        began = time.monotonic()
        page = await opened(f"#/jobs/{handle.id}")
        await expect(page.locator(".counts")).to_be_visible()
        assert time.monotonic() - began < LOAD_SECONDS, f"tab {number + 1}"
        await expect(page.locator("#state")).to_have_text("live")
        await expect(page.locator(".line")).to_have_count(1)
        pages.append(page)
    gate.set()
    await expect(pages[6].locator(".counts")).to_contain_text(re.compile(r"\d\d completed"))
    await pages[0].close()  # it was the first, so it led
    for page in pages[1:]:
        await shown(page, handle, site)


async def test_tabs_share_without_locks(
    opened: Opens, engine: Engine, site: Site, gate: asyncio.Event
) -> None:
    """A page from another machine over plain HTTP has no locks: tabs agree by themselves."""
    handle = await submitted(engine, papers=40, seconds=0.3, hold=True)
    pages = []
    for _ in range(3):
        page = await opened("#/workers")
        await page.add_init_script("delete Navigator.prototype.locks")
        await page.goto(f"{site.url}#/jobs/{handle.id}")
        await page.reload()
        assert not await page.evaluate("'locks' in navigator")
        await expect(page.locator("#state")).to_have_text("live")
        pages.append(page)
    gate.set()
    await pages[0].close()
    for page in pages[1:]:
        await shown(page, handle, site)
