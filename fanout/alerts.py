"""Incidents: what is wrong is told once, whoever sees it, and told again when it is over.

Every worker looks; a row in `fanout.incident`, unique while it is open, decides who was first. What
is told:

    batch_stuck          no sign of life for long, or given up
    failure_rate         too many of a batch's documents fail
    no_worker            jobs are due, and no live worker serves their kind
    engine_error         a loop of a worker fails again and again
    notification_queue   it fills: somebody who LISTENs has a transaction open for long

To webhooks by a job that is enqueued in the transaction that opens or closes the incident, to hooks
(`@engine.on_alert`) by one of the workers that have some. An incident begins, and ends, when one
worker has seen it so twice in a row: a restart is none.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from .loop import Loop

if TYPE_CHECKING:
    from uuid import UUID

    from .settings import Settings
    from .store import Store

__all__ = ["Alert", "AlertKind", "Alerts", "Hook"]

_log = logging.getLogger("fanout.alerts")

HOOK_SECONDS: Final = 60.0
"""How long a hook may take; then it is cancelled, and that is logged."""
HOOK_GRACE_SECONDS: Final = 5.0
"""How long a worker that stops waits for hooks: whom they page must not miss it for a deploy."""
TOLD_AFTER_CLOSE: Final = timedelta(minutes=15)
"""How long a batch that has ended badly is an incident."""
KEPT: Final = timedelta(days=90)
PRUNE_SECONDS: Final = 3600.0
PRUNE_STEP: Final = 1000
FAILURES_IN_A_ROW: Final = 5
"""Errors of a loop that are an incident: over some ten seconds."""


class AlertKind(StrEnum):
    """What is wrong."""

    BATCH_STUCK = "batch_stuck"
    FAILURE_RATE = "failure_rate"
    NO_WORKER = "no_worker"
    ENGINE_ERROR = "engine_error"
    NOTIFICATION_QUEUE = "notification_queue"


@dataclass(frozen=True, slots=True)
class Alert:
    """An incident, as it begins or as it has ended."""

    id: int
    kind: AlertKind
    subject: str
    """A job's id, a kind of job, a loop of a worker; empty where there is but one."""
    job_id: int | None
    message: str
    opened_at: datetime
    closed_at: datetime | None

    @property
    def is_open(self) -> bool:
        """Does it last?"""
        return self.closed_at is None


Hook = Callable[[Alert], Awaitable[None] | None]


def alert_of(row: Any) -> Alert:
    """A row of `incidents`."""
    values = dict(row)
    return Alert(kind=AlertKind(values.pop("kind")), **values)


class Alerts:
    """Looks every `alert_interval` seconds, opens and closes incidents, and tells `hooks`.

    `failing()` gives (name, errors in a row, the last one) of this worker's loops; `on_enqueued()`
    is called when jobs that send webhooks may have been enqueued.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        token: UUID,
        worker_name: str,
        *,
        hooks: Sequence[Hook] = (),
        failing: Callable[[], Sequence[tuple[str, int, str]]] = lambda: (),
        on_enqueued: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._token = token
        self._worker_name = worker_name
        self._hooks = hooks
        self._failing = failing
        self._on_enqueued = on_enqueued
        self._seen: frozenset[tuple[str, str, str]] = frozenset()
        self._telling: set[asyncio.Task[None]] = set()
        self._prune_due = 0.0  # time.monotonic()
        self.looks = Loop("alerts", self.check, settings.alert_interval)

    def start(self) -> None:
        """Begin; again is fine."""
        self.looks.start()

    async def stop(self) -> None:
        """End; hooks that run have a few seconds, then they are cancelled. Again is fine."""
        await self.looks.stop()
        if not self._telling:
            return
        _, late = await asyncio.wait(self._telling, timeout=HOOK_GRACE_SECONDS)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def check(self) -> None:
        """One look."""
        arguments = self._arguments()
        seen = frozenset(
            (row["what"], row["kind"], row["subject"])
            for row in await self._store.rows("troubles", *arguments)
        )
        twice, self._seen = seen & self._seen, seen
        for what, statement, level in (
            ("new", "open_incidents", logging.ERROR),
            ("over", "close_incidents", logging.INFO),
        ):
            found = sorted((kind, subject) for which, kind, subject in twice if which == what)
            if found:
                await self._write(statement, arguments, found, level)
        if self._hooks:
            await self._tell()
        await self._prune()

    def _arguments(self) -> tuple[object, ...]:
        """$1 to $9 of `trouble`."""
        settings = self._settings
        failing = [
            (
                f"{name} on {self._worker_name}",
                f"{name} on {self._worker_name} failed {count} times in a row: {error}",
            )
            for name, count, error in self._failing()
            if count >= FAILURES_IN_A_ROW
        ]
        return (
            self._token,
            timedelta(seconds=settings.alert_stuck_after),
            timedelta(seconds=settings.alert_no_worker_after),
            settings.alert_failure_percent / 100,
            settings.alert_failures,
            settings.alert_queue_percent / 100,
            [subject for subject, _ in failing],
            [message for _, message in failing],
            TOLD_AFTER_CLOSE,
        )

    async def _write(
        self,
        statement: str,
        arguments: tuple[object, ...],
        found: list[tuple[str, str]],
        level: int,
    ) -> None:
        rows = await self._store.rows(
            statement, *arguments, [kind for kind, _ in found], [subject for _, subject in found]
        )
        for row in rows:
            alert = alert_of(row)
            _log.log(
                level,
                "%s: %s",
                alert.message if alert.is_open else f"over: {alert.message}",
                alert.kind,
                extra={"incident": alert.id, "job_id": alert.job_id},
            )
        if rows:
            self._on_enqueued()

    async def _tell(self) -> None:
        for row in await self._store.rows("tell_incidents"):
            values = dict(row)
            told_before = values.pop("told_before")
            alert = alert_of(values)
            if told_before == 0:
                self._call_all(
                    Alert(alert.id, alert.kind, alert.subject, alert.job_id, alert.message,
                          alert.opened_at, None)
                )  # fmt: skip
            if not alert.is_open:
                self._call_all(alert)

    def _call_all(self, alert: Alert) -> None:
        """In tasks of their own: a hook that hangs holds nobody up."""
        for hook in self._hooks:
            task = asyncio.create_task(_called(hook, alert), name="fanout alert")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _prune(self) -> None:
        if time.monotonic() >= self._prune_due:
            self._prune_due = time.monotonic() + PRUNE_SECONDS
            await self._store.rows("prune_incidents", KEPT, PRUNE_STEP)


async def _called(hook: Hook, alert: Alert) -> None:
    try:
        async with asyncio.timeout(HOOK_SECONDS):
            if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(
                type(hook).__call__
            ):
                await hook(alert)  # type: ignore[misc] # that is what was asked
            else:
                # A plain function may send mail: not in the loop that runs handlers.
                answer = await asyncio.to_thread(hook, alert)
                if inspect.isawaitable(answer):
                    await answer
    except Exception:  # noqa: BLE001 - whatever it raises is logged, with its traceback
        _log.exception(
            "a hook failed on incident %d, the others are told", alert.id,
            extra={"incident": alert.id},
        )  # fmt: skip
