"""Which exceptions are which: one table, that a handler can extend.

| what the handler raised | it is |
|---|---|
| what the handler's own `permanent=` / `transient=` names | that |
| PermanentError | permanent |
| TransientError | transient, at its `retry_after` |
| an HTTP error (httpx, aiohttp, requests: a status in it) 408, 425, 429, 5xx | transient, honouring
Retry-After |
| any other HTTP 4xx | permanent |
| UsageError, pydantic.ValidationError: bad input | permanent |
| FileNotFoundError, IsADirectoryError, NotADirectoryError: not found | permanent |
| UnicodeDecodeError: corrupt file | permanent |
| TimeoutError, ConnectionError, and anything else | transient |
| DatabaseUnavailable: the engine's own database | infrastructure: back to pending, no retry used up
    |
| a group: permanent only if everything in it is | |
"""

from __future__ import annotations

import email.utils
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

import pydantic

from .errors import DatabaseUnavailable, PermanentError, TransientError, UsageError

__all__ = ["Blame", "Classified", "classify"]


class Blame(Enum):
    """Whose fault it is, and so what becomes of the job."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class Classified:
    """`retry_after`: seconds that the other side asked us to wait; None: it did not say."""

    blame: Blame
    retry_after: float | None = None


HTTP_STATUSES: Final = range(100, 600)
CLIENT_ERROR: Final = 4
TRANSIENT_STATUSES: Final = frozenset({408, 425, 429})
_PERMANENT: Final = (
    PermanentError,
    UsageError,
    pydantic.ValidationError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    UnicodeDecodeError,
)


def classify(
    error: BaseException,
    *,
    permanent: tuple[type[BaseException], ...] = (),
    transient: tuple[type[BaseException], ...] = (),
) -> Classified:
    """Judge what a handler raised; `permanent` and `transient` are its own, and go first."""
    if permanent and isinstance(error, permanent):
        return Classified(Blame.PERMANENT)
    if transient and isinstance(error, transient):
        return Classified(Blame.TRANSIENT, _retry_after(error))
    if isinstance(error, BaseExceptionGroup):
        return _of_group(
            [
                classify(inner, permanent=permanent, transient=transient)
                for inner in error.exceptions
            ]
        )
    if isinstance(error, DatabaseUnavailable):
        return Classified(Blame.INFRASTRUCTURE)
    if isinstance(error, TransientError):
        return Classified(Blame.TRANSIENT, seconds_of(error.retry_after))
    if isinstance(error, _PERMANENT):
        return Classified(Blame.PERMANENT)
    status = _http_status(error)
    if status is not None and status // 100 == CLIENT_ERROR and status not in TRANSIENT_STATUSES:
        return Classified(Blame.PERMANENT)
    return Classified(Blame.TRANSIENT, _retry_after(error))


def _of_group(inner: list[Classified]) -> Classified:
    blames = {one.blame for one in inner}
    if blames == {Blame.PERMANENT}:
        return Classified(Blame.PERMANENT)
    if Blame.TRANSIENT in blames or Blame.PERMANENT in blames:
        waits = [one.retry_after for one in inner if one.retry_after is not None]
        return Classified(Blame.TRANSIENT, max(waits, default=None))
    return Classified(Blame.INFRASTRUCTURE)


def _http_status(error: BaseException) -> int | None:
    """The status of an HTTP error, wherever the client keeps it: error.response.status_code (httpx,
    requests), error.status (aiohttp), error.status_code (openai, starlette), error.code
    (urllib).
    """
    response = _attribute(error, "response")
    for holder, name in (
        (response, "status_code"),
        (response, "status"),
        (error, "status_code"),
        (error, "status"),
        (error, "code"),
    ):
        value = _attribute(holder, name)
        if isinstance(value, int) and not isinstance(value, bool) and value in HTTP_STATUSES:
            return value
    return None


def _attribute(holder: object, name: str) -> Any:
    """An attribute of a stranger, whose properties may raise what they like: the verdict must not
    be lost to that.
    """
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001 - see above
        return None


def _retry_after(error: BaseException) -> float | None:
    """Seconds from a Retry-After header."""
    for holder in (error, _attribute(error, "response")):
        get = _attribute(_attribute(holder, "headers"), "get")
        try:
            value = get("Retry-After") or get("retry-after")
        except Exception:  # noqa: BLE001 - not headers after all
            value = None
        if (seconds := seconds_of(value)) is not None:
            return seconds
    return None


def seconds_of(value: object) -> float | None:
    """Seconds from now, in either form of Retry-After, or as a handler's author may write it; None:
    not a time.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            pass
        else:
            return None if math.isnan(number) else max(0.0, number)
    try:
        when = email.utils.parsedate_to_datetime(str(value))
        # "-0000" reads as a date without a zone; HTTP knows no other than GMT.
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0.0, (when - datetime.now(UTC)).total_seconds())
    except Exception:  # noqa: BLE001 - a header is anybody's text
        return None
