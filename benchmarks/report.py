"""The readable side of a report: a table, and the bars that were set before it was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

BARS: Final[tuple[tuple[str, str, Callable[[float], bool]], ...]] = (
    ("ratio_to_naive", "≥ 10", lambda value: value >= 10),
    ("ratio_to_ceiling", "≥ 0.5", lambda value: value >= 0.5),
    ("commits_per_child", "≤ 0.05", lambda value: value <= 0.05),
    ("peak_rss_mb", "< 150", lambda value: value < 150),
    ("pickup_latency_ms.p50", "≤ 6", lambda value: value <= 6),
    ("large_to_standard", "≥ 0.8", lambda value: value >= 0.8),
    ("many_to_standard", "≥ 0.5", lambda value: value >= 0.5),
    ("limited_to_unlimited", "≥ 0.6", lambda value: value >= 0.6),
    ("ratio_to_nchan", "≥ 0.6", lambda value: value >= 0.6),
    ("burst_to_nchan", "> 1", lambda value: value > 1),
    ("many_p99_ms", "≤ 250", lambda value: value <= 250),
    ("kib_per_idle_client", "≤ 36", lambda value: value <= 36),
    ("steady_p99_ms", "≤ 150", lambda value: value <= 150),
    ("loss_with_lines", "≤ 0.15", lambda value: value <= 0.15),
    ("loss_with_watchers", "≤ 0.1", lambda value: value <= 0.1),
    ("gapless", "true", bool),
    ("exact", "true", bool),
    ("closed_once", "true", bool),
)
DELIVERY: Final = {
    "deliveries": "deliveries/s",
    "deliveries_p50": "  p50 ms there",
    "deliveries_p99": "  p99 ms there",
    "cpu_us_per_delivery": "  µs a delivery there",
    "burst_deliveries": "deliveries/s in a burst",
    "steady_p50": "20 events/s: p50 ms",
    "steady_p99": "  p99 ms",
    "cpu_us_per_lone_delivery": "  µs a delivery",
    "kib_per_idle_client": "KiB an idle client",
    "mib_with_stuck": "MiB with 10 % stuck",
}
COMPARED: Final = (
    "rate",
    "ceiling_rate",
    "naive_rate",
    "ratio_to_ceiling",
    "ratio_to_naive",
    "pickup_latency_ms.p50",
    "pickup_latency_ms.p99",
    "parent_lock_ms.p50",
    "parent_lock_ms.p99",
    "claim_ms.p50",
    "claim_ms.p99",
    "children_per_flush",
    "commits_per_child",
    "wal_bytes_per_child",
    "level_2_rate",
    "level_3_to_level_2",
    "close_delay_ms.p50",
    "level_2_close_delay_ms.p50",
    "level_2_wal_bytes_per_child",
    "peak_rss_mb",
    "cpu_seconds.workers",
    "cpu_seconds.server",
    "exact",
    "closed_once",
)


def show(report: dict[str, Any]) -> None:
    """Print a report."""
    console = Console()
    parts = [_rates(report), _deliveries(report), _bars(report), _story(report)]
    console.print(Group(*(part for part in parts if part is not None)))


def show_comparison(names: tuple[str, str], reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Print two reports side by side."""
    table = Table("figure", *names, "second / first", title="two runs compared")
    for path in COMPARED:
        first, second = (_at(report, path) for report in reports)
        if first is None and second is None:
            continue
        numbers = isinstance(first, float | int) and isinstance(second, float | int) and first
        ratio = f"{second / first:.3f}" if numbers and not isinstance(first, bool) else ""
        table.add_row(path, _text(first), _text(second), ratio)
    for part in ("workload", "versions", "machine"):
        for key in sorted(set(reports[0].get(part, {})) | set(reports[1].get(part, {}))):
            first, second = (report.get(part, {}).get(key) for report in reports)
            if first != second and key != "load_average":
                table.add_row(f"{part}.{key}", _text(first), _text(second), "differs")
    Console().print(table)


def _rates(report: dict[str, Any]) -> Table | None:
    rows = [(name, some) for name, some in report.get("spread", {}).items() if some]
    if not rows:
        return None
    work = report["workload"]
    title = f"{work['children']:,} children in {work['batches']:,}, {work['workers']} workers"
    columns = ("children/s", "least", "most", "worker µs", "server µs")
    table = Table("", *columns, title=f"{report['scenario']}: {title}")
    for name, some in rows:
        spent = report.get("cpu_us_per_child", {}).get(name, {})
        table.add_row(
            name,
            *(f"{some[key]:,.0f}" for key in ("median", "min", "max")),
            *(_text(spent.get(part, "")) for part in ("workers", "server")),
        )
    return table


def _deliveries(report: dict[str, Any]) -> Table | None:
    rows = report.get("contenders")
    if not rows:
        return None
    title = f"{report['scenario']}: {report['workload']['clients']:,} clients"
    left_out = report["left_out"]
    table = Table("", *rows, *left_out, title=title)
    for field, label in DELIVERY.items():
        values = [_text(some[field]) for some in rows.values()]
        table.add_row(label, *values, *("left out" for _ in left_out))
    return table


def _bars(report: dict[str, Any]) -> Table:
    bars = {path: (bar, passes) for path, bar, passes in BARS}
    table = Table("figure", "value", "bar", "")
    for path in dict.fromkeys((*bars, *COMPARED)):
        value = _at(report, path)
        if value is None:
            continue
        bar, passes = bars.get(path, ("", None))
        mark = Text("")
        if passes is not None:
            mark = Text("pass", "green") if passes(value) else Text("MISSED", "bold red")
        table.add_row(path, _text(value), bar, mark)
    return table


def _story(report: dict[str, Any]) -> Text:
    versions, machine = report["versions"], report["machine"]
    return Text(
        f"{machine['cores']} cores of {machine['cpu_model']}, {machine['memory_mb']:,} MB, "
        f"{machine['filesystem']}, load {machine['load_average'][0]} at the start; "
        f"PostgreSQL {versions['postgres']}, Python {versions['python']}, "
        f"asyncpg {versions['asyncpg']}, uvloop {versions['uvloop']}, "
        f"commit {versions['fanout_commit']}; {report['started_at']}",
        "dim",
    )


def _at(report: dict[str, Any], path: str) -> Any:
    value: Any = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
