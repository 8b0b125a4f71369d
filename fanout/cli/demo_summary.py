"""What the demo says in the end: counts, rate, the slowest, failures, where everything is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Final

from rich.text import Text

from fanout.demo.meter import LLM, PARSER, Fault, Stats
from fanout.states import Status
from fanout.values import Progress

from .demo_run import Outcome
from .exits import Exit, clean
from .live import rate
from .output import STYLES, console, duration, near
from .watch import show_reasons, show_slowest

__all__ = ["bill", "tell"]

MEGABYTE = 1_000_000
CENT: Final = 0.01
SERVICES: Final = (PARSER, LLM)
ALWAYS: Final = ("429",)
"""Told also when there was none: that is the point of a limit."""
ANSWERS: Final = ("429", "503", "500", Fault.HANG, Fault.LOST)


def tell(outcome: Outcome) -> int:
    """Print the summary. Returns the exit code."""
    progress = outcome.progress
    head = Text("documents: ", style="bold")
    head.append(f"{progress.total:,}")
    head.append(f" · {progress.outcome}", STYLES.get(progress.outcome, ""))
    head.append(f" · batch {progress.id}", "dim")
    console.print(head)
    for line in _lines(outcome):
        console.print(f"  {line}", markup=False)
    if outcome.stats is not None:
        for line in bill(outcome.stats, progress):
            console.print(f"  {line}", markup=False)
    if outcome.slowest:
        show_slowest([(near(key), status, took) for key, status, took in outcome.slowest])
    if progress.failed:
        show_reasons([replace(one, example=near(one.example)) for one in outcome.reasons])
    console.print(f"\nresults  {near(outcome.written.results)}", markup=False)
    console.print(f"report   {near(outcome.written.report)}", markup=False)
    return Exit.FINE if progress.status is Status.COMPLETED else Exit.WRONG


def _lines(outcome: Outcome) -> list[str]:
    progress, batch, written = outcome.progress, outcome.batch, outcome.written
    if not progress.total:
        return ["no document was found: an empty batch, complete at once"]
    if batch.was_closed:
        return [
            f"nothing has changed: {progress.completed:,} taken from before, 0 extracted now"
            + (f"; {progress.failed:,} could not be read" if progress.failed else ""),
            "--fresh reads all of it again",
        ]
    parts = [
        f"{written.read:,} extracted now",
        written.unchanged and f"{written.unchanged:,} unchanged, taken from before",
        written.duplicates and f"{written.duplicates:,} with the same content as another",
        progress.failed and f"{progress.failed:,} could not be read",
    ]
    lines = [", ".join(part for part in parts if part)]
    now = progress.ended - batch.had_ended
    if batch.had_ended:
        lines.append(
            f"an interrupted run had done {batch.had_ended:,}, this one did the other {now:,}"
        )
    size_bytes = outcome.corpus.size_bytes
    is_small = size_bytes < MEGABYTE
    size = f"{size_bytes / 1000:,.1f} kB" if is_small else f"{size_bytes / MEGABYTE:,.1f} MB"
    lines.append(f"{rate(now / outcome.seconds)} over {duration(outcome.seconds)}, {size} in all")
    if progress.reason:
        lines.append(clean(progress.reason))
    return lines


def bill(stats: Stats, progress: Progress) -> list[str]:
    """What the paid service saw and charged, beside what the batch added up."""
    paid, lost = stats.paid, sum(stats.faults.get(f"{one} {Fault.LOST}", 0) for one in SERVICES)
    charged = f"{paid.get(PARSER, 0):,} parses, {paid.get(LLM, 0):,} summaries, ${stats.cost:,.4f}"
    again = f"{stats.paid_twice:,} documents TWICE" if stats.paid_twice else "nothing twice"
    lines = [*map(partial(_seen, stats), SERVICES), f"it charged {charged}, {again}"]
    if lost:
        lines.append(f"{lost:,} answers were lost after the work, and came again at no cost")
    if not stats.asked_again:
        lines.append("no answer that had come was asked for again: checkpoints kept it")
    if sums := progress.sums:
        told = ", ".join(f"{name} {_plain(amount)}" for name, amount in sums.items())
        lines.append(f"the batch added up {told}")
        missing = stats.cost - sums.get("cost", 0)
        if progress.status is Status.COMPLETED and missing > CENT:
            lines.append(f"${_plain(missing)} was added by attempts that died with their worker")
    return lines


def _seen(stats: Stats, service: str) -> str:
    """Calls, the most at once, and how often which answer came."""
    told = Counter(
        {
            key.removeprefix(f"{service} "): n
            for key, n in (stats.answers | stats.faults).items()
            if key.startswith(f"{service} ")
        }
    )
    answers = ", ".join(f"{one}: {told[one]:,}" for one in ANSWERS if told[one] or one in ALWAYS)
    return (
        f"{service}: {stats.calls.get(service, 0):,} calls, "
        f"at most {stats.most_at_once.get(service, 0)} at once; {answers}"
    )


def _plain(amount: float) -> str:
    return f"{amount:,.4f}".rstrip("0").rstrip(".")
