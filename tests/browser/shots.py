"""Screenshots of every view, or of those named, from a system that runs.

`python -m tests.browser.shots FOLDER [VIEW …]`

Light, dark and narrow. Needs a Chromium; takes about two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from playwright.async_api import BrowserContext

from fanout import Engine, embedded
from fanout.cron import Schedule
from tests.browser.app import Plan, build
from tests.browser.driving import Site, chromium
from tests.engine.running import quick

LOOKS = {
    "light": ({"width": 1100, "height": 900}, "light"),
    "dark": ({"width": 1100, "height": 900}, "dark"),
    "narrow": ({"width": 390, "height": 844}, "light"),
}
SETTLING_SECONDS = 2.5


@contextlib.asynccontextmanager
async def _database() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="fanout-shots-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        server = embedded.acquire(folder / "pg", options={"fsync": "off"})
        with server:
            yield server.dsn()
            server.stop("immediate")


async def _batches(engine: Engine) -> dict[str, str]:
    """Batches of every sort; view name → address."""
    small = await engine.submit("papers_batch", Plan(papers=0, seconds=0), key="nothing-new")
    done = await engine.submit(
        "papers_batch", Plan(papers=320, seconds=0.05, fail_every=23), key="import-2026-10"
    )
    await done.wait(120)
    hostile = await engine.submit(
        "papers_batch",
        Plan(papers=27, seconds=0, fail_every=3, mode="hostile"),
        key="<img src=x onerror=alert(0)> \u202e gnp.exe",
    )
    await hostile.wait(60)
    huge = await engine.submit(
        "papers_batch", Plan(papers=12_000, seconds=0, fail_every=190), key="archive-1996-2025"
    )
    await asyncio.sleep(20)
    stopped = await engine.submit("papers_batch", Plan(papers=50, seconds=5), key="by-mistake")
    await asyncio.sleep(2)
    await stopped.cancel()
    await huge.cancel()
    running = await engine.submit(
        "papers_batch", Plan(papers=200, seconds=2.5, fail_every=14), key="import-2026-11"
    )
    limited = await engine.submit(
        "papers_batch",
        Plan(papers=40, seconds=6, parser=True, flaky=True),
        key="one-at-a-time",
        budget={"cost": 20, "pages": 1200},
        on_closed="papers_report",
    )
    reported = await engine.submit(
        "papers_batch",
        Plan(papers=12, seconds=0.2, flaky=True, fail_every=5),
        key="reported",
        on_closed="papers_report",
        budget={"pages": 700},
    )
    await reported.wait(120)
    paused = await engine.submit("papers_batch", Plan(papers=90, seconds=1), key="tomorrow")
    async for progress in paused.watch(0.1):
        if progress.completed > 20:
            break
    await paused.pause()
    await engine.submit("papers_ocr", key="nobody-serves-it")
    await engine.schedules.add(
        Schedule("nightly", "papers_batch", "0 3 * * *", "Europe/Berlin", payload='{"papers": 1}')
    )
    await engine.schedules.add(Schedule("weekly", "papers_report", "30 7 * * 1"))
    await engine.schedules.pause("weekly")
    retried = await anext(reported.failures())
    failed = await anext(done.failures())
    fine = (await done.children_page(limit=1))[0]
    return {
        "batches": "#/",
        "running": f"#/jobs/{running.id}",
        "closed": f"#/jobs/{done.id}",
        "table": f"#/jobs/{done.id}?view=table&status=failed",
        "huge": f"#/jobs/{huge.id}",
        "cancelled": f"#/jobs/{stopped.id}",
        "empty-batch": f"#/jobs/{small.id}",
        "hostile": f"#/jobs/{hostile.id}?view=table",
        "child-failed": f"#/jobs/{failed.id}",
        "child": f"#/jobs/{fine.id}",
        "child-retried": f"#/jobs/{retried.id}",
        "limited": f"#/jobs/{limited.id}",
        "paused": f"#/jobs/{paused.id}",
        "reported": f"#/jobs/{reported.id}",
        "limits": "#/limits",
        "schedules": "#/schedules",
        "workers": "#/workers",
        "submit": "#/submit?kind=papers_batch",
        "missing": "#/jobs/4711",
    }


async def _take(browser: BrowserContext, url: str, address: str, to: Path) -> None:
    for look, (size, scheme) in LOOKS.items():
        page = await browser.new_page()
        await page.set_viewport_size(size)  # type: ignore[arg-type]
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        await page.goto(url + address)
        await asyncio.sleep(SETTLING_SECONDS)
        await page.screenshot(path=to.with_name(f"{to.name}-{look}.png"), full_page=True)
        await page.close()


async def main(folder: Path, names: set[str]) -> None:
    """Take them all, or those of `names`."""
    folder.mkdir(parents=True, exist_ok=True)
    async with _database() as dsn, chromium() as chrome:
        browser = await chrome.new_context()
        engine = build(dsn, quick())
        async with engine:
            site = Site(dsn)
            await site.start()
            try:
                await _take(browser, site.url, "#/", folder / "first-visit")
                async with engine.worker(concurrency=10, name="pod-1"):
                    views = await _batches(engine)
                    for name, address in views.items():
                        if names and name not in names:
                            continue
                        await _take(browser, site.url, address, folder / name)
                page = await browser.new_page()
                still = await engine.submit("papers_batch", Plan(papers=80, seconds=1), key="slow")
                async with engine.worker(concurrency=4, name="pod-2"):
                    await page.goto(f"{site.url}#/jobs/{still.id}")
                    await asyncio.sleep(6)
                await asyncio.sleep(SETTLING_SECONDS)
                await site.stop()
                await asyncio.sleep(SETTLING_SECONDS)
                await page.screenshot(path=folder / "lost.png")
            finally:
                await site.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "screenshots"), {*sys.argv[2:]}))
