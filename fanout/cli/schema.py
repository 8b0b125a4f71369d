"""`migrate` and `settings`: what must be true before anything runs."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

import annotated_types

from fanout.embedded import EmbeddedServer
from fanout.migrate import migrate as bring_up_to_date
from fanout.settings import Settings

from .database import Dsn, Schema, found, place, settings_for
from .output import AsJson, Listing, console, print_json

__all__ = ["migrate", "settings"]


def migrate(dsn: Dsn = None, schema: Schema = None) -> None:
    """Create or update the tables. Doing it twice, or from ten machines at once, is fine."""
    database = found(dsn, schema)
    name = database.settings.schema_name
    try:
        report = asyncio.run(
            bring_up_to_date(database.dsn, schema=name, settings=database.settings)
        )
    finally:
        _release(database.server)
    where = f"schema {name} in {place(database.dsn)}"
    console.print(
        f"{where}: is up to date, version {report.after}"
        if report.before == report.after
        else f"{where}: version {report.before} → {report.after}",
        markup=False,
    )


def _release(server: EmbeddedServer | None) -> None:
    if server is not None:
        server.release()


def settings(schema: Schema = None, *, as_json: AsJson = False) -> None:
    """Every setting: its value, unit, reason, and the environment variable that sets it."""
    now = settings_for(schema)
    rows = [
        {
            "name": name,
            "value": getattr(now, name)
            if name != "migrate_on_start"
            else Settings().migrate_on_start,
            "default": field.default,
            "unit": _unit(name, field),
            "environment": f"FANOUT_{name.upper()}",
            "reason": field.description,
        }
        for name, field in Settings.model_fields.items()
    ]
    if as_json:
        for row in rows:
            print_json(row)
        return
    listing = Listing("setting", "value", "unit", "environment", "reason", right=["value"])
    listing.page(
        [
            (
                row["name"],
                f"{_said(row['value'])}{'' if row['value'] == row['default'] else ' *'}",
                row["unit"],
                row["environment"],
                row["reason"],
            )
            for row in rows
        ]
    )
    changed = [row["environment"] for row in rows if row["environment"] in os.environ]
    if changed:
        console.print(f"\n* set by {', '.join(changed)}", markup=False)


BYTES: Final = "_bytes"


def _unit(name: str, field: Any) -> str:
    if name.endswith(BYTES):
        return "bytes"
    above_zero = any(isinstance(mark, annotated_types.Gt) for mark in field.metadata)
    return "s" if field.annotation is float and above_zero else ""


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}"
