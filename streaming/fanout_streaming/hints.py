"""What a NOTIFY payload says. Any role may send one: it is checked, and what is none of ours is
none.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from fanout.events import inline_lines, readable

__all__ = ["Hint", "parsed"]

MAX_HINT_CHARACTERS: Final = 8000
MAX_HINT_EVENTS: Final = 10_000
MAX_NUMBER: Final = 2**62
MAX_MARK: Final = 2**63


class Hint(NamedTuple):
    """A NOTIFY payload that has our shape."""

    stream_id: int
    generation: int
    first: int
    last: int
    lines: list[bytes]
    """A JSON text for each event, which nobody has read yet; empty: they are in the table."""
    mark: int | None
    """Of the batch that they are of."""
    mark_before: int | None
    """Of the batch before it; None: these are not the first of their batch, or none is told."""

    def joins(self, mark: int | None) -> bool:
        """Do its events follow those of a batch with this mark, or belong to that batch?"""
        if self.mark is None or mark is None:
            return False
        return mark == (self.mark if self.mark_before is None else self.mark_before)


def parsed(payload: str) -> Hint | None:
    """The hint that a payload says; None: it is none of ours."""
    if len(payload) > MAX_HINT_CHARACTERS:
        return None
    head, lines = inline_lines(payload)
    said = readable(head.encode("utf-8", "replace"))
    if said is None or said.get("v") != 1:
        return None
    numbers: list[Any] = [said.get(name) for name in ("s", "g", "f", "n")]
    if not all(type(number) is int and 0 < number < MAX_NUMBER for number in numbers):
        return None
    stream_id, generation, first, count = numbers
    if count > MAX_HINT_EVENTS:
        return None
    return Hint(
        stream_id,
        generation,
        first,
        first + count - 1,
        lines if len(lines) == count else [],
        _mark(said.get("m")),
        _mark(said.get("p")),
    )


def _mark(value: object) -> int | None:
    return value if type(value) is int and -MAX_MARK <= value < MAX_MARK else None
