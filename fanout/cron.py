"""Schedules: jobs at set times, each once over all pods.

    declared ──▶ next_at passes ──tick──▶ a job with the key cron:NAME:TIME, and the next next_at
                        (one statement: whoever is second finds another next_at)

Any worker ticks, of whatever kinds. Times are read on the wall clock of the schedule's zone, as
Debian's cron does: a time that falls into the hour that is left out in spring comes when that hour
is over, one in the hour that comes twice in autumn comes once; what comes every hour, or every few
minutes, goes on by real time.

What was missed, because no worker lived, by the schedule's rule: `one` job for all of it, for the
last of its times; `skip` it; or `all` of it, the last hundred times at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast, get_args
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from .checks import check_kind, check_max_retries, check_priority
from .errors import UsageError
from .loop import Loop
from .wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .store import Store

__all__ = ["Cron", "Missed", "Schedule", "ScheduleRow", "Schedules"]

Missed = Literal["skip", "one", "all"]

_log = logging.getLogger("fanout.cron")

LOOK_SECONDS: Final = 10.0
"""How late the first time of a schedule that somebody has just added may come."""
LATE_SECONDS: Final = 60.0
"""A time that is older when a worker sees it was missed."""
MOST_MISSED: Final = 100
"""Missed times that the rule `all` makes up for."""
AT_ONCE: Final = 100
"""Schedules of one look."""
FIELDS: Final = 5
_SECOND: Final = timedelta(seconds=1)
_EXAMPLE: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Where an expression is tried."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is submitted when, checked and encoded."""

    name: str
    kind: str
    expression: str
    """Five fields: minute, hour, day of the month, month, day of the week."""
    timezone: str = "UTC"
    """Whose wall clock the fields speak of, like Europe/Berlin."""
    missed: Missed = "one"
    payload: str = "null"
    """JSON text, at most 1,024 bytes."""
    priority: int | None = None
    max_retries: int | None = None
    tenant: str = ""
    options: str | None = None
    """JSON text, see `fanout.options`."""

    def checked(self) -> Self:
        """Itself. Raises UsageError: names what is wrong with it."""
        check_kind(self.name, "name")
        check_kind(self.kind)
        check_priority(self.priority)
        check_max_retries(self.max_retries)
        if self.missed not in get_args(Missed):
            raise UsageError("missed", f"{self.missed!r} is none", "One of: skip, one, all")
        if "deadline" in (decode(self.options) or {}):
            raise UsageError(
                "deadline", "is one time, for all jobs to come", "Give seconds, or a timedelta"
            )
        self.times()
        return self

    def times(self) -> Times:
        """Its times. Raises UsageError: the expression or the time zone is wrong."""
        return Times(self.expression, self.timezone)


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule as the database has it."""

    schedule: Schedule
    declared_by: Literal["code", "operator"]
    enabled: bool
    next_at: datetime
    last_at: datetime | None
    """The time that its last job was for."""
    last_job_id: int | None
    now: datetime
    """The database's time when this was read."""


class Times:
    """The times of an expression in a zone, both ways.

    Raises:
        UsageError: the expression or the zone is wrong.
    """

    def __init__(self, expression: str, timezone: str) -> None:
        if len(expression.split()) != FIELDS:
            raise UsageError(
                "expression",
                f"{expression!r} does not have five fields",
                'Give minute, hour, day of the month, month, day of the week, like "0 7 * * 1-5"',
            )
        self._expression = expression.upper()
        self._zone = _zone(timezone)
        try:
            self.after(_EXAMPLE)
        except CronSimError as bad:
            raise UsageError(
                "expression",
                f"{expression!r}: {str(bad)[:1].lower()}{str(bad)[1:]}",
                "Minute 0-59, hour 0-23, day 1-31, month 1-12, weekday 0-7 (0 and 7: Sunday)",
            ) from None
        except StopIteration:
            raise UsageError(
                "expression", f"{expression!r} never comes", "Give a day that there is"
            ) from None

    def after(self, moment: datetime) -> datetime:
        """The first time later than `moment`, in UTC."""
        # In the hour that comes twice the iterator may begin before `moment`.
        return next(at for at in self._walk(moment) if at > moment)

    def until(self, moment: datetime, most: int) -> list[datetime]:
        """The last times, at most `most`, not later than `moment`; the latest first, in UTC."""
        found = (at for at in self._walk(moment + _SECOND, reverse=True) if at <= moment)
        return list(islice(found, most))

    def _walk(self, moment: datetime, *, reverse: bool = False) -> Iterable[datetime]:
        local = moment.astimezone(self._zone)
        for at in CronSim(self._expression, local, reverse=reverse):
            yield at.astimezone(UTC)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(
            "timezone", f"there is no time zone {name!r}", "Give one like Europe/Berlin, or UTC"
        ) from None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a due schedule does now."""

    run_at: datetime | None
    """The time of its job; None: it was missed, and is passed over."""
    next_at: datetime


def plan(times: Times, missed: str, next_at: datetime, now: datetime) -> Plan:
    """What to do about `next_at`, which has passed by `now`. Pure."""
    due: datetime | None = next_at
    if now - next_at > timedelta(seconds=LATE_SECONDS):
        if missed == "all":
            last = times.until(now, MOST_MISSED)
            due = max(next_at, last[-1]) if len(last) == MOST_MISSED else next_at
        else:
            latest = max([next_at, *times.until(now, 1)])
            late = (now - latest).total_seconds() > LATE_SECONDS
            due = None if missed == "skip" and late else latest
    return Plan(due, times.after(now if due is None else due))


class Schedules:
    """The schedules of one database. Raises DatabaseUnavailable from every method."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def all(self) -> list[ScheduleRow]:
        """All of them, by name."""
        return [_row(row) for row in await self._store.rows("schedules", None)]

    async def get(self, name: str) -> ScheduleRow:
        """One of them. Raises UsageError: there is none of that name."""
        rows = await self._store.rows("schedules", check_kind(name, "name"))
        if not rows:
            raise UsageError("name", f"there is no schedule {name!r}", "List them: fanout cron")
        return _row(rows[0])

    async def declare(self, schedules: Iterable[Schedule]) -> None:
        """What a program's code says, at each of its starts. What an operator has paused stays
        paused, and a schedule of an operator's own stays as it is.
        """
        await self._put(schedules, "code")

    async def add(self, schedule: Schedule) -> ScheduleRow:
        """Add an operator's schedule, or change it.

        Raises:
            UsageError: the name is taken by one that is declared in code.
        """
        await self._put([schedule], "operator")
        row = await self.get(schedule.name)
        if row.declared_by != "operator":
            raise UsageError(
                "name", f"{schedule.name!r} is declared in code", "Change it there, or take another"
            )
        return row

    async def _put(self, schedules: Iterable[Schedule], who: str) -> None:
        items = sorted((one.checked() for one in schedules), key=lambda one: one.name)
        if not items:
            return
        now = (await self._store.rows("schedule_time"))[0]["now"]
        rows = [
            (
                one.name,
                one.kind,
                one.payload,
                one.expression,
                one.timezone,
                one.missed,
                one.priority,
                one.max_retries,
                one.tenant,
                one.options,
                one.times().after(now),
            )
            for one in items
        ]
        columns = [list(column) for column in zip(*rows, strict=True)]
        await self._store.rows("put_schedules", *columns, who)

    async def remove(self, name: str) -> str:
        """Remove one; says who declared it: code declares it anew at its next start.

        Raises UsageError: there is none.
        """
        rows = await self._store.rows("remove_schedule", check_kind(name, "name"))
        if not rows:
            await self.get(name)
        return str(rows[0]["declared_by"])

    async def pause(self, name: str) -> None:
        """No jobs of it until it is resumed. Raises UsageError: there is none."""
        if not await self._store.rows("pause_schedule", check_kind(name, "name")):
            await self.get(name)

    async def resume(self, name: str) -> datetime:
        """Go on with its next time; those that passed meanwhile are not made up for.

        Returns that time. Raises UsageError: there is none.
        """
        while True:
            row = await self.get(name)
            one = row.schedule
            rows = await self._store.rows(
                "resume_schedule",
                name,
                one.times().after(row.now),
                one.expression,
                one.timezone,
            )
            if rows:
                return cast("datetime", rows[0]["next_at"])

    async def run(self, name: str) -> tuple[str, int]:
        """Submit one job of it now: its kind, and its id. Raises UsageError: there is none."""
        rows = await self._store.rows("run_schedule", check_kind(name, "name"))
        if not rows:
            await self.get(name)
        return rows[0]["kind"], rows[0]["job_id"]

    async def soonest(self, limit: int) -> Sequence[Any]:
        """Those whose time comes first: name, expression, timezone, missed, next_at, now."""
        return await self._store.rows("soonest_schedules", limit)

    async def tick(self, row: Any, todo: Plan) -> tuple[str, int | None] | None:
        """Do what is planned about a row of `soonest`: (kind, job id), if this was the first to."""
        rows = await self._store.rows(
            "tick",
            row["name"],
            row["next_at"],
            row["expression"],
            row["timezone"],
            todo.run_at,
            todo.next_at,
        )
        return (rows[0]["kind"], rows[0]["job_id"]) if rows else None


class Cron:
    """The loop that ticks, on every worker. `on_submitted(kind)` is called after each job."""

    def __init__(
        self, store: Store, *, on_submitted: Callable[[str], None] = lambda _kind: None
    ) -> None:
        self.schedules = Schedules(store)
        self._on_submitted = on_submitted
        self.looks = Loop("cron", self.look, LOOK_SECONDS, jitter=0.1)
        self._alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; again is fine."""
        self.looks.start()

    async def stop(self) -> None:
        """End. Again is fine."""
        await self.looks.stop()
        if self._alarm is not None:
            self._alarm.cancel()

    async def look(self) -> None:
        """Tick what is due, and come again when the next one is."""
        unreadable: set[str] = set()
        ticked = True
        rows: list[Any] = []
        while ticked:  # again, for times that were missed
            soonest = await self.schedules.soonest(AT_ONCE)
            rows = [row for row in soonest if row["name"] not in unreadable]
            ticked = False
            for row in (row for row in rows if row["next_at"] <= row["now"]):
                try:
                    ticked |= await self._tick(row)
                except UsageError as error:
                    unreadable.add(row["name"])
                    _log.error("schedule %s cannot be read: %s", row["name"], error)
        readable = [row for row in rows if row["name"] not in unreadable]
        if readable:
            self._come_again((readable[0]["next_at"] - readable[0]["now"]).total_seconds())

    async def _tick(self, row: Any) -> bool:
        """Was this the first to?"""
        times = Times(row["expression"], row["timezone"])
        todo = plan(times, row["missed"], row["next_at"], row["now"])
        done = await self.schedules.tick(row, todo)
        if done is None:
            return False
        kind, job_id = done
        if job_id is None:
            _log.warning("schedule %s: missed times are passed over", row["name"])
        else:
            _log.info("schedule %s: job %d", row["name"], job_id, extra={"job_id": job_id})
            self._on_submitted(kind)
        return True

    def _come_again(self, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if seconds < LOOK_SECONDS:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.05, seconds), self.looks.nudge)


def _row(row: Any) -> ScheduleRow:
    schedule = Schedule(
        row["name"],
        row["kind"],
        row["expression"],
        row["timezone"],
        row["missed"],
        row["payload"],
        row["priority"],
        row["max_retries"],
        row["tenant"],
        row["options"],
    )
    return ScheduleRow(
        schedule,
        row["declared_by"],
        row["enabled"],
        row["next_at"],
        row["last_at"],
        row["last_job_id"],
        row["now"],
    )
