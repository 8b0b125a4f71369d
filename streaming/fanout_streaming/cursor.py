"""Where a reader is in a stream: `generation.number`, the SSE `id` of the last event it has seen.

A reader of several streams has one text for all of them: `12:1.340_13:1.2`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Cursor", "parse_cursor", "parse_cursors"]

MAX_TEXT: Final = 2048
MAX_DIGITS: Final = 18
_CURSOR: Final = re.compile(r"([1-9][0-9]{0,8})\.([0-9]{1,18})", re.ASCII)


class Cursor(NamedTuple):
    """The last event that was seen; number 0: none."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"


def parse_cursor(text: str) -> Cursor | None:
    """The cursor that a text says, or None for everything that is not one."""
    found = _CURSOR.fullmatch(text) if len(text) <= MAX_TEXT else None
    return None if found is None else Cursor(int(found[1]), int(found[2]))


def parse_cursors(text: str) -> dict[int, Cursor]:
    """The cursors of a reader of several streams, by stream; what is not one is left out."""
    if len(text) > MAX_TEXT:
        return {}
    cursors: dict[int, Cursor] = {}
    for part in text.split("_"):
        stream, colon, position = part.partition(":")
        cursor = parse_cursor(position)
        if (
            colon
            and cursor is not None
            and stream.isascii()
            and stream.isdigit()
            and len(stream) <= MAX_DIGITS
        ):
            cursors[int(stream)] = cursor
    return cursors


def join_cursors(cursors: Mapping[int, Cursor]) -> str:
    """One text for several cursors."""
    return "_".join(f"{stream}:{cursor}" for stream, cursor in cursors.items())
