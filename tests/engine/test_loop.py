"""A step again and again: it starts once, stops whole, and outlives what the step raises."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from fanout import DatabaseUnavailable
from fanout.loop import Loop


class Steps:
    """Counts its steps, and can be awaited; `trouble` is raised by the next ones."""

    def __init__(self) -> None:
        self.count = 0
        self.running = 0
        self.most_running = 0
        self.trouble: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self._changed = asyncio.Condition()

    async def step(self) -> None:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.entered.set()
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        self.count += 1
        async with self._changed:
            self._changed.notify_all()
        if self.trouble:
            raise self.trouble.pop(0)

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: self.count >= count)


async def test_it_steps_at_once_and_then_by_its_interval() -> None:
    """The first step does not wait; later ones do, unless nudged."""
    steps = Steps()
    loop = Loop("test", steps.step, 0.01)
    loop.start()
    await steps.reached(5)
    await loop.stop()
    assert not loop.is_running


async def test_a_nudge_is_a_step_now() -> None:
    """Also one that comes while a step runs: the next step follows it at once."""
    steps = Steps()
    loop = Loop("test", steps.step, 3600)
    loop.start()
    await steps.reached(1)
    loop.nudge()
    await steps.reached(2)
    steps.gate.clear()
    steps.entered.clear()
    loop.nudge()
    await steps.entered.wait()
    loop.nudge()
    loop.nudge()
    steps.gate.set()
    await steps.reached(4)
    await loop.stop()
    assert steps.count == 4


async def test_starting_again_is_one_loop() -> None:
    """Two starts, one task."""
    steps = Steps()
    loop = Loop("test", steps.step, 0.001)
    for _ in range(10):
        loop.start()
    await steps.reached(10)
    await loop.stop()
    assert steps.most_running == 1


async def test_a_stop_ends_the_step_that_runs() -> None:
    """It returns when nothing runs any more, and again is fine."""
    steps = Steps()
    steps.gate.clear()
    loop = Loop("test", steps.step, 3600)
    loop.start()
    await steps.entered.wait()
    await asyncio.gather(loop.stop(), loop.stop())
    await loop.stop()
    assert (steps.running, steps.count) == (0, 0)


async def test_a_patient_stop_lets_the_step_end() -> None:
    """As long as that is within its patience."""
    steps = Steps()
    steps.gate.clear()
    loop = Loop("test", steps.step, 3600)
    loop.start()
    await steps.entered.wait()
    stopping = asyncio.create_task(loop.stop(patience=10))
    await asyncio.sleep(0)
    steps.gate.set()
    await stopping
    assert (steps.running, steps.count) == (0, 1)


@pytest.mark.parametrize("patience", [0, 10])
async def test_a_stopped_loop_can_be_started_again(patience: float) -> None:
    """However it was stopped."""
    steps = Steps()
    loop = Loop("test", steps.step, 3600)
    for count in (1, 2, 3):
        loop.start()
        await steps.reached(count)
        await loop.stop(patience)


async def test_errors_are_survived_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A flood of the same trouble is one line, and its end another."""
    steps = Steps()
    steps.trouble = [DatabaseUnavailable("away"), ValueError("odd")]
    loop = Loop("test", steps.step, 0.001)
    with caplog.at_level(logging.INFO, "fanout.test"):
        loop.start()
        await steps.reached(4)
        await loop.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "DatabaseUnavailable: away" in caplog.text
    assert "after 2 errors" in caplog.text
    assert loop.failures == 0


async def test_an_error_of_our_own_making_comes_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A database that is away needs none, anything else does."""
    steps = Steps()
    steps.trouble = [KeyError("oops")]
    loop = Loop("test", steps.step, 0.001)
    loop.start()
    await steps.reached(2)
    await loop.stop()
    assert "Traceback" in caplog.text


async def test_starts_and_stops_at_random_leave_one_loop_or_none() -> None:
    """From many coroutines at once, with a step in every state."""
    chance = random.Random(7)
    steps = Steps()
    loop = Loop("test", steps.step, 0.0001)

    async def meddle() -> None:
        for _ in range(100):
            match chance.randrange(4):
                case 0:
                    loop.start()
                case 1:
                    await loop.stop(chance.choice([0, 0.001, 1]))
                case 2:
                    loop.nudge()
                case _:
                    await asyncio.sleep(0)

    await asyncio.gather(*(meddle() for _ in range(10)))
    await loop.stop()
    before = steps.count
    await asyncio.sleep(0.01)
    assert steps.count == before
    assert steps.running == 0
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "fanout test"]
    loop.start()
    await steps.reached(before + 1)
    await loop.stop()
