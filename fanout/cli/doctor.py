"""`doctor`: is all well, and what to do where it is not. Judging is in `checks`."""

from __future__ import annotations

import asyncio

from rich.text import Text

from fanout.errors import UsageError

from .checks import Check, Level, findings
from .database import Dsn, Schema, found, place
from .examination import examined
from .exits import clean, describe, without_password
from .output import AsJson, console, print_json

__all__ = ["doctor"]

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(dsn: Dsn = None, schema: Schema = None, *, as_json: AsJson = False) -> int:
    """Examine database, schema and workers. Each line says ok, warn or fail, and what to do.

    The exit code is 0 (all ok), 1 (warnings) or 2 (something fails, also: no connection).
    """
    database = found(dsn, schema)
    try:
        checks = findings(asyncio.run(examined(database)), database.settings)
        checks.insert(0, Check("connect", Level.OK, f"connected to {place(database.dsn)}"))
    except UsageError:
        raise
    except Exception as error:
        expected = describe(error)
        if expected is None:
            raise
        checks = [
            Check(
                "connect",
                Level.FAIL,
                without_password(expected[1]),
                f"start the server at {place(database.dsn)}, or name another with --dsn",
            )
        ]
    finally:
        if database.server is not None:
            database.server.release()
    worst = max(check.level for check in checks)
    if as_json:
        print_json({"level": worst.name.lower(), "checks": [check.plain() for check in checks]})
    else:
        for check in checks:
            _print(check)
    return int(worst)


def _print(check: Check) -> None:
    line = Text(f"{check.level.name.lower():<5}", style=STYLES[check.level])
    line.append(f"{check.name:<14}", style="default")
    line.append(clean(check.found), style="default")
    if check.remedy:
        line.append(f"\n{'':<19}→ {clean(check.remedy)}", style="default")
    console.print(line)
