"""Looking through the stored lines: bounded, in order, and nothing is passed over."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest
from fanout_streaming import Cursor, Looking, search

from fanout import Engine
from tests.streaming.harness import Stream, a_stream


@pytest.fixture
async def stream(engine: Engine, conn: asyncpg.Connection) -> Stream:
    return await a_stream(engine, conn)


def numbers(found: Any) -> list[int]:
    return [int(identity.partition(".")[2]) for identity, _ in found.lines]


async def store(stream: Stream, *events: dict[str, Any]) -> None:
    body = b"\n".join(json.dumps({"job": stream.id, **event}).encode() for event in events)
    await stream.store(body, len(events))


async def test_what_fits_is_found_and_nothing_else(engine: Engine, stream: Stream) -> None:
    """By text, whatever its case; by level, which a failure and a retry have of themselves."""
    await store(
        stream,
        {"type": "log", "level": "info", "message": "Straße 1"},
        {"type": "log", "level": "error", "message": "STRASSE 2"},
        {"type": "progress", "message": "strasse 3"},
        {"type": "failed", "message": "strasse 4"},
        {"type": "retry", "message": "no"},
        {"type": "log", "message": 5},
    )

    async def at(**looking: Any) -> list[int]:
        return numbers(await search(engine.events, stream.id, Looking(**looking), None, 100))

    assert await at() == [1, 2, 4, 5, 6]
    assert await at(contains="strasse") == [1, 2, 4]
    assert await at(level="error") == [2, 4]
    assert await at(level="warning") == [5]
    assert await at(level="info", contains="STRASSE") == [1]
    assert await at(job_id=stream.id, level="info") == [1, 6]
    assert await at(job_id=1 << 40) == []


async def test_text_beyond_the_cut_is_found(engine: Engine, stream: Stream) -> None:
    """The whole message is looked through; the line comes cut, as to every watcher."""
    await store(stream, {"type": "log", "message": "x" * 9000 + "needle"})
    found = await search(engine.events, stream.id, Looking(contains="needle"), None, 10)
    ((_, event),) = found.lines
    assert event["truncated"] is True
    assert "needle" not in event["message"]


async def test_pages_join_without_a_gap_also_where_nothing_fits(
    engine: Engine, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look is bounded in bytes: it may find nothing, and says where to go on."""
    monkeypatch.setattr("fanout_streaming.looking.PAGE_BYTES", 1)
    monkeypatch.setattr("fanout_streaming.looking.PAGES", 3)
    for n in range(20):
        await store(stream, *({"type": "log", "message": f"{n} {n % 7}"} for _ in range(3)))
    after: Cursor | None = None
    seen: list[int] = []
    looks = 0
    while True:
        found = await search(engine.events, stream.id, Looking(contains=" 6"), after, 2)
        seen += numbers(found)
        looks += 1
        if found.next is None:
            break
        generation, number = map(int, found.next.split("."))
        after = Cursor(generation, number)
    assert seen == [19, 20, 21, 40, 41, 42]
    assert looks > 6


async def test_what_was_pruned_or_never_was_is_an_end(
    engine: Engine, conn: asyncpg.Connection, stream: Stream
) -> None:
    """No stream, no events, a cursor of another generation or beyond the end."""
    nothing = Looking()
    assert await search(engine.events, 1 << 40, nothing, None, 5) == ([], None)
    assert await search(engine.events, stream.id, nothing, None, 5) == ([], None)
    await store(stream, *({"type": "log", "message": str(n)} for n in range(3)))
    assert numbers(await search(engine.events, stream.id, nothing, Cursor(9, 2), 5)) == [1, 2, 3]
    assert await search(engine.events, stream.id, nothing, Cursor(1, 99), 5) == ([], None)
    await conn.execute(
        "UPDATE fanout.event_batch SET at = at - interval '2 h' WHERE stream_id = $1", stream.id
    )
    await engine.events.prune(3600, 10)
    assert await search(engine.events, stream.id, nothing, None, 5) == ([], None)
