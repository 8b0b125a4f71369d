"""Downloads: a batch's children, results or failures as CSV or JSON lines, a page at a time."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from fanout import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fanout import Child, JobHandle

__all__ = ["MEDIA_TYPES", "lines_of", "safe_cell"]

MEDIA_TYPES: Final = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}
CHUNK_CHARACTERS: Final = 32 << 10

FORMULA: Final = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""What a cell must not begin with: spreadsheets would run it. The wide forms count too."""

Row = dict[str, Any]

COLUMNS: Final[dict[str, tuple[Status | None, Callable[[Child], Row]]]] = {
    "children": (
        None,
        lambda child: {
            "document_key": child.document_key,
            "status": str(child.status),
            "id": child.id,
            "kind": child.kind,
            "attempt": child.attempt,
            "failures": child.failures,
            "claimed_at": _time(child.claimed_at),
            "finished_at": _time(child.finished_at),
            "took_seconds": child.took.total_seconds() if child.took else None,
            "error_type": child.error_type,
            "error": child.error,
            "reason": child.reason,
        },
    ),
    "results": (
        Status.COMPLETED,
        lambda child: {"document_key": child.document_key, "result": child.result},
    ),
    "failures": (
        Status.FAILED,
        lambda child: {
            "document_key": child.document_key,
            "error_type": child.error_type,
            "error": child.error,
            "reason": child.reason,
            "failures": child.failures,
            "deaths": child.deaths,
            "finished_at": _time(child.finished_at),
        },
    ),
}
"""What → which children, and what of each."""
HEADS: Final = {
    "children": ("document_key", "status", "id", "kind", "attempt", "failures", "claimed_at",
                 "finished_at", "took_seconds", "error_type", "error", "reason"),
    "results": ("document_key", "result"),
    "failures": ("document_key", "error_type", "error", "reason", "failures", "deaths",
                 "finished_at"),
}  # fmt: skip


async def lines_of(handle: JobHandle, what: str, form: str) -> AsyncIterator[bytes]:
    """The file, in pieces of some ten KB; memory holds a page."""
    status, row_of = COLUMNS[what]
    write = _csv_line if form == "csv" else _json_line
    parts = [_csv_line(dict(zip(HEADS[what], HEADS[what], strict=True)))] if form == "csv" else []
    size = 0
    async for child in handle.children(status=status):
        parts.append(write(row_of(child)))
        size += len(parts[-1])
        if size >= CHUNK_CHARACTERS:
            yield _encoded(parts)
            parts, size = [], 0
    yield _encoded(parts)


def _encoded(parts: list[str]) -> bytes:
    return "".join(parts).encode("utf-8", "replace")


def _json_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _csv_line(row: Row) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerow([safe_cell(v) for v in row.values()])
    return buffer.getvalue()


def safe_cell(value: Any) -> str | int | float:
    """A value as a cell that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if value >= 0 else f"'{value}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.replace("\x00", "")
    # Blanks in front do not help: some programs cut them off, and then look.
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA) else text


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
