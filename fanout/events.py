"""Events: what a handler says while it runs, as JSON texts of one line, and the envelope in which
NOTIFY carries them.

    log        {"type": "log", "at": ms, "job": id, "key": document, "attempt": n, "level": "info",
        "message": "…"}
    progress   {"type": "progress", …, "done": 3, "of": 12}           the latest of a job wins
    failed     {"type": "failed", …, "message": reason}               after the commit that ended
        the child
    retry      {"type": "retry", …, "message": reason, "delay": s}    after the commit that put it
        back
    dropped    {"type": "dropped", "count": n}                        a full buffer lost lines of
        this stream
    end        {"type": "end", …}                                     written by the database;
        nothing follows it
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_json

from .wire import clipped

if TYPE_CHECKING:
    from .values import Claim

__all__ = [
    "LEVELS",
    "MAX_ENVELOPE_BYTES",
    "encode_event",
    "envelope",
    "event_text",
    "shortened",
    "str_of",
]

LEVELS: Final = ("debug", "info", "warning", "error")
MAX_MESSAGE_BYTES: Final = 256 << 10
MAX_FIELD_BYTES: Final = 4 << 10
MAX_EVENT_BYTES: Final = 320 << 10
MAX_LINE_BYTES: Final = 6000
"""Of an event as watchers get it; the whole is in the table, under its number."""
MAX_ENVELOPE_BYTES: Final = 7000
"""PostgreSQL takes 7,999 bytes; the rest is headroom."""


def encode_event(kind: str, claim: Claim, message: str | None = None, **more: Any) -> bytes:
    """One event of a claim as a JSON text without a line break.

    Never raises for what `message` holds.
    """
    event: dict[str, Any] = {
        "type": kind,
        "at": round(time.time() * 1000),
        "job": claim.id,
        "attempt": claim.attempt,
    }
    if claim.document_key is not None:
        event["key"] = claim.document_key
    event.update(more)
    if message is not None:
        event["message"] = clipped(message, MAX_MESSAGE_BYTES)
        if len(event["message"]) < len(message):
            event["bytes"] = len(message.encode("utf-8", "replace"))
    return to_json(event, inf_nan_mode="null")


def event_text(kind: str, claim: Claim, message: str | None = None, **more: Any) -> bytes:
    """`encode_event` for what user code hands over: what JSON cannot say is said in words."""
    more = {name: value for name, value in more.items() if value is not None and value != {}}
    try:
        text = encode_event(kind, claim, message, **more)
        if len(text) <= MAX_EVENT_BYTES:
            return text
    except (ValueError, UnicodeError, RecursionError):
        pass
    more = {name: clipped(str_of(value), MAX_FIELD_BYTES) for name, value in more.items()}
    return encode_event(kind, claim, message, **more)


def str_of(value: object) -> str:
    """The text of anything; a broken __str__ must not turn a log line into a failure."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - user code's, and of no consequence
        return f"<{type(value).__name__} without a text>"


def dropped_event(count: int) -> bytes:
    """The mark that a full buffer leaves where it lost `count` lines."""
    return to_json({"type": "dropped", "at": round(time.time() * 1000), "count": count})


def envelope(
    stream_id: int,
    generation: int,
    first_number: int,
    count: int,
    body: bytes,
    *,
    closed: bool = False,
    late: frozenset[int] = frozenset(),
    inline: bool = True,
) -> str:
    """The NOTIFY payload for a stored batch, at most 7,000 bytes, always valid JSON.

    The events ride along if they fit, long messages cut at a character and marked `truncated` with
    their full length; else only where they are. Every payload is unique, for it carries numbers:
    NOTIFY folds equal ones.
    """
    head: dict[str, Any] = {"v": 1, "s": stream_id, "g": generation, "f": first_number, "n": count}
    if closed:
        head["c"] = True
    if late:
        head["l"] = sorted(late)
    bare = json.dumps(head, separators=(",", ":"))
    if not inline:
        return bare
    room = MAX_ENVELOPE_BYTES - len(bare) - len(',"b":[]')
    events = b",".join(shortened(line) for line in body.split(b"\n"))
    return bare if len(events) > room else f'{bare[:-1]},"b":[{events.decode()}]}}'


def _cut_line(line: bytes, room: int) -> bytes | None:
    """An event whose message is cut so that the whole has at most `room` bytes as JSON; None: it
    cannot be.
    """
    event: dict[str, Any] = json.loads(line)
    message = event.get("message")
    if not isinstance(message, str):
        return None
    event["message"] = ""
    event["truncated"] = True
    event.setdefault("bytes", len(message.encode()))
    left = room - len(to_json(event))
    if left < 0:
        return None
    event["message"] = _fitting(message, left)
    return to_json(event)


def _fitting(message: str, room: int) -> str:
    """The longest beginning of `message` that has at most `room` bytes in JSON, where quotes and
    controls take more.
    """
    low, high = 0, min(len(message), room)
    while low < high:
        middle = (low + high + 1) // 2
        if len(to_json(message[:middle])) - 2 <= room:
            low = middle
        else:
            high = middle - 1
    return message[:low]


def shortened(line: bytes) -> bytes:
    """A stored event as watchers get it: a message that makes it longer than 6,000 bytes is cut,
    and marked.
    """
    return line if len(line) <= MAX_LINE_BYTES else _cut_line(line, MAX_LINE_BYTES) or line
