"""The benchmark harness at a toy scale: its report has its shape, and is exact. Never a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHILDREN = 200


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One tiny run of `fan_out`: a round each, two batches, a few single jobs."""
    file = tmp_path_factory.mktemp("bench") / "new folder" / "report.json"
    done = bench(
        *("run", "fan_out", "--children", str(CHILDREN), "--batches", "2", "--workers", "2"),
        *("--rounds", "1", "--pickups", "5", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    assert "ratio_to_ceiling" in done.stdout
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def test_every_contender_counts_exactly_and_closes_once(report: dict[str, Any]) -> None:
    """Counters equal a recount in all rounds of all contenders, and each batch closed once."""
    assert report["exact"] is True
    assert report["closed_once"] is True
    assert [one["contender"] for one in report["rounds"]] == ["fanout", "ceiling", "naive"]
    assert [one["closes"] for one in report["rounds"]] == [2, 2, 2]
    for one in report["rounds"]:
        assert sum(worker["executed"] for worker in one["workers"]) >= CHILDREN


@pytest.mark.parametrize(
    "field",
    [
        "rate",
        "ceiling_rate",
        "naive_rate",
        "ratio_to_ceiling",
        "ratio_to_naive",
        "commits_per_child",
        "wal_bytes_per_child",
        "peak_rss_mb",
        "children_per_flush",
    ],
)
def test_a_figure_is_a_number_above_0(report: dict[str, Any], field: str) -> None:
    """The figures that the bars are about were measured."""
    assert report[field] > 0


@pytest.mark.parametrize("field", ["pickup_latency_ms", "parent_lock_ms", "claim_ms"])
def test_a_latency_has_percentiles_and_a_sample_size(report: dict[str, Any], field: str) -> None:
    """p50 is at most p99, over at least one sample."""
    latency = report[field]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert latency["n"] >= (5 if field == "pickup_latency_ms" else 1)


def test_the_naive_form_commits_once_a_child(report: dict[str, Any]) -> None:
    """The count of commits is right where it is known beforehand."""
    naive = next(one for one in report["rounds"] if one["contender"] == "naive")
    assert 1 <= naive["commits_per_child"] < 1.2


def test_a_number_has_a_story(report: dict[str, Any]) -> None:
    """Machine, versions and settings are in the report, and the server was durable."""
    server = report["settings"]["server"]
    assert [server[name] for name in ("fsync", "synchronous_commit", "full_page_writes")] == (
        ["on"] * 3
    )
    assert report["workload"]["children"] == CHILDREN
    assert {"concurrency", "prefetch", "flush_limit"} <= set(report["settings"]["engine"])
    assert {"cores", "cpu_model", "memory_mb", "filesystem"} <= set(report["machine"])
    assert {"python", "postgres", "asyncpg", "uvloop", "fanout_commit"} <= set(report["versions"])


def test_a_report_can_be_compared(report: dict[str, Any], tmp_path: Path) -> None:
    """`compare` prints two reports side by side."""
    for name in ("before", "after"):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    done = bench("compare", str(tmp_path / "before.json"), str(tmp_path / "after.json"))
    assert done.returncode == 0, done.stderr
    assert "1.000" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "fan_out", "--children", "0"], "--children"),
        (["run", "fan_out", "--skip", "nothing"], "--skip"),
        (["run", "fan_out", "--children", "3", "--batches", "4"], "--children"),
    ],
)
def test_nonsense_is_refused_before_a_server_starts(arguments: list[str], named: str) -> None:
    """Exit code 2, and the option is named."""
    done = bench(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
