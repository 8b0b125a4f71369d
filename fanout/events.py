"""Events: what a handler says while it runs, as JSON texts of one line, and the envelopes in which
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
        nothing follows it, unless the job is opened again
    reopened   what watchers get in the place of an end that others follow
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json, to_json

from .wire import clipped

if TYPE_CHECKING:
    from collections.abc import Collection

    from .values import Claim

__all__ = [
    "LEVELS",
    "MAX_ENVELOPE_BYTES",
    "Event",
    "as_reopened",
    "as_told",
    "encode_event",
    "envelopes",
    "event_text",
    "inline_lines",
    "lines_of",
    "readable",
    "str_of",
]

LEVELS: Final = ("debug", "info", "warning", "error")
MAX_MESSAGE_BYTES: Final = 256 << 10
MAX_PROGRESS_BYTES: Final = 1 << 10
"""Of a message beside a progress: one is kept for each job, whatever the buffer holds."""
MAX_FIELD_BYTES: Final = 4 << 10
MAX_EVENT_BYTES: Final = 320 << 10
MAX_DIGITS: Final = 4000
"""Python reads no integer of 4,300 digits: what may hold one is read before it is stored."""
MAX_LINE_BYTES: Final = 6000
"""Of an event as watchers get it; the whole is in the table, under its number."""
MAX_ENVELOPE_BYTES: Final = 7000
"""PostgreSQL takes 7,999 bytes; the rest is headroom."""
MAX_ENVELOPES: Final = 8
"""Of one batch. To read the table costs a watcher about as much as to receive so many."""
MARKS_BYTES: Final = 50
INLINE: Final = ',"b":[\n'
BETWEEN: Final = b"\n,\n"
"""Line breaks are white space in JSON, and in no event: the receiver cuts here, and parses each
event once.
"""
LATE: Final = b',"late":true}'
UNREADABLE: Final = b'{"type":"log","level":"error","message":"an event that cannot be read"}'


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job's stream, as a program gets it."""

    stream_id: int
    """The root job's id."""
    id: str
    """`generation.number`: the cursor to go on after it."""
    type: str
    """log, progress, failed, retry, dropped, end, reopened or reset (events were lost here)."""
    data: dict[str, Any]


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
        most = MAX_PROGRESS_BYTES if kind == "progress" else MAX_MESSAGE_BYTES
        event["message"] = clipped(message, most)
        # Four bytes a character at most: only what may have been cut is measured.
        if 4 * len(message) > most and (size := len(message.encode("utf-8", "replace"))) > most:
            event["bytes"] = size
    return to_json(event, inf_nan_mode="null")


def event_text(kind: str, claim: Claim, message: str | None = None, **more: Any) -> bytes:
    """`encode_event` for what user code hands over: what JSON cannot say is said in words.

    Never raises.
    """
    more = {name: value for name, value in more.items() if value is not None and value != {}}
    try:
        text = encode_event(kind, claim, message, **more)
        if len(text) <= MAX_DIGITS or (len(text) <= MAX_EVENT_BYTES and readable(text) is not None):
            return text
    except Exception:  # noqa: BLE001, S110 - values of user code: they are said in words below
        pass
    more = {name: clipped(str_of(value), MAX_FIELD_BYTES) for name, value in more.items()}
    text = encode_event(kind, claim, message, **more)
    if len(text) <= MAX_EVENT_BYTES:
        return text
    # Controls and quotes take up to six bytes in JSON.
    return encode_event(kind, claim, _fitting(message or "", MAX_MESSAGE_BYTES), **more)


def str_of(value: object) -> str:
    """The text of anything; a broken __str__ must not turn a log line into a failure."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - user code's, and of no consequence
        return f"<{type(value).__name__} without a text>"


def dropped_event(count: int) -> bytes:
    """The mark that a full buffer leaves where it lost `count` lines."""
    return to_json({"type": "dropped", "at": round(time.time() * 1000), "count": count})


# -- stored events as watchers get them ----------------------------------------------------------


def readable(line: bytes) -> dict[str, Any] | None:
    """The event that a JSON text says; None: it says none."""
    try:
        try:
            event = from_json(line, allow_inf_nan=False)
        except ValueError:  # perhaps only nested deeper than this parser likes
            event = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def lines_of(body: bytes, count: int) -> list[bytes]:
    """The texts of a stored batch, exactly `count`: numbers hang on it."""
    lines = body.split(b"\n")
    if len(lines) != count:
        lines = (lines + [UNREADABLE] * count)[:count]
    return lines


def as_told(line: bytes, late: Collection[int] = ()) -> tuple[dict[str, Any], bytes]:
    """A stored event and its JSON text as watchers get them, without a line break; never raises.

    A long message is cut at a character and marked `truncated` with its full length; an event of a
    claim that had been given to another worker by then is marked `late`. The same wherever it comes
    from.
    """
    event = readable(line)
    if event is None:
        event, line = readable(UNREADABLE) or {}, UNREADABLE
    elif b"\r" in line or b"\n" in line:
        line = _json(event)
    job_id = event.get("job")
    is_late = bool(late) and isinstance(job_id, int) and job_id in late
    room = MAX_LINE_BYTES - (len(LATE) if is_late else 0)  # told twice, it must not be cut twice
    if len(line) > room:
        line = _cut(event, room)
    if is_late:
        event["late"] = True
        line = line[:-1] + LATE
    return event, line


def as_reopened(raw: bytes) -> bytes:
    """An end that is none any more, for its job was opened again: who watches must go on."""
    event = readable(raw) or {}
    return _json({**event, "type": "reopened"})


def _json(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _cut(event: dict[str, Any], room: int) -> bytes:
    """Shorten an event in place until it has at most `room` bytes as JSON: its message, and if that
    does not do, its fields.
    """
    message = event.get("message")
    message = message if isinstance(message, str) else ""
    event["message"] = ""
    event["truncated"] = True
    event.setdefault("bytes", len(message.encode("utf-8", "replace")))
    if (left := room - len(_json(event))) < 0:
        for name, value in list(event.items()):
            if isinstance(value, dict | list) or (
                isinstance(value, str) and len(value) > MAX_FIELD_BYTES // 4
            ):
                del event[name]
        left = room - len(_json(event))
    event["message"] = _fitting(message, left)
    return _json(event)


def _fitting(message: str, room: int) -> str:
    """The longest beginning of `message` that has at most `room` bytes in JSON, where quotes and
    controls take more.
    """
    low, high = 0, max(0, min(len(message), room))
    while low < high:
        middle = (low + high + 1) // 2
        if len(_quoted(message[:middle])) - 2 <= room:
            low = middle
        else:
            high = middle - 1
    return message[:low]


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")


# -- envelopes -----------------------------------------------------------------------------------


def envelopes(
    stream_id: int,
    generation: int,
    first_number: int,
    count: int,
    body: bytes,
    *,
    closed: bool = False,
    late: Collection[int] = (),
    inline: bool = True,
    marks: tuple[int | None, int | None] = (None, None),
) -> list[str]:
    """The NOTIFY payloads for a stored batch, each at most 7,000 bytes and valid JSON.

    The events ride along, in one envelope or in a few; else one says only where they are. Every
    payload is unique, for it carries numbers: NOTIFY folds equal ones. `marks`: of the batch before
    this one, and of this one; without them, watchers look into the table.
    """
    bare = _head(stream_id, generation, first_number, count, closed=closed) + "}"
    most = MAX_ENVELOPES * MAX_ENVELOPE_BYTES
    before, mark = marks
    if not inline or (len(body) > most and count > MAX_ENVELOPES):
        return [bare]
    room = MAX_ENVELOPE_BYTES - len(bare) - len(INLINE) - len("\n]") - MARKS_BYTES - 20
    groups: list[list[bytes]] = [[]]
    size = 0
    for line in lines_of(body, count):
        # Most stand as they are told; the receiver reads each in any case.
        text = line if len(line) <= MAX_LINE_BYTES and not late else as_told(line, late)[1]
        if size + len(text) > room and groups[-1]:
            groups.append([])
            size = 0
        if len(text) > room or len(groups) > MAX_ENVELOPES:
            return [bare]
        groups[-1].append(text)
        size += len(text) + len(BETWEEN)
    made: list[str] = []
    number = first_number
    for group in groups:
        last = number + len(group) == first_number + count
        head = _head(stream_id, generation, number, len(group), closed=closed and last)
        if mark is not None and before is not None:
            head += f',"m":{mark}' if made else f',"m":{mark},"p":{before}'
        made.append(f"{head}{INLINE}{BETWEEN.join(group).decode()}\n]}}")
        number += len(group)
    return made


def _head(stream_id: int, generation: int, first: int, count: int, *, closed: bool) -> str:
    end = ',"c":true' if closed else ""
    return f'{{"v":1,"s":{stream_id},"g":{generation},"f":{first},"n":{count}{end}'


def inline_lines(payload: str) -> tuple[str, list[bytes]]:
    """The head of an envelope as JSON, and the texts of the events that ride along, as they stand:
    nobody has looked at them yet.
    """
    head, inline, rest = payload.partition(INLINE)
    if not inline or not rest.endswith("\n]}"):
        return payload, []
    return head + "}", rest[:-3].encode("utf-8", "surrogatepass").split(BETWEEN)
