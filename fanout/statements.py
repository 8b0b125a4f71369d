"""The SQL files, loaded once per schema name."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.resources.abc import Traversable

__all__ = ["FOLDERS", "load_migrations", "load_statements"]

FOLDERS: Final = (
    "transitions",
    "reads",
    "workers",
    "events",
    "access",
    "cron",
    "retention",
    "webhooks",
    "alerts",
    "testing",
    "limits",
)
_SCHEMA_PREFIX: Final = re.compile(r"(?<![\w.])fanout\.")
_INCLUDE: Final = re.compile(r"^-- include (\w+)$", re.MULTILINE)


def _folder(name: str) -> Traversable:
    return files("fanout").joinpath("sql", name)


def _in_schema(sql: str, schema: str) -> str:
    return sql if schema == "fanout" else _SCHEMA_PREFIX.sub(f"{schema}.", sql)


@cache
def load_statements(schema: str = "fanout") -> Mapping[str, str]:
    """Name → SQL of every statement the store runs, with includes spliced in, for tables in
    `schema`.

    `schema` is a checked setting, a plain lower-case name; no other text is ever put into SQL.
    """
    texts = {
        entry.name: entry.read_text(encoding="utf-8")
        for folder in FOLDERS
        for entry in _folder(folder).iterdir()
        if entry.name.endswith(".sql")
    }

    def spliced(sql: str) -> str:
        return _INCLUDE.sub(lambda found: spliced(texts[f"{found[1]}.inc.sql"].rstrip()), sql)

    return {
        name.removesuffix(".sql"): _in_schema(spliced(sql), schema).strip()
        for name, sql in sorted(texts.items())
        if not name.endswith(".inc.sql")
    }


@cache
def load_migrations(schema: str = "fanout") -> tuple[tuple[int, str, str], ...]:
    """(version, name, SQL) of every migration, ascending.

    Forward only; a landed file never changes.
    """
    return tuple(
        (
            int(entry.name[:4]),
            entry.name[5:].removesuffix(".sql"),
            _in_schema(entry.read_text(encoding="utf-8"), schema),
        )
        for entry in sorted(_folder("schema").iterdir(), key=lambda entry: entry.name)
        if re.fullmatch(r"\d{4}_\w+\.sql", entry.name)
    )


def statement(name: str, schema: str = "fanout") -> str:
    """The SQL of one statement.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        return load_statements(schema)[name]
    except KeyError:
        raise UsageError(
            "name",
            f"there is no statement {name!r}",
            f"One of: {', '.join(load_statements(schema))}",
        ) from None
