"""`children`: the children of a batch, as a list or for export, a page at a time."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import sys
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from fanout.handle import JobHandle
from fanout.states import Status
from fanout.values import Child

from .database import Dsn, Schema, opened
from .exits import clean
from .jobs import JobId
from .output import AsJson, Listing, console, duration, jsonable, print_json

__all__ = ["Format", "children", "safe_cell"]

PAGE: Final = 500


class Format(StrEnum):
    """How children are written."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


def children(
    job: JobId,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    status: Annotated[Status | None, typer.Option(help="Only in this state.")] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="csv is safe to open in a spreadsheet; jsonl is exact."),
    ] = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """List or export the children of a batch, by document key. Never holds more than a page."""
    write = {Format.TABLE: _table, Format.CSV: _csv, Format.JSONL: _jsonl}[
        Format.JSONL if as_json else form
    ]

    async def read() -> None:
        async with opened(dsn, schema) as engine:
            handle = engine.handle(job)
            await handle.job()  # raises for an id that never was
            await write(_pages(handle, status))

    asyncio.run(read())


async def _pages(handle: JobHandle, status: Status | None) -> AsyncIterator[list[Child]]:
    after: str | None = None
    while page := await handle.children_page(status=status, after_key=after, limit=PAGE):
        yield page
        after = page[-1].document_key


async def _table(pages: AsyncIterator[list[Child]]) -> None:
    listing = Listing(
        "job", "status", "runs", "took", "document", "why", right=["job", "runs", "took"]
    )
    empty = True
    async for page in pages:
        empty = False
        listing.page(
            [
                (
                    child.id,
                    child.status,
                    child.attempt,
                    duration(child.took.total_seconds()) if child.took else "",
                    child.document_key,
                    child.reason or child.error,
                )
                for child in page
            ]
        )
    if empty:
        console.print("no children", markup=False)


COLUMNS: Final = (
    "id", "parent_id", "document_key", "kind", "status", "attempt", "failures", "deaths", "run_at",
    "claimed_at", "finished_at", "took_seconds", "error_type", "error", "reason", "payload",
    "result",
)  # fmt: skip


async def _csv(pages: AsyncIterator[list[Child]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    async for page in pages:
        for child in page:
            row = _plain(child)
            row["payload"], row["result"] = _json_cell(child.payload), _json_cell(child.result)
            writer.writerow([safe_cell(row[column]) for column in COLUMNS])


async def _jsonl(pages: AsyncIterator[list[Child]]) -> None:
    async for page in pages:
        for child in page:
            print_json(_plain(child))


def _plain(child: Child) -> dict[str, Any]:
    plain: dict[str, Any] = jsonable(child)
    return plain | {"took_seconds": jsonable(child.took)}


def _json_cell(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


_FORMULA: Final = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")


def safe_cell(cell: object) -> object:
    """A cell that no spreadsheet takes for a formula: what begins like one gets an apostrophe."""
    if not isinstance(cell, str):
        return cell
    text = clean(cell, one_line=False)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text
