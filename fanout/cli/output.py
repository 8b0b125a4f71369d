"""What commands print: aligned lists that stream, and JSON with stable names."""

from __future__ import annotations

import dataclasses
import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import UUID

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from .exits import clean

__all__ = [
    "AsJson",
    "Listing",
    "ago",
    "console",
    "duration",
    "jsonable",
    "near",
    "print_json",
    "stamp",
]

AsJson = Annotated[
    bool,
    typer.Option("--json", help="JSON for scripts: one object a line; times are ISO 8601 in UTC."),
]

STYLES: Final = {
    "completed": "green",
    "completed with failures": "yellow",
    "failed": "red",
    "cancelled": "magenta",
    "processing": "cyan",
    "waiting": "cyan",
    "running": "green",
    "stopping": "yellow",
    "lost": "red",
}

console = Console(highlight=False, soft_wrap=True)
"""Stdout, whatever it is at the time. Never give it markup: texts come from documents."""


def jsonable(value: Any) -> Any:
    """`value` as plain JSON: dataclasses by field, times as ISO 8601 UTC, durations as seconds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, UUID) else value


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    text = json.dumps(jsonable(value), ensure_ascii=False)
    # JSON escapes C0 itself; the rest would reach a terminal.
    sys.stdout.write(
        "".join(f"\\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c for c in text) + "\n"
    )


class Listing:
    """Rows under heads, aligned by the first page, printed as they come, cut to a terminal."""

    def __init__(self, *heads: str, right: Sequence[str] = ()) -> None:
        self._heads = heads
        self._right = {heads.index(head) for head in right}
        self._widths: list[int] | None = None

    def page(self, rows: Sequence[Sequence[object]]) -> None:
        """Print some rows; the first ones set the widths."""
        cells = [["" if cell is None else clean(cell) for cell in row] for row in rows]
        if self._widths is None:
            self._widths = [
                max((cell_len(row[n]) for row in [list(self._heads), *cells]), default=0)
                for n in range(len(self._heads))
            ]
            self._print(self._heads, "bold")
        for row in cells:
            self._print(row, None)

    def _print(self, row: Sequence[str], style: str | None) -> None:
        line = Text(style=style or "")
        last = len(row) - 1
        for n, (cell, width) in enumerate(zip(row, self._widths or (), strict=True)):
            room = max(width, cell_len(cell))
            if n == last and n not in self._right:
                padded = cell
            elif n in self._right:
                padded = " " * (room - cell_len(cell)) + cell
            else:
                padded = set_cell_size(cell, room)
            line.append(padded, None if style else STYLES.get(cell))
            line.append("" if n == last else "  ")
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        line.rstrip()
        console.print(line)


def near(path: str) -> str:
    """A path as short as it says where: from here, or from where packages are installed."""
    for folder in (Path.cwd(), Path(sysconfig.get_path("purelib"))):
        if Path(path).is_relative_to(folder):
            return str(Path(path).relative_to(folder))
    return path


def stamp(at: datetime | None) -> str:
    """A time for people, in UTC."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def ago(seconds: float) -> str:
    """How long ago, roughly."""
    return f"{duration(max(0.0, seconds))} ago"


def duration(seconds: float) -> str:
    """A length of time, as short as it stays true."""
    for below, text in (
        (1, f"{seconds * 1000:.0f} ms"),
        (10, f"{seconds:.1f} s"),
        (120, f"{seconds:.0f} s"),
        (600, f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"),
        (7200, f"{seconds / 60:.0f} min"),
        (48 * 3600, f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"),
    ):
        if seconds < below:
            return text
    return f"{seconds / 86_400:.0f} days"
