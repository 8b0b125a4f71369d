"""How a command ends: exit codes, and one readable line for everything that can go wrong.

| code | what it says |
|---|---|
| 0 | done; of a job: completed |
| 1 | the job failed or was cancelled; its state does not allow this; something is wrong |
| 2 | bad input: an argument, a setting, a job that is not there, a key that is taken |
| 3 | the database is not available, or its schema is not this program's |
| 4 | the batch completed, but children of it failed |
| 75 | a worker process without a supervisor must be started again |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import os
import re
import sys
from typing import Final

import asyncpg
import typer

from fanout.embedded import EmbeddedPostgresError
from fanout.errors import (
    DatabaseUnavailable,
    FanoutError,
    IdempotencyConflict,
    JobNotFound,
    SchemaMismatch,
    UsageError,
)
from fanout.states import Status

__all__ = ["Exit", "clean", "complain", "describe", "of_outcome"]


class Exit:
    """Exit codes, by name."""

    FINE: Final = 0
    WRONG: Final = 1
    USAGE: Final = 2
    DATABASE: Final = 3
    WITH_FAILURES: Final = 4
    START_AGAIN: Final = os.EX_TEMPFAIL
    INTERRUPTED: Final = 130
    BROKEN_PIPE: Final = 141


EPILOG: Final = (
    "Exit codes: 0 done; 1 the job failed or was cancelled, or something is wrong; 2 bad input; "
    "3 the database is not available; 4 completed, but children failed; 130 Ctrl-C."
)

ClickException: Final = typer.BadParameter.__mro__[2]
"""Of the click that typer uses, which newer versions carry inside."""

# C0 and C1 but tab and newline, and what reorders text: a file name must not steer a terminal.
# And lone surrogates, which cannot be printed.
_STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PASSWORD: Final = re.compile(r"(://[^/@\s:]*):[^/\s]*@|(\bpassword=)[^&\s]+", re.IGNORECASE)


def clean(text: object, *, one_line: bool = True) -> str:
    """`text` fit for a terminal: nothing in it moves the cursor or reorders what follows."""
    shown = _STEERING.sub("\ufffd", str(text))
    return " ".join(shown.split()) if one_line else shown


def without_password(text: str) -> str:
    """`text` with every password of a DSN in it replaced."""
    return _PASSWORD.sub(lambda m: f"{m[1]}:***@" if m[1] else f"{m[2]}***", text)


_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, Exit.USAGE),
    (JobNotFound, Exit.USAGE),
    (IdempotencyConflict, Exit.USAGE),
    (EmbeddedPostgresError, Exit.DATABASE),
    (DatabaseUnavailable, Exit.DATABASE),
    (SchemaMismatch, Exit.DATABASE),
    (FanoutError, Exit.WRONG),
    (asyncpg.PostgresError, Exit.DATABASE),
    (asyncpg.InterfaceError, Exit.DATABASE),
)
"""The first that fits."""
_PREFIXES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (DatabaseUnavailable, "the database is not available: "),
    (asyncpg.PostgresError, "the database refused: "),
    (asyncpg.InterfaceError, "the database refused: "),
)


def describe(error: BaseException) -> tuple[int, str] | None:
    """(exit code, one line) for an error that can be expected; None: it is a defect."""
    if isinstance(error, ClickException):
        message = getattr(error, "format_message", error.__str__)()
        context = getattr(error, "ctx", None)
        more = f" See: {context.command_path} --help" if context is not None else ""
        return Exit.USAGE, f"{message.rstrip('.')}.{more}"
    prefix = next((prefix for kind, prefix in _PREFIXES if isinstance(error, kind)), "")
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    return None if code is None else (code, f"{prefix}{error}")


def complain(error: BaseException) -> int:
    """Say on stderr what went wrong, return the exit code. FANOUT_TRACEBACK=1 raises instead."""
    found = None if os.environ.get("FANOUT_TRACEBACK") == "1" else describe(error)
    if found is None and os.environ.get("FANOUT_TRACEBACK") != "1":
        code = Exit.WRONG
        line = (
            f"{type(error).__name__}: {error}. This is a defect of fanout: "
            "FANOUT_TRACEBACK=1 shows where"
        )
    elif found is None:
        raise error
    else:
        code, line = found
    print(f"fanout: {clean(without_password(line))}", file=sys.stderr)  # noqa: T201 - the CLI's voice
    return code


def of_outcome(status: Status, failed: int) -> int:
    """The exit code of a job that has closed."""
    if status is not Status.COMPLETED:
        return Exit.WRONG
    return Exit.WITH_FAILURES if failed else Exit.FINE
