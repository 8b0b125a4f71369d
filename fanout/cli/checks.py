"""How the doctor judges what it found. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from fanout.migrate import expected_version
from fanout.settings import Settings

from .examination import LISTEN_SECONDS, Facts
from .output import duration

__all__ = ["Check", "Level", "findings"]

OLDEST: Final = 14
NEWEST: Final = 18
SKEW_SECONDS: Final = 2.0
LONG_TRANSACTION_SECONDS: Final = 300.0
FULL_QUEUE: Final = 0.5
FEW_CONNECTIONS: Final = 0.85
SHOWN: Final = 3


class Level(IntEnum):
    """How bad; also the doctor's exit code."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    level: Level
    found: str
    remedy: str = ""

    def plain(self) -> dict[str, str]:
        """For JSON."""
        level = self.level.name.lower()
        return {"name": self.name, "level": level, "found": self.found, "remedy": self.remedy}


def findings(facts: Facts, settings: Settings) -> list[Check]:
    """Judge. Pure."""
    return [
        *_server(facts.health),
        _schema(facts.schema_version, settings.schema_name),
        _notifications(facts, settings),
        *_durability(facts.health),
        *_load(facts),
        *_work(facts),
    ]


def _check(
    name: str,
    is_fine: bool,  # noqa: FBT001 - a condition, read in its place
    fine: str,
    bad: str,
    remedy: str,
    level: Level = Level.WARN,
) -> Check:
    return Check(name, Level.OK, fine) if is_fine else Check(name, level, bad, remedy)


def _server(health: dict[str, Any]) -> list[Check]:
    major, named = health["server_version_num"] // 10_000, f"PostgreSQL {health['server_version']}"
    return [
        _check(
            "version",
            OLDEST <= major <= NEWEST,
            named,
            f"{named} is not among the supported {OLDEST} to {NEWEST}",
            "upgrade the server"
            if major < OLDEST
            else "upgrade fanout, or watch it closely: this was never tested",
            Level.FAIL if major < OLDEST else Level.WARN,
        ),
        _check(
            "primary",
            not health["in_recovery"],
            "takes writes",
            "the server is in recovery: a standby, or a primary that starts",
            "name the primary in the DSN (target_session_attrs=read-write with several hosts)",
            Level.FAIL,
        ),
    ]


def _schema(version: int, name: str) -> Check:
    expected = expected_version()
    return _check(
        "schema",
        version == expected,
        f"{name} is at version {version}, as this program needs",
        f"{name} is at version {version}, this program needs {expected}"
        if version
        else f"there is no schema {name}",
        "upgrade this program" if version > expected else "run `fanout migrate`",
        Level.FAIL,
    )


def _notifications(facts: Facts, settings: Settings) -> Check:
    took = facts.listen_seconds
    return _check(
        "listen",
        took is not None,
        f"a notification arrives in {duration(took or 0)}",
        f"no notification arrived within {LISTEN_SECONDS:g} s",
        "jobs are picked up by polling alone"
        if settings.transaction_pooler
        else "does the DSN lead through a transaction pooler? Name the server itself, "
        "or set FANOUT_TRANSACTION_POOLER=1 and live with polling",
    )


_LOSSES: Final = {
    "fsync": "a crash of the machine can destroy the database",
    "synchronous_commit": "a crash of the server loses the last commits: what had ended runs again",
    "full_page_writes": "a crash of the machine can destroy pages",
}


def _durability(health: dict[str, Any]) -> list[Check]:
    return [
        _check(
            name.replace("synchronous_commit", "sync commit").replace(
                "full_page_writes", "page writes"
            ),
            health[name] != "off",
            f"{name} is {health[name]}",
            f"{name} is {health[name]}: {loss}",
            f"set {name} = on, unless this data may be lost",
        )
        for name, loss in _LOSSES.items()
    ]


def _load(facts: Facts) -> list[Check]:
    health = facts.health
    used, most = health["connections"], health["max_connections"]
    oldest, queue = health["oldest_transaction_seconds"] or 0.0, health["notification_queue_usage"]
    ahead = "ahead of" if facts.skew_seconds > 0 else "behind"
    return [
        _check(
            "clock",
            abs(facts.skew_seconds) <= SKEW_SECONDS,
            f"within {max(1.0, abs(facts.skew_seconds) * 1000):.0f} ms of the server's",
            f"this machine is {duration(abs(facts.skew_seconds))} {ahead} the server",
            "run a time service on both: run_at is reckoned here, leases and due times there",
        ),
        _check(
            "connections",
            used < most * FEW_CONNECTIONS,
            f"{used} of {most} are in use",
            f"{used} of {most} are in use",
            "raise max_connections, or lower FANOUT_POOL_SIZE: a worker takes that and 2 more",
        ),
        _check(
            "transactions",
            oldest < LONG_TRANSACTION_SECONDS,
            "none is open for long",
            f"one has been open for {duration(oldest)}: vacuum is held up, claims slow down",
            "find it: SELECT pid, query FROM pg_stat_activity ORDER BY xact_start",
        ),
        _check(
            "notify queue",
            queue < FULL_QUEUE,
            f"{queue:.0%} full",
            f"{queue:.0%} full: when it is full, every NOTIFY fails",
            "find who LISTENs in a transaction that stays open, and end it",
        ),
    ]


def _work(facts: Facts) -> list[Check]:
    unserved = [row["kind"] for row in facts.stuck if row["why"].startswith("no worker serves")]
    others = [row for row in facts.stuck if not row["why"].startswith("no worker serves")]
    lost = [worker.name for worker in facts.workers if worker.state == "lost"]
    alive = len(facts.workers) - len(lost)
    return [
        _check(
            "workers",
            not lost,
            f"{alive} alive" if alive else "none, and none is lost",
            f"{alive} alive, {len(lost)} lost within the last day: {_some(lost)}",
            "their jobs went to others; look why they died",
        ),
        _check(
            "served",
            not unserved,
            "every kind that is due has a worker",
            f"jobs are due that no worker serves: {_some(unserved)}",
            "start a worker whose engine has that handler: fanout worker --app module:engine",
        ),
        _check(
            "stuck work",
            not others,
            "none",
            f"{len(others)}: {_some([_named(row) for row in others])}",
            "a worker's sweeper mends this within seconds; without one, `fanout sweep --rescue`",
        ),
    ]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _named(row: dict[str, Any]) -> str:
    return f"job {row['id']}: {row['why']}"
