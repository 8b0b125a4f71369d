"""API processes of their own: what their clients get through everything, and what they keep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import asyncpg
import psutil
import pytest

from fanout import Engine, JobHandle
from fanout.events import event_text
from fanout.publisher import Publisher
from tests.api.harness import House
from tests.api.raw import raw_stream, vanish
from tests.api.test_serving import serving
from tests.cli.harness import finished
from tests.engine.running import until
from tests.streaming.test_events import a_claim
from tests.streaming.test_storm import CLOSE, Lossy

EVENTS = 20_000
READERS = 50
POOL = 4
"""Connections to the database, which come when they are needed, and stay."""
LEVEL_BYTES = 20 << 20
KILL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE application_name = 'fanout relay' AND datname = current_database()"""


@dataclass
class Storm:
    """Two processes of the API, and clients that go from one to the other."""

    dsn: str
    job_id: int
    said: int = 0
    ports: list[int] = field(default_factory=list)
    connects: int = 0

    @asynccontextmanager
    async def process(
        self, port: int = 0
    ) -> AsyncIterator[tuple[Callable[[], Awaitable[None]], int]]:
        """A process that serves; (what stops it, its port)."""
        async with serving(
            self.dsn, *(("--port", str(port)) if port else ()), FANOUT_RELAY_SWEEP_INTERVAL="0.3"
        ) as (process, url):
            found = int(url.rpartition(":")[2])
            self.ports.append(found)

            async def stop() -> None:
                self.ports.remove(found)
                process.terminate()
                said = await finished(process)
                assert said.code == 0, said.err
                assert "Traceback" not in said.err

            yield stop, found

    async def client(self, start: int) -> None:
        """Follow the job to its end. Fails at the first event that is not the next one."""
        number = start
        while True:
            path, last = f"/v1/jobs/{self.job_id}/events", f"1.{number}" if number else None
            self.connects += 1
            leaves_after = random.choice([3, 30, 300, 10_000])
            # A process that stops, or is not back yet: an EventSource would try again, too.
            with contextlib.suppress(OSError, EOFError):
                async with raw_stream(random.choice(self.ports), path, last) as stream:
                    assert stream.status == 200
                    async for chunk in stream.events():
                        for told in chunk:
                            assert told.name != "reset", told
                            if told.name not in {"log", "end"}:
                                continue
                            number += 1
                            assert (told.generation, told.number) == (1, number)
                            if told.name == "end":
                                assert number == EVENTS + 1
                                return
                            if number % 50 == 0:
                                assert json.loads(told.data)["n"] == number
                        leaves_after -= 1
                        if not leaves_after:
                            break
            await asyncio.sleep(0.02)


async def test_every_client_of_two_processes_gets_each_event_once_in_order(
    database: str, conn: asyncpg.Connection
) -> None:
    """Fifty clients that join anywhere in 20,000 events and change processes, while LISTEN is
    killed, one NOTIFY of four is lost, and one of the processes is stopped and started again.
    """
    async with Engine(database) as engine, AsyncExitStack() as stack:
        engine._events = Lossy(engine.events)
        handle = await engine.submit("nobody_serves_it")
        await engine.events.open_streams([handle.id])
        storm = Storm(database, handle.id)
        starting = [stack.enter_async_context(storm.process()) for _ in range(2)]
        (stop, port), _ = await asyncio.gather(*starting)
        is_back = asyncio.Event()

        async def speak() -> None:
            publisher = Publisher(engine.events, uuid.uuid4(), engine.settings)
            publisher.start()
            while storm.said < EVENTS:
                for _ in range(min(random.randint(1, EVENTS // 40), EVENTS - storm.said)):
                    if storm.said == EVENTS - 1:
                        await is_back.wait()
                    storm.said += 1
                    text = event_text("log", a_claim(), "a line", level="info", n=storm.said)
                    publisher.publish(handle.id, text, None)
                await asyncio.sleep(random.uniform(0, 0.1))
                await until(lambda: publisher._loose < 256 << 10)  # what is dropped has no number
            await publisher.stop(20)
            assert publisher.dropped == 0
            await conn.execute(CLOSE, handle.id)

        async def restart() -> None:
            await until(lambda: storm.said > EVENTS // 3)
            await stop()
            await stack.enter_async_context(storm.process(port))
            is_back.set()

        async def rage() -> None:
            while True:
                await asyncio.sleep(0.4)
                await engine.store._pool.fetch(KILL)

        async def come(after: int) -> None:
            await until(lambda: storm.said >= after)
            head = (await engine.events.heads([handle.id]))[handle.id]
            await storm.client(random.choice([0, random.randint(0, head.last_number)]))

        raging = asyncio.create_task(rage())
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            group.create_task(speak())
            group.create_task(restart())
            for n in range(READERS):
                group.create_task(come(n * EVENTS // READERS))
        raging.cancel()
        assert storm.connects > READERS


# -- what is left ----------------------------------------------------------------------------------


async def come_and_go(port: int, handle: JobHandle, number: int) -> None:
    """So many connects: some read what there is, some stay for a hello, some vanish before it."""
    path = f"/v1/jobs/{handle.id}/events"

    async def one(n: int) -> None:
        if n % 5 == 0:
            await asyncio.to_thread(partial(vanish, port, path, reset=n % 2 == 0))
            return
        async with raw_stream(port, path, f"1.{n % 40}") as stream:
            async for chunk in stream.events():
                if n % 2 or any(told.number == 40 for told in chunk):
                    return

    for first in range(0, number, 25):
        await asyncio.gather(*(one(n) for n in range(first, min(number, first + 25))))


@pytest.mark.parametrize("connects", [1000, pytest.param(10_000, marks=pytest.mark.chaos)])
async def test_memory_sockets_and_threads_are_back_at_their_base_after_many_connects(
    database: str, connects: int
) -> None:
    """A process that has served thousands has no more of anything than one that served hundreds."""
    async with Engine(database) as engine, serving(database) as (process, url):
        handle = await spoken(engine)
        port = int(url.rpartition(":")[2])
        await come_and_go(port, handle, 300)
        server = psutil.Process(process.pid)
        files, threads, memory = await at_rest(server)
        await come_and_go(port, handle, connects)
        await until(lambda: server.num_fds() <= files + POOL)
        assert server.num_threads() <= threads
        # The allocator reaches its level after some thousands: 12 MiB more than at first, whatever
        # comes. A thousand readers that are never freed have 36, ten thousand of anything more.
        assert server.memory_info().rss - memory < LEVEL_BYTES


async def at_rest(server: psutil.Process) -> tuple[int, int, int]:
    """(open files, threads, bytes) when no client is left."""
    seen = -1
    while seen != (seen := server.num_fds()):  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.3)
    return seen, server.num_threads(), server.memory_info().rss


async def spoken(engine: Engine) -> JobHandle:
    """A job that is open, with forty lines."""
    handle = await engine.submit("nobody_serves_it")
    await engine.events.open_streams([handle.id])
    publisher = Publisher(engine.events, uuid.uuid4(), engine.settings)
    publisher.start()
    for _ in range(40):
        publisher.publish(handle.id, event_text("log", a_claim(), "a line", level="info"), None)
    await publisher.stop(20)
    return handle


async def test_no_task_and_no_place_is_left_after_many_connects(own: House) -> None:
    """Whoever served them all has as many tasks as before."""
    handle = await spoken(own.engine)
    await come_and_go(own.port, handle, 50)
    stats = own.service.relay.stats

    def is_empty() -> bool:
        return own.service.streams.total() == 0 and stats()["readers"] == 0

    def tasks() -> list[str]:
        return sorted(task.get_name() for task in asyncio.all_tasks() if is_of_streams(task))

    await until(is_empty)
    before = tasks()
    await come_and_go(own.port, handle, 500)
    await until(is_empty)
    await until(lambda: len(tasks()) <= len(before))
    assert stats()["topics"] == 1


def is_of_streams(task: asyncio.Task[object]) -> bool:
    """Of the API or of a connection, not of the test."""
    name = task.get_name()
    return name.startswith("fanout ") or "RequestResponseCycle" in repr(task.get_coro())
