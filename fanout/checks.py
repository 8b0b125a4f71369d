"""What a job may be called, and the numbers that come with it: checked wherever a job comes in."""

from __future__ import annotations

import re
from typing import Final

from .errors import ConfigurationError, UsageError
from .states import Status

__all__ = [
    "check_concurrency",
    "check_kind",
    "check_limit",
    "check_max_retries",
    "check_priority",
    "check_status",
]

KIND: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
MOST_RETRIES: Final = 1_000_000
MAX_ROWS_A_PAGE: Final = 100_000


def check_kind(name: object, field: str = "kind") -> str:
    """`name` if it can be a kind. Raises ConfigurationError."""
    if not isinstance(name, str) or not KIND.fullmatch(name):
        raise ConfigurationError(
            field,
            f"{name!r} is not a valid name",
            "A kind is letters, digits and underscores, starts with a letter and has at most "
            "63 characters, like papers_extract",
        )
    return name


def check_priority(priority: object) -> None:
    """Raises UsageError unless `priority` is one, or None."""
    if priority is not None and not (_is_count(priority) and priority in range(10)):
        raise UsageError("priority", f"{priority!r} is out of range", "Give 0 (first) to 9 (last)")


def check_concurrency(count: object) -> None:
    """Raises UsageError unless `count` children may run at once, or None: as many as may."""
    if count is not None and not (_is_count(count) and count in range(1, 2**31)):
        raise UsageError(
            "concurrency", f"{count!r} is not a count", "Give 1 or more, or None for no limit"
        )


def check_max_retries(count: object) -> None:
    """Raises UsageError unless `count` is one, or None."""
    if count is not None and not (_is_count(count) and count in range(MOST_RETRIES + 1)):
        raise UsageError(
            "max_retries", f"{count!r} is not a count", f"Give 0 to {MOST_RETRIES:,} retries"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_status(status: Status | str | None) -> Status | None:
    """The status of that name; None for None or "". Raises UsageError."""
    try:
        return Status(status) if status else None
    except ValueError:
        raise UsageError("status", f"{status!r} is none", f"One of: {', '.join(Status)}") from None


def check_limit(limit: int) -> int:
    """`limit` if a page can have so many rows. Raises UsageError."""
    if not _is_count(limit) or limit not in range(1, MAX_ROWS_A_PAGE + 1):
        raise UsageError("limit", f"{limit!r} is out of range", f"Give 1 to {MAX_ROWS_A_PAGE:,}")
    return limit
