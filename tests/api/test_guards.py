"""What stands before every route: names, origins, types, sizes, deadlines, headers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
from fanout_api.routes import TABLE

from tests.api.harness import House, house
from tests.api.test_access import path_of

ROUTES = sorted(
    {(e.method, e.path) for e in TABLE.endpoints}
    | {("GET", "/"), ("GET", "/static/x"), ("GET", "/no")}
)
LISTED = "https://app.example.com"


@contextlib.asynccontextmanager
async def connected(it: House) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection, for what no client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def said(it: House, raw: bytes, *, seconds: float = 10) -> bytes:
    """What the server answers to these bytes until it closes."""
    async with connected(it) as (reader, writer), asyncio.timeout(seconds):
        writer.write(raw)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""


async def count_jobs(it: House) -> int:
    """How many jobs there are."""
    async with it.engine.store._pool.acquire() as conn:
        count: int = await conn.fetchval("SELECT count(*) FROM fanout.job")
        return count


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_another_name_is_turned_away_everywhere(
    shared: House, method: str, path: str
) -> None:
    """421 with an empty body, before anything else: a rebound name reads nothing."""
    answer = await shared.client.request(method, path_of(path, 1), headers={"Host": "evil.example"})
    assert (answer.status_code, answer.content) == (421, b"")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:80", 421),
        ("evil.example:80@localhost", 421),
        ("localhost:", 421),
        ("localhost:x", 421),
        ("[::2]", 421),
        ("127.0.0.2", 421),  # an address, but not the one that was reached
        ("", 421),
    ],
)
async def test_our_own_names_pass(shared: House, host: str, status: int) -> None:
    """With or without a port."""
    answer = await said(
        shared,
        f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(),
    )
    assert answer.startswith(f"HTTP/1.1 {status}".encode())


async def test_the_address_itself_is_no_name(database: str) -> None:
    """A probe in a cluster asks by address; a name cannot be rebound to look like one."""
    async with house(database, allowed_hosts="jobs.example.com") as it:
        assert (await it.client.get("/healthz")).status_code == 200
        for host, status in (("jobs.example.com", 200), ("localhost", 421), ("10.0.0.1", 421)):
            answer = await it.client.get("/healthz", headers={"Host": host})
            assert answer.status_code == status


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
async def test_no_name_or_two_is_turned_away(shared: House, hosts: bytes) -> None:
    """Which of two would count is anybody's guess."""
    answer = await said(shared, b"GET /healthz HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
    assert answer[9:12] in (b"421", b"400")


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None,
     "application/json; charset=utf-16", "text/json", "application/jsonx"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/1/cancel", "/v1/session"])
async def test_a_write_that_is_not_json_is_refused(
    shared: House, content_type: str | None, path: str
) -> None:
    """A form on another site can send these without asking: 415, and no row."""
    before = await count_jobs(shared)
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = await shared.client.post(path, content=b'{"kind":"single"}', headers=headers)
    assert answer.status_code == 415
    assert await count_jobs(shared) == before


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/jobs"), ("DELETE", "/v1/session")])
async def test_a_write_from_another_site_is_refused(
    shared: House, headers: dict[str, str], method: str, path: str
) -> None:
    """403, and no row."""
    before = await count_jobs(shared)
    answer = await shared.client.request(method, path, json={"kind": "single"}, headers=headers)
    assert answer.status_code == 403
    assert await count_jobs(shared) == before


@pytest.mark.parametrize("path", ["/", "/static/app.css", "/static/fanout-events.js"])
async def test_the_page_comes_compressed_to_who_asks_for_it(shared: House, path: str) -> None:
    """The page and its files, a third of the bytes; to who does not ask, as they are."""
    packed = await shared.client.get(path, headers={"Accept-Encoding": "gzip"})
    plain = await shared.client.get(path, headers={"Accept-Encoding": "identity"})
    assert packed.status_code == plain.status_code == 200
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in plain.headers
    assert packed.content == plain.content


async def test_the_page_itself_may_write(shared: House) -> None:
    """Same origin, by what browsers say."""
    for headers in (
        {"Origin": shared.url, "Sec-Fetch-Site": "same-origin"},
        {"Origin": shared.url},
        {"Sec-Fetch-Site": "none"},
        {},
    ):
        answer = await shared.client.post("/v1/jobs", json={"kind": "single"}, headers=headers)
        assert answer.status_code == 201


async def test_another_site_cannot_embed_or_ask_first(shared: House) -> None:
    """An <img> to a stream takes no place; a preflight gets no permission; a link still works."""
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert (await shared.client.get("/v1/jobs", headers=embedded)).status_code == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await shared.client.get("/healthz", headers=link)).status_code == 200
    asked = await shared.client.options(
        "/v1/jobs",
        headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert asked.status_code == 405
    assert not [name for name in asked.headers if name.startswith("access-control")]


async def test_a_listed_origin_may_read_with_its_cookie(database: str) -> None:
    """Exactly the one that is listed, never a star."""
    async with house(database, allowed_origins=LISTED) as it:
        site = {"Origin": LISTED, "Sec-Fetch-Site": "same-site"}
        answer = await it.client.get("/v1/jobs", headers=site)
        assert answer.headers["access-control-allow-origin"] == LISTED
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "Origin" in answer.headers["vary"]
        asked = await it.client.options(
            "/v1/jobs", headers={**site, "Access-Control-Request-Method": "POST"}
        )
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, LISTED)
        other = await it.client.get("/v1/jobs", headers={"Origin": LISTED + ".evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_every_answer_carries_the_security_headers(shared: House) -> None:
    """Errors and files too."""
    for path in ("/", "/healthz", "/nowhere", "/v1/jobs", "/v1/jobs/0"):
        headers = (await shared.client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers
    assert (await shared.client.get("/v1/jobs")).headers["cache-control"] == "no-store"


async def test_a_request_has_an_id_that_a_log_line_has_too(
    shared: House, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller's own if it is one; the log has no query and nothing that steers a terminal."""
    caplog.set_level(logging.INFO, "fanout.access")
    own = await shared.client.get("/v1/jobs?kind=secret", headers={"X-Request-ID": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    odd = await shared.client.get("/v1/%0d%0aINJECTED", headers={"X-Request-ID": "a b;c"})
    assert odd.headers["x-request-id"] != "a b;c"
    lines = [r.getMessage() for r in caplog.records if r.name == "fanout.access"]
    assert any("abc-1" in line and "/v1/jobs" in line for line in lines)
    assert "secret" not in "".join(lines)
    assert all(line.isprintable() for line in lines)


async def test_a_defect_tells_its_id_and_no_trace(
    own: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500; the log has the trace under the id."""

    async def broken(*_: Any) -> Any:
        raise RuntimeError("a secret path")

    await own.client.get("/v1/about")
    monkeypatch.setattr(own.engine.store, "about", broken)
    answer = await own.client.get("/v1/about")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    told = answer.json()
    assert any(told["request_id"] in r.getMessage() and r.exc_info for r in caplog.records)


async def test_an_outage_is_told_without_the_databases_address(
    own: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 with Retry-After."""
    await own.client.get("/v1/about")
    await own.engine.store._pool.close()
    answer = await own.client.get("/v1/jobs")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "postgres" not in answer.text.lower()


# -- sizes and deadlines ---------------------------------------------------------------------------


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        (
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            *lines,
            "",
            "",
        )
    ).encode()


async def test_a_declared_giant_is_refused_before_it_comes(shared: House) -> None:
    """413 at once, and the connection is closed."""
    answer = await said(shared, head("/v1/jobs", "Content-Length: 1000000000"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()


async def test_a_giant_in_chunks_is_refused_on_its_way(shared: House) -> None:
    """As soon as it is over the limit; memory holds no more than that."""
    process = psutil.Process()
    before = process.memory_info().rss
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    async with connected(shared) as (reader, writer):
        writer.write(head("/v1/jobs", "Transfer-Encoding: chunked"))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 200 << 20 and not reader.at_eof():
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
                if reader._buffer:  # type: ignore[attr-defined]
                    break
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 413") or sent < 50 << 20
    assert process.memory_info().rss - before < 20 << 20


async def test_a_compressed_body_is_not_unpacked(shared: House) -> None:
    """415: no bomb goes off."""
    answer = await shared.client.post(
        "/v1/jobs",
        content=b"\x1f\x8b",
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )
    assert answer.status_code == 415


async def test_endless_headers_are_refused(shared: House) -> None:
    """431, and closed."""
    lines = b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(64))
    answer = await said(shared, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + lines)
    assert answer.startswith(b"HTTP/1.1 431") or answer == b""


@pytest.mark.parametrize("length", ["-1", "1e3", "99999999999999999999999", "٣"])
async def test_a_length_that_is_none_is_refused(shared: House, length: str) -> None:
    """400 or 413, never an error."""
    answer = await said(shared, head("/v1/jobs", f"Content-Length: {length}", "Connection: close"))
    assert answer[9:12] in (b"400", b"413")


async def test_who_sends_slowly_is_cut_off_and_others_are_served(database: str) -> None:
    """Nothing at all, half the headers, half the body, byte by byte: gone after the deadline."""
    beginnings = [b"", b"GET /healthz HTT", b"GET /healthz HTTP/1.1\r\nHost: loc",
                  head("/v1/jobs", "Content-Length: 100") + b'{"kind"']  # fmt: skip
    async with house(database, receive_deadline=0.7) as it:
        await it.client.get("/v1/about")
        started = time.monotonic()

        async def slow(beginning: bytes) -> float:
            async with connected(it) as (reader, writer):
                writer.write(beginning)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    while not reader.at_eof():
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(reader.read(100), 0.2)
                        if beginning:
                            writer.write(b"x")
                            await writer.drain()
                return time.monotonic() - started

        waiting = asyncio.gather(*(slow(b) for b in beginnings for _ in range(15)))
        quick = [await timed(it.client) for _ in range(20)]
        ended = await asyncio.wait_for(waiting, 15)
        assert max(ended) < 4
        assert max(quick) < 1
        connections = psutil.Process().net_connections()
        assert sum(c.laddr[1] == it.port and c.status == "ESTABLISHED" for c in connections) <= 2


async def timed(client: httpx.AsyncClient) -> float:
    """Seconds that a request takes."""
    started = time.monotonic()
    assert (await client.get("/healthz")).status_code == 200
    return time.monotonic() - started


async def test_a_slow_body_is_told_so(database: str) -> None:
    """408."""
    async with house(database, receive_deadline=0.3) as it:
        await it.client.get("/v1/about")
        answer = await said(it, head("/v1/jobs", "Content-Length: 100") + b"{")
        assert answer.startswith(b"HTTP/1.1 408")


# -- text in headers -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a\u00e9\u4e2d", "x%0d%0aSet-Cookie: a=b", "<b>", "a;b=c"])
async def test_no_text_of_a_user_becomes_a_header(shared: House, key: str) -> None:
    """Whatever the key: the address is made of numbers, and the answer is 2xx."""
    answer = await shared.client.post(
        "/v1/jobs",
        json={"kind": "single"},
        headers=[(b"Idempotency-Key", key.encode())],
    )
    assert answer.status_code in (200, 201)
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    assert answer.json()["key"] == key
    assert "set-cookie" not in answer.headers


async def test_line_breaks_in_the_path_stay_in_the_path(shared: House) -> None:
    """No second header, no second answer."""
    answer = await said(
        shared,
        b"GET /v1/jobs/%0d%0aSet-Cookie:%20a=b HTTP/1.1\r\nHost: localhost\r\n"
        b"Connection: close\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"set-cookie" not in answer.lower().split(b"\r\n\r\n")[0]
