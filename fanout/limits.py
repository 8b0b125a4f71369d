"""Limits as a person sees and sets them: global over all pods, held by the database.

`kind:papers_extract` limits how many jobs of a kind run at once; any other name is a resource that
handlers ask for by `async with job.limit("parser")`. What an operator sets wins over what the code
declares, field by field, until it is reset.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from .errors import UsageError
from .values import LimitRow

if TYPE_CHECKING:
    from .store import Store

__all__ = ["Bounds", "Limits", "check_limit_name", "encode_bounds", "encode_kind_bounds"]

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
KIND_PREFIX: Final = "kind:"
MOST: Final = 2**31 - 1
FASTEST: Final = 1e9
LONGEST_BURST_SECONDS: Final = 86_400.0


class Bounds(TypedDict, total=False):
    """What a limit bounds. None, or left out: no such limit."""

    concurrency: int | None
    """How many at once, over all pods; 0: none for now."""
    per_partition: int | None
    """How many at once of one partition; jobs without one are one."""
    requests_per_minute: float | None
    weight_per_minute: float | None
    """Tokens, for an LLM: the `weight` of each `job.limit`."""
    burst: float | None
    """Seconds of an unused rate that may be used at once; default 1."""


class Limits:
    """`engine.limits`: list, set and reset. Holds for every claim and grant that begins after it;
    takes no slot away from who has one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list(self) -> list[LimitRow]:
        """All limits, by name, with how many use one and how many wait."""
        return [_limit_row(row) for row in await self._store.rows("limits", None)]

    async def get(self, name: str) -> LimitRow | None:
        """One limit; None: nobody has named it yet."""
        rows = await self._store.rows("limits", check_limit_name(name))
        return _limit_row(rows[0]) if rows else None

    async def set(self, name: str, **bounds: Unpack[Bounds]) -> LimitRow:
        """Bound a limit, from now on and over what the code says; None lifts one of its bounds.
        What is not named stays as it was.

        Raises:
            UsageError: names the field and the remedy; nothing was changed.
        """
        check_limit_name(name)
        if not bounds:
            raise UsageError(
                "limit",
                "nothing to set is given",
                f"Give one of: {', '.join(Bounds.__annotations__)}",
            )
        found = _checked(bounds)
        if name.startswith(KIND_PREFIX) and (unfit := sorted(set(found) - KIND_BOUNDS)):
            raise UsageError(
                unfit[0],
                "a kind has no rate",
                "Limit its concurrency, or ask for a named limit in the handler: job.limit(…)",
            )
        await self._store.rows("set_limit", name, json.dumps(found))
        row = await self.get(name)
        assert row is not None  # noqa: S101 - set right before, and only a reset removes it
        return row

    async def reset(self, name: str) -> bool:
        """Back to what the code says. False: nothing was set."""
        return bool(await self._store.rows("reset_limit", check_limit_name(name)))


def check_limit_name(name: object) -> str:
    """`name`. Raises UsageError if it cannot name a limit."""
    if isinstance(name, str) and NAME.fullmatch(name.removeprefix(KIND_PREFIX)):
        return name
    raise UsageError(
        "name",
        f"{name!r} cannot name a limit",
        "Letters, digits and underscores, at most 63, like parser; for a kind kind:papers_extract",
    )


def encode_bounds(bounds: Bounds) -> str | None:
    """JSON text of what code declares; None: nothing. Raises UsageError."""
    found = {name: value for name, value in _checked(bounds).items() if value is not None}
    return json.dumps(found) if found else None


def encode_kind_bounds(limit: int | None, limit_per_partition: int | None) -> str | None:
    """JSON text of what `@engine.job` declares; None: nothing. Raises UsageError."""
    return encode_bounds({"concurrency": limit, "per_partition": limit_per_partition})


def _checked(bounds: Bounds) -> dict[str, Any]:
    unknown = sorted(set(bounds) - set(Bounds.__annotations__))
    if unknown:
        raise UsageError(
            unknown[0], "a limit has no such bound", f"One of: {', '.join(Bounds.__annotations__)}"
        )
    for name, value in bounds.items():
        if value is not None:
            _check_bound(name, value)
    return dict(bounds)


def _check_bound(name: str, value: object) -> None:
    is_count = name in KIND_BOUNDS
    most = MOST if is_count else LONGEST_BURST_SECONDS if name == "burst" else FASTEST
    if (
        not isinstance(value, int if is_count else int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not 0 <= value <= most
        or (value == 0 and name.endswith("per_minute"))
    ):
        raise UsageError(
            name,
            f"{value!r} is not one",
            "Give a count" if is_count else "Give seconds" if name == "burst" else "Give a rate",
        )


KIND_BOUNDS: Final = frozenset({"concurrency", "per_partition"})


def _limit_row(row: Any) -> LimitRow:
    return LimitRow(
        name=row["name"],
        concurrency=row["concurrency"],
        per_partition=row["per_partition"],
        requests_per_minute=row["requests_per_minute"],
        weight_per_minute=row["weight_per_minute"],
        burst=row["burst"],
        in_use=row["in_use"],
        waiting=row["waiting"],
        next_seconds=row["next_seconds"]
        if row["requests_per_minute"] or row["weight_per_minute"]
        else None,
        set_by="operator" if row["operator"] else "code" if row["code"] else "nobody",
    )
