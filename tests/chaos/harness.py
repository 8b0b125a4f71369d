"""Worker processes to be killed, frozen and restarted, and facts of the database to wait for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from fanout import Engine, Settings
from fanout.values import Progress
from tests.chaos.app import SETTINGS, build
from tests.chaos.calls import FOLDER_VARIABLE, CallLog, Calls

__all__ = ["Fleet", "Process", "closed", "settings_of", "until"]

ROOT = Path(__file__).parents[2]


async def until(conn: asyncpg.Connection, sql: str, *arguments: object, seconds: float = 30) -> Any:
    """Wait until a query gives something that is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := await conn.fetchval(sql, *arguments)):
        if time.monotonic() > deadline:
            rows = await conn.fetch(
                "SELECT status, kind, deaths, failures, count(*), min(id) FROM fanout.job "
                "GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
            )
            raise AssertionError(f"not within {seconds} s: {sql}\n" + "\n".join(map(str, rows)))
        await asyncio.sleep(0.03)
    return value


def settings_of(environment: Mapping[str, str] = SETTINGS, **changes: Any) -> Settings:
    """The settings that worker processes have, for an engine in the test's own process."""
    values: dict[str, Any] = {
        name.removeprefix("FANOUT_").lower(): value for name, value in environment.items()
    }
    return Settings(**{**values, **changes})


@dataclass
class Process:
    """One worker process."""

    popen: subprocess.Popen[bytes]
    name: str
    calls: Calls
    errors: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, signal_number: int) -> None:
        self.popen.send_signal(signal_number)

    async def killed(self) -> None:
        """Kill -9, and it is gone."""
        self.popen.kill()
        await self.ended(10)

    async def ended(self, seconds: float) -> int:
        """Wait for its end; the exit code."""
        deadline = time.monotonic() + seconds
        while (code := self.popen.poll()) is None:
            if time.monotonic() > deadline:
                said = self.errors.read_text()[-3000:]
                raise AssertionError(f"{self.name} did not end in {seconds} s\n{said}")
            await asyncio.sleep(0.02)
        return code

    async def line(self, event: str, seconds: float = 15, **fields: object) -> dict[str, Any]:
        """Wait for a line of its log."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.calls.lines(event, self.pid):
                if all(line.get(name) == value for name, value in fields.items()):
                    return line
            if time.monotonic() > deadline or not self.is_alive:
                said = self.errors.read_text()[-3000:]
                raise AssertionError(f"{self.name}: no line {event} {fields}\n{said}")
            await asyncio.sleep(0.02)


@dataclass
class Fleet:
    """Worker processes on one database, and the log of their calls."""

    dsn: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = Calls(self.folder)

    def spawn(self, name: str = "w", dsn: str | None = None, **environment: str) -> Process:
        """Start one process; it is not up yet."""
        errors = self.folder / f"errors-{len(self.processes)}"
        with errors.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.worker"],
                cwd=ROOT,
                env=os.environ
                | SETTINGS
                | self.environment
                | {
                    "DATABASE_URL": dsn or self.dsn,
                    "CHAOS_NAME": name,
                    FOLDER_VARIABLE: str(self.folder),
                }
                | environment,
                stdout=out,
                stderr=out,
            )
        process = Process(popen, name, self.calls, errors)
        self.processes.append(process)
        return process

    async def up(self, name: str = "w", dsn: str | None = None, **environment: str) -> Process:
        """Start one process and wait until it works."""
        process = self.spawn(name, dsn, **environment)
        await process.line("boot", 30)
        return process

    async def ups(self, n: int, **environment: str) -> list[Process]:
        return list(await asyncio.gather(*(self.up(f"w{i}", **environment) for i in range(n))))

    def engine(self, **changes: Any) -> Engine:
        """An engine in the test's own process, with the same handlers: to submit, not to run."""
        settings = settings_of(SETTINGS | self.environment, **changes)
        return build(self.dsn, CallLog(self.folder), settings)

    @property
    def errors(self) -> str:
        return "".join(process.errors.read_text() for process in self.processes)

    def close(self) -> None:
        """Kill what is left, also what is frozen."""
        for process in self.processes:
            if process.is_alive:
                process.popen.kill()
                process.send(signal.SIGCONT)
            process.popen.wait(10)


async def closed(engine: Engine, job_id: int, seconds: float = 60) -> Progress:
    """Wait until a job is closed, and its follow-up, if any, too."""
    progress = await engine.handle(job_id).wait(seconds)
    async with asyncio.timeout(seconds):
        while True:
            rows = await engine.store._pool.fetch(
                "SELECT 1 FROM fanout.job WHERE follows_id = $1 "
                "AND status IN ('pending', 'processing', 'waiting')",
                job_id,
            )
            if not rows:
                return progress
            await asyncio.sleep(0.03)
