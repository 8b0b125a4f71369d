"""Streams: from any cursor, to the end, and every place given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from fanout import JobHandle
from tests.api.harness import PATIENCE, Batch, Frame, House, a_client, frames, house, parse
from tests.api.raw import vanish
from tests.engine.running import until


@pytest.fixture(scope="module")
async def batch(shared: House) -> JobHandle:
    """A closed batch with ten lines and one failure in its stream."""
    return await shared.closed_batch(n=2, bad=1, lines=10)


async def whole(shared: House, path: str, **headers: str) -> tuple[httpx.Response, list[Frame]]:
    """A stream that ends by itself, read to its end."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await shared.client.get(path, headers=named)
    return answer, told(answer) if answer.status_code == 200 else []


def told(answer: httpx.Response) -> list[Frame]:
    """The stream's events; progress comes at times of its own."""
    return [frame for frame in parse(answer.text) if frame.name != "progress"]


def numbers(found: list[Frame]) -> list[int]:
    return [int(f.id.split(".")[1]) for f in found if f.id and f.name not in ("hello", "hb")]


async def test_a_finished_job_is_told_whole_and_the_stream_ends(
    shared: House, batch: JobHandle
) -> None:
    """hello, every event once and in order, the end; headers that no proxy holds back."""
    answer, found = await whole(shared, f"/v1/jobs/{batch.id}/events")
    assert answer.text.startswith("retry: ")
    assert [found[0].name, found[-1].name] == ["hello", "end"]
    assert numbers(found) == list(range(1, len(numbers(found)) + 1))
    lines = [f.data["message"] for f in found if f.name == "log"]
    assert lines == [f"line {n}" for n in range(10)]
    headers = answer.headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-store, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers


async def test_a_cursor_goes_on_after_it(shared: House, batch: JobHandle) -> None:
    """Last-Event-ID first, else ?after=; the last one of all is 204, which stops a browser."""
    path = f"/v1/jobs/{batch.id}/events"
    _, found = await whole(shared, path)
    last = found[-1].id
    _, after = await whole(shared, f"{path}?after=1.4")
    assert numbers(after)[0] == 5
    _, header = await whole(shared, f"{path}?after=1.9", Last_Event_ID="1.2")
    assert numbers(header)[0] == 3
    done, _ = await whole(shared, path, Last_Event_ID=str(last))
    assert (done.status_code, done.content) == (204, b"")


@pytest.mark.parametrize(
    "cursor",
    ["abc", "-1", "0", "1", "1.", ".1", "1.-1", str(2**63), str(2**70), f"1.{2**63}", f"{2**70}.1",
     "9.9", "1.999999", "x" * 10_000, "1.1\x01", "1:1.2", "\u00e9", "%00"],
    ids=lambda c: f"{len(c)} {c[:20]}",
)  # fmt: skip
async def test_a_cursor_that_is_none_is_never_an_error(
    shared: House, batch: JobHandle, cursor: str
) -> None:
    """200 and a bounded answer that says so, or 204; by header and by address."""
    path = f"/v1/jobs/{batch.id}/events"
    headers = [(b"Last-Event-ID", cursor.encode())]
    for answer in (
        await shared.client.get(path, headers=headers) if cursor.isprintable() else None,
        await shared.client.get(path, params={"after": cursor[:64]}),
    ):
        if answer is None:
            continue
        assert answer.status_code in (200, 204)
        if answer.status_code == 200:
            found = told(answer)
            (stream,) = found[0].data["streams"]
            resets = [f for f in found if f.name == "reset"]
            assert stream["gap"] or resets
            assert found[-1].name == "end" or stream["after"] >= stream["last"]


async def test_ndjson_for_scripts(shared: House, batch: JobHandle) -> None:
    """A JSON object a line, each with its cursor, to the end."""
    answer = await shared.client.get(
        f"/v1/jobs/{batch.id}/events", headers={"Accept": "application/x-ndjson"}
    )
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["type"] == "end"
    assert lines[0]["id"] == "1.1"


async def test_a_childs_stream_has_its_own_events(shared: House, batch: JobHandle) -> None:
    """And the end of the batch."""
    children = (await shared.client.get(f"/v1/jobs/{batch.id}/children?status=failed")).json()
    child = children["children"][0]["id"]
    _, found = await whole(shared, f"/v1/jobs/{child}/events")
    assert [f.name for f in found if f.name != "hello"] == ["failed", "end"]
    assert {f.data["job"] for f in found if f.name == "failed"} == {child}


async def test_one_stored_event_can_be_read_whole(shared: House, batch: JobHandle) -> None:
    """By its number; another one is 404."""
    event = await shared.client.get(f"/v1/jobs/{batch.id}/events/1")
    assert event.json()["message"] == "line 0"
    for number in ("0", "999", "x", str(2**70)):
        missing = await shared.client.get(f"/v1/jobs/{batch.id}/events/{number}")
        assert missing.status_code == 404


async def test_several_jobs_over_one_connection(shared: House, batch: JobHandle) -> None:
    """Each event says whose it is; a cursor for all leads on."""
    other = await shared.closed_batch(n=1, lines=2)
    answer = await shared.client.get(f"/v1/streams?s={batch.id}:1.5&s={other.id}")
    found = told(answer)
    assert {s["job"] for s in found[0].data["streams"]} == {batch.id, other.id}
    lines = [(f.data["stream"], f.data["message"]) for f in found if f.name == "log"]
    assert [m for s, m in lines if s == batch.id] == [f"line {n}" for n in range(5, 10)]
    assert [m for s, m in lines if s == other.id] == ["line 0", "line 1"]
    again = await shared.client.get(
        f"/v1/streams?s={batch.id}&s={other.id}", headers={"Last-Event-ID": str(found[-1].id)}
    )
    assert again.status_code == 204


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 422), ("s=", 404), ("s=x", 404), ("s=0", 404), ("s=987654321", 404),
     ("s=" + "&s=".join(str(n) for n in range(1, 34)), 422), ("s=1&t=2", 422)],
)  # fmt: skip
async def test_streams_that_cannot_be_are_refused(shared: House, query: str, status: int) -> None:
    """None, too many, unknown ones."""
    assert (await shared.client.get(f"/v1/streams?{query}")).status_code == status


async def test_a_head_request_opens_no_stream(shared: House, batch: JobHandle) -> None:
    """Headers, and that is all."""
    answer = await shared.client.head(f"/v1/jobs/{batch.id}/events")
    assert answer.status_code == 200
    assert shared.service.streams.total() == 0


async def test_live_events_follow_the_stored_ones(own: House) -> None:
    """A stream that is open while the batch runs gets everything once, progress, and the end."""
    handle = await own.engine.submit("batch", Batch(n=20, bad=1, lines=50))
    found: list[Frame] = []

    async def watch() -> None:
        async with own.client.stream("GET", f"/v1/jobs/{handle.id}/events") as answer:
            async for frame in frames(answer):
                found.append(frame)  # noqa: PERF401 - looked at while it grows

    watching = asyncio.create_task(watch())
    await until(lambda: found)
    async with own.engine.worker():
        await asyncio.wait_for(watching, PATIENCE)
    assert numbers(found) == list(range(1, len(numbers(found)) + 1))
    assert [f.data["message"] for f in found if f.name == "log"] == [f"line {n}" for n in range(50)]
    assert [f.name for f in found if f.name != "progress"][-1] == "end"
    percents = [f.data["percent"] for f in found if f.name == "progress"]
    assert percents == sorted(percents)


# -- places ----------------------------------------------------------------------------------------


async def is_empty(it: House) -> bool:
    stats = it.service.relay.stats()
    return it.service.streams.total() == 0 and stats["readers"] == 0


async def test_readers_that_vanish_before_the_first_byte_leave_nothing(own: House) -> None:
    """300 of them, half with a reset: no place, no reader, no task is left."""
    handle = await own.engine.submit("batch", Batch(n=1))
    path = f"/v1/jobs/{handle.id}/events"
    async with own.client.stream("GET", path) as answer:
        assert answer.status_code == 200
    await until(lambda: is_empty(own))
    tasks = len(asyncio.all_tasks())
    for number in range(300):
        await asyncio.to_thread(vanish, own.port, path, reset=number % 2 == 0)
    await until(lambda: is_empty(own))
    await until(lambda: len(asyncio.all_tasks()) <= tasks + 1)
    async with own.client.stream("GET", path) as answer:
        assert [f.name async for f in first(answer, 1)] == ["hello"]


async def first(answer: httpx.Response, count: int) -> AsyncIterator[Frame]:
    """The first `count` events."""
    async for frame in frames(answer):
        yield frame
        count -= 1
        if not count:
            return


async def test_a_reader_that_takes_nothing_is_dropped(database: str) -> None:
    """After the send timeout; nobody else notices."""
    async with house(database, send_timeout=0.5) as it:
        handle = await it.engine.submit("batch", Batch(n=1))
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", it.port))
        path = f"/v1/jobs/{handle.id}/events"
        stuck.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await until(lambda: it.service.streams.total() == 1)
        await flood(it, handle.id)
        await until(lambda: it.service.streams_dropped == 1)
        await until(lambda: is_empty(it))
        stuck.close()
        async with it.client.stream("GET", path) as answer:
            assert [f.name async for f in first(answer, 1)] == ["hello"]


async def flood(it: House, stream_id: int) -> None:
    """4 MB of events in the table, and a hint."""
    line = json.dumps({"type": "log", "at": 1, "job": stream_id, "message": "x" * 60_000}).encode()
    from uuid import uuid4  # noqa: PLC0415

    from fanout.event_store import NewBatch  # noqa: PLC0415

    writer = uuid4()
    for number in range(1, 70):
        batch = NewBatch(stream_id, 1, line, number, frozenset())
        await it.engine.events.append([batch], writer)


async def test_too_many_streams_are_told_to_come_later(database: str) -> None:
    """200, a long retry, goodbye: any other status would end an EventSource for ever."""
    async with house(database, max_streams=2) as it:
        handle = await it.engine.submit("batch", Batch(n=1))
        path = f"/v1/jobs/{handle.id}/events"
        async with it.client.stream("GET", path), it.client.stream("GET", path):
            answer = await it.client.get(path)
            assert answer.status_code == 200
            assert int(answer.text.split("\n")[0].removeprefix("retry: ")) >= 5000
            assert [f.name for f in parse(answer.text)] == ["bye"]
        await until(lambda: is_empty(it))
        async with it.client.stream("GET", path) as again:
            assert [f.name async for f in first(again, 1)] == ["hello"]


async def test_an_absent_database_ends_no_stream_for_ever(
    own: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 and come later, where any other route says 503."""
    handle = await own.engine.submit("single", 1)
    await own.client.get("/v1/about")
    await own.engine.store._pool.close()
    answer = await own.client.get(f"/v1/jobs/{handle.id}/events")
    assert answer.status_code == 200
    assert [f.name for f in parse(answer.text)] == ["bye"]
    lines = await own.client.get(
        f"/v1/jobs/{handle.id}/events", headers={"Accept": "application/x-ndjson"}
    )
    assert (lines.status_code, lines.text) == (200, "")


async def test_a_stop_says_goodbye(database: str) -> None:
    """Every open stream gets bye with a retry, and the server is gone at once."""
    said: list[list[Frame]] = []

    async def watch(url: str, path: str, opened: asyncio.Event) -> None:
        async with (
            a_client(url) as client,
            client.stream("GET", path) as answer,
        ):
            found: list[Frame] = []
            said.append(found)
            async for frame in frames(answer):
                opened.set()
                found.append(frame)

    async with house(database) as it:
        handle = await it.engine.submit("batch", Batch(n=1))
        opened = [asyncio.Event() for _ in range(5)]
        watching = [
            asyncio.create_task(watch(it.url, f"/v1/jobs/{handle.id}/events", event))
            for event in opened
        ]
        for event in opened:
            await event.wait()
    with contextlib.suppress(httpx.HTTPError):
        await asyncio.wait_for(asyncio.gather(*watching), 5)
    assert [found[-1].name for found in said] == ["bye"] * 5


def test_frames_are_read_as_the_standard_says() -> None:
    """The tests' own reader."""
    text = "retry: 5\n\nid: 1.2\nevent: log\ndata: {\ndata: }\n\nevent: x\n\n"
    assert parse(text) == [Frame("log", "1.2", {})]
