"""Figures for Prometheus, read when they are asked for: from the database, the relay, the workers
of this process.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector, CollectorRegistry

from fanout.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from fanout.measures import Histogram
    from fanout.values import LimitRow

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
    limits = await Limits(store).list()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Once(
            [
                *_of_queue(queue),
                *_of_server(health),
                *_of_fleet(workers),
                *_of_limits(limits),
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


def _of_limits(rows: list[LimitRow]) -> Iterator[Metric]:
    for name, text in (
        ("limit_concurrency", "How many may use a limit at once."),
        ("limit_in_use", "How many use it."),
        ("limit_waiting", "How many wait for it, up to 10,000."),
    ):
        family = GaugeMetricFamily(f"fanout_{name}", text, labels=("limit",))
        for row in rows:
            if (value := getattr(row, name.removeprefix("limit_"))) is not None:
                family.add_metric((row.name,), value)
        yield family


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
        ("events_sent_again", "Batches of events that a fail-over had lost.",
         sum(w.publisher.sent_again for w in workers)),
        ("event_hints_dropped", "Hints of events that could not be sent.",
         sum(w.publisher.hints_dropped for w in workers)),
    ):  # fmt: skip
        yield _counter(name, text, value)
    yield _gauge(
        "finish_flush_seconds",
        "How long the last one took.",
        max((w.finisher.last_flush_seconds for w in workers), default=0),
    )
    yield _histogram(
        "finish_seconds", "Flushes of outcomes.", [((), w.finisher.seconds) for w in workers]
    )
    yield _histogram(
        "finish_size", "Outcomes of a flush.", [((), w.finisher.sizes) for w in workers]
    )
    yield _histogram("claim_seconds", "Claims.", [((), w.claim_seconds) for w in workers])
    yield _histogram(
        "handler_seconds",
        "Runs of handlers, also those that failed.",
        [((kind,), one) for w in workers for kind, one in w.handler_seconds.items()],
        labels=("kind",),
    )
    yield from _of_ends(workers)


def _of_ends(workers: list[Any]) -> Iterator[Metric]:
    jobs = CounterMetricFamily(
        "fanout_jobs_ended",
        "Jobs that ended with their handlers, after the commit.",
        labels=("kind", "status"),
    )
    ended = sum((worker.finisher.ended for worker in workers), Counter[tuple[str, str]]())
    for (kind, status), number in sorted(ended.items()):
        jobs.add_metric((kind, status), number)
    yield jobs
    batches = CounterMetricFamily(
        "fanout_batches_closed", "Batches that their last child closed.", labels=("status",)
    )
    closed = sum((worker.finisher.closed for worker in workers), Counter[str]())
    for status, number in sorted(closed.items()):
        batches.add_metric((status,), number)
    yield batches


def _histogram(
    name: str,
    text: str,
    found: list[tuple[tuple[str, ...], Histogram]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """One histogram of those of several workers, for each set of labels."""
    family = HistogramMetricFamily(f"fanout_{name}", text, labels=labels)
    by_labels: dict[tuple[str, ...], list[Histogram]] = {}
    for values, one in found:
        by_labels.setdefault(values, []).append(one)
    for values, many in sorted(by_labels.items()):
        upto = accumulate(sum(counts) for counts in zip(*(h.counts for h in many), strict=True))
        bounds = [*map(str, many[0].bounds), "+Inf"]
        buckets: list[Any] = list(zip(bounds, upto, strict=True))
        family.add_metric(values, buckets, sum(h.total for h in many))
    return family


def _finish(workers: list[Any], name: str) -> int:
    return sum(getattr(worker.finisher, name) for worker in workers)


def _sum(rows: list[Any], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fanout_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"fanout_{name}", text, value=value)
