"""The call log: what handlers really did, kept outside the database.

One append-only file per process, one `os.write` a line, so that a killed process leaves whole
lines. The fence on attempt and token cannot be tested from inside the database: with it dropped
every invariant there stays green.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import asyncpg

from tests.machine.invariants import check

__all__ = ["CallLog", "Calls", "settled"]

FOLDER_VARIABLE: Final = "CHAOS_LOG"


class CallLog:
    """Writes the lines of this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), "at": time.time(), **fields})
        os.write(self._fd, line.encode() + b"\n")

    @classmethod
    def of_environment(cls) -> CallLog:
        return cls(Path(os.environ[FOLDER_VARIABLE]))


class Calls:
    """Reads the lines of all processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, event: str | None = None, pid: int | None = None) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("*.jsonl")):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                if event in (None, line["event"]) and pid in (None, line["pid"]):
                    yield line

    def starts(self, job_id: int | None = None) -> list[dict[str, Any]]:
        """The calls of a job, or all."""
        return [line for line in self.lines("start") if job_id in (None, line["job"])]

    def ends(self, job_id: int | None = None) -> list[dict[str, Any]]:
        return [line for line in self.lines("end") if job_id in (None, line["job"])]

    async def disagreements(self, conn: asyncpg.Connection) -> list[str]:
        """Where what handlers did and what the database says cannot both be true."""
        jobs = {
            row["id"]: row
            for row in await conn.fetch(
                "SELECT id, kind, status, attempt, error_type FROM fanout.job"
            )
        }
        calls = Counter((line["job"], line["attempt"]) for line in self.lines("start"))
        ok = {(line["job"], line["attempt"]) for line in self.lines("end") if line["how"] == "ok"}
        called = defaultdict(set)
        for job_id, attempt in calls:
            called[job_id].add(attempt)
        wrong = [
            f"job {job_id} was called {n} times in attempt {attempt}"
            for (job_id, attempt), n in calls.items()
            if n > 1
        ]
        for job_id, attempts in called.items():
            if job_id not in jobs:
                wrong.append(f"job {job_id} was called and does not exist")
            elif max(attempts) > jobs[job_id]["attempt"]:
                wrong.append(f"job {job_id} was called in attempt {max(attempts)}, never claimed")
        for job_id, row in jobs.items():
            if row["status"] == "completed" and (job_id, row["attempt"]) not in ok:
                wrong.append(f"job {job_id} is completed, its attempt {row['attempt']} is not ok")
            was_run = row["status"] == "failed" and row["error_type"] != "DocumentGone"
            if was_run and not called[job_id]:
                wrong.append(f"job {job_id} failed without a call")
        return wrong


async def settled(conn: asyncpg.Connection, calls: Calls, *, quiet: bool = True) -> None:
    """Everything has drained: counters equal a recount, all is closed once, each follow-up is there
    once and ran, and the call log tells the same story.
    """
    # Where all children have one parent, the planner would scan the whole table for each job.
    await conn.execute("SET enable_seqscan = off")
    assert await check(conn, quiet=quiet) == []
    assert await calls.disagreements(conn) == []
    for row in await conn.fetch(
        "SELECT id, kind FROM fanout.job WHERE follows_id IS NOT NULL AND status = 'completed'"
    ):
        assert len([line for line in calls.ends(row["id"]) if line["how"] == "ok"]) >= 1, row
