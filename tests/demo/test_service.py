"""The stand-in for a paid service: what it lets in, what it charges, how it fails."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fanout.demo.documents import discover, snapshot
from fanout.demo.meter import LLM, PARSER, Fault, Meter, Refusal, Rules, Stats, Told, Visit
from fanout.demo.service import Orders, Service

CALM = {"error_every": 0, "lost_every": 0, "hang_every": 0, "away_after": 0}


def rules(**values: Any) -> Rules:
    """Quick, and without faults, unless they are asked for."""
    return Rules(**{"parse_seconds": 0.05, **CALM, **values})


def there() -> bool:
    return True


def client_of(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=address, headers={"Authorization": "Bearer s3cret"}, timeout=30
    )


@contextlib.asynccontextmanager
async def serving(one: Rules) -> AsyncIterator[httpx.AsyncClient]:
    """The service in threads, and a client that knows its key."""
    with Service(Orders(key="s3cret", rules=one)) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            async with client_of(service.address) as client:
                yield client
        finally:
            await asyncio.to_thread(service.shutdown)
            await asyncio.to_thread(thread.join)


@contextlib.asynccontextmanager
async def process_of(memory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The service as a process of its own, as the demo starts it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fanout.demo.service"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        orders = Orders(key="s3cret", rules=rules(), memory=memory)
        process.stdin.write(orders.model_dump_json().encode() + b"\n")
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().strip()
        async with client_of(address) as client:
            yield client
    finally:
        process.stdin.close()  # it ends with whoever started it
        async with asyncio.timeout(60):
            assert await process.wait() == 0


def document(folder: Path, name: str = "fox.txt") -> dict[str, Any]:
    """What a child sends of a file."""
    path = folder / name
    path.write_text("The quick brown fox jumps over the lazy dog in the warm sun.")
    [found] = discover([path])
    return snapshot(found).model_dump(mode="json")


async def parse(client: httpx.AsyncClient, body: dict[str, Any], key: str) -> httpx.Response:
    return await client.post("/parse", json=body, headers={"Idempotency-Key": key})


async def stats(client: httpx.AsyncClient) -> Stats:
    return Stats.model_validate((await client.get("/stats")).json())


async def test_two_at_a_time_and_the_third_is_told_when_to_come_again(tmp_path: Path) -> None:
    """429 with Retry-After, and the books know the most at once."""
    async with serving(rules(parse_seconds=1)) as client:
        bodies = [document(tmp_path, f"{n}.txt") for n in range(6)]
        said = await asyncio.gather(
            *(parse(client, body, f"k{n}") for n, body in enumerate(bodies))
        )
        assert sorted(one.status_code for one in said) == [200, 200, 429, 429, 429, 429]
        assert {one.headers["Retry-After"] for one in said if one.status_code == 429} == {"1"}
        books = await stats(client)
        assert books.most_at_once == {PARSER: 2}
        assert (books.paid, books.answers) == ({PARSER: 2}, {"parser 200": 2, "parser 429": 4})


async def test_a_key_is_charged_once_and_a_lost_answer_comes_again(tmp_path: Path) -> None:
    """The connection is reset after the work; the same key gets the answer, at no cost."""
    body = document(tmp_path)
    async with serving(rules(lost_every=1)) as client:
        with pytest.raises(httpx.NetworkError):
            await parse(client, body, "k")
        again = await parse(client, body, "k")
        assert again.json()["document"]["words"] == 13
        assert again.headers["Idempotent-Replayed"] == "true"
        books = await stats(client)
        assert (books.paid, books.paid_twice, books.replayed) == ({PARSER: 1}, 0, 1)
        assert books.cost == again.json()["cost"]
        assert books.asked_again == 0

        assert (await parse(client, body, "k")).status_code == 200
        assert (await stats(client)).asked_again == 1
        with pytest.raises(httpx.NetworkError):
            await parse(client, body, "a key of its own for each attempt")
        assert (await stats(client)).paid_twice == 1


async def test_what_was_paid_outlives_the_process(tmp_path: Path) -> None:
    """A demo that is interrupted and run again pays for nothing twice; half a line is no harm."""
    memory, body = tmp_path / "paid.jsonl", document(tmp_path)
    async with process_of(memory) as client:
        first = (await parse(client, body, "k")).json()
    with memory.open("a") as file:
        file.write('{"at": ["par')
    async with process_of(memory) as client:
        again = await parse(client, body, "k")
        assert (again.json(), again.headers["Idempotent-Replayed"]) == (first, "true")
        assert (await stats(client)).paid == {PARSER: 1}


async def test_a_client_that_hangs_up_leaves_its_place(tmp_path: Path) -> None:
    """After a timeout the next one is let in at once, and the service never counts three."""
    bodies = [document(tmp_path, f"{n}.txt") for n in range(4)]
    async with serving(rules(hang_every=1)) as client:
        for n, body in enumerate(bodies):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(
                    "/parse", json=body, headers={"Idempotency-Key": f"k{n}"}, timeout=0.2
                )
        books = await stats(client)
        assert (books.most_at_once, books.paid, books.answers) == ({PARSER: 1}, {}, {})
        assert books.faults == {"parser no answer": 4}


async def test_it_gives_up_for_a_while_and_errors_now_and_then(tmp_path: Path) -> None:
    """503 says when to come again; a 500 costs nothing."""
    async with serving(rules(away_after=2, away_seconds=60, error_every=2)) as client:
        bodies = [document(tmp_path, f"{n}.txt") for n in range(4)]
        said = [await parse(client, body, f"k{n}") for n, body in enumerate(bodies)]
        assert [one.status_code for one in said] == [200, 500, 200, 503]
        assert 1 <= int(said[3].headers["Retry-After"]) <= 60
        assert (await stats(client)).paid == {PARSER: 2}


async def test_bad_documents_strangers_and_nonsense_are_refused(tmp_path: Path) -> None:
    """An unreadable document has its reason, who does not know the key learns nothing."""
    body = document(tmp_path)
    (tmp_path / "fox.txt").write_bytes(b"")
    async with serving(rules()) as client:
        empty = await parse(client, body, "k")
        assert (empty.status_code, empty.json()["detail"]) == (422, "the file is empty")
        assert (await client.post("/parse", json=body)).status_code == 400
        assert (await parse(client, {"key": "nonsense"}, "k")).status_code == 422
        known = {"Idempotency-Key": "k"}
        assert (await client.post("/other", json=body, headers=known)).status_code == 404
        client.headers["Authorization"] = "Bearer guess"
        assert (await parse(client, body, "k")).status_code == 401
        assert (await client.get("/stats")).status_code == 404


def enter(meter: Meter, number: int, now: float, tokens: int) -> Visit | Refusal | Told:
    """A call to the LLM by a key of its own, that leaves at once."""
    visit = meter.enter(LLM, f"k{number}", now, there, tokens=tokens)
    if isinstance(visit, Visit):
        meter.leave(visit)
    return visit


def test_the_llm_has_a_rate_of_requests_and_of_tokens() -> None:
    """Smooth: a sixth of a minute's worth at once, then as it comes back."""
    meter = Meter(rules(llm_requests_per_minute=60, llm_tokens_per_minute=6_000))
    for n in range(10):
        assert isinstance(enter(meter, n, 100, 10), Visit)
    refused = enter(meter, 10, 100, 10)
    assert refused == Refusal(429, 1.0, "above the rate")
    assert isinstance(enter(meter, 10, 101, 900), Visit)
    assert enter(meter, 11, 102, 900) == Refusal(429, 7.0, "above the rate")
    assert isinstance(enter(meter, 11, 110, 900), Visit)
    assert isinstance(enter(meter, 12, 200, 60_000), Visit)  # however big, once all has come back


def test_a_key_whose_client_came_back_too_early_is_charged_once() -> None:
    """The first call's work goes on though nobody waits for it; the second one's is the same."""
    meter = Meter(rules(parse_at_once=1))
    assert isinstance(meter.enter(PARSER, "k", 0, lambda: False), Visit)
    assert isinstance(meter.enter(PARSER, "k", 1, there), Visit)
    for words in (12, 13):
        meter.pay(PARSER, "k", "fox.txt", {"words": words}, 0.01, 2)
    assert (meter.stats().paid, meter.stats().cost) == ({PARSER: 1}, 0.01)
    assert meter.enter(PARSER, "k", 3, there) == Told({"words": 12})


@pytest.mark.parametrize(
    ("fault", "is_hit"),
    [(Fault.ERROR, lambda n: n % 2 == 0 and n % 3), (Fault.LOST, lambda n: n % 3 == 0)],
)
def test_faults_come_by_number(fault: Fault, is_hit: Callable[[int], object]) -> None:
    """Every n-th call that was let in, the worst of those that are due."""
    meter = Meter(rules(error_every=2, lost_every=3, parse_at_once=50))
    visits = [meter.enter(PARSER, f"k{n}", 0, there) for n in range(1, 13)]
    hit = [n for n, one in enumerate(visits, 1) if isinstance(one, Visit) and one.fault is fault]
    assert hit == [n for n in range(1, 13) if is_hit(n)]
