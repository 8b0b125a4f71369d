"""What a batch leaves behind: one JSON lines file with a line for each document, and the report."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from fanout import Child, JobHandle, Progress, Status

from .report import Failure, Totals, write_report

__all__ = ["REPORT", "RESULTS", "Written", "write_outputs"]

RESULTS: Final = "results.jsonl"
REPORT: Final = "report.md"


class Written(BaseModel):
    """What `demo_report` returns."""

    results: str
    report: str
    read: int = 0
    """Documents that this batch read."""
    unchanged: int = 0
    """Documents whose content an earlier batch had read."""
    duplicates: int = 0
    """Documents of the same content as another one of this batch."""


async def write_outputs(handle: JobHandle, progress: Progress, folder: Path) -> Written:
    """Write both files, each whole or not at all; an older one is replaced. In flat memory.

    Raises:
        OSError: the folder cannot be written to.
    """
    results, report = folder / RESULTS, folder / REPORT
    written = await _write_results(handle, results, report)
    totals = Totals(
        documents=progress.total,
        succeeded=progress.completed,
        failed=progress.failed + progress.cancelled,
        elapsed_seconds=progress.elapsed_seconds,
    )
    await asyncio.to_thread(write_report, _succeeded(results), _failed(results), totals, report)
    return written


async def _write_results(handle: JobHandle, results: Path, report: Path) -> Written:
    results.parent.mkdir(parents=True, exist_ok=True)
    begun_at = (await handle.job()).created_at
    kinds = Counter[str]()
    descriptor, temporary = tempfile.mkstemp(dir=results.parent, prefix=".results-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            async for child in handle.children():
                line = _line(child)
                kinds[_origin(line, begun_at)] += 1
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        await asyncio.to_thread(_publish, Path(temporary), results)
    except BaseException:
        _remove(Path(temporary))
        raise
    return Written(
        results=str(results),
        report=str(report),
        read=kinds["read"],
        unchanged=kinds["unchanged"],
        duplicates=kinds["duplicates"],
    )


def _origin(line: Mapping[str, Any], begun_at: datetime) -> str:
    if line["status"] != Status.COMPLETED:
        return "failed"
    if line["read_at"] is None:
        return "read"
    return "unchanged" if datetime.fromisoformat(line["read_at"]) < begun_at else "duplicates"


def _publish(temporary: Path, results: Path) -> None:
    # mkstemp makes it private; results are for whoever may read the folder.
    temporary.chmod(0o644)
    temporary.replace(results)


def _remove(temporary: Path) -> None:
    temporary.unlink(missing_ok=True)


def _line(child: Child) -> dict[str, Any]:
    head = {"document": child.document_key, "status": str(child.status)}
    if child.status is Status.COMPLETED:
        result: dict[str, Any] = child.result
        return head | result
    name = (child.payload or {}).get("name", child.document_key)
    return head | {"name": name, "error": child.error or child.reason or "it did not end"}


def _lines(results: Path) -> Iterator[dict[str, Any]]:
    with results.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _succeeded(results: Path) -> Iterator[Mapping[str, object]]:
    return (line for line in _lines(results) if line["status"] == Status.COMPLETED)


def _failed(results: Path) -> Iterator[Failure]:
    return (
        Failure(line["name"], line["error"])
        for line in _lines(results)
        if line["status"] != Status.COMPLETED
    )
