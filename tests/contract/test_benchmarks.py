"""The benchmark harness at a toy scale: its report has its shape, and is exact. Never a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lines import Read, as_event, line, read_of

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


def ran(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """A report, and what was printed."""
    file = folder / "report.json"
    done = bench("run", *arguments, "--rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(file.read_text())
    return read, done.stdout


def test_every_client_gets_every_line(tmp_path: Path) -> None:
    """`sse_relay` with a few clients: all contenders but those that a machine need not have."""
    report, printed = ran(
        *(tmp_path, "sse_relay", "--clients", "4", "--many", "6", "--burst", "20"),
        *("--seconds", "0.2", "--skip", "nchan,plain_sse"),
    )
    assert "kib_per_idle_client" in printed
    assert report["left_out"] == ["nchan", "plain_sse"]
    assert list(report["contenders"]) == ["fanout", "raw_asgi"]
    for one in report["rounds"]:
        assert one["burst"]["delivered"] == 4 * 20
        assert not one["burst"]["missing"] + one["burst"]["broken"]
        assert not one["steady"]["broken"]
        assert 0 < one["steady"]["p50"] <= one["steady"]["p99"]
        assert one["cpu_us_per_lone_delivery"] >= 0
    assert report["many"]["delivered"] == 6 * 2
    assert report["ratio_to_nchan"] is None


def test_watching_changes_no_count(tmp_path: Path) -> None:
    """`notify` with a few children: all of them are made and counted, whoever watches."""
    report, printed = ran(tmp_path, "notify", "--children", "100", "--clients", "3")
    assert "loss_with_lines" in printed
    assert report["exact"] is True
    assert [one["beside"] for one in report["rounds"]] == ["quiet", "lines", "watchers"]
    assert report["offered_rate"] < report["highest_rate"]


def test_lines_are_found_again() -> None:
    """What clients read is cut anywhere, and framed by servers in several ways."""
    frames = [b"event: log\ndata: %s\n\n" % as_event(line(number)) for number in (7, 8, 10)]
    whole = read_of(b"1f\r\n" + frames[0] + frames[1] + b"\r\n" + frames[2][:50])
    assert (whole.first, whole.last, whole.is_gapless) == (7, 8, True)
    rest = read_of(whole.rest + frames[2][50:])
    assert (rest.first, rest.last, rest.rest) == (10, 10, b"")
    assert not read_of(b"".join(frames)).is_gapless
    assert read_of(frames[0].replace(b"\n", b"\r\n")).last == 7
    assert read_of(b"event: progress\n\n" + frames[0][:9]) == Read(0, 0, frames[0][:9])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "fan_out", "--children", "0"], "--children"),
        (["run", "fan_out", "--skip", "nothing"], "--skip"),
        (["run", "fan_out", "--children", "3", "--batches", "4"], "--children"),
        (["run", "sse_relay", "--skip", "naive"], "--skip"),
        (["run", "sse_relay", "--clients", "1"], "--clients"),
    ],
)
def test_nonsense_is_refused_before_a_server_starts(arguments: list[str], named: str) -> None:
    """Exit code 2, and the option is named."""
    done = bench(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
