"""Figures for Prometheus, read when they are asked for: from the database, the relay, the workers
of this process.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from .service import Service

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

RELAY: Final = (
    ("readers", "streams_open", "Streams that are open in this process."),
    ("topics", "stream_topics", "Streams that this process keeps in memory."),
    ("ring_bytes", "stream_ring_bytes", "Bytes of events in memory."),
    ("lag", "stream_lag_events", "Events that are known to be stored and not read yet, at most."),
    ("listening", "stream_listening", "1 while LISTEN works."),
    ("listen_age_seconds", "stream_listen_age_seconds", "Seconds since LISTEN was shown to work."),
)
RELAY_COUNTERS: Final = (
    ("hints", "stream_hints", "Notifications that were ours."),
    ("garbage", "stream_garbage", "Notifications that were not."),
    ("catch_ups", "stream_catch_ups", "Gaps that were read from the table."),
    ("healed", "stream_healed", "Gaps that only the sweep found: hints were lost."),
    ("reconnects", "stream_reconnects", "Times that LISTEN was begun again."),
)


class _Once(Collector):
    """A registry of one collection."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


async def exposition(service: Service) -> bytes:
    """All figures as text. Raises DatabaseUnavailable."""
    store = service.engine.store
    queue, health, workers = await store.queue(), await store.health(), await store.workers()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Once(
            [
                *_of_queue(queue),
                *_of_server(health),
                *_of_fleet(workers),
                *_of_relay(service),
                *_of_local_workers(service),
            ]
        )
    )
    return generate_latest(registry)


def _of_queue(queue: list[dict[str, Any]]) -> Iterator[Metric]:
    jobs = GaugeMetricFamily(
        "fanout_jobs", "Open jobs, children included.", labels=("kind", "status")
    )
    oldest = GaugeMetricFamily(
        "fanout_oldest_pending_seconds", "How long the oldest due job has waited.", labels=("kind",)
    )
    now = datetime.now(UTC)
    for row in queue:
        jobs.add_metric((row["kind"], row["status"]), row["n"])
        if row["status"] == "pending":
            oldest.add_metric(
                (row["kind"],), max(0.0, (now - row["oldest_run_at"]).total_seconds())
            )
    yield jobs
    yield oldest


def _of_server(health: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge(
        "notification_queue_usage",
        "Share of PostgreSQL's notification queue that is in use; at 1 NOTIFY fails.",
        health["notification_queue_usage"],
    )
    yield _gauge("database_connections", "Connections to the server.", health["connections"])
    yield _gauge(
        "oldest_transaction_seconds",
        "Age of the oldest transaction: it holds back vacuum and notifications.",
        health["oldest_transaction_seconds"] or 0,
    )


def _of_fleet(rows: list[Any]) -> Iterator[Metric]:
    states = GaugeMetricFamily("fanout_workers", "Worker processes by state.", labels=("state",))
    for state in ("running", "stopping", "lost"):
        states.add_metric((state,), sum(row.state == state for row in rows))
    yield states
    live = [row for row in rows if row.state != "lost"]
    yield _gauge("slots", "Handlers that may run at once, all workers.", _sum(live, "concurrency"))
    yield _gauge("slots_free", "Of those, free.", _sum(live, "free"))


def _of_relay(service: Service) -> Iterator[Metric]:
    stats = service.relay.stats()
    for key, name, text in RELAY:
        if (value := stats.get(key)) is not None:
            yield _gauge(name, text, value)
    for key, name, text in RELAY_COUNTERS:
        yield _counter(name, text, stats.get(key) or 0)
    yield _counter("streams_served", "Streams that were opened.", service.streams_served)
    yield _counter("streams_refused", "Streams told to come later.", service.streams_refused)
    yield _counter(
        "streams_dropped", "Readers that took nothing for too long.", service.streams_dropped
    )


def _of_local_workers(service: Service) -> Iterator[Metric]:
    workers = service.workers
    for name, text, value in (
        ("worker_executed", "Handlers that were run here.", sum(w.executed for w in workers)),
        ("finish_flushes", "Transactions that wrote outcomes.", _finish(workers, "flushes")),
        ("finish_outcomes", "Outcomes that they wrote.", _finish(workers, "written")),
        ("finish_lost", "Outcomes whose claim was given away.", _finish(workers, "lost")),
        ("lease_expiries", "Leases that ran out, found here.",
         sum(w.sweeper.rescued for w in workers)),
        ("counter_drifts", "Batches whose counters had to be mended.",
         sum(w.sweeper.drifts for w in workers)),
        ("batches_given_up", "Batches without a sign of life.",
         sum(w.sweeper.given_up for w in workers)),
        ("events_published", "Events that handlers sent.",
         sum(w.publisher.published for w in workers)),
        ("events_dropped", "Events that a full buffer lost.",
         sum(w.publisher.dropped for w in workers)),
    ):  # fmt: skip
        yield _counter(name, text, value)
    yield _gauge(
        "finish_flush_seconds",
        "How long the last one took.",
        max((w.finisher.last_flush_seconds for w in workers), default=0),
    )


def _finish(workers: list[Any], name: str) -> int:
    return sum(getattr(worker.finisher, name) for worker in workers)


def _sum(rows: list[Any], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fanout_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"fanout_{name}", text, value=value)
