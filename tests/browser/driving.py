"""Chromium and an API process, started and ended; what a page complained of meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, async_playwright, expect

__all__ = ["CHROMIUM", "Site", "Witness", "asks", "chromium", "expect", "free_port"]

expect.set_options(timeout=30_000)  # this machine may have other things to do
ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("FANOUT_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WATCH = """
addEventListener("securitypolicyviolation", (e) =>
  console.error(`CSP violation: ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));
"""
EXPECTED = ("Failed to load resource", "net::ERR_")
"""What Chromium itself says when a server is away, or answers 401."""


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser. Its contexts know nothing of each other, and have seen nothing yet."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Witness:
    """What must not happen in any page of a test."""

    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Requests to anywhere else."""

    async def attend(self, page: Page, site: str) -> Page:
        await page.add_init_script(WATCH)

        async def dismissed(dialog: Any) -> None:
            self.complaints.append(f"dialog: {dialog.message}")
            await dialog.dismiss()

        def said(message: Any) -> None:
            if message.type in {"error", "warning"} and not message.text.startswith(EXPECTED):
                self.complaints.append(f"{message.type}: {message.text}")

        page.on("dialog", dismissed)
        page.on("console", said)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.on(
            "request",
            lambda request: (
                self.foreign.append(request.url)
                if not request.url.startswith((site, "data:", "blob:"))
                else None
            ),
        )
        return page


async def asks(page: Page, verb: str, question: str) -> None:
    """Press a verb's button, read what it will do, and say yes."""
    await page.get_by_role("button", name=verb, exact=True).click()
    await expect(page.locator(".asking.open")).to_contain_text(question)
    await page.locator(".asking.open .danger").click()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Site:
    """One API process, to be stopped and started on the same port."""

    dsn: str
    port: int = field(default_factory=free_port)
    prefix: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}{self.prefix}/"

    async def start(self) -> None:
        self.process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [
                sys.executable,
                "-m",
                "tests.browser.server",
                str(self.port),
                self.prefix,
            ],
            cwd=ROOT,
            env=os.environ | {"DATABASE_URL": self.dsn} | self.environment,
        )
        async with asyncio.timeout(30):
            while True:
                assert self.process.poll() is None, "the API process has ended"
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.write(
                        f"GET {self.prefix}/healthz HTTP/1.1\r\nHost: localhost\r\n"
                        "Connection: close\r\n\r\n".encode()
                    )
                    answer = await reader.read()
                    writer.close()
                    await writer.wait_closed()
                    if b" 200 " in answer[:20]:
                        return
                await asyncio.sleep(0.1)

    async def stop(self, how: int = signal.SIGTERM) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            await asyncio.to_thread(process.wait, 15)
