"""Every knob, read once into a frozen object.

Each has its unit, its reason and an environment variable.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .errors import ConfigurationError

__all__ = ["Settings", "networks_of"]

MAX_PAYLOAD_BYTES: Final = 1024
"""A job row carries ids, not bodies: every version of the row carries it again.

The table has the same CHECK.
"""

Seconds = Annotated[float, Field(gt=0, le=10 * 366 * 86_400, allow_inf_nan=False)]
"""More than ten years is a mistake, and more than PostgreSQL's intervals are good for."""


def networks_of(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    """The networks of `webhook_networks`. Raises ValueError."""
    return tuple(ip_network(one.strip()) for one in text.split(",") if one.strip())


class Settings(BaseSettings):
    """Settings of one engine.

    `Settings(lease=5)` or FANOUT_LEASE=5; a wrong value names the field and the value got.

    Raises:
        ConfigurationError: a value is out of range, or two values do not fit together.
    """

    model_config = SettingsConfigDict(env_prefix="FANOUT_", frozen=True, extra="forbid")

    schema_name: str = Field("fanout", description="PostgreSQL schema that holds all tables.")
    pool_size: int = Field(
        4, ge=2, description="Connections of the engine in a pod; LISTEN and heartbeat come on top."
    )
    database_timeout: Seconds = Field(
        10,
        description="Seconds until a statement is lost: a half-open connection hangs no worker.",
    )
    transaction_pooler: bool = Field(
        default=False,
        description="The DSN leads to a transaction pooler: no prepared statements, no LISTEN.",
    )
    migrate_on_start: bool = Field(
        default=True, description="Bring the schema up to date when the engine starts."
    )

    concurrency: int = Field(
        10,
        ge=1,
        description="Handlers that run at once in one process: memory of waiting coroutines.",
    )
    prefetch: int = Field(
        500,
        ge=0,
        description="Most jobs claimed ahead, and only what is run within prefetch_seconds.",
    )
    prefetch_seconds: Seconds = Field(
        0.1,
        description="Seconds of work held ahead: what a crash sends to be run alone.",
    )
    ageing: Seconds = Field(
        60,
        description="Seconds per step of priority after which a job is served beside better ones.",
    )
    poll_interval: Seconds = Field(
        1, description="Seconds between looks of an idle worker: the backstop of the wake-up."
    )

    lease: Seconds = Field(30, description="Seconds until a silent worker's jobs are given away.")
    heartbeat: Seconds = Field(
        10, description="Seconds between renewals of the leases; at most a third of the lease."
    )
    sweep_interval: Seconds = Field(
        10,
        description="Seconds between looks for expired leases and unclosed batches, jittered.",
    )
    give_up_interval: Seconds = Field(
        600, description="Seconds between looks for batches without a sign of life, jittered."
    )
    give_up_after: Seconds = Field(
        7200,
        description="Seconds without a sign of life, with free slots, until a batch is given up.",
    )
    max_deaths: int = Field(
        3, ge=1, description="Deaths while a job ran alone that end it as poison."
    )

    timeout: Seconds = Field(
        1800,
        description="Seconds a handler may run, queueing not counted, where it names none itself.",
    )
    timeout_grace: Seconds = Field(
        10,
        description="Seconds to stop after the timeout; then the lease goes and the process exits.",
    )
    max_retries: int = Field(
        3,
        ge=0,
        description="Retries after transient errors, where a handler names none: 3 are 4 runs.",
    )
    backoff_base: Seconds = Field(
        10, description="Seconds before the first retry; doubled for each further one."
    )
    backoff_max: Seconds = Field(600, description="Most seconds between two runs.")
    backoff_jitter: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share by which a delay varies, so that retries do not come in one wave.",
    )
    stop_grace: Seconds = Field(
        20, description="Seconds that running handlers have after SIGTERM; then they are released."
    )

    chunk_size: int = Field(
        1000, ge=1, le=10_000, description="Children that one statement of fan_out dispatches."
    )
    flush_limit: int = Field(
        500, ge=1, le=5000, description="Most outcomes that one transaction writes."
    )
    doom_chunk: int = Field(
        500, ge=1, le=5000, description="Children that one transaction cancels."
    )

    inline_events: bool = Field(
        default=True,
        description="Hints carry the text of events: NOTIFY shows it to every role.",
    )
    event_retention: Seconds = Field(
        7 * 86_400, description="Seconds that events are kept; then they are pruned in small steps."
    )
    job_retention: float = Field(
        7 * 86_400,
        ge=0,
        le=10 * 366 * 86_400,
        allow_inf_nan=False,
        description="Seconds that closed jobs are kept, their results with them; 0: for ever.",
    )

    alert_interval: Seconds = Field(
        60, description="Seconds between looks for what is wrong, jittered; two make an incident."
    )
    alert_stuck_after: Seconds = Field(
        900, description="Seconds without a sign of life that make a batch an incident."
    )
    alert_no_worker_after: Seconds = Field(
        120, description="Seconds that jobs are due while no worker serves their kind."
    )
    alert_failure_percent: float = Field(
        20, gt=0, le=100, description="Share of a batch's documents that may fail."
    )
    alert_failures: int = Field(
        10, ge=1, description="Failures below which the share says nothing yet."
    )
    alert_queue_percent: float = Field(
        10, gt=0, le=100, description="Share of PostgreSQL's notification queue that may be used."
    )

    webhooks: bool = Field(
        default=False,
        description="Workers send webhooks: they make connections to addresses of endpoints.",
    )
    webhook_timeout: Seconds = Field(
        20, description="Seconds until an endpoint must have answered, all in all."
    )
    webhook_http: bool = Field(
        default=False, description="Endpoints may have http:// URLs: what is told can be read."
    )
    webhook_networks: str = Field(
        "",
        description="Private networks that endpoints may be in, as 10.1.0.0/16,fd00:1::/32.",
    )

    max_result_bytes: int = Field(
        1 << 20, ge=2, description="A larger result fails its child, permanently."
    )
    max_checkpoint_bytes: int = Field(64 << 10, ge=2, description="A larger checkpoint is refused.")
    max_error_bytes: int = Field(
        8 << 10, ge=64, description="A longer error text is cut, and marked."
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as invalid:
            first = invalid.errors()[0]
            # Only one rule is about two settings at once.
            field = ".".join(str(part) for part in first["loc"]) or "heartbeat"
            got = f", got {first['input']!r}" if first["loc"] else ""
            raise ConfigurationError(
                field,
                f"{first['msg'].removeprefix('Value error, ')}{got}",
                f"Set it in code or as FANOUT_{field.upper()}",
            ) from None

    @field_validator("schema_name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", name) or name.startswith("pg_"):
            raise ValueError(
                "a schema is lower-case letters, digits and underscores, at most 40, not pg_…"
            )
        return name

    @field_validator("webhook_networks")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        networks_of(text)
        return text

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.heartbeat * 3 > self.lease * (1 + 1e-9):  # 0.1 * 3 is a little more than 0.3
            raise ValueError(
                f"{self.heartbeat:g} s is too long for a lease of {self.lease:g} s: "
                "three heartbeats must fit into a lease, or a healthy worker loses its jobs"
            )
        return self
