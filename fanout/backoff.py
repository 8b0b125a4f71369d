"""How long until the next run. Pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from .settings import Settings

__all__ = ["retry_delay"]


def retry_delay(
    failures: int, retry_after: float | None, settings: Settings, random: Random
) -> float:
    """Seconds until the next run after `failures` (0 or more) earlier ones: base × 2^failures ±
    jitter, at most `backoff_max`, and never less than the `retry_after` seconds that a service
    asked for (that is capped at a day).
    """
    exponential = min(settings.backoff_base * 2.0 ** min(failures, 30), settings.backoff_max)
    delay = exponential * (1 + random.uniform(-settings.backoff_jitter, settings.backoff_jitter))
    if retry_after is None:
        return min(delay, settings.backoff_max)
    # Jitter only ever adds here: coming back early is what the service asked us not to do.
    asked = min(max(retry_after, 0.0), 86_400.0)
    return max(delay, asked * (1 + random.uniform(0, settings.backoff_jitter)))
