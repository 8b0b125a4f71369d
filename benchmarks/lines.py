"""Lines that say when they were made and which they are: said at a rate, found again in bytes.

`~0000000012.00000006123456789012~`: the number of the line, and time.monotonic_ns(), which all
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MARK: Final = re.compile(rb"~(\d{10})\.(\d{20})~")
LINE_BYTES: Final = 110
"""With what the engine puts around it, an event has about 200 bytes."""
TICK_SECONDS: Final = 0.005
SAMPLES: Final = 8
"""Lines of one read whose age is looked at; each stands for its share."""


def line(number: int) -> str:
    """A line that is made now."""
    return f"~{number:010d}.{time.monotonic_ns():020d}~".ljust(LINE_BYTES, "x")


def as_event(text: str) -> bytes:
    """What a server without an engine sends: as long as an event of the engine."""
    return b'{"type":"log","job":1,"attempt":1,"at":1700000000000,"message":"%s"}' % text.encode()


async def paced(say: Callable[[list[str]], None], first: int, events: int, rate: float) -> float:
    """Have `events` lines said, at `rate` a second or, 0, all at once. Returns the seconds."""
    started = time.perf_counter()
    said = 0
    while True:
        passed = time.perf_counter() - started
        due = min(events, int(passed * rate) + 1) if rate else events
        if due > said:
            say([line(first + n) for n in range(said, due)])
            said = due
        if said >= events:
            return time.perf_counter() - started
        await asyncio.sleep(max(TICK_SECONDS, (said / rate) - passed))


class Read(NamedTuple):
    """What stands in one read of a client's."""

    first: int
    """0: no whole event."""
    last: int
    rest: bytes
    is_gapless: bool = True
    samples: tuple[tuple[int, float], ...] = ()
    """When lines were made, and how many lines each stands for."""
    arrivals: list[int] | None = None
    """When clients read just this: most read the same."""


def read_of(data: bytes) -> Read:
    """Find the lines in what was read. An event ends with an empty line."""
    end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
    if end < 4:
        return Read(0, 0, data)
    found = MARK.findall(data, 0, end)
    rest = data[end:]
    if not found:
        return Read(0, 0, rest)
    numbers = [int(number) for number, _ in found]
    step = max(1, len(found) // SAMPLES)
    picked = [int(at) for _, at in found[::step]]
    samples = tuple((at, len(found) / len(picked)) for at in picked)
    gapless = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return Read(numbers[0], numbers[-1], rest, gapless, samples, [])
