"""Whatever a handler takes, gives or keeps has a defined end; its child ends, the batch closes."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import math
from collections.abc import Callable
from typing import Any

import asyncpg
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout import Document, Engine, Job, Status, UsageError
from fanout.wire import checked_text, clipped, decode, encode
from tests.engine.running import assert_true_to_its_children, closed, counts, quick, running

MIB = 1 << 20


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def circle(kind: type[list[Any] | dict[str, Any]]) -> Any:
    value: Any = kind()
    if isinstance(value, list):
        value.append(value)
    else:
        value["a"] = value
    return value


class Colour(enum.Enum):
    RED = "red"


class Model(pydantic.BaseModel):
    score: float = 0.0
    note: str | None = None


SAID: dict[str, tuple[Callable[[], Any], Any]] = {
    "exact": (lambda: 9007199254740993, 9007199254740993),
    "2^63": (lambda: 2**63, 2**63),
    "2^70": (lambda: [2**70, -(2**70)], [2**70, -(2**70)]),
    "4300 digits": (lambda: 10**4299, 10**4299),
    "small": (lambda: 5e-324, 5e-324),
    "large": (lambda: 1.7976931348623157e308, 1.7976931348623157e308),
    "minus zero": (lambda: -0.0, -0.0),
    "third": (lambda: 1 / 3, 1 / 3),
    "text": (lambda: '汉\U0001f600\x01\x7f\u2028"\\', '汉\U0001f600\x01\x7f\u2028"\\'),
    "says nul": (lambda: "\\u0000 NaN Infinity", "\\u0000 NaN Infinity"),
    "brackets": (lambda: "[" * 300, "[" * 300),
    "64 levels": (lambda: deep(64), deep(64)),
    "wide": (lambda: [[]] * 5000, [[]] * 5000),
    "tuple": (lambda: (1, (2,)), [1, [2]]),
    "set": (lambda: {1}, [1]),
    "bytes": (lambda: b"ab", "ab"),
    "int keys": (lambda: {1: {None: 2}}, {"1": {"None": 2}}),
    "empty key": (lambda: {"": {"": []}}, {"": {"": []}}),
    "model": (lambda: Model(score=1), {"score": 1.0, "note": None}),
    "date": (lambda: dt.date(2031, 1, 1), "2031-01-01"),
    "decimal": (lambda: decimal.Decimal("1.10"), "1.10"),
    "enum": (lambda: Colour.RED, "red"),
    "generator": (lambda: (n for n in range(3)), [0, 1, 2]),
    "1 MiB": (lambda: "x" * (MIB - 2), "x" * (MIB - 2)),
}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "NUL": (lambda: {"a": ["x", "a\0"]}, ".a[1]: holds a NUL"),
    "NUL key": (lambda: {"a\0": 1}, "holds a NUL"),
    "surrogate": (lambda: {"a": "\ud800"}, ".a: holds a lone surrogate"),
    "surrogate key": (lambda: {"\udfff": 1}, "holds a lone surrogate"),
    "NaN": (lambda: [math.nan], "[0]: is nan"),
    "inf": (lambda: {"a": math.inf}, ".a: is inf"),
    "1e999": (lambda: {"a": {"b": -1e999}}, ".a.b: is -inf"),
    "NaN in a model": (lambda: Model(score=math.nan), ".score: is nan"),
    "65 levels": (lambda: deep(65), "nested deeper than 64 levels"),
    "250 levels": (lambda: deep(250), "recursion limit exceeded"),
    "200,000 levels": (lambda: deep(200_000), "nested deeper than 64 levels"),
    "5,000 digits": (lambda: 10**5000, "cannot be read back: number out of range"),
    "circle": (lambda: circle(list), "nested deeper"),
    "named circle": (lambda: circle(dict), "nested deeper"),
    "bad bytes": (lambda: b"\xff", "invalid utf-8"),
    "object": (object, "cannot be written as JSON"),
    "exception": (lambda: ValueError("x"), "cannot be written as JSON"),
    "1 MiB + 1": (lambda: "x" * (MIB - 1), f"has {MIB + 1} bytes of JSON, the limit is {MIB}"),
    "huge": (lambda: ["x" * MIB] * 20, "bytes of JSON, the limit is"),
}


def unravel(value: Any) -> None:
    """Take a deep value apart level by level: its end must not be a deep recursion either."""
    while isinstance(value, list) and len(value) == 1 and value[0] is not value:
        value = value[0]


@pytest.mark.parametrize("name", SAID)
def test_what_can_be_said_is_said(name: str) -> None:
    """And reads back as plain JSON."""
    make, plain = SAID[name]
    back = decode(encode(make(), "result", MIB))
    assert back == plain
    assert type(back) is type(plain)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_is_refused_with_its_path(name: str) -> None:
    """As a UsageError, whatever the serializer would raise."""
    make, why = REFUSED[name]
    value = make()
    with pytest.raises(UsageError) as caught:
        encode(value, "result", MIB)
    assert why in str(caught.value)
    assert str(caught.value).startswith("result")
    assert len(str(caught.value)) < 1000
    unravel(value)


async def test_every_result_ends_its_child(engine: Engine, conn: asyncpg.Connection) -> None:
    """Said, it is completed; refused, it failed for good, with the reason; the batch closes."""
    runs: list[str] = []

    @engine.job
    async def leaf(job: Job[str]) -> Any:
        runs.append(job.payload)
        return (SAID.get(job.payload) or REFUSED[job.payload])[0]()

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, ((name, name) for name in {**SAID, **REFUSED}))

    async with running(engine):
        handle = await engine.submit(batch)
        done, refused = len(SAID), len(REFUSED)
        assert counts(await closed(handle)) == (done + refused, done, refused, 0)
        async for key, result in handle.results():
            assert result == SAID[key][1], key
        async for child in handle.failures():
            assert child.error is not None
            assert REFUSED[child.document_key][1].lstrip(".") in child.error
            assert child.error_type == "UsageError"
    assert sorted(runs) == sorted({**SAID, **REFUSED})
    await assert_true_to_its_children(conn)


async def test_every_checkpoint_is_kept_or_refused(engine: Engine) -> None:
    """Refused before it reaches the database; the handler may catch that and go on."""

    @engine.job(timeout=60)
    async def leaf(job: Job[None]) -> list[str]:
        kept = []
        for name, (make, _) in SAID.items():
            if name != "1 MiB":
                await job.save_checkpoint(make())
                kept.append(name)
        for name, (make, why) in REFUSED.items():
            value = make()
            if name in {"huge", "1 MiB + 1"}:
                continue
            with pytest.raises(UsageError) as caught:
                await job.save_checkpoint(value)
            assert why in str(caught.value)
            unravel(value)
        with pytest.raises(UsageError, match="checkpoint: has 65537 bytes"):
            await job.save_checkpoint("x" * 65535)
        await job.save_checkpoint("x" * 65534)
        return kept

    async with running(engine):
        handle = await engine.submit(leaf)
        assert len(await handle.result(60)) == len(SAID) - 1


async def test_every_payload_is_taken_or_refused(engine: Engine) -> None:
    """At submit, and in a fan-out, where the document is named."""
    manager: dict[str, str] = {}

    @engine.job
    async def batch(job: Job[None]) -> None:
        for name, (make, _) in REFUSED.items():
            value = make()
            with pytest.raises(UsageError) as caught:
                await job.fan_out("leaf", [Document(name, value)])
            manager[name] = caught.value.field
            unravel(value)

    async with running(engine):
        for name, (make, plain) in SAID.items():
            try:
                handle = await engine.submit("any", make())
            except UsageError as refused:
                assert "the limit is 1024" in str(refused), name  # noqa: PT017 - some fit, some do not
            else:
                assert (await handle.job()).payload == plain
        for make, _ in REFUSED.values():
            value = make()
            with pytest.raises(UsageError, match=r"^payload"):
                await engine.submit("any", value)
            unravel(value)
        handle = await engine.submit(batch)
        progress = await closed(handle)
        assert (progress.status, counts(progress)) == (Status.COMPLETED, (0, 0, 0, 0))
    assert set(manager) == set(REFUSED)
    assert all(field.startswith(f"document {name!r}") for name, field in manager.items())


async def test_what_a_model_cannot_read_back_is_not_written(engine: Engine) -> None:
    """A model's NaN would become null, and fail every reader of the result or snapshot."""

    @engine.job(max_retries=0)
    async def leaf(job: Job[Model]) -> Model:
        return Model(score=math.nan if job.payload.note else 1, note=job.payload.note)

    async with running(engine):
        with pytest.raises(UsageError, match=r"payload\.score: is nan"):
            await engine.submit(leaf, Model(score=math.nan))
        good = await engine.submit(leaf, Model())
        assert (await closed(good)).status is Status.COMPLETED
        bad = await engine.submit(leaf, Model(note="x"))
        assert (await closed(bad)).status is Status.FAILED
        assert "result.score: is nan" in str((await bad.job()).error)


async def test_a_key_of_any_text_comes_back(engine: Engine) -> None:
    """Document keys and idempotency keys are text, not identifiers."""
    keys = [
        "a'b",
        'a"b',
        "汉\U0001f600",
        " ",
        "\n",
        "\x01",
        "%s",
        "../..",
        "x" * 512,
        "\ufffd",
        "a:b.c",
    ]

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out("leaf", ((key, None) for key in keys))

    @engine.job
    async def leaf(job: Job[None]) -> str | None:
        return job.document_key

    async with running(engine):
        handle = await engine.submit(batch)
        await closed(handle)
        assert sorted([key async for key, result in handle.results() if key == result]) == sorted(
            keys
        )
        for key in keys:
            assert (await engine.submit("leaf", key=key, delay=60)).created
            assert await engine.find(key)


@given(st.text(), st.integers(64, 300))
def test_any_text_is_made_storable(text: str, limit: int) -> None:
    """Within its bytes, without NUL or surrogate, untouched if there was nothing to do."""
    clean = clipped(text, limit)
    assert len(clean.encode()) <= limit
    assert "\0" not in clean
    if "\0" not in text and len(text.encode(errors="replace")) <= limit and text.isascii():
        assert clean == text


def test_half_characters_are_replaced_one_by_one() -> None:
    """A pair that was split makes its character again."""
    assert clipped("a\ud800b\udc00", 100) == "a\ufffdb\ufffd"
    assert clipped("\ud83d\ude00", 100) == "\U0001f600"
    assert clipped("a\0", 100) == "a\u2400"


@given(st.text(max_size=300))
def test_a_key_is_taken_as_it_is_or_refused(text: str) -> None:
    """Never changed."""
    try:
        assert checked_text(text, "key", 512) == text
    except UsageError:
        assert (
            not text
            or "\0" in text
            or len(text.encode(errors="surrogatepass")) > 512
            or any(0xD800 <= ord(character) < 0xE000 for character in text)
        )


def test_settings_bound_what_is_kept() -> None:
    """So that a row is never too large to move."""
    settings = quick(max_result_bytes=10)
    with pytest.raises(UsageError, match="the limit is 10"):
        encode("x" * 9, "result", settings.max_result_bytes)
