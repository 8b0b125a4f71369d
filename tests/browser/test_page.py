"""The page as a person meets it: text of strangers, keyboard, small and dark screens, sign-in."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import BrowserContext, Page

from fanout import Engine, JobHandle
from fanout.access import Access, Scope
from fanout.cron import Schedule
from fanout.limits import Limits
from tests.browser.app import HOSTILE, Options, Plan
from tests.browser.conftest import Opens
from tests.browser.driving import Site, Witness, asks, expect

pytestmark = pytest.mark.browser

DASHBOARD = Path(__file__).parents[2] / "api/fanout_api/dashboard"
MOST_BYTES = 60 * 1024
TRANSFERRED = """
() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(({ name }) => !name.includes("/v1/"))
  .map(({ name, transferSize }) => [name.split("#")[0].split("/").at(-1), transferSize])
"""
MOVES = """
() => [...document.querySelectorAll("main *")].filter((e) => {
  const { transitionDuration, animationName } = getComputedStyle(e);
  return transitionDuration !== "0s" || animationName !== "none";
}).map((e) => e.outerHTML.slice(0, 80))
"""
OUTLINE = "() => getComputedStyle(document.activeElement).outlineStyle"
KEY = "<img src=x onerror=alert(0)> \u202e gnp.exe </script>"
LEAST_CONTRAST = 4.5
TEXTS = """(selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent)"""
CONTRASTS = """
() => {
  const channels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (text) => {
    const [r, g, b] = channels(text).map((v) =>
      (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!text || !e.checkVisibility() || e.disabled) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 30), contrast]);
  }
  return low;
}
"""


async def batch(engine: Engine, key: str, **plan: Any) -> JobHandle:
    """A batch that has ended."""
    handle = await engine.submit("papers_batch", Plan(**{"seconds": 0, **plan}), key=key)
    await handle.wait(60)
    return handle


async def test_a_first_visit_is_small_and_says_how_to_begin(opened: Opens) -> None:
    """60 KB come over the wire, for all views; without a job, three ways to submit one."""
    page = await opened()
    await expect(page.locator(".ways dt")).to_have_count(3)
    await expect(page.locator("#state")).to_have_text("live")
    sizes = dict(await page.evaluate(TRANSFERRED))
    files = {path.name for path in DASHBOARD.iterdir() if path.suffix in {".js", ".css", ".svg"}}
    assert files <= sizes.keys(), "a view is loaded later, and not counted"
    assert sum(sizes.values()) < MOST_BYTES, sizes


async def test_text_of_strangers_is_text(opened: Opens, engine: Engine) -> None:
    """R90: in key, document key, snapshot, log, error and result: shown as it is, never run."""
    handle = await batch(engine, KEY, papers=18, fail_every=2, mode="hostile")
    children = [child async for child in handle.children()]
    page = await opened()
    await expect(page.locator(".jobs .key")).to_have_text(KEY)
    assert await page.evaluate(TEXTS, ".jobs .key") == [KEY]
    await expect(page.locator(".jobs .ctl")).to_have_attribute("data-name", "RLO")

    page = await opened(f"#/jobs/{handle.id}?view=table")
    await expect(page.locator("td a")).to_have_count(18)
    assert await page.evaluate(TEXTS, "td a") == [child.document_key for child in children]
    await expect(page.locator(".line").first).to_be_visible()
    logged = await page.evaluate(TEXTS, ".line .text")
    assert set(HOSTILE) <= set(logged)
    failed = {child.error for child in children if child.error}
    reasons = await page.evaluate(TEXTS, ".reasons li > div > bdi:first-child")
    assert set(reasons) == failed
    assert KEY.split(" ", maxsplit=1)[0] in await page.title()

    for child in children[:9]:
        page = await opened(f"#/jobs/{child.id}")
        await expect(page.locator(".job .key")).to_be_visible()
        assert await page.evaluate(TEXTS, ".job .key") == [child.document_key]
        shown = "".join(await page.evaluate(TEXTS, ".facts pre"))
        if child.error:
            assert child.error in shown
        await page.close()
    for tag in ("img[src=x]", "main script", "svg[onload]"):
        assert await (await opened(f"#/jobs/{handle.id}")).locator(tag).count() == 0


async def test_everything_by_keyboard(opened: Opens, engine: Engine) -> None:
    """From the list to a batch, along its squares to a child, back, and a cancel that asks once."""
    handle = await engine.submit("papers_batch", Plan(papers=60, seconds=2), key="by-hand")
    page = await opened()
    await expect(page.locator(".jobs li")).to_have_count(1)
    for _ in range(20):  # past the header and the filters
        await page.keyboard.press("Tab")
        assert await page.evaluate(OUTLINE) != "none"
        if await page.locator(".jobs a:focus").count():
            break
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_contain_text("by-hand")
    await expect(page.locator(".squares")).to_be_visible()
    await page.locator(".squares").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Home", "ArrowRight"):
        await page.keyboard.press(key)
    await expect(page.locator(".says").last).to_contain_text("paper-00001 · 2 of 60")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_contain_text("paper-00001")
    await page.go_back()
    await expect(page.locator("h1")).to_contain_text("by-hand")
    cancel = page.get_by_role("button", name="Cancel", exact=True)
    await cancel.focus()
    await page.keyboard.press("Enter")
    await expect(
        page.get_by_text(re.compile(r"Cancels \d+ children that have not ended"))
    ).to_be_visible()
    await expect(page.get_by_role("button", name="No", exact=True)).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(cancel).to_be_focused()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    assert (await handle.wait(30)).status == "cancelled"
    await expect(page.locator(".job .badge")).to_have_text("cancelled")


async def test_a_batch_is_steered(opened: Opens, engine: Engine, gate: asyncio.Event) -> None:
    """Paused, given another priority and concurrency, resumed; and what followed its close."""
    handle = await engine.submit(
        "papers_batch",
        Plan(papers=12, seconds=0, hold=True),
        key="steered",
        on_closed="papers_report",
    )
    page = await opened(f"#/jobs/{handle.id}")
    await expect(page.locator(".counts")).to_contain_text("4 running")
    await asks(page, "Pause", "What runs goes on to its end")
    await expect(page.locator(".job .badge")).to_have_text("paused")
    await expect(page.locator(".waits")).to_contain_text("until it is resumed")
    await page.get_by_label("Priority").select_option("1")
    await expect(page.get_by_text("set", exact=True)).to_be_visible()
    assert (await handle.job()).priority == 1
    for text, most in (("2", 2), ("", None)):
        await page.get_by_label("Children at once").fill(text)
        async with page.expect_response("**/concurrency"):
            await page.get_by_role("button", name="Set", exact=True).click()
        assert (await handle.job()).concurrency == most
    await page.get_by_text("Add documents").click()
    await page.get_by_label("Kind", exact=True).fill("papers_extract")
    await page.get_by_label("Documents, a line").fill('{"key": "late"}\n{"key"')
    await page.get_by_role("button", name="Add", exact=True).click()
    await expect(page.get_by_text("Line 2 is not JSON")).to_be_visible()
    assert (await handle.job()).total == 12
    paper = {"number": 12, "title": "A late one", "seconds": 0, "fails": False}
    late = json.dumps({"key": "late", "payload": paper})
    await page.get_by_label("Documents, a line").fill(late)
    await page.get_by_role("button", name="Add", exact=True).click()
    await expect(page.get_by_text("1 document added")).to_be_visible()
    assert (await handle.job()).total == 13
    other = await opened()
    await expect(other.locator(".jobs .badge")).to_have_text("paused")
    await asks(page, "Resume", "Its children start again")
    await expect(page.locator(".job .badge")).to_have_text("running")
    gate.set()
    await handle.wait(60)
    await expect(page.get_by_role("button", name="Pause")).to_be_disabled()
    await expect(page.get_by_role("button", name="Pause")).to_have_attribute(
        "title", "It has ended."
    )
    follow_up = page.locator(".chain a")
    await expect(follow_up).to_contain_text("papers_report")
    await follow_up.click()
    await expect(page.locator(".chain [aria-current]")).to_contain_text("papers_report")


async def test_failures_are_retried_by_reason(opened: Opens, engine: Engine) -> None:
    """A group is retried alone; the batch opens again, and the page follows it to its new end."""
    handle = await batch(engine, "again", papers=20, fail_every=4)
    page = await opened(f"#/jobs/{handle.id}")
    await expect(page.locator("#state")).to_contain_text("ended")
    group = page.locator(".reasons li").first
    await group.get_by_role("button", name="Retry").click()
    await group.get_by_role("button", name="Retry").click()
    await expect(page.get_by_text("will run again")).to_be_visible()
    assert (await handle.wait(20)).generation == 2
    await expect(page.locator("#state")).to_contain_text("ended")
    await expect(page.locator(".job .badge")).to_have_text("completed with failures")
    await page.get_by_role("button", name="Show").first.click()
    await expect(page.locator("td .badge").first).to_have_text("failed")
    assert "reason=" in page.url


async def test_the_address_holds_the_state(opened: Opens, engine: Engine) -> None:
    """A filter, a search and a line can be sent to a colleague."""
    handle = await batch(engine, "sent", papers=30, fail_every=5)
    page = await opened(f"#/jobs/{handle.id}")
    await page.get_by_label("Search the log").fill("paper-00004")
    await expect(page.locator(".line")).to_have_count(2)
    await page.locator(".line .at").first.click()
    assert "q=paper-00004" in page.url
    assert "line=1." in page.url
    copy = await opened(page.url.split("/", 3)[3])
    await expect(copy.locator(".pointed")).to_have_count(1)
    await expect(copy.locator(".pointed")).to_contain_text("paper-00004")
    await copy.close()
    page = await opened("#/?status=failed")
    await expect(page.get_by_text("No batch is like this.")).to_be_visible()
    await page.get_by_role("button", name="Show all").click()
    await expect(page.locator(".jobs li")).to_have_count(1)


async def test_lines_that_were_never_loaded_are_found(opened: Opens, engine: Engine) -> None:
    """A search is of the newest thousand lines, and says so; and of all that is stored."""
    handle = await batch(engine, "long", papers=420)
    page = await opened(f"#/jobs/{handle.id}")
    await expect(page.locator(".line").last).to_contain_text("ended")
    await page.get_by_label("Search the log").fill("SELECTED 420")
    await expect(page.get_by_text(re.compile(r"^0 of [1-9],\d+ lines"))).to_be_visible()
    await page.get_by_role("button", name="search all that is stored").click()
    await expect(page.locator(".line")).to_have_count(1)
    await expect(page.locator(".line")).to_contain_text("selected 420 papers")
    await expect(page.get_by_text("1 of all that is stored")).to_be_visible()


async def test_a_job_is_submitted_with_a_form(opened: Opens, engine: Engine) -> None:
    """The form is made from the kind's schema; what is wrong is said beside it."""
    page = await opened("#/submit?kind=papers_batch")
    await page.get_by_label("papers", exact=True).fill("3")
    await page.get_by_label("seconds", exact=True).fill("0")
    await page.get_by_label("tags", exact=True).fill("one\ntwo\n")
    await page.get_by_label("pages", exact=True).fill("12")
    await page.get_by_label("mode", exact=True).select_option("hostile")
    await page.get_by_text("Key, priority").click()
    await page.get_by_label("Idempotency key").fill("by-form")
    await page.get_by_text("A batch: how many at once").click()
    for label, text in (
        ("Children at once", "2"),
        ("Fails after", "50 %"),
        ("Deadline in seconds", "600"),
        ("Budget", "cost=50 pages=1000"),
        ("Then", "papers_report"),
    ):
        await page.get_by_label(label, exact=True).fill(text)
    await page.get_by_role("button", name="Submit").click()
    await expect(page.locator("h1")).to_contain_text("by-form")
    job = await engine.find("by-form")
    assert job is not None
    row = await job.job()
    assert (row.concurrency, row.fail_after_percent, row.on_closed) == (2, 50, "papers_report")
    assert row.budget == {"cost": 50, "pages": 1000}
    assert row.deadline is not None
    payload = row.payload
    plan = Plan(papers=3, seconds=0, mode="hostile", tags=["one", "two"], options=Options(pages=12))
    assert Plan.model_validate(payload) == plan
    page = await opened("#/submit?kind=papers_batch")
    await page.get_by_label("as JSON", exact=True).check()
    await page.get_by_label("Payload as JSON").fill('{"papers": "' + "x" * 2000 + '"}')
    await expect(page.get_by_text(re.compile(r"of 1024 bytes"))).to_have_class(re.compile("bad"))
    await page.get_by_role("button", name="Submit").click()
    await expect(page.locator(".notice.bad")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_screens(opened: Opens, engine: Engine, scheme: str) -> None:
    """Nothing is wider than a narrow screen, and all text has the contrast of WCAG AA."""
    handle = await batch(engine, "screens", papers=40, fail_every=6)
    child = [child async for child in handle.children()][5]
    await Limits(engine.store).set("parser", concurrency=2)
    await engine.schedules.add(Schedule("nightly", "papers_batch", "0 3 * * *"))
    addresses = (
        "#/",
        f"#/jobs/{handle.id}",
        f"#/jobs/{handle.id}?view=table",
        f"#/jobs/{child.id}",
        "#/workers",
        "#/limits",
        "#/schedules",
        "#/submit",
    )
    for address in addresses:
        page = await opened(address)
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        await expect(page.locator("#state")).not_to_have_text("connecting")
        await expect(page.locator("[data-ready]")).to_have_count(1)
        assert await page.evaluate(CONTRASTS) == [], address
        assert await page.evaluate(MOVES) == [], address
        await page.set_viewport_size({"width": 360, "height": 700})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360, address
        await page.close()


async def test_it_prints(opened: Opens, engine: Engine) -> None:
    """On paper: what is known, the whole log, black on white; nothing that wants a click."""
    handle = await batch(engine, "printed", papers=40, fail_every=6)
    page = await opened(f"#/jobs/{handle.id}")
    await expect(page.locator(".line").last).to_contain_text("ended")
    await page.emulate_media(media="print", color_scheme="dark")
    for unwanted in ("button", "nav", "select", "input"):
        for element in await page.locator(unwanted).all():
            await expect(element).to_be_hidden()
    await expect(page.locator(".counts")).to_be_visible()
    log = page.locator(".log")
    assert await log.evaluate("(box) => box.scrollHeight - box.clientHeight") <= 1
    ground = await page.locator("body").evaluate("(e) => getComputedStyle(e).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert await page.evaluate(CONTRASTS) == []


async def test_errors_have_a_view(opened: Opens) -> None:
    """A job that is not there, an address that is none."""
    page = await opened("#/jobs/4711")
    await expect(page.get_by_role("alert")).to_contain_text("no such job")
    page = await opened("#/nowhere")
    await expect(page.get_by_role("alert")).to_be_visible()


async def test_behind_a_prefix(
    browser: BrowserContext, engine: Engine, database: str, witness: Witness
) -> None:
    """Mounted at /apps/fanout everything is found, with and without the slash at the end."""
    handle = await batch(engine, "mounted", papers=5)
    site = Site(database, prefix="/apps/fanout")
    await site.start()
    try:
        page = await witness.attend(await browser.new_page(), site.url.rstrip("/"))
        await page.goto(site.url.rstrip("/") + f"#/jobs/{handle.id}")
        await expect(page.locator(".counts")).to_contain_text("5 of 5")
        await expect(page.locator(".line").first).to_be_visible()
        assert page.url.startswith(site.url)
    finally:
        await site.stop()
    assert not witness.complaints
    assert not witness.foreign


async def test_signing_in(
    browser: BrowserContext, engine: Engine, database: str, witness: Witness
) -> None:
    """Without a key: a form; with a wrong one: a sentence; who may only look is told why."""
    handle = await batch(engine, "secret", papers=5, fail_every=2)
    _, key = await Access(engine.store).add_key("reader", {Scope.READ})
    site = Site(database, environment={"FANOUT_API_AUTH": "key"})
    await site.start()
    try:
        page: Page = await witness.attend(await browser.new_page(), site.url)
        await page.goto(site.url + f"#/jobs/{handle.id}")
        await page.get_by_label("Key", exact=True).fill("fo_wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_contain_text("not known")
        await page.get_by_label("Key", exact=True).fill(key)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator(".counts")).to_contain_text("5 of 5")
        await expect(page.locator("#state")).to_contain_text("ended")
        for name in ("Cancel", "Retry failed", "Retry"):
            await expect(page.get_by_role("button", name=name, exact=True).first).to_be_disabled()
        await expect(page.locator(".job .actions small")).to_contain_text("scope operate")
        assert key not in await page.evaluate(
            "document.cookie + location.href + JSON.stringify(localStorage)"
        )
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("Key", exact=True)).to_be_visible()
    finally:
        await site.stop()
    assert not witness.complaints
