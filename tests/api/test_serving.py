"""The commands: where they listen, how they stop, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import asyncpg
import pytest
from fanout_api.serving import bound_sockets

from fanout import Engine
from tests.api.harness import a_client
from tests.api.raw import raw_stream
from tests.cli.harness import APP, command, finished, program, spawned
from tests.engine.running import until


@contextlib.asynccontextmanager
async def serving(dsn: str, *arguments: str, **more: str) -> AsyncIterator[tuple[Process, str]]:
    """A `fanout api` that is ready, and its address; killed at the end if it still runs."""
    process = await spawned("api", "--port", "0", *arguments, DATABASE_URL=dsn, **more)
    try:
        yield process, await ready(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def ready(process: Process) -> str:
    """The address in the line that says ready."""
    assert process.stdout is not None
    async with asyncio.timeout(40):
        line = (await process.stdout.readline()).decode()
    if not line.startswith("ready "):
        raise AssertionError(line + (await finished(process)).err)
    return line.split()[1].rstrip("/")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - what is refused
async def test_it_listens_nowhere_else_without_keys(database: str, host: str) -> None:
    """Exit 2, one line, with the remedy."""
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    said = await program("api", "--host", host, "--port", "0", DATABASE_URL=database)
    assert said.code == 2
    assert said.is_readable_error
    assert "FANOUT_API_AUTH=key" in said.err


async def test_with_keys_it_may_listen_anywhere(database: str) -> None:
    """And asks for them."""
    everywhere = ("--host", "0.0.0.0")  # noqa: S104 - what is asked for
    async with (
        serving(database, *everywhere, FANOUT_API_AUTH="key") as (_, url),
        a_client(url) as client,
    ):
        assert (await client.get("/v1/jobs")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200


async def test_a_port_that_is_taken_is_told(database: str) -> None:
    """Exit 2."""
    (taken,) = bound_sockets("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        said = await program("api", "--port", port, DATABASE_URL=database)
    assert said.code == 2
    assert port in said.err


async def test_sigterm_with_a_hundred_streams_one_of_them_stuck(database: str) -> None:
    """Everybody gets a goodbye, and the process is gone within 5 s, with exit code 0; what is left
    after the two that it waits for is cut, so that a busy machine adds only its own slowness.
    """
    async with Engine(database) as engine:
        handle = await engine.submit("single", 1)
    await fill(database, handle.id)
    last: list[str] = []

    async def watch(port: int, opened: asyncio.Event) -> None:
        name = ""
        async with raw_stream(port, f"/v1/jobs/{handle.id}/events?after=1.70") as stream:
            async for chunk in stream.events():
                name = chunk[-1].name
                opened.set()
        last.append(name)

    async with serving(database) as (process, url):
        port = int(url.rpartition(":")[2])
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", port))
        stuck.sendall(
            f"GET /v1/jobs/{handle.id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        opened = [asyncio.Event() for _ in range(100)]
        watching = [asyncio.create_task(watch(port, event)) for event in opened]
        async with asyncio.timeout(30):
            for event in opened:
                await event.wait()
        started = time.monotonic()
        process.terminate()
        said = await finished(process)
        took = time.monotonic() - started
        await asyncio.gather(*watching, return_exceptions=True)
        stuck.close()
    assert said.code == 0, said.err
    assert took < 8
    assert last == ["bye"] * 100
    assert "Traceback" not in said.err


async def fill(dsn: str, stream_id: int) -> None:
    """70 events of 60 KB, so that a reader that reads nothing gets stuck."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(
            "INSERT INTO fanout.stream (stream_id, last_number) VALUES ($1, 70)", stream_id
        )
        line = json.dumps({"type": "log", "at": 1, "job": stream_id, "message": "x" * 60_000})
        await conn.executemany(
            """INSERT INTO fanout.event_batch (stream_id, first_number, count, writer, batch, body)
               VALUES ($1, $2, 1, gen_random_uuid(), $2, $3)""",
            [(stream_id, number, line.encode()) for number in range(1, 71)],
        )
    finally:
        await conn.close()


async def test_a_database_that_is_down_does_not_keep_it_from_starting() -> None:
    """Ready to answer, not ready to work; no crash loop. SIGINT ends it with 0."""
    async with serving("postgresql://nobody@127.0.0.1:1/nothing") as (process, url):
        async with a_client(url) as client:
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/v1/jobs")).status_code == 503
        process.send_signal(signal.SIGINT)
        said = await finished(process)
    assert said.code == 0
    assert "Traceback" not in said.err


async def test_up_runs_everything_and_one_signal_ends_it(database: str) -> None:
    """API and workers; a job that is submitted is run; nothing is left behind."""
    process = await spawned("up", "--app", APP, "--dsn", database, "--port", "0", "--workers", "1")
    try:
        url = await ready(process)
        async with a_client(url) as client:

            async def are_there() -> bool:
                return len((await client.get("/v1/workers")).json()["workers"]) == 1

            await until(are_there)
            kind = (await client.get("/v1/kinds")).json()["kinds"][0]["name"]
            made = await client.post("/v1/jobs", json={"kind": kind})
            assert made.status_code in (201, 422)
        process.send_signal(signal.SIGINT)
        said = await finished(process)
        assert said.code == 0, said.err
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
    conn = await asyncpg.connect(database)
    try:
        assert await conn.fetchval("SELECT count(*) FROM fanout.worker") == 0
    finally:
        await conn.close()


async def test_keys_are_made_listed_and_revoked(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is shown once, on stdout alone; a name is taken while its key lives."""
    where = ("--dsn", database)
    made = await command(
        capsys, "keys", "create", "ci", "--scope", "submit", "--tenant", "a", *where
    )
    assert made.code == 0
    text = made.out.strip()
    assert text.startswith("fo_")
    again = await command(capsys, "keys", "create", "ci", *where)
    assert (again.code, again.is_readable_error) == (2, True)
    listed = await command(capsys, "keys", "list", "--json", *where)
    (key,) = listed.lines()
    assert (key["name"], key["scopes"], key["tenant"]) == ("ci", ["submit"], "a")
    assert text not in listed.out + (await command(capsys, "keys", "list", *where)).out
    assert (await command(capsys, "keys", "revoke", "ci", *where)).code == 0
    assert (await command(capsys, "keys", "revoke", "ci", *where)).code == 2
    (key,) = (await command(capsys, "keys", "list", "--json", *where)).lines()
    assert key["revoked_at"] is not None
