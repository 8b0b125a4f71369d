"""The story of a number: which machine, which versions, which settings, which commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncpg

ROOT: Final = Path(__file__).parents[1]
SERVER_SETTINGS: Final = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_sync_method",
    "wal_level",
    "wal_compression",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "commit_delay",
    "autovacuum",
    "autovacuum_naptime",
    "max_connections",
)
MUST_BE_ON: Final = ("fsync", "synchronous_commit", "full_page_writes")


class NotDurable(RuntimeError):
    """The server would not survive a power cut: its figures mean nothing."""


async def server_settings(connection: asyncpg.Connection) -> dict[str, str]:
    """What was in force. Raises NotDurable."""
    settings = {
        name: str(await connection.fetchval("SELECT current_setting($1)", name))
        for name in SERVER_SETTINGS
    }
    if off := [name for name in MUST_BE_ON if settings[name] != "on"]:
        raise NotDurable(
            f"{', '.join(off)} is not on; a benchmark of a server that may lose commits is none"
        )
    return settings


def versions(postgres: str) -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "postgres": postgres,
        "asyncpg": _version("asyncpg"),
        "uvloop": _version("uvloop"),
        "pydantic": _version("pydantic"),
        "fanout": _version("pgfanout"),
        "fanout_commit": commit(),
    }


def commit() -> str | None:
    """The commit that ran, with "+" where the tree had other changes; None outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        done = subprocess.run(
            [git, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return None if done.returncode else done.stdout.strip()

    head = ask("rev-parse", "--short=12", "HEAD")
    changed = ask("status", "--porcelain", "--", "fanout", "benchmarks")
    return head and head + ("+" if changed else "")


def machine(folder: Path | None) -> dict[str, Any]:
    """Cores, processor, memory, the file system under the server's data (None: elsewhere)."""
    return {
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "cpu_model": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "memory_mb": _kilobytes(Path("/proc/meminfo"), "MemTotal") // 1024,
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": None if folder is None else _filesystem(folder),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def peak_rss_mb() -> float:
    """The most memory that this process had at once, in MB (VmHWM)."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM") / 1024


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_value(file: Path, name: str) -> str:
    """The value of the first `name: value` line; "" where there is none, or no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _kilobytes(file: Path, name: str) -> int:
    return int((_first_value(file, name) or "0").split()[0])


def _filesystem(folder: Path) -> str | None:
    """The type of the mount that holds `folder`: on tmpfs, fsync costs nothing."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    mounts = [line.split()[1:3] for line in lines]
    holding = [(point, kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else None
