"""What a batch can be told: how it closes, when it has failed, what it may cost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Literal, TypedDict

from .errors import UsageError
from .wire import checked_text, encode

__all__ = ["Options", "encode_options"]

PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d+)?) ?%")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
MOST: Final = 2**31 - 1
MOST_BUDGETS: Final = 8
"""So that they always fit into their column."""
LONGEST_SECONDS: Final = 10 * 366 * 86_400.0


class Options(TypedDict, total=False):
    """Keyword arguments of `Engine.submit` about a batch; also the `options` of a kind, which are
    its defaults.
    """

    partition: str
    """Whose share of a limit it uses, a customer's for example: a batch hands it to its children.
    """
    closing: Literal["count", "aggregate"]
    """`count`: the last child closes the batch, at once. `aggregate`: children never touch the
    batch's row; a sweep counts them, every 10 s.
    """
    concurrency: int
    """Children of this batch that may run at once, over all workers."""
    fail_after: int | str
    """So many failed children, or such a share of all ("5 %", judged once all are dispatched), end
    the batch as failed; the rest is cancelled.
    """
    deadline: datetime | timedelta | float
    """A time with a time zone, or seconds from now: what is still open then ends as failed."""
    budget: Mapping[str, float]
    """What `job.add` may sum up to, like {"cost": 50}: a batch that reaches it ends as failed."""
    webhook: str
    """The endpoint (`engine.webhooks`) that is told of its close."""


def encode_options(options: Options) -> str | None:
    """JSON text for `fanout.submit_job`; None: there are none.

    Raises:
        UsageError: names the option and the remedy.
    """
    if not options:
        return None
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise UsageError(
            unknown[0], "there is no such option", f"One of: {', '.join(Options.__annotations__)}"
        )
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            found |= _CHECKS[name](value)
    return encode(found, "options", 4096) if found else None


def _partition(value: object) -> dict[str, Any]:
    return {"partition": _text(value, "partition")}


def _webhook(value: object) -> dict[str, Any]:
    return {"webhook": _text(value, "webhook")}


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(field, f"{value!r} is not a name", "Give some text, or leave it out")
    return checked_text(value, field, 128)


def _closing(value: object) -> dict[str, Any]:
    if value not in ("count", "aggregate"):
        raise UsageError("closing", f"{value!r} is none", "One of: count, aggregate")
    return {"closing": value} if value == "aggregate" else {}


def _concurrency(value: object) -> dict[str, Any]:
    return {"concurrency": _positive(value, "concurrency")}


def _positive(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise UsageError(field, f"{value!r} is not a count", "Give 1 or more")
    return value


def _fail_after(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        share = PERCENT.fullmatch(value.strip())
        if share is None or not 0 < float(share[1]) <= 100:  # noqa: PLR2004 - a percentage
            raise UsageError(
                "fail_after", f"{value!r} is not a share", 'Give a count, or a share like "5 %"'
            )
        return {"fail_after_percent": float(share[1])}
    return {"fail_after": _positive(value, "fail_after")}


def _deadline(value: object) -> dict[str, Any]:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise UsageError(
                "deadline",
                f"{value!r} has no time zone",
                "Give an aware one, like datetime.now(UTC)",
            )
        return {"deadline": value.isoformat()}
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not math.isfinite(seconds)
        or not 0 < seconds <= LONGEST_SECONDS
    ):
        raise UsageError(
            "deadline",
            f"{value!r} is not a time to come",
            "Give a datetime with a time zone, a timedelta, or seconds from now, above 0",
        )
    return {"deadline_seconds": float(seconds)}


def _budget(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise UsageError("budget", f"{value!r} is not a budget", 'Give one like {"cost": 50}')
    if len(value) > MOST_BUDGETS:
        raise UsageError("budget", f"names {len(value)} sums", f"Name {MOST_BUDGETS} at most")
    for name, most in value.items():
        check_amount(name, most, "budget")
        if most <= 0:
            raise UsageError("budget", f"{most!r} {name} allow nothing", "Give more than 0")
    return {
        "budget": {
            name: float(most) if isinstance(most, Decimal) else most for name, most in value.items()
        }
    }


def check_amount(name: object, amount: object, field: str) -> None:
    """Raises UsageError unless `name` can name a sum and `amount` is a finite number."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(
            field,
            f"{name!r} cannot name a sum",
            "Letters, digits and underscores, at most 63, like cost",
        )
    if (
        not isinstance(amount, int | float | Decimal)
        or isinstance(amount, bool)
        or not math.isfinite(amount)
        or abs(float(amount)) > 1e15  # noqa: PLR2004 - beyond it a double skips whole numbers
    ):
        raise UsageError(field, f"{amount!r} {name} is not an amount", "Give a finite number")


_CHECKS: Final[Mapping[str, Any]] = {
    "partition": _partition,
    "closing": _closing,
    "concurrency": _concurrency,
    "fail_after": _fail_after,
    "deadline": _deadline,
    "budget": _budget,
    "webhook": _webhook,
}
