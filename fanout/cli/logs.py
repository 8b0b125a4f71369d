"""Logs of a worker process: one line a record, with the job, its attempt and the worker on it."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from .exits import clean, without_password

__all__ = ["LogFormat", "LogLevel", "set_up_logs"]

FIELDS: Final = ("worker", "job_id", "attempt", "kind")


class LogFormat(StrEnum):
    """How a record is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """From where on records are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_up_logs(form: LogFormat, level: LogLevel, worker: str) -> None:
    """Write every record of this process to stderr, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form is LogFormat.JSON else Text())
    handler.addFilter(_Worker(worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _Worker(logging.Filter):
    """Puts the process's worker on records that do not know theirs."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "worker"):
            record.worker = self._worker
        return True


class Text(logging.Formatter):
    """For people: time, level, where from, what, then the fields that there are."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback indented below it."""
        at = datetime.fromtimestamp(record.created, UTC)
        fields = "".join(
            f" {name}={clean(value)}"
            for name in FIELDS
            if (value := getattr(record, name, None)) is not None
        )
        line = (
            f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}Z {record.levelname:<8} "
            f"{record.name}: {clean(without_password(record.getMessage()))}{fields}"
        )
        return line + "".join(f"\n    {part}" for part in _trace(record).splitlines())


class Json(logging.Formatter):
    """For machines: one object a line, all fields always there."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        entry: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_password(record.getMessage()),
            **{name: getattr(record, name, None) for name in FIELDS},
        }
        if trace := _trace(record):
            entry["traceback"] = trace
        return json.dumps(entry, ensure_ascii=False, default=str)


def _trace(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    return clean(
        without_password("".join(traceback.format_exception(record.exc_info[1]))), one_line=False
    )
