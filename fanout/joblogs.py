"""Lines of Python's `logging`, and of structlog, that a handler writes, in its job's stream.

logging.getLogger("papers").addHandler(JobLogHandler())
structlog.configure(processors=[…, to_job_stream, …])
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from .events import str_of

if TYPE_CHECKING:
    from .job import Job

__all__ = ["JobLogHandler", "current_job", "to_job_stream"]

TAKEN: Final = frozenset({"message", "self"})
"""Names that `Job.log` has for itself."""

current_job: ContextVar[Job[Any] | None] = ContextVar("fanout_job", default=None)
"""The job whose handler runs here; None outside of one."""


def _level(levelno: int) -> str:
    for least, name in (
        (logging.ERROR, "error"),
        (logging.WARNING, "warning"),
        (logging.INFO, "info"),
    ):
        if levelno >= least:
            return name
    return "debug"


class JobLogHandler(logging.Handler):
    """Sends each record to the stream of the job that wrote it; outside of a job, nowhere."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; not the engine's own, which tell an operator the same."""
        job = current_job.get()
        if job is None or record.name.startswith("fanout."):
            return
        try:
            job.log(self.format(record), level=_level(record.levelno))
        except Exception:  # noqa: BLE001 - logging's own rule: a handler never raises
            self.handleError(record)


def to_job_stream(
    _logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: sends the event to the stream of the job that wrote it, and passes it
    on.
    """
    job = current_job.get()
    if job is not None:
        fields = {
            f"{name}_" if name in TAKEN else str_of(name): value
            for name, value in event.items()
            if name not in {"event", "level"}
        }
        level = {"warn": "warning", "critical": "error", "exception": "error"}.get(method, method)
        job.log(str_of(event.get("event", "")), level=level, **fields)
    return event
