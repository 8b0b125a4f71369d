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


class Hint(NamedTuple):
    """A NOTIFY payload that has our shape."""

    stream_id: int
    generation: int
    first: int
    last: int
    lines: list[bytes]
    """A JSON text for each event, which nobody has read yet; empty: they are in the table."""


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
        stream_id, generation, first, first + count - 1, lines if len(lines) == count else []
    )
