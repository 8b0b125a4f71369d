"""`submit`: one job, from a shell."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from typing import Annotated, Any, Final

import typer
from pydantic_core import from_json

from fanout.engine import Engine
from fanout.errors import UsageError
from fanout.handle import JobHandle

from .database import Dsn, Schema, opened
from .output import AsJson, console, print_json
from .watch import followed

__all__ = ["submit"]

MOST_BYTES_READ: Final = 1 << 20
"""Far above what a payload may have: enough to say how much too large it is."""


def submit(
    kind: Annotated[str, typer.Argument(help="The handler's name, as papers_batch.")],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAYLOAD]",
            help="JSON, at most 1 KB; - reads it from stdin.",
            show_default="null",
        ),
    ] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key: submitted again with it, it is the same job."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(min=0, max=9, help="0 (first) to 9 (last).", show_default="5")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(help="Not before so many seconds from now.")
    ] = None,
    run_at: Annotated[
        str | None, typer.Option(help="Not before this time, as 2026-11-30T08:00:00+01:00.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch it until it is closed.")] = False,
    as_json: AsJson = False,
) -> int:
    """Submit one job. With --wait the exit code is the job's, as of `fanout watch`."""
    value = parsed(payload)
    due = _time(run_at)

    async def send() -> int:
        async with opened(dsn, schema) as engine:
            handle = await engine.submit(
                kind, value, key=key, priority=priority, delay=delay, run_at=due
            )
            _tell(handle, kind, as_json=as_json)
            return await _wait(engine, handle, as_json=as_json) if wait else 0

    return asyncio.run(send())


def _tell(handle: JobHandle, kind: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"id": handle.id, "kind": kind, "created": handle.created})
    elif handle.created:
        console.print(f"submitted job {handle.id}", markup=False)
    else:
        console.print(
            f"job {handle.id} holds this key already, with the same content", markup=False
        )


async def _wait(engine: Engine, handle: JobHandle, *, as_json: bool) -> int:
    sys.stdout.flush()
    return await followed(engine, handle.id, as_json=as_json)


def parsed(text: str | None) -> Any:
    """The value of a payload given as an argument or on stdin. Raises UsageError."""
    if text is None:
        return None
    if text == "-":
        raw = sys.stdin.buffer.read(MOST_BYTES_READ)
    else:
        # What the shell passed, byte for byte: the parser says where it is not UTF-8.
        raw = text.encode("utf-8", "surrogateescape")
    try:
        return from_json(raw)
    except ValueError as error:
        raise UsageError(
            "payload",
            f"is not JSON: {error}",
            """Quote it for the shell, as '{"ids": [1, 2]}', or give - and pipe it in""",
        ) from None


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            "run_at",
            f"{text!r} is not a time",
            "Give it as 2026-11-30T08:00:00+01:00, or use --delay",
        ) from None
