"""`demo --parser` as a person runs it: limits hold, nothing is paid twice, whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from fanout import Progress, Status, UsageError
from fanout.cli import demo_service, demo_summary
from fanout.demo.meter import Stats
from fanout.demo.paid import books
from tests.cli.harness import Said, finished, spawned

PROSE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the warm sun. "
DOCUMENTS = 13
"""Twelve that can be read, and an empty one."""


PATIENCE = 200
"""Seconds for one run: it takes some, and more on a machine that has much else to do."""
pytestmark = pytest.mark.timeout(2.5 * PATIENCE)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "papers"
    folder.mkdir()
    for n in range(DOCUMENTS - 1):
        (folder / f"{n:02}.md").write_text(f"# Paper {n}\n\n{PROSE * (n + 1)}")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def arguments(dsn: str, documents: Path, out: Path, *more: str) -> list[str]:
    return [
        *("demo", "--parser", str(documents), "--dsn", dsn, "--results", str(out)),
        *("--parse-seconds", "0.05", "--port", "0", *more),
    ]


async def program(*more: str) -> Said:
    return await finished(await spawned(*more), PATIENCE)


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def assert_paid_once(said: Said, documents: int) -> None:
    """Both services charged each document once, and the batch added up just that."""
    charged = re.search(r"it charged (\d+) parses, (\d+) summaries, \$([\d.]+), (.+)", said.out)
    assert charged is not None, said.out + said.err
    assert charged.groups()[:2] == (str(documents), str(documents))
    assert charged[4] == "nothing twice"
    added = re.search(r"the batch added up cost ([\d.]+), pages (\d+), tokens ", said.out)
    assert added is not None, said.out
    assert float(added[1]) == pytest.approx(float(charged[3]), abs=1e-4)


async def test_the_limits_hold_and_nothing_is_paid_twice(
    database: str, documents: Path, tmp_path: Path
) -> None:
    """Errors, lost answers and an outage cost attempts, and no document, no slot and no dollar."""
    out = tmp_path / "out"
    first = await program(*arguments(database, documents, out))
    assert first.code == 0, first.err
    assert "Traceback" not in first.err
    assert f"documents: {DOCUMENTS} · completed with failures" in first.out
    assert re.search(r"parser: \d+ calls, at most 2 at once; 429: 0, 503: [1-9]", first.out)
    assert re.search(r"llm: \d+ calls, at most [1-5] at once; 429: 0", first.out)
    assert_paid_once(first, DOCUMENTS - 1)
    lines = {Path(line["document"]).name: line for line in results(out)}
    assert lines["03.md"]["summary"].startswith("Paper 3: ")
    assert lines["empty.txt"]["error"] == "the file is empty"
    assert not list(out.glob(".paid-*"))

    address = re.search(r"the paid service is at (http://\S+)", first.err)
    assert address is not None
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{address[1]}/stats")

    again = await program(*arguments(database, documents, out))
    assert (again.code, "nothing has changed: 12 taken from before" in again.out) == (0, True)
    assert "paid service" not in again.err


async def test_interrupted_and_run_again_it_pays_for_nothing_twice(
    database: str, documents: Path, tmp_path: Path
) -> None:
    """What was paid for and not yet stored comes again by its key; what is stored is not asked."""
    out = tmp_path / "out"
    process = await spawned(*arguments(database, documents, out))
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        async for line in process.stderr:
            if (said := re.search(rb"(\d+) of \d+", line)) and int(said[1]) > 0:
                break
    process.send_signal(signal.SIGINT)
    assert (await finished(process, PATIENCE)).code == 130

    second = await program(*arguments(database, documents, out, "--workers", "1"))
    assert second.code == 0, second.err
    assert "an interrupted run had done" in second.out
    charged = re.search(r"it charged (\d+) parses, (\d+) summaries, .*, (.+)", second.out)
    assert charged is not None, second.out
    assert charged.groups() == ("12", "12", "nothing twice")
    assert len(results(out)) == DOCUMENTS


async def test_two_at_once_in_one_folder_are_one_too_many(tmp_path: Path) -> None:
    """The second would pay a service that does not know what the first one's was paid."""
    memory = tmp_path / ".paid-1.jsonl"
    rules = demo_service.rules_for(10, 0.1)
    async with demo_service.paid_service(rules, memory) as access:
        assert (await books(access)).calls == {}
        with pytest.raises(UsageError, match="another demo is at work"):
            async with demo_service.paid_service(rules, memory):
                pass
    async with demo_service.paid_service(rules, memory) as access:
        assert (await books(access)).paid == {}


async def test_a_budget_ends_the_batch(database: str, documents: Path, tmp_path: Path) -> None:
    """What was spent is told, what is left is cancelled, and the exit code says so."""
    more = ("--budget", "0.03", "--workers", "1")
    said = await program(*arguments(database, documents, tmp_path / "out", *more))
    assert said.code == 1, said.err
    assert f"documents: {DOCUMENTS} · failed" in said.out
    assert "budget" in said.out
    assert "nothing twice" in said.out


def test_the_bill_says_what_went_wrong() -> None:
    """A document that was charged twice, answers that were asked for again, sums that are short."""
    stats = Stats(
        calls={"parser": 9, "llm": 7}, answers={"parser 429": 2, "parser 200": 6, "llm 500": 1},
        faults={"parser no answer": 1}, most_at_once={"parser": 3}, paid={"parser": 6}, cost=0.6,
        paid_twice=1, replayed=1, asked_again=1,
    )  # fmt: skip
    progress = Progress(
        id=1, kind="k", status=Status.COMPLETED, total=6, completed=6, failed=0, cancelled=0,
        processing=0, pending=0, percent=100, rate_per_second=None, eta_seconds=None,
        elapsed_seconds=1, outcome="completed", generation=1, sums={"cost": 0.5},
    )  # fmt: skip
    assert demo_summary.bill(stats, progress) == [
        "parser: 9 calls, at most 3 at once; 429: 2, no answer: 1",
        "llm: 7 calls, at most 0 at once; 429: 0, 500: 1",
        "it charged 6 parses, 0 summaries, $0.6000, 1 documents TWICE",
        "the batch added up cost 0.5",
        "$0.1 was added by attempts that died with their worker",
    ]
