"""Bodies that parsers disagree about, or that could not be stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.harness import House
from tests.api.test_jobs import problem

JSON = {"Content-Type": "application/json"}


def submit(payload: str) -> bytes:
    return ('{"kind":"single","payload":' + payload + "}").encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b'{"kind":"single",}',
        b'{"kind":"single"} {}',
        b"{'kind':'single'}",
        b'\xef\xbb\xbf{"kind":"single"}',
        '{"kind":"single"}'.encode("utf-16"),
        '{"kind":"single"}'.encode("utf-16-le"),
        '{"kind":"single"}'.encode("utf-32"),
        b'{"kind":"sin\xffgle"}',
        b'{"kind":"single","payload":"\xed\xa0\x80"}',
        b'{"kind":"single","kind":"batch"}',
        submit('{"a":1,"a":2}'),
        submit("NaN"),
        submit("Infinity"),
        submit("-Infinity"),
        submit("1e999"),
        submit("-1e999"),
        submit("[" * 20_000 + "]" * 20_000),
        submit('{"a":' * 5_000 + "1" + "}" * 5_000),
        submit("0x10"),
        submit("01"),
        submit('"\t"'),
    ],
    ids=lambda raw: repr(raw[:40]),
)
async def test_what_is_not_plain_json_is_refused(shared: House, raw: bytes) -> None:
    """400, told as a problem; never an error, never a row."""
    told = problem(await shared.client.post("/v1/jobs", content=raw, headers=JSON), 400)
    assert told["type"] == "urn:fanout:bad-body"


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ('"a\\u0000b"', "payload"),
        ('{"a":["x","\\u0000"]}', "payload.a[1]"),
        ('{"a\\u0000":1}', "payload (a key)"),
        ('"\\ud800"', "payload"),
        ('{"x":"\\udfff"}', "payload.x"),
        ("[" * 100 + "]" * 100, None),
        ("9" * 5000, None),
    ],
)
async def test_what_cannot_be_stored_is_named_by_its_path(
    shared: House, payload: str, field: str | None
) -> None:
    """NUL, lone surrogates, depth, digits: 4xx with where it is."""
    answer = await shared.client.post("/v1/jobs", content=submit(payload), headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    if field is not None:
        assert answer.json()["field"] == field


@pytest.mark.parametrize(
    "value",
    [
        9007199254740993,
        -(2**63),
        10**100,
        0.1,
        "é中😀",
        "\u2028",
        {"a": [None, True, {}]},
        "\ud83d\ude00",
    ],
)
async def test_what_is_json_comes_back_exactly(shared: House, value: Any) -> None:
    """The same value, also of numbers beyond what a browser can hold."""
    raw = submit(json.dumps(value))
    made = await shared.client.post("/v1/jobs", content=raw, headers=JSON)
    assert made.status_code == 201, made.text
    found = await shared.client.get(made.headers["location"])
    assert json.loads(found.text)["payload"] == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "payload",
    ['{"a": "\\ud800"}', "[" * 400 + "]" * 400, "1e999", '"\\u0000"'],
    ids=lambda p: p[:20],
)
async def test_what_came_in_by_sql_is_shown_and_never_an_error(shared: House, payload: str) -> None:
    """A json column takes what the API refuses; it can be read, and so can its neighbours."""
    async with shared.engine.store._pool.acquire() as conn:
        job_id = await conn.fetchval(
            "INSERT INTO fanout.job (kind, payload) VALUES ('single', $1::text::json) RETURNING id",
            payload,
        )
    found = await shared.client.get(f"/v1/jobs/{job_id}")
    assert found.status_code == 200
    json.loads(found.content)
    assert (await shared.client.get("/v1/jobs")).status_code == 200
