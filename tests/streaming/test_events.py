"""Events as JSON, cut and enveloped: any text goes through, and comes out as one event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fanout_streaming.frames import entry
from fanout_streaming.hints import parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from fanout.events import (
    MAX_ENVELOPE_BYTES,
    Event,
    as_reopened,
    as_told,
    envelopes,
    event_text,
    inline_lines,
    lines_of,
    readable,
)
from fanout.values import Claim
from tests.streaming.wire import Browser, Message

HOSTILE = (
    "4,000 é: " + "é" * 4000,
    "x" * 5990 + "😀" * 10,
    "x" * 5989 + "👩‍👩‍👧‍👦" * 10,
    "NUL \0 in it",
    "lone \ud800 and \udfff surrogates",
    "CR\rLF\nCRLF\r\nevent: end\ndata: {}\n\n",
    "LS \u2028 PS \u2029 NEL \x85 VT \x0b FF \x0c",
    "id: 9.9\nretry: 1",
    " leading space: and colon",
    "\ufeffBOM",
    '"quotes" \\ and \x1b[31m colours',
    "\x01" * 3000,
    '"' * 5000,
    "",
)
ANY_TEXT = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=200),
    st.sampled_from(HOSTILE),
    st.builds(
        lambda text, times: text * times, st.text(min_size=1, max_size=4), st.integers(1, 4000)
    ),
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT, st.binary(max_size=9)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(ANY_TEXT, inner, max_size=3)
    ),
    max_leaves=6,
)


def a_claim(key: str | None = "paper.pdf", **values: Any) -> Claim:
    fields: dict[str, Any] = dict.fromkeys(Claim._fields)
    return Claim(**{**fields, "id": 7, "attempt": 2, "document_key": key, **values})


def strict(text: bytes | str) -> Any:
    """What a browser's JSON.parse takes."""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def as_messages(line: bytes) -> list[Message]:
    return Browser().feed(entry(3, 1, line).frame)


def as_stored(text: str) -> str:
    """What a message becomes: what cannot be stored is said in other characters."""
    utf16 = text.replace("\0", "\u2400").encode("utf-16-le", "surrogatepass")
    return utf16.decode("utf-16-le", "replace")


@pytest.mark.parametrize("text", HOSTILE)
def test_any_message_is_one_event_with_exact_data(text: str) -> None:
    """A browser gets exactly one event of a known name, and the message as it was, or its begin."""
    line = event_text("log", a_claim(), text, level="info")
    assert b"\n" not in line
    assert b"\r" not in line
    (message,) = as_messages(line)
    assert (message.id, message.name) == ("1.3", "log")
    told = message.data["message"]
    assert as_stored(text).startswith(told)
    assert told == as_stored(text) or message.data["truncated"]
    assert strict(line)["message"] == as_stored(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_in_key_kind_and_fields_stays_inside_data(text: str) -> None:
    """Key, names and values of fields are user text as well."""
    key = as_stored(text)[:100] or "k"
    line = event_text("log", a_claim(key), "m", level="info", fields={"name" + text: text, "n": 1})
    (message,) = as_messages(line)
    assert message.data["key"] == key
    assert message.name == "log"
    assert message.data["message"] == "m"


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@given(message=ANY_TEXT, fields=VALUES, key=st.none() | ANY_TEXT.map(as_stored))
@settings(max_examples=150, deadline=None)
def test_whatever_user_code_says_is_one_event(message: str, fields: Any, key: str | None) -> None:
    """It never raises, is JSON that a browser takes, and no longer than a watcher should get."""
    line = event_text("log", a_claim(key and key[:200]), message, level="info", fields=fields)
    strict(line)
    assert len(line) <= 330 << 10
    (got,) = as_messages(line)
    assert got.name == "log"
    _, told = as_told(line)
    assert len(told) <= 6000


class Nasty:
    """Nothing about it works."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


class NastyDict(dict[str, int]):
    def items(self) -> Any:
        raise KeyError


def test_values_that_cannot_be_said_never_raise() -> None:
    """What JSON cannot say is said in words, broken __str__ and all; a log line fails no job."""
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (
        Nasty(),
        NastyDict(a=1),
        cycle,
        {1: 2},
        object(),
        float("nan"),
        10**5000,
        {"a": Nasty()},
    ):
        line = event_text("log", a_claim(), "m", level="info", fields={"value": value})
        assert strict(line)["message"] == "m"


def test_a_line_of_a_megabyte_is_cut_and_says_so() -> None:
    """256 KiB are kept, with the length of the whole; watchers get its beginning."""
    line = event_text("log", a_claim(), "é" * (1 << 19), level="info")
    stored = strict(line)
    assert len(stored["message"].encode()) <= 256 << 10
    assert stored["bytes"] == 1 << 20
    (message,) = as_messages(line)
    assert message.data["truncated"] is True
    assert message.data["bytes"] == 1 << 20
    assert set(message.data["message"]) == {"é"}


def test_large_fields_are_left_out_for_watchers_and_kept_in_the_table() -> None:
    """A watcher's line stays small whatever makes it long."""
    line = event_text("log", a_claim(), "m" * 9000, level="info", fields={"page": "y" * 50_000})
    assert strict(line)["fields"]["page"] == "y" * 50_000
    event, told = as_told(line)
    assert len(told) <= 6000
    assert event["truncated"] is True
    assert event["message"].startswith("mmm")


BODIES = st.lists(
    st.builds(
        lambda message, fields: event_text("log", a_claim(), message, level="info", fields=fields),
        ANY_TEXT,
        VALUES,
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@given(lines=BODIES, late=st.sets(st.sampled_from([7, 8])), first=st.integers(1, 2**60))
@settings(max_examples=150, deadline=None)
def test_envelopes_are_small_valid_and_say_what_the_table_says(
    lines: list[bytes], late: set[int], first: int
) -> None:
    """Each payload is JSON of at most 7,000 bytes; its events are cut exactly as those read."""
    body = b"\n".join(lines)
    payloads = envelopes(2**60, 2**30, first, len(lines), body, late=late, closed=True)
    assert len(set(payloads)) == len(payloads)
    numbers: list[int] = []
    inline: list[bytes] = []
    for payload in payloads:
        assert len(payload.encode()) <= MAX_ENVELOPE_BYTES
        assert strict(payload)["v"] == 1
        hint = parsed(payload)
        assert hint is not None
        numbers += range(hint.first, hint.last + 1)
        inline += [entry(1, 1, line).frame for line in hint.lines]
    assert numbers == list(range(first, first + len(lines)))
    assert strict(payloads[-1])["c"] is True
    if inline:
        assert inline == [entry(1, 1, line, late).frame for line in lines_of(body, len(lines))]


def test_equal_lines_make_payloads_that_differ() -> None:
    """NOTIFY folds equal payloads of one transaction."""
    body = b"\n".join([event_text("log", a_claim(), "retry", level="info")] * 3)
    (payload,) = envelopes(1, 1, 5, 3, body)
    assert len(inline_lines(payload)[1]) == 3
    assert envelopes(1, 1, 8, 3, body) != [payload]


def test_a_long_batch_says_only_where_it_is() -> None:
    """Beyond a few envelopes, reading the table costs less than receiving."""
    body = b"\n".join([event_text("log", a_claim(), "x" * 2000, level="info")] * 100)
    (payload,) = envelopes(1, 1, 1, 100, body)
    assert strict(payload) == {"v": 1, "s": 1, "g": 1, "f": 1, "n": 100}
    (payload,) = envelopes(1, 1, 1, 1, body.split(b"\n", maxsplit=1)[0], inline=False)
    assert "b" not in strict(payload)


@pytest.mark.parametrize(
    "stored",
    [
        b'{"type":',
        b"[]",
        b"null",
        b"",
        b"\xff\xfe",
        b'{"type":"log","value":NaN}',
        b'{"type":"log","message":"a"}\rdata: x',
        b'{"type":["log"],"job":[1],"message":{}}',
        b'{"type":"\\ud800","message":"\\udfff"}',
        b"[" * 5000,
        b'{"type":"log","fields":' + b"[" * 400 + b"]" * 400 + b"}",
    ],
)
def test_one_bad_line_of_the_table_ends_no_stream(stored: bytes) -> None:
    """Whatever lies in the table, a watcher gets one event, and the stream goes on."""
    frame = entry(3, 1, stored, frozenset({1})).frame
    (message,) = Browser().feed(frame)
    assert message.name in {"log", "end"}
    assert isinstance(message.data, dict)


def test_a_batch_has_as_many_lines_as_it_has_numbers() -> None:
    """A body that disagrees with its count shifts no number."""
    assert len(lines_of(b"{}\n{}", 3)) == 3
    assert len(lines_of(b"{}\n{}\n{}", 2)) == 2


def test_white_space_in_a_stored_line_is_no_line_break() -> None:
    """JSON may hold a CR between its tokens; an event stream may not."""
    (message,) = Browser().feed(entry(1, 1, b'{"type":"log",\r"message":"a"}').frame)
    assert message.data == {"type": "log", "message": "a"}


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "not JSON",
        "[]",
        "[1, 2]",
        '"text"',
        "7",
        "null",
        "{}",
        '{"v":2,"s":1,"g":1,"f":1,"n":1}',
        '{"v":1,"s":1,"g":1,"f":1}',
        '{"v":1,"s":"1","g":1,"f":1,"n":1}',
        '{"v":1,"s":1.5,"g":1,"f":1,"n":1}',
        '{"v":1,"s":true,"g":1,"f":1,"n":1}',
        '{"v":1,"s":1,"g":null,"f":1,"n":1}',
        '{"v":1,"s":1,"g":1,"f":[1],"n":1}',
        '{"v":1,"s":1,"g":1,"f":0,"n":1}',
        '{"v":1,"s":1,"g":1,"f":-5,"n":1}',
        '{"v":1,"s":1,"g":1,"f":1,"n":0}',
        '{"v":1,"s":1,"g":1,"f":1,"n":99999999}',
        '{"v":1,"s":1,"g":1,"f":' + "9" * 100 + ',"n":1}',
        '{"v":1,"s":1,"g":1,"f":' + "9" * 7000 + ',"n":1}',
        '{"v":1,"s":1,"g":1,"f":1e999,"n":1}',
        '{"v":1,"s":NaN,"g":1,"f":1,"n":1}',
        "[" * 7000,
        '{"a":' * 1000,
        "\ud800",
        "x" * 8001,
    ],
)
def test_a_payload_of_somebody_else_is_none(payload: str) -> None:
    """Not JSON, arrays, huge numbers, wrong types: no hint, and no error."""
    assert parsed(payload) is None


def test_a_forged_envelope_whose_parts_are_no_events_is_found() -> None:
    """Cut where line breaks are, its parts need not be JSON: each is read before it is believed."""
    payload = '{"v":1,"s":1,"g":1,"f":1,"n":2,"b":[\n{"x":[1\n,\n2]},{"y":1}\n]}'
    strict(payload)
    hint = parsed(payload)
    assert hint is not None
    assert any(readable(line) is None for line in hint.lines)


def test_an_end_that_others_follow_has_another_name() -> None:
    """A client leaves at an end."""
    assert strict(as_reopened(b'{"type":"end","outcome":"failed"}')) == {
        "type": "reopened",
        "outcome": "failed",
    }


def test_an_event_is_frozen() -> None:
    """A value is shared without fear."""
    event = Event(1, "1.2", "log", {})
    with pytest.raises(AttributeError):
        event.id = "1.3"  # type: ignore[misc]
