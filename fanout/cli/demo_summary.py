"""What the demo says in the end: counts, rate, the slowest, failures, where everything is."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from fanout.states import Status

from .demo_run import Outcome
from .exits import Exit, clean
from .live import rate
from .output import STYLES, console, duration
from .watch import show_reasons, show_slowest

__all__ = ["tell"]


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
        show_slowest(outcome.slowest)
    if progress.failed:
        show_reasons(outcome.reasons)
    console.print(f"\nresults  {_near(outcome.written.results)}", markup=False)
    console.print(f"report   {_near(outcome.written.report)}", markup=False)
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
    lines = [
        f"{written.reused:,} unchanged, taken from before, {written.read:,} extracted now"
        + (f", {progress.failed:,} could not be read" if progress.failed else "")
    ]
    now = progress.ended - batch.had_ended
    if batch.had_ended:
        lines.append(
            f"an interrupted run had done {batch.had_ended:,}, this one did the other {now:,}"
        )
    size = f"{outcome.corpus.size_bytes / 1e6:,.1f} MB"
    lines.append(f"{rate(now / outcome.seconds)} over {duration(outcome.seconds)}, {size} in all")
    if progress.reason:
        lines.append(clean(progress.reason))
    return lines


def _near(path: str) -> str:
    """As short as it can be typed from here."""
    here = Path.cwd()
    found = Path(path)
    return clean(found.relative_to(here) if found.is_relative_to(here) else found)
