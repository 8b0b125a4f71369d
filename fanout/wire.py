"""JSON at the edge: what is refused here never reaches the database, so no row is ever unstorable
or unreadable.

Refused, each with the path of the culprit: NUL and lone surrogates (PostgreSQL stores neither), NaN
and infinities (also 1e999, which JSON parsers turn into one), integers of more than 4,300 digits
(Python would not read them back), nesting beyond 64 levels, text over a limit in bytes.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import TypeAdapter

__all__ = ["Json", "checked_text", "clipped", "decode", "encode"]

Json = Any
"""What JSON can say:

None, bool, int, float, str, list, dict with str keys. Also what pydantic turns into it.
"""

MAX_DEPTH: Final = 64
MAX_INT_DIGITS: Final = 4300
_PYDANTIC_REMEDY: Final = "Use a pydantic model, a dataclass, or what JSON can say"


def encode(value: Any, field: str, limit: int, adapter: TypeAdapter[Any] | None = None) -> str:
    """JSON text of `value`, at most `limit` bytes of UTF-8.

    `adapter` knows its type; None: plain JSON.

    Raises:
        UsageError: it cannot be said in JSON, or PostgreSQL or Python could not read it back; names
            the path.
    """
    try:
        raw = (
            to_json(value, inf_nan_mode="constants")
            if adapter is None
            else adapter.dump_json(value)
        )
    except (PydanticSerializationError, ValueError, RecursionError, UnicodeError) as refused:
        _look_for_culprit(value, field)
        raise UsageError(
            field, f"cannot be written as JSON: {_first_line(refused)}", _PYDANTIC_REMEDY
        ) from None
    if len(raw) > limit:
        raise UsageError(
            field,
            f"has {len(raw)} bytes of JSON, the limit is {limit}",
            "Store the data elsewhere and pass its id",
        )
    if b"null" in raw:
        # A model writes NaN as null, and would not read that back as a number.
        _look_for_culprit(
            to_jsonable_python(value)
            if adapter is None
            else adapter.dump_python(value, mode="json"),
            field,
        )
    # The quick look. Only what is suspicious is walked in Python.
    if (
        b"\\u0000" in raw
        or b"NaN" in raw
        or b"Infinity" in raw
        or raw.count(b"[") + raw.count(b"{") > MAX_DEPTH
        or len(raw) > MAX_INT_DIGITS
    ):
        _look_for_culprit(_parsed(raw, field), field)
    return raw.decode()


def decode(text: str | None) -> Any:
    """The value of stored JSON text; None for SQL NULL."""
    if text is None:
        return None
    try:
        return from_json(text)
    except (
        ValueError
    ):  # nested deeper than we accept: it came in by SQL, and must still be readable
        return json.loads(text)


def checked_text(text: str, field: str, limit: int) -> str:
    """`text` if it can be stored as a key of 1 to `limit` bytes.

    Raises:
        UsageError: it is empty, too long, or holds a NUL or a lone surrogate.
    """
    if not isinstance(text, str):
        raise UsageError(field, f"is a {type(text).__name__}", "Give a string")
    _check_string(text, field)
    if not 0 < len(text.encode()) <= limit:
        raise UsageError(
            field, f"has {len(text.encode())} bytes", f"Give 1 to {limit} bytes of text"
        )
    return text


def clipped(text: str, limit: int) -> str:
    """`text` made storable and cut to `limit` bytes of UTF-8 at a character, with a mark that says
    how long it was.

    NUL becomes U+2400 and a lone surrogate U+FFFD: an error text must never be the reason that an
    error is lost.
    """
    # UTF-16 knows which surrogates are half a character and which are alone; one U+FFFD for each of
    # those.
    whole = text.replace("\x00", "\u2400").encode("utf-16-le", "surrogatepass")
    clean = whole.decode("utf-16-le", "replace").encode()
    if len(clean) <= limit:
        return clean.decode()
    mark = f" … (cut, {len(clean)} bytes in all)".encode()
    return clean[: max(0, limit - len(mark))].decode("utf-8", "ignore") + mark.decode()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _parsed(raw: bytes, field: str) -> Any:
    try:
        return from_json(raw, allow_inf_nan=True)
    except ValueError as refused:
        raise UsageError(
            field, f"cannot be read back: {_first_line(refused)}", _PYDANTIC_REMEDY
        ) from None


def _look_for_culprit(value: Any, field: str) -> None:
    for path, leaf, depth in _walk(value, field):
        if depth > MAX_DEPTH:
            raise UsageError(
                path,
                f"is nested deeper than {MAX_DEPTH} levels",
                "Flatten it, or store it elsewhere and pass its id",
            )
        if isinstance(leaf, str):
            _check_string(leaf, path)
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            raise UsageError(
                path, f"is {leaf}, which JSON cannot say", "Use null, or a finite number"
            )
        elif isinstance(leaf, int) and leaf.bit_length() > MAX_INT_DIGITS * 3.3219:
            raise UsageError(path, f"has more than {MAX_INT_DIGITS} digits", "Pass it as a string")


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any, int]]:
    """(path, value, depth) of everything in plain data, without recursion: the input may be 200,000
    levels deep.
    """
    todo: list[tuple[str, Any, int]] = [(path, value, 0)]
    while todo:
        where, item, depth = todo.pop()
        yield where, item, depth
        if isinstance(item, dict):
            for key, inner in item.items():
                if isinstance(key, str):
                    yield f"{where} (a key)", key, depth
                todo.append(
                    (
                        f"{where}.{key}" if isinstance(key, str) and key.isprintable() else where,
                        inner,
                        depth + 1,
                    )
                )
        elif isinstance(item, list | tuple):
            todo.extend((f"{where}[{n}]", inner, depth + 1) for n, inner in enumerate(item))


def _check_string(text: str, path: str) -> None:
    if "\x00" in text:
        raise UsageError(path, "holds a NUL character, which PostgreSQL cannot store", "Remove it")
    try:
        text.encode()
    except UnicodeEncodeError as refused:
        raise UsageError(
            path,
            f"holds a lone surrogate at position {refused.start}, which is not text",
            "Decode file names with errors='replace'",
        ) from None
