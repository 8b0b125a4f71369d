"""`submit`: one job, from a shell."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from typing import Annotated, Any, Final, Literal, cast

import typer
from pydantic_core import from_json

from fanout.engine import Engine
from fanout.errors import UsageError
from fanout.handle import JobHandle
from fanout.options import Options

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
    partition: Annotated[
        str | None, typer.Option(help="Whose share of a limit it uses, a customer's for example.")
    ] = None,
    closing: Annotated[
        Literal["count", "aggregate"] | None,
        typer.Option(
            help="Its last child closes it, or a sweep that counts.", show_default="count"
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Children of it that may run at once.")
    ] = None,
    fail_after: Annotated[
        str | None,
        typer.Option(help='So many failed children, or such a share as "5 %", end it as failed.'),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Still open then, it ends as failed: seconds from now, or a time as of --run-at."
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="A sum that ends it as failed, as cost=50; may be given again.",
        ),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(help="The endpoint that is told of its close, by its name.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch it until it is closed.")] = False,
    as_json: AsJson = False,
) -> int:
    """Submit one job. With --wait the exit code is the job's, as of `fanout watch`."""
    value = parsed(payload)
    due = _time(run_at, "run_at", "or use --delay")
    options = _options(
        partition=partition,
        closing=closing,
        concurrency=concurrency,
        fail_after=_whole(fail_after),
        deadline=_deadline(deadline),
        budget=_budget(budget),
        webhook=webhook,
    )

    async def send() -> int:
        async with opened(dsn, schema) as engine:
            handle = await engine.submit(
                kind, value, key=key, priority=priority, delay=delay, run_at=due, **options
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


def _options(**given: Any) -> Options:
    """What was given; the engine checks it."""
    return cast("Options", {name: value for name, value in given.items() if value is not None})


def _whole(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def _deadline(text: str | None) -> float | datetime | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return _time(text, "deadline", "or seconds from now")


def _budget(given: list[str] | None) -> dict[str, float] | None:
    if not given:
        return None
    budget: dict[str, float] = {}
    for text in given:
        name, _, amount = text.partition("=")
        try:
            budget[name] = float(amount)
        except ValueError:
            raise UsageError(
                "budget", f"{text!r} is not NAME=NUMBER", "Give it as cost=50"
            ) from None
    return budget


def _time(text: str | None, field: str, otherwise: str) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            field,
            f"{text!r} is not a time",
            f"Give it as 2026-11-30T08:00:00+01:00, {otherwise}",
        ) from None
