"""Everything at once: fifty readers who come anywhere and change processes, while hints are lost,
listeners are killed and a process stops. Each gets every event once, in order, and the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Sequence

import asyncpg
from fanout_streaming import Relay, RelaySettings

from fanout import Engine
from fanout.events import event_text
from fanout.publisher import Publisher
from tests.engine.running import until
from tests.streaming.harness import Staged, a_stream, engine_on, quick
from tests.streaming.test_events import a_claim
from tests.streaming.wire import Browser

CLOSE = """
UPDATE fanout.job SET status = 'completed', finished_at = clock_timestamp(), claim_token = NULL,
       lease_expires_at = NULL WHERE id = $1"""
EVENTS = int(os.environ.get("FANOUT_STORM_EVENTS", "3000"))
"""20,000 take a minute and a half on two busy cores."""
READERS = 50


class Lossy(Staged):
    """One hint of four is never sent."""

    async def notify(self, channel: str, payloads: Sequence[str]) -> None:
        kept = [payload for payload in payloads if random.random() > 0.25]
        await super().notify(channel, kept)


class Storm:
    """The relays that are up, and what goes on."""

    def __init__(self, engines: Sequence[Engine], settings: RelaySettings) -> None:
        self.engines = engines
        self.settings = settings
        self.relays: list[Relay | None] = [None, None]
        self.reconnects = 0
        self.is_over = False

    async def up(self, n: int) -> None:
        relay = Relay(self.engines[n], self.settings)
        await relay.start()
        self.relays[n] = relay

    async def down(self, n: int) -> None:
        relay, self.relays[n] = self.relays[n], None
        if relay is not None:
            await relay.stop()

    async def a_relay(self) -> Relay:
        while not (there := [one for one in self.relays if one is not None]):  # noqa: ASYNC110 - a person would
            await asyncio.sleep(0.01)
        return random.choice(there)

    async def read(self, stream: int, start: int) -> None:
        """Follow the stream to its end, from one process to the other; fail at the first gap."""
        browser = Browser()
        cursor = f"1.{start}" if start else None
        expected = start + 1
        while True:
            relay = await self.a_relay()
            subscription = await relay.subscribe({stream: cursor})
            leaves_after = random.choice([1, 3, 30, 300, 10_000])
            slowly = random.random() < 0.2
            try:
                async for chunk in subscription.chunks():
                    for message in browser.feed(chunk):
                        assert message.name != "reset", message
                        if message.name in {"log", "end"}:
                            assert message.number == expected, (message.number, expected)
                            expected += 1
                            if message.name == "end":
                                assert expected == EVENTS + 2
                                return
                            if message.number % 10 == 0:
                                assert message.data["n"] == message.number
                            cursor = message.id
                    leaves_after -= 1
                    if leaves_after <= 0:
                        break
                    if slowly:
                        await asyncio.sleep(0.02)
            finally:
                await subscription.close()
            browser = Browser()
            self.reconnects += 1

    async def rage(self, conn: asyncpg.Connection) -> None:
        """Kill listeners, and stop and start one process after the other."""
        n = 0
        while not self.is_over:
            await asyncio.sleep(0.15)
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'fanout relay' AND datname = current_database()"
            )
            await self.down(n)
            await asyncio.sleep(0.15)
            await self.up(n)
            n = 1 - n


async def test_fifty_readers_in_a_storm(database: str, conn: asyncpg.Connection) -> None:
    """Thousands of events over two relays on two engines, LISTEN killed, a quarter of the hints
    lost, each relay stopped again and again: no gap, no double, one end, nothing left behind.
    """
    async with engine_on(database, pool_size=6) as one, engine_on(database, pool_size=6) as two:
        for engine in (one, two):
            engine._events = Lossy(engine.events)
        stream = await a_stream(one, conn)
        storm = Storm([one, two], quick())
        await storm.up(0)
        await storm.up(1)
        publisher = Publisher(one.events, uuid.uuid4(), one.settings)
        publisher.start()
        said = 0

        async def speak() -> None:
            nonlocal said
            while said < EVENTS:
                for _ in range(random.randint(1, 400)):
                    if said < EVENTS:
                        said += 1
                        text = event_text("log", a_claim(), "a line", level="info", n=said)
                        publisher.publish(stream.id, text, None)
                await asyncio.sleep(random.uniform(0, 0.02))
                await until(lambda: publisher._loose < 256 << 10)  # what is dropped has no number

        async def come() -> None:
            await until(lambda: said > random.randint(0, EVENTS - 1) or said >= EVENTS)
            head = (await two.events.heads([stream.id]))[stream.id]
            await storm.read(stream.id, random.choice([0, random.randint(0, head.last_number)]))

        raging = asyncio.create_task(storm.rage(conn))
        speaking = asyncio.create_task(speak())
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            for _ in range(READERS):
                group.create_task(come())
            await speaking
            await publisher.stop(20)
            # The relays end a job that has closed, so only now: its last line is stored.
            async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool:
                await pool.execute(CLOSE, stream.id)
        storm.is_over = True
        await raging
        for relay in storm.relays:
            assert relay is not None
            assert relay.stats()["readers"] == 0
        await storm.down(0)
        await storm.down(1)
        assert publisher.dropped == 0
        assert storm.reconnects > READERS
