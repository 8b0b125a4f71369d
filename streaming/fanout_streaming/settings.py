"""The relay's knobs."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["RelaySettings"]


class RelaySettings(BaseSettings):
    """Settings of one relay: `RelaySettings(heartbeat=5)` or FANOUT_RELAY_HEARTBEAT=5."""

    model_config = SettingsConfigDict(env_prefix="FANOUT_RELAY_", frozen=True, extra="forbid")

    heartbeat: float = Field(
        default=15, gt=0, description="Seconds of silence until a reader hears a heartbeat."
    )
    sweep_interval: float = Field(
        default=3, gt=0, description="Seconds between looks at the heads: heals lost hints."
    )
    poll_interval: float = Field(
        default=1, gt=0, description="Seconds between looks while LISTEN does not work."
    )
    progress_interval: float = Field(
        default=0.25, gt=0, description="Seconds between readings of the counters."
    )
    detail_interval: float = Field(
        default=2, gt=0, description="Seconds between readings of why nothing moves."
    )
    watch_seconds: float = Field(
        default=60, gt=0, description="Seconds that workers take a stream for watched."
    )
    linger: float = Field(
        default=30, ge=0, description="Seconds that a stream stays in memory without readers."
    )
    max_age: float = Field(
        default=1500, gt=0, description="Seconds until a reader is asked to connect again, ± 20 %."
    )
    ring_budget: int = Field(
        default=64 << 20, ge=1 << 20, description="Bytes of events in memory, all streams."
    )
    replays: int = Field(
        default=6, ge=1, description="Replays from the table at once: the pool is small."
    )
    end_after: float = Field(
        default=1.5, gt=0, description="Seconds until an ended job's stream gets its end here."
    )
