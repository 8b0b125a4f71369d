"""The paid service beside a run of `demo --parser`: a process that lives as long as the run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from fanout.demo.meter import Rules
from fanout.demo.service import Orders
from fanout.demo.terms import Access
from fanout.errors import FanoutError, UsageError

__all__ = ["paid_service", "rules_for"]

START_SECONDS: Final = 60.0
AWAY_PARSES: Final = 8
"""It gives up for as long as so many parses take."""
TIMEOUT_PARSES: Final = 6
"""A call may take as long as so many parses; where a parse takes 15 s that is the 90 s rule."""
LEAST_TIMEOUT_SECONDS: Final = 5.0


def rules_for(documents: int, parse_seconds: float) -> Rules:
    """A service that is away once in the middle of so many documents, as fast as is asked for."""
    usual = Rules()
    faster = usual.parse_seconds / parse_seconds
    return Rules(
        parse_seconds=parse_seconds,
        llm_requests_per_minute=max(1, round(usual.llm_requests_per_minute * faster)),
        llm_tokens_per_minute=max(1, round(usual.llm_tokens_per_minute * faster)),
        away_after=max(1, documents // 2),
        away_seconds=AWAY_PARSES * parse_seconds,
    )


@asynccontextmanager
async def paid_service(rules: Rules, memory: Path) -> AsyncIterator[Access]:
    """Serve while the body runs. `memory` outlives it: what was paid stays paid.

    Raises:
        UsageError: another run is at work with this memory.
        FanoutError: it did not start; it has said why on stderr.
    """
    with memory.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "results",
                f"another demo is at work in {memory.parent}",
                "Wait for it, or name another folder with --results",
            ) from None
        async with _serving(rules, memory) as access:
            yield access


@asynccontextmanager
async def _serving(rules: Rules, memory: Path) -> AsyncIterator[Access]:
    key = secrets.token_urlsafe()
    # A session of its own: Ctrl-C is the demo's, whose workers still wait for answers.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fanout.demo.service"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - it was asked for
    assert process.stdout is not None  # noqa: S101 - it was asked for
    try:
        orders = Orders(key=key, rules=rules, memory=memory)
        with contextlib.suppress(ConnectionError):  # said below
            process.stdin.write(orders.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        async with asyncio.timeout(START_SECONDS):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise FanoutError("the stand-in for the paid service did not start")
        yield Access(
            address=address,
            key=key,
            rules=rules,
            timeout_seconds=max(LEAST_TIMEOUT_SECONDS, TIMEOUT_PARSES * rules.parse_seconds),
        )
    finally:
        process.stdin.close()
        await process.wait()
