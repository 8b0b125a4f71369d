"""Texts and numbers that a database, a parser or a notification cannot carry."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from fanout import DatabaseUnavailable, Document, Job, PermanentError, Settings, UsageError
from fanout.statements import load_migrations, load_statements
from fanout.store import Store
from fanout.wakeups import MAX_PAYLOAD_BYTES, Waker, channel_of
from fanout.wire import MAX_DEPTH, clipped, decode, encode
from tests.cases.lab import Calls, counters, engine_on, until, until_true
from tests.machine.invariants import check

NUL, SURROGATE = "a\x00b", "a\ud800b"
NOT_TEXT = [NUL, SURROGATE]


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "NUL in a value": ({"name": NUL}, r"payload\.name"),
    "NUL in a key": ({NUL: 1}, r"payload \(a key\)"),
    "NUL in a list": ({"a": [1, NUL]}, r"payload\.a\[1\]"),
    "lone surrogate": ({"name": SURROGATE}, r"payload\.name"),
    "lone surrogate in a key": ({SURROGATE: 1}, "payload"),
    "file name with surrogateescape": ({"f": b"\xff.pdf".decode("utf-8", "surrogateescape")}, "f"),
    "NaN": ({"x": math.nan}, r"payload\.x"),
    "inf": ({"x": math.inf}, r"payload\.x"),
    "1e999": ({"x": json.loads("1e999")}, r"payload\.x"),
    "200,000 nested arrays": (deep(200_000), "payload"),
    "too deep": (deep(MAX_DEPTH + 1), "payload"),
    "5,000 digits": ({"n": 10**5000}, "payload"),
    "too long": ({"text": "x" * 1024}, "1024"),
    "too long in bytes": ({"text": "é" * 600}, "1024"),
    "not JSON": ({"x": object()}, "payload"),
}


async def test_what_cannot_be_stored_is_refused_at_submit(
    database: str, conn: asyncpg.Connection
) -> None:
    """kestra-io/kestra #10326, hatchet-dev/hatchet #2573 (NUL); encode/django-rest-framework #7026
    (surrogates), #5235, ZJU-REAL/Polaris #287 (NaN); pydantic/jiter #120 (depth, digits): a clear
    error that names the path, and no row; the same for a kind that is served by others."""
    async with engine_on(database) as engine:
        for value, names in REFUSED.values():
            with pytest.raises(UsageError, match=names):
                await engine.submit("leaf", value)
            with pytest.raises(UsageError):
                await engine.submit("elsewhere", value)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0


@pytest.mark.parametrize("text", NOT_TEXT, ids=["NUL", "surrogate"])
async def test_a_key_that_is_not_text_is_refused(
    text: str, database: str, conn: asyncpg.Connection
) -> None:
    """hatchet-dev/hatchet PR #3276: the idempotency key and a document's key are checked like any
    other text."""
    async with engine_on(database) as engine:
        with pytest.raises(UsageError, match="key"):
            await engine.submit("leaf", key=text)
    assert await conn.fetchval("SELECT count(*) FROM fanout.job") == 0


EXACT: list[Any] = [
    9007199254740993,
    -(2**63),
    2**70,
    10**4000,
    {"": 1},
    {"a\nb": "c\r\n\t\u2028"},
    "\u202ertl \x1b[31m </script> 😀 %s $1",
    0.1 + 0.2,
    5e-324,
    True,
    None,
    [],
    deep(MAX_DEPTH - 1),
]


@pytest.mark.parametrize("value", EXACT, ids=range(len(EXACT)))
def test_what_is_accepted_comes_back_exactly(value: Any) -> None:
    """pydantic/jiter #120: parsers disagree at the edges: what was accepted is read back as it
    was, big integers and all."""
    back = decode(encode(value, "payload", 10_000))
    assert back == value
    assert type(back) is type(value)


UNSTORABLE: dict[str, Any] = {
    "NUL": NUL,
    "NUL in a key": {"a": {NUL: 1}},
    "lone surrogate": SURROGATE,
    "NaN": math.nan,
    "inf": math.inf,
    "1e309": [1e308 * 10],
    "100,000 nested arrays": deep(100_000),
    "5,000 digits": 10**5000,
    "not JSON": object(),
    "too long": "x" * (Settings().max_result_bytes + 1),
}


@pytest.mark.parametrize("what", UNSTORABLE)
async def test_a_result_that_cannot_be_stored_fails_its_child_at_once(
    what: str, database: str, conn: asyncpg.Connection
) -> None:
    """kestra-io/kestra #10326 (RUNNING for ever), ZJU-REAL/Polaris #287, datagouv/hydra #72 (one
    NaN took the run down): a permanent failure of that child with a readable reason, never a
    retry; its neighbours complete, the batch closes."""
    calls = Calls()
    async with engine_on(database) as engine:

        @engine.job(max_retries=3)
        async def odd(job: Job[Any]) -> Any:
            calls.starts.append((job.id, job.attempt))
            return UNSTORABLE[what] if job.payload else "fine"

        @engine.job
        async def odds(job: Job[Any]) -> None:
            await job.fan_out(odd, [Document(str(n), n == 1) for n in range(3)])

        async with engine.worker():
            handle = await engine.submit(odds)
            progress = await handle.wait(15)
            assert (progress.completed, progress.failed) == (2, 1)
            [failure] = [child async for child in handle.failures()]
    assert failure.document_key == "1"
    assert failure.error is not None
    assert failure.error.startswith("result")
    assert {attempt for _, attempt in calls.starts} == {1}
    assert await check(conn, quiet=True) == []


class Reading(BaseModel):
    value: float


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_model_does_not_smuggle_nan_in(
    value: float, database: str, conn: asyncpg.Connection
) -> None:
    """ZJU-REAL/Polaris #287: pydantic writes NaN as null by default: what a typed handler
    returned is refused, and not quietly something else, or it is null by rule; it is never
    retried."""
    async with engine_on(database) as engine:

        @engine.job(max_retries=3)
        async def typed(job: Job[Any]) -> Reading:
            return Reading(value=value)

        async with engine.worker():
            handle = await engine.submit(typed)
            await handle.wait(10)
            row = await handle.job()
    assert (row.attempt, row.failures <= 1) == (1, True)
    assert str(row.status) == "failed" or row.result == {"value": None}


@pytest.mark.parametrize(
    "text",
    [
        NUL,
        SURROGATE,
        "é" * 100_000,
        "😀" * 50_000,
        "x\r\ndata: forged\n\nevent: bye\r: \u2028",
        "",
        "\x1b[31mred\x1b[0m \u202e",
        "\udcff" * 9000,
    ],
    ids=["NUL", "surrogate", "é", "emoji", "SSE", "empty", "ANSI", "surrogates"],
)
async def test_an_error_text_never_keeps_its_error_from_being_counted(
    text: str, database: str, conn: asyncpg.Connection
) -> None:
    """fanout/django-eventstream #185 (CR, LF), open-webui/open-webui PR #27084, getsentry/sentry
    PR #10752 (surrogates), hatchet-dev/hatchet #2573 (NUL): the child is failed at once; its
    text is kept, storable, within 8 KiB of UTF-8, cut at a character, and never empty."""
    async with engine_on(database) as engine:

        @engine.job
        async def bad(job: Job[Any]) -> None:
            raise PermanentError(text)

        async with engine.worker():
            handle = await engine.submit(bad)
            await handle.wait(10)
            row = await handle.job()
    assert (str(row.status), row.attempt) == ("failed", 1)
    assert row.error
    assert len(row.error.encode()) <= Settings().max_error_bytes
    if text.isprintable() and len(text) < 1000 and text:
        assert row.error == text
    if "data: forged" in text:
        assert row.error == text  # kept as data; whoever renders it escapes it


@pytest.mark.parametrize("limit", [64, 65, 66, 67, 100])
@pytest.mark.parametrize("letter", ["x", "é", "漢", "😀"])
def test_a_cut_falls_between_characters(letter: str, limit: int) -> None:
    """ansible/awx #12999, saurabhnanda/odd-jobs #42, danidee10/channels_postgres #84: bytes are
    counted, not characters, and no character is cut in two."""
    cut = clipped(letter * 1000, limit)
    assert len(cut.encode()) <= limit
    assert "�" not in cut
    assert f"{len((letter * 1000).encode())} bytes in all" in cut


# -- wake-ups ----------------------------------------------------------------------------------


async def test_a_hint_of_any_size_fits_and_is_heard(
    database: str, conn: asyncpg.Connection
) -> None:
    """ansible/awx #12999, danidee10/channels_postgres #84: a NOTIFY of 8,000 bytes raises and
    takes its transaction with it: a hint that would be too long wakes everybody instead."""
    heard: list[str] = []
    await conn.add_listener("fanout_wake", lambda *a: heard.append(str(a[3])))
    async with engine_on(database) as engine:
        waker = Waker(engine.store, engine.settings)
        for n in range(300):
            waker.wake(f"{'k' * 58}{n:04}")
        await until_true(lambda: "[]" in heard)
        waker.wake("leaf")
        await until_true(lambda: '["leaf"]' in heard)
        await waker.close()
        assert waker.dropped == 0
    assert all(len(payload.encode()) <= MAX_PAYLOAD_BYTES for payload in heard)


async def test_the_same_hint_twice_is_two_hints(database: str, conn: asyncpg.Connection) -> None:
    """graphprotocol/graph-node #936: equal notifications of one transaction are folded into one:
    each hint is a transaction of its own, so a second one is never lost in the first."""
    heard: list[str] = []
    await conn.add_listener("fanout_wake", lambda *a: heard.append(str(a[3])))
    async with engine_on(database) as engine:
        for n in range(1, 4):
            engine.wake("leaf")
            await until_true(lambda: len(heard) == n)  # noqa: B023 -- awaited at once
    assert heard == ['["leaf"]'] * 3


@pytest.mark.parametrize("schema", ["f", "a" * 40, "with_1_digit"])
async def test_the_channel_is_one_that_postgresql_keeps_whole(
    schema: str, conn: asyncpg.Connection
) -> None:
    """impossibl/pgjdbc-ng #113: a channel's name is a constant of the schema, lower case and
    shorter than 63 bytes, so neither side cuts or folds it; ids never become names."""
    channel = channel_of(Settings(schema_name=schema))
    assert len(channel.encode()) < 63
    heard: list[str] = []
    await conn.add_listener(channel, lambda *a: heard.append(str(a[2])))
    await conn.execute("SELECT pg_notify($1, 'x')", channel)
    await until_true(lambda: heard == [channel])
    for bad in ('Mixed"Case;--', "x" * 41, "", "😀", "pg_x", "a.b"):
        with pytest.raises(UsageError, match="schema_name"):
            Settings(schema_name=bad)


async def test_garbage_on_the_channel_is_counted_and_ignored(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """ansible/awx #12999: whatever anybody sends on the channel, the listener lives and hears
    the next hint."""
    async with engine_on(database, calls, poll_interval=30) as engine, engine.worker() as worker:
        await until(
            conn,
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'fanout listen' "
            "AND query LIKE 'LISTEN%'",
        )
        garbage = ["", "{", "[1]", '{"a": 1}', "\u2028", "[" * 5000, '"leaf"', "1e999", "NaN"]
        for payload in garbage:
            await conn.execute("SELECT pg_notify('fanout_wake', $1)", payload)
        await until_true(lambda: worker.listener.garbage == len(garbage))
        handle = await engine.submit("leaf")
        await handle.wait(3)


async def test_the_listener_holds_no_transaction_and_no_notify_is_sent_beside_data(
    database: str, conn: asyncpg.Connection, calls: Calls
) -> None:
    """hasura/graphql-engine #6263, que-rb/que #229, mozilla/tls-observatory #109: a listener
    inside a transaction fills the queue, and then every commit with a NOTIFY fails. Ours never
    has one open, and as no data travels with a NOTIFY, one that is refused costs nothing but a
    hint."""
    sampled = set()
    with pytest.MonkeyPatch.context() as patch:

        async def refused(*_: Any) -> None:
            raise DatabaseUnavailable("too many notifications in the NOTIFY queue")

        patch.setattr(Store, "wake", refused)
        async with engine_on(database, calls) as engine, engine.worker():
            handle = await engine.submit("batch", {"n": 50, "child": {"seconds": 0.01}})
            while not (await handle.progress()).is_closed:
                for row in await conn.fetch(
                    "SELECT state, xact_start, backend_xmin FROM pg_stat_activity "
                    "WHERE application_name = 'fanout listen'"
                ):
                    if row["state"] == "idle":
                        sampled.add((row["xact_start"], row["backend_xmin"]))
    assert sampled == {(None, None)}
    assert await counters(conn, handle.id) == ("completed", 50, 50, 0, 0)


def test_what_notifies_writes_nothing() -> None:
    """que-rb/que #229: NOTIFY stands in statements of its own: no statement that writes data
    notifies, and no trigger or function does."""
    texts = dict(load_statements()) | {name: sql for _, name, sql in load_migrations()}
    writes = re.compile(r"\b(INSERT INTO|UPDATE fanout|DELETE FROM|CREATE)\b")
    notifying = {name: sql for name, sql in texts.items() if "notify(" in sql.lower()}
    assert "wake" in notifying
    assert [name for name, sql in notifying.items() if writes.search(sql)] == []
    assert MAX_PAYLOAD_BYTES < 7900
