"""An app whose batches a person would recognise: papers that are read, some of which cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, Literal

from pydantic import BaseModel, Field

from fanout import Document, Engine, Job, PermanentError, Settings

__all__ = ["HOSTILE", "Paper", "Plan", "build"]

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "javascript:alert(3)",
    '"><svg/onload=alert(4)>',
    "\x1b[31mred\x1b[0m \x07bell",
    "safe\u202egpj.exe",
    "zero\u200bwidth \u2066isolate",
    "{{7*7}} ${7*7} <!--",
    "a" * 250,
)
"""What must be text wherever it is shown."""

TITLES = ("Attention", "Sparse", "Causal", "Robust", "Latent", "Neural", "Bayesian", "Quantum")
REASONS = (
    "parser: file is encrypted",
    "parser: file is encrypted",
    "no text found (scanned images)",
    "422 from parser: damaged cross-reference table at byte 88,213",
)


class Options(BaseModel):
    """How a paper is read."""

    language: str = "en"
    pages: int | None = Field(default=None, ge=1, description="at most so many pages")


class Plan(BaseModel):
    """A batch of papers."""

    papers: int = Field(default=20, ge=0, le=100_000, description="how many")
    seconds: float = Field(default=0.2, ge=0, description="each takes about so long")
    fail_every: int = Field(default=0, ge=0, description="one of so many fails; 0: none")
    mode: Literal["plain", "hostile"] = "plain"
    hold: bool = Field(default=False, description="papers wait at the gate")
    parser: bool = Field(default=False, description="papers take turns, two at a time")
    flaky: bool = Field(default=False, description="each paper fails once, and is tried again")
    tags: list[str] = []
    options: Options = Options()


class Paper(BaseModel):
    """The snapshot of one paper."""

    number: int
    title: str
    seconds: float
    fails: bool
    waits: bool = False
    parser: bool = False
    flaky: bool = False
    hostile: str | None = None


def build(
    dsn: str | None = None,
    settings: Settings | None = None,
    gate: asyncio.Event | None = None,
) -> Engine:
    """The engine with its two kinds. Papers of a batch with `hold` wait until `gate` is set."""
    engine = Engine(dsn, settings=settings)

    @engine.job(max_retries=1)
    async def papers_extract(job: Job[Paper]) -> dict[str, object]:
        """Read one paper."""
        paper = job.payload
        async with job.limit("parser", 2) if paper.parser else contextlib.nullcontext():
            if paper.waits and gate is not None:
                await gate.wait()
        job.log(f"{paper.title}: opened, {paper.number * 37 % 40 + 3} pages")
        steps = 3
        for step in range(1, steps + 1):
            await asyncio.sleep(paper.seconds / steps * random.uniform(0.5, 1.5))
            job.progress(step, steps)
        _say(job, paper)
        pages = paper.number * 37 % 40 + 3
        job.add(pages=pages, cost=pages / 100)
        if paper.flaky and job.attempt == 1:
            raise ConnectionError("parser: connection reset")
        if paper.fails:
            raise PermanentError(paper.hostile or REASONS[paper.number % len(REASONS)])
        characters = paper.number * 7919 % 60_000 + 1200
        job.log(f"{characters:,} characters")
        return {"characters": characters, "title": paper.hostile or paper.title}

    @engine.job
    async def papers_batch(job: Job[Plan]) -> dict[str, int]:
        """Fan out over the papers."""
        plan = job.payload
        job.log(f"selected {plan.papers} papers")
        await job.fan_out(papers_extract, [_document(plan, n) for n in range(plan.papers)])
        return {"papers": plan.papers}

    @engine.job
    async def papers_report(job: Job[Any]) -> str:
        """What follows a batch."""
        return "written"

    return engine


def _say(job: Job[Paper], paper: Paper) -> None:
    if paper.hostile is not None:
        for level in ("info", "warning", "error"):
            job.log(paper.hostile, level=level)
    if paper.number % 17 == 5:
        job.log("429 from parser, again in 20 s", level="warning")


def _document(plan: Plan, number: int) -> Document:
    hostile = HOSTILE[number % len(HOSTILE)] if plan.mode == "hostile" else None
    title = f"{TITLES[number % len(TITLES)]} methods {number}"
    fails = bool(plan.fail_every) and number % plan.fail_every == plan.fail_every - 1
    key = f"paper-{number:05d}" if hostile is None else f"{number:03d} {hostile}"
    paper = Paper(
        number=number,
        title=title,
        seconds=plan.seconds,
        fails=fails,
        waits=plan.hold,
        parser=plan.parser,
        flaky=plan.flaky,
        hostile=hostile,
    )
    return Document(key, paper)
