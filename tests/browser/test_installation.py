"""What is shown beside the batches: limits, schedules, what was tried and what it cost."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from fanout import Engine
from fanout.cron import Schedule
from tests.browser.app import HOSTILE, Plan
from tests.browser.conftest import Opens
from tests.browser.driving import asks, expect

pytestmark = pytest.mark.browser


async def test_a_limit_is_seen_and_changed(
    opened: Opens, engine: Engine, gate: asyncio.Event
) -> None:
    """Where a person looks first, in the list, and on a page of its own; a change holds at once."""
    plan = Plan(papers=4, seconds=0, hold=True, parser=True)
    handle = await engine.submit("papers_batch", plan)
    page = await opened(f"#/jobs/{handle.id}")
    sentence = "waiting for parser (2 of 2 in use)"
    await expect(page.locator(".waits")).to_contain_text(sentence)
    await page.get_by_role("link", name="Batches").click()
    await expect(page.locator(".jobs .note")).to_contain_text(sentence)
    await page.get_by_role("link", name="Limits").click()
    row = page.locator("tbody tr", has_text="parser")
    await expect(row.locator("td").nth(1)).to_have_text("2 of 2")
    await expect(row.locator("td").nth(2)).to_have_text("2")
    await page.get_by_label("How many at once: parser").fill("3")
    await row.get_by_role("button", name="Set").click()
    await expect(row.locator("td").nth(1)).to_have_text("3 of 3")
    await expect(row).to_contain_text("an operator")
    await asks(page, "Reset", "What the code says holds again")
    await expect(row.locator("td").nth(1)).to_have_text("3 of 2")
    gate.set()
    await handle.wait(60)


async def test_schedules_are_seen_paused_and_run(opened: Opens, engine: Engine) -> None:
    """When each comes next; off and on again; one now."""
    await engine.schedules.add(
        Schedule("nightly", "papers_batch", "0 3 * * *", "Europe/Berlin", payload='{"papers": 1}')
    )
    page = await opened("#/schedules")
    row = page.locator("tbody tr")
    await expect(row).to_contain_text("0 3 * * * Europe/Berlin")
    await asks(page, "Pause", "No job of it until it is resumed")
    await expect(row).to_contain_text("paused")
    assert not (await engine.schedules.get("nightly")).enabled
    await asks(page, "Resume", "next time")
    await expect(row.get_by_role("button", name="Pause")).to_be_visible()
    await asks(page, "Run now", "Submits one job of papers_batch")
    await row.get_by_role("link").first.click()
    await expect(page.locator("h1")).to_contain_text("papers_batch")


async def test_incidents_stand_above_every_view(opened: Opens, conn: asyncpg.Connection) -> None:
    """While they last; then they are in the list of what was."""
    await conn.execute(
        "INSERT INTO fanout.incident (kind, subject, message) VALUES ('engine_error', $1, $1)",
        HOSTILE[0],
    )
    page = await opened()
    await expect(page.locator("#alerts li")).to_contain_text(HOSTILE[0])
    await page.get_by_role("link", name="Workers").click()
    await expect(page.locator("tbody tr", has_text="engine error")).to_contain_text("lasts")
    await conn.execute("UPDATE fanout.incident SET closed_at = clock_timestamp()")
    await expect(page.locator("tbody tr", has_text="engine error")).not_to_contain_text("lasts")
    await expect(page.locator("#alerts")).to_be_hidden()


async def test_attempts_and_sums_are_shown(opened: Opens, engine: Engine) -> None:
    """What a batch has used, and of its budget; a child's tries, with why each ended."""
    plan = Plan(papers=4, seconds=0, flaky=True, fail_every=4)
    handle = await engine.submit("papers_batch", plan, budget={"pages": 400})
    await handle.wait(60)
    page = await opened(f"#/jobs/{handle.id}")
    # 3 + 40 + 37 + 34 pages, each read twice.
    await expect(page.locator(".sums")).to_contain_text("228 of 400 · 57 %")
    await expect(page.locator(".sums")).to_contain_text("cost2.28")
    failed = await anext(handle.failures())
    await page.goto(page.url.split("#")[0] + f"#/jobs/{failed.id}")
    tries = page.locator(".timeline li")
    await expect(tries).to_have_count(2)
    await expect(tries.first).to_contain_text("failed, tried again")
    await expect(tries.first).to_contain_text("parser: connection reset")
    await expect(tries.last).to_contain_text("failed")
