"""Progress for people: a bar that moves on a terminal, a line now and then where there is none.

Both are handed committed counts and print failures as they come; neither knows the database.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fanout.states import Status
from fanout.values import Child, Progress

from .exits import clean
from .output import STYLES, duration

__all__ = ["View", "eta", "facts"]

PLAIN_SECONDS: Final = 5.0
"""Between two lines where there is no terminal and the percentage hardly moves."""
PLAIN_STEP: Final = 10
"""Percent after which a line is due at any rate."""
WHOLE_SECONDS: Final = 120
DETAILS: Final = re.compile(r"\(.*\)|[0-9:]+")
LEVELS: Final = {"debug": "debug   ", "warning": "warning ", "error": "error   "}
LEVEL_STYLES: Final = {"warning": "yellow", "error": "red"}
LISTED_AS_THEY_COME: Final = 20


class View:
    """`with View(title) as view: view.show(progress, new_failures)`. On stderr, beside data."""

    def __init__(self, title: str, label: Callable[[str], str] = str) -> None:
        self._title = title
        self._label = label
        self._console = Console(stderr=True, highlight=False)
        self._live = (
            Live(console=self._console, transient=True, auto_refresh=True, refresh_per_second=8)
            if self._console.is_terminal
            else None
        )
        self._spinner = Spinner("dots", style="cyan")
        self._listed = 0
        self._plain_at = float("-inf")
        self._plain_percent = -PLAIN_STEP
        self._plain_waits: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, line: str, *, is_passing: bool = False) -> None:
        """What goes on before and after; a passing one is for a terminal only. Thread-safe."""
        if self._live is not None:
            self._spinner.update(text=Text(f" {line}"))
            self._live.update(self._spinner)
        elif not is_passing:
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - the CLI's voice

    def show(self, progress: Progress, failures: Iterable[Child] = ()) -> None:
        """What is true now, and which children failed since the last call."""
        for child in failures:
            self._failed(child)
        if self._live is not None:
            self._live.update(self._drawn(progress))
        elif self._plain_is_due(progress):
            percent = f"{progress.percent} %, " if progress.total else ""
            waits = "; ".join(("", *map(clean, progress.waits_for)))
            print(f"{self._title}: {percent}{facts(progress)}{waits}", file=sys.stderr, flush=True)  # noqa: T201

    def say(self, message: str, level: str = "info", who: str = "") -> None:
        """A line of a job's log."""
        line = Text(LEVELS.get(level, ""), style=LEVEL_STYLES.get(level, "dim"))
        if who:
            line.append(f"{clean(who)}  ", style="dim")
        line.append(clean(message), style="default")
        line.truncate(self._console.width if self._live else 500, overflow="ellipsis")
        self._console.print(line, soft_wrap=True)

    def _failed(self, child: Child) -> None:
        self._listed += 1
        if self._listed > LISTED_AS_THEY_COME:
            if self._listed == LISTED_AS_THEY_COME + 1:
                self._console.print(
                    "… more failures: they are counted, and summed up at the end", style="red"
                )
            return
        line = Text("failed  ", style="red")
        line.append(clean(self._label(child.document_key)), style="default")
        line.append(f"  {clean(child.error or child.reason or '')}", style="dim")
        line.truncate(self._console.width if self._live else 500, overflow="ellipsis")
        self._console.print(line, soft_wrap=True)

    def _plain_is_due(self, progress: Progress) -> bool:
        now = time.monotonic()
        due = not progress.is_closed and (  # the summary, that comes next, says it better
            progress.percent - self._plain_percent >= PLAIN_STEP
            or _gist(progress) != self._plain_waits
            or now - self._plain_at >= PLAIN_SECONDS
        )
        if due:
            self._plain_at, self._plain_percent = now, progress.percent
            self._plain_waits = _gist(progress)
        return due

    def _drawn(self, progress: Progress) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        head.add_column(no_wrap=True, overflow="ellipsis", ratio=None)
        title = Text(clean(self._title), style="bold")
        if progress.total:
            finished = progress.ended
            bar = ProgressBar(total=max(1, progress.total), completed=finished, width=36)
            count = f"{finished:,} of {progress.total:,}{'' if _sealed(progress) else ' so far'}"
            head.add_row(title, bar, Text(f"{progress.percent} %", style="bold"), Text(count))
        else:
            self._spinner.update(text=Text(""))
            head.add_row(
                title,
                self._spinner,
                Text(str(progress.status), style=STYLES.get(progress.status, "")),
            )
        lines: list[RenderableType] = [head, Text(facts(progress, counts=False), style="dim")]
        lines += [Text(f"waits: {clean(why)}", style="yellow") for why in progress.waits_for]
        return Group(*lines)


def _gist(progress: Progress) -> tuple[str, ...]:
    """What it waits for, without numbers and details, which change all the time."""
    return tuple(DETAILS.sub("", why) for why in progress.waits_for)


def _sealed(progress: Progress) -> bool:
    return progress.status is Status.WAITING or progress.is_closed


def facts(progress: Progress, *, counts: bool = True) -> str:
    """One line: counts, rate, what is left, what runs."""
    parts: list[str] = []
    if progress.total and counts:
        parts.append(f"{progress.ended:,} of {progress.total:,}")
    elif not progress.total:
        parts.append(progress.outcome)
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.cancelled:
        parts.append(f"{progress.cancelled:,} cancelled")
    if progress.rate_per_second:
        parts.append(rate(progress.rate_per_second))
    if progress.eta_seconds:
        parts.append(eta(progress.eta_seconds))
    if not progress.is_closed and progress.total:
        parts.append(f"{progress.processing:,} running")
        parts.append(f"{progress.pending:,} to come")
    elapsed = progress.elapsed_seconds
    parts.append(
        f"{duration(elapsed)} in all"
        if progress.is_closed
        else f"{duration(elapsed) if elapsed >= WHOLE_SECONDS else f'{elapsed:.0f} s'} so far"
    )
    return " · ".join(parts)


def rate(per_second: float) -> str:
    """Children per second, or per minute where that reads better."""
    if per_second >= 1:
        return f"{per_second:,.0f}/s" if per_second >= 20 else f"{per_second:.1f}/s"  # noqa: PLR2004
    return f"{per_second * 60:.1f}/min"


def eta(seconds: tuple[float, float]) -> str:
    """The range in which the last child ends."""
    least, most = (
        f"{max(1, round(end))} s" if end < WHOLE_SECONDS else duration(end) for end in seconds
    )
    return f"{least} left" if least == most else f"{least} to {most} left"
