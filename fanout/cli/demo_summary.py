"""What the demo says in the end: counts, rate, the slowest, failures, where everything is."""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text

from fanout.states import Status

from .demo_run import Outcome
from .exits import Exit, clean
from .live import rate
from .output import STYLES, console, duration, near
from .watch import show_reasons, show_slowest

__all__ = ["tell"]

MEGABYTE = 1_000_000


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
