"""Can this process do its work?"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from fanout import DatabaseUnavailable, SchemaMismatch
from fanout.embedded import EmbeddedPostgresError
from fanout.migrate import expected_version

from .models import Check, Ready

if TYPE_CHECKING:
    from .service import Service

__all__ = ["ready_of"]

PATIENCE_SECONDS: Final = 3.0
"""A probe that hangs says less than one that fails."""
LISTEN_SILENCE_SECONDS: Final = 60.0


async def ready_of(service: Service) -> Ready:
    """Every check, each told: which one failed is what somebody wants to know at 3 a.m."""
    checks = [*await _of_database(service), _of_listener(service), *_of_workers(service)]
    return Ready(ready=all(check.ok for check in checks), checks=checks)


async def _of_database(service: Service) -> list[Check]:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await service.ready()
            facts = await service.engine.store.about()
    except SchemaMismatch as error:
        return [_no("migrations", f"version {error.found}, not {error.expected}")]
    except TimeoutError:
        return [_no("database", f"no answer within {PATIENCE_SECONDS:g} s")]
    except (DatabaseUnavailable, EmbeddedPostgresError):
        return [_no("database", "no connection")]
    found, expected = facts["schema_version"], expected_version()
    return [
        _yes("database", "answers"),
        Check(
            name="migrations",
            ok=found == expected,
            detail=f"version {found}" + ("" if found == expected else f", not {expected}"),
        ),
    ]


def _of_listener(service: Service) -> Check:
    """A relay that cannot listen polls: slower, and no reason to take the process away."""
    stats = service.relay.stats()
    age = stats.get("listen_age_seconds")
    if not stats.get("readers"):
        return _yes("listen", "nobody watches")
    if not stats.get("listening"):
        return _yes("listen", "down, the relay polls")
    return _yes("listen", "up" if age is None else f"heard {age:.0f} s ago")


def _of_workers(service: Service) -> list[Check]:
    return [
        Check(
            name=f"worker {worker.name}",
            ok=not worker.failed.is_set(),
            detail="a handler does not stop" if worker.failed.is_set() else "claims",
        )
        for worker in service.workers
    ]


def _yes(name: str, detail: str) -> Check:
    return Check(name=name, ok=True, detail=detail)


def _no(name: str, detail: str) -> Check:
    return Check(name=name, ok=False, detail=detail)
