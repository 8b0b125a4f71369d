"""Which files an app's code lies in, and when one changes: a look at their times, no more."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

__all__ = ["Sources"]

SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})
OWN: Final = ("fanout", "fanout_streaming", "fanout_api")
"""Looked at as well where this engine itself is worked on: not where it is installed."""
SUFFIXES: Final = (".py", ".sql")


@dataclass(frozen=True)
class Sources:
    """Folders of code."""

    folders: tuple[Path, ...]

    @classmethod
    def of_app(cls, app: str) -> Self:
        """Where the code of `module:engine` lies: its top-level package, or the folder of a module
        that has none. Imports nothing of it.
        """
        name = app.partition(":")[0].partition(".")[0]
        # As `load_app` will do.
        if os.getcwd() not in sys.path:  # noqa: PTH109 - a string, as in sys.path
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        folders = {
            folder
            for module in (name, *OWN)
            for folder in _folders_of(module)
            if not SKIPPED & set(folder.parts)
        }
        return cls(tuple(sorted(folders)))

    async def changed(self, look_seconds: float) -> str:
        """Wait until a file is changed, new or gone; its path."""
        before = await asyncio.to_thread(self._times)
        while True:
            await asyncio.sleep(look_seconds)
            now = await asyncio.to_thread(self._times)
            if changed := before.items() ^ now.items():
                return min(name for name, _ in changed)

    def _times(self) -> dict[str, int]:
        return {name: time for folder in self.folders for name, time in _times_in(folder)}


def _folders_of(module: str) -> Iterator[Path]:
    if not module:
        return
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    if spec.submodule_search_locations:
        yield from (Path(place).resolve() for place in spec.submodule_search_locations)
    elif spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin).resolve().parent


def _times_in(folder: Path) -> Iterator[tuple[str, int]]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and name[0] != "."]
        for name in files:
            if name.endswith(SUFFIXES):
                path = os.path.join(place, name)  # noqa: PTH118 - thousands, each second
                try:
                    yield path, os.stat(path).st_mtime_ns  # noqa: PTH116 - the same
                except OSError:
                    continue
