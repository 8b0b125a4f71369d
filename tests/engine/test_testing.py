"""What users test with: `fanout.testing`, and docs/testing.md, whose examples are run here."""

from __future__ import annotations

import asyncio
import contextlib
import re
import types
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fanout import (
    ConfigurationError,
    Document,
    Engine,
    Job,
    PermanentError,
    Settings,
    TransientError,
    UsageError,
    testing,
)

pytest_plugins = ["fanout.pytest_plugin"]

PAGE = (Path(__file__).parents[2] / "docs/testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python( app)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def server(server_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that all tests share: one test below starts its own."""
    monkeypatch.setenv("FANOUT_TEST_DSN", server_dsn)


def examples() -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """The functions of the page, by name."""
    app = types.ModuleType("app")
    found: dict[str, Any] = {"app": app}
    for is_app, source in BLOCKS:
        code = compile(source, "docs/testing.md", "exec", dont_inherit=True)
        exec(code, app.__dict__ if is_app else found)  # noqa: S102 - the page's own code
    return {name: it for name, it in found.items() if name.startswith("test_")}


@pytest.mark.parametrize("name", sorted(examples()))
async def test_the_examples_of_the_page(name: str) -> None:
    """Each of them, as it stands."""
    await examples()[name]()


def test_the_page_has_examples() -> None:
    assert len(examples()) == 6


async def test_it_starts_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process, with a database of its own a block; it is gone afterwards."""
    monkeypatch.delenv("FANOUT_TEST_DSN")
    mine = testing._Server()
    monkeypatch.setattr(testing, "_server", mine)
    try:
        async with testing.database() as one, testing.database() as other:
            assert one != other
            for dsn in (one, other):
                conn = await asyncpg.connect(dsn)
                assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0
                await conn.close()
    finally:
        await asyncio.to_thread(mine._undo.close)
    with pytest.raises((OSError, asyncpg.PostgresError)):
        await asyncpg.connect(one)


async def test_a_fixture_for_those_who_connect_themselves(fanout_dsn: str) -> None:
    """The plugin's."""
    conn = await asyncpg.connect(fanout_dsn)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0
    await conn.close()


async def test_the_engine_is_moved_and_moved_back() -> None:
    """Also in another schema, also when the test fails; handlers alone are enough."""
    engine = Engine("postgresql://nowhere/app", settings=Settings(schema_name="mine"))

    @engine.job
    async def work(job: Job[int]) -> int:
        return job.payload + 1

    with contextlib.suppress(ZeroDivisionError):
        async with testing.engine(engine) as bench:
            handle = await bench.run(work, [("a", 1)])
            assert [one async for one in handle.results()] == [("a", 2)]
            assert await bench.connection.fetchval("SELECT count(*) FROM mine.job") == 2
            with pytest.raises(ConfigurationError, match="started already"):
                async with testing.engine(engine):
                    pass
            raise ZeroDivisionError  # a test that fails
    assert (engine.dsn, engine.settings) == (
        "postgresql://nowhere/app",
        Settings(schema_name="mine"),
    )
    async with testing.engine(work) as bench:
        handle = await bench.submit(work, 2)
        assert await bench.drain() == 1
        assert await handle.result() == 3
    with pytest.raises(ConfigurationError, match="neither an engine nor handlers"):
        async with testing.engine():
            pass


async def test_time_moves_only_when_told() -> None:
    """`run_at`, retries and deadlines; a drain does not wait for them."""
    engine = Engine("postgresql://nowhere")
    tries: list[int] = []

    @engine.job(max_retries=2)
    async def flaky(job: Job[None]) -> None:
        tries.append(job.failures)
        raise TransientError("busy")

    async with testing.engine(engine) as bench:
        later = await bench.submit(flaky, delay=3600)
        assert await bench.drain() == 0
        await bench.advance(timedelta(minutes=59))
        assert await bench.drain() == 0
        await bench.advance(60)
        assert await bench.drain() == 1
        assert await bench.drain() == 0, "the retry is ten seconds away"
        await bench.advance(10)
        assert await bench.drain() == 1
        await bench.advance(20)
        assert await bench.drain() == 1
        assert (await later.progress()).outcome == "failed"
        assert tries == [0, 1, 2]
        assert [event.type for event in await bench.events(later)] == [
            "retry", "retry", "failed", "end"
        ]  # fmt: skip
        with pytest.raises(UsageError, match="before now"):
            await bench.advance(-1)


async def test_a_run_does_not_wait_for_its_retries() -> None:
    """Backoff of minutes is over at once; what was submitted for later is as much nearer."""
    engine = Engine("postgresql://nowhere", settings=Settings(backoff_base=200))
    tries: list[str] = []

    @engine.job(max_retries=2)
    async def flaky(job: Job[str]) -> int:
        tries.append(job.payload)
        if job.failures < int(job.payload):
            raise TransientError("busy", retry_after=300 if job.failures else None)
        return job.failures

    async with testing.engine(engine) as bench:
        later = await bench.submit(flaky, "0", delay=3600)
        handle = await bench.run(flaky, [("a", "0"), ("b", "1"), ("c", "3")])
        assert [one async for one in handle.results()] == [("a", 0), ("b", 1)]
        assert [child.error async for child in handle.failures()] == ["busy"]
        assert sorted(tries) == ["0", "1", "1", "3", "3", "3"]
        job = await later.job()
        assert (job.run_at - job.created_at).total_seconds() == pytest.approx(3600, abs=1)
        assert (await later.progress()).status == "pending"


async def test_a_drain_ends() -> None:
    """What submits itself for ever, or never ends, fails the test, and is named."""
    engine = Engine("postgresql://nowhere")

    @engine.job
    async def again(job: Job[None]) -> None:
        await engine.submit(again)

    async with testing.engine(engine) as bench:
        await bench.submit(again)
        with pytest.raises(AssertionError, match="it goes on"):
            await bench.drain(most=5)

        @engine.job
        async def stuck(job: Job[None]) -> None:
            await bench.connection.fetchval("SELECT pg_sleep(0)")

        await bench.connection.execute("DELETE FROM fanout.job")
        await bench.connection.execute(
            """INSERT INTO fanout.limits (name, operator)
               VALUES ('kind:stuck', '{"concurrency": 0}')"""
        )
        await bench.submit(stuck)
        with pytest.raises(AssertionError, match=r"not drained after 0\.5 s: \d+ stuck pending"):
            await bench.drain(seconds=0.5)


async def test_events_of_what_is_open_and_of_a_child() -> None:
    """So far; a child has its own."""
    engine = Engine("postgresql://nowhere")

    @engine.job
    async def work(job: Job[str]) -> None:
        job.log(job.payload)
        if job.payload == "b" and not job.failures:
            raise TransientError("busy")

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(work, [("a", "a"), ("b", "b")])

    async with testing.engine(engine) as bench:
        handle = await bench.submit(batch)
        assert await bench.events(handle) == []
        await bench.drain()
        assert sorted(event.type for event in await bench.events(handle)) == ["log", "log", "retry"]
        [a, _] = [child async for child in handle.children()]
        own = await bench.events(bench.engine.handle(a.id))
        assert [event.data["message"] for event in own] == ["a"]
        await bench.advance(60)
        await bench.drain()
        assert (await bench.events(handle))[-1].type == "end"


async def test_a_made_up_job_records() -> None:
    """In async handlers and in plain ones; what cannot be made up says so."""
    engine = Engine("postgresql://nowhere")

    @engine.job
    def plain(job: Job[int]) -> int:
        with job.limit("llm", weight=10) as slot:
            slot.correct(12)
        job.add(cost=0.1)
        job.add(cost=0.2, pages=1)
        job.progress(1, 2, "half")
        return job.payload * 2

    @engine.job
    async def manager(job: Job[None]) -> None:
        if job.checkpoint is None:
            await job.save_checkpoint(7)
        first = await job.fan_out("elsewhere", [("a", 1), Document("b", gone="deleted")])
        again = await job.fan_out("elsewhere", [("a", 1), ("c", 2)])
        assert (first.created, again.created, again.known) == (2, 1, 1)
        async with job.timeout(5):
            raise PermanentError(f"{job.kind} {job.attempt} {job.document_key} {job.key}")

    one = testing.job(21)
    assert plain(one) == 42
    assert one.record.limits == ["llm"]
    assert one.record.added == {"cost": pytest.approx(0.3), "pages": 1}
    assert one.record.progress == [(1, 2, "half")]
    with pytest.raises(UsageError, match="add"):
        one.add(cost="much")

    other = testing.job(None, attempt=3, document_key="d", kind="manager")
    with pytest.raises(PermanentError, match="manager 3 d test-1"):
        await manager(other)  # type: ignore[misc]
    assert (other.record.checkpoints, other.checkpoint) == ([7], 7)
    assert [one.key for one in other.record.children["elsewhere"]] == ["a", "b", "c"]
    with pytest.raises(UsageError, match=r"testing\.engine"):
        _ = other.batch
