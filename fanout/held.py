"""The claims that this process holds, seen from two threads: the worker's loop changes them, the
heartbeat reads.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from .values import Claim

__all__ = ["Held", "Stop"]


class Stop(Enum):
    """Why a running handler was told to stop."""

    LOST = auto()
    """The claim was given away, or its batch was ended: whatever it does now, nothing is written.
    """
    SHUTDOWN = auto()
    """This process stops: back to pending, at no cost."""


@dataclass(slots=True, eq=False)
class Held:
    """One claim from the moment it was made until its outcome is committed, or lost."""

    claim: Claim
    claimed_at: float
    """time.monotonic()."""
    task: asyncio.Task[None] | None = None
    """None while it waits in the local buffer."""
    deadline: float | None = None
    """time.monotonic() when the running handler's timeout has passed; counted from its call, not
    from the claim.
    """
    timed_out: bool = False
    """It was told to stop because its deadline had passed."""
    let_go_at: float | None = None
    """time.monotonic() after which its lease is not renewed: the timeout, and the grace to stop,
    have passed.
    """
    stop: Stop | None = None
    is_slow: bool = False
    """Its handler was not known to take milliseconds when it began."""
    slots: int = 0
    """How many slots of named limits it holds."""
    waits: int = 0
    """How many slots it waits for: its timeout does not run meanwhile."""
    waits_since: float = 0.0
    """time.monotonic() of the first of them."""
    stopped_clock: tuple[float, float] | None = None
    """`deadline` and `let_go_at` as they were then."""
    fans_out: bool = False
    """Children are counted on its row: it is beaten in a statement of its own."""

    @property
    def is_overdue(self) -> bool:
        """Did the handler not stop in time? Then this process cannot be trusted with the job."""
        return self.let_go_at is not None and time.monotonic() > self.let_go_at

    def begin_wait(self) -> None:
        """Stop the clock of its timeout, while it waits for a limit."""
        self.waits += 1
        if self.waits == 1 and self.deadline is not None and self.let_go_at is not None:
            self.waits_since = time.monotonic()
            self.stopped_clock = self.deadline, self.let_go_at
            self.deadline = self.let_go_at = math.inf

    def end_wait(self) -> None:
        """Let it run again, once nothing is waited for."""
        self.waits -= 1
        if self.waits or self.stopped_clock is None:
            return
        (deadline, let_go_at), self.stopped_clock = self.stopped_clock, None
        if self.deadline is not None:  # the handler has not ended meanwhile
            waited = time.monotonic() - self.waits_since
            self.deadline, self.let_go_at = deadline + waited, let_go_at + waited
