"""Running commands: in this process where they only read, as processes where they work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fanout.cli import run

ROOT = Path(__file__).parents[2]
APP = "tests.cli.cli_app:engine"


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    def lines(self) -> list[Any]:
        """Its output, read as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def is_readable_error(self) -> bool:
        """One line of its own, and no traceback."""
        own = [line for line in self.err.splitlines() if line.startswith("fanout: ")]
        return len(own) >= 1 and "Traceback" not in self.err


async def until(what: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    """Wait for a fact of the database."""
    async with asyncio.timeout(seconds):
        while not await what():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.02)


async def command(capsys: Any, *arguments: str) -> Said:
    """Run a command in a thread of this process."""
    capsys.readouterr()
    code = await asyncio.to_thread(run, list(arguments))
    captured = capsys.readouterr()
    return Said(code, captured.out, captured.err)


def environment(**more: str) -> dict[str, str]:
    """An environment without what the developer's own would tell the commands."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FANOUT_") and name != "DATABASE_URL"
    }
    return kept | {"PYTHONUNBUFFERED": "1"} | more


async def spawned(*arguments: str, **more: str) -> Process:
    """Start `fanout` as a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fanout", *arguments),
        cwd=ROOT,
        env=environment(**more),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )


async def finished(process: Process, seconds: float = 40) -> Said:
    """Wait for a process to end."""
    async with asyncio.timeout(seconds):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Said(process.returncode, out.decode(), err.decode())


async def program(*arguments: str, **more: str) -> Said:
    """Run `fanout` as a process to its end."""
    return await finished(await spawned(*arguments, **more))


@contextlib.asynccontextmanager
async def worker(dsn: str, *arguments: str, **more: str) -> AsyncIterator[Process]:
    """A `fanout worker` that is ready; killed at the end if the test did not stop it."""
    process = await spawned("worker", "--app", APP, *arguments, DATABASE_URL=dsn, **more)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            said = await process.stdout.readline()
        if said != b"ready\n":
            raise AssertionError((await finished(process)).err)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


def holders_of(home: Path) -> list[psutil.Process]:
    """Processes that have to do with an embedded server's folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(home) in argument for argument in process.info["cmdline"] or ())
    ]


async def nothing_left(home: Path) -> None:
    """The keeper stops the server when its last holder is gone."""
    deadline = time.monotonic() + 15
    while left := holders_of(home):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)
