"""Which exceptions are which."""

from __future__ import annotations

import email.message
import math
import urllib.error
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any, NoReturn

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout import (
    ConfigurationError,
    DatabaseUnavailable,
    PermanentError,
    TransientError,
    UsageError,
)
from fanout.failures import Blame, Classified, classify

PERMANENT, TRANSIENT = Classified(Blame.PERMANENT), Classified(Blame.TRANSIENT)


class HttpxLike(Exception):
    """httpx.HTTPStatusError and requests.HTTPError keep the response."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"{status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


class RequestsLike(OSError):
    """requests.HTTPError is an OSError with a response."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"{status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


class AiohttpLike(Exception):
    """aiohttp.ClientResponseError keeps status and headers itself."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"{status}")
        self.status = status
        self.headers = headers or {}


class OpenaiLike(Exception):
    """openai.APIStatusError keeps status_code itself, and the response for its headers."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"{status}")
        self.status_code = status
        self.response = SimpleNamespace(headers=headers or {})


def urllib_like(status: int, headers: dict[str, str] | None = None) -> urllib.error.HTTPError:
    """Urllib keeps the code, and headers in an email message."""
    message = email.message.Message()
    for name, value in (headers or {}).items():
        message[name] = value
    error = urllib.error.HTTPError("http://x", status, "no", message, None)
    error.close()
    return error


CLIENTS: list[Any] = [HttpxLike, RequestsLike, AiohttpLike, OpenaiLike, urllib_like]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_error_is_permanent(client: Any) -> None:
    """Any 4xx but three says that the same request will never do."""
    for status in set(range(400, 500)) - {408, 425, 429}:
        assert classify(client(status)) == PERMANENT, status


@pytest.mark.parametrize("client", CLIENTS)
def test_a_busy_or_broken_server_is_transient(client: Any) -> None:
    """408, 425, 429 and 5xx may be different next time."""
    for status in (408, 425, 429, *range(500, 600)):
        assert classify(client(status)) == TRANSIENT, status


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["Retry-After", "retry-after"])
def test_retry_after_in_seconds_is_honoured(client: Any, name: str) -> None:
    """Whatever the client, whatever the case of the header."""
    assert classify(client(429, {name: "17"})) == Classified(Blame.TRANSIENT, 17.0)


@pytest.mark.parametrize("client", CLIENTS)
def test_retry_after_as_a_date_is_honoured(client: Any) -> None:
    """A date is turned into seconds from now."""
    when = datetime.now(UTC) + timedelta(seconds=90)
    verdict = classify(client(503, {"Retry-After": format_datetime(when, usegmt=True)}))
    assert verdict.retry_after is not None
    assert 85 < verdict.retry_after <= 90


def test_a_date_in_the_past_is_no_wait() -> None:
    """Also one that says -0000 for its zone."""
    for text in ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 -0000"):
        assert classify(AiohttpLike(429, {"Retry-After": text})).retry_after == 0


@given(st.text() | st.binary() | st.integers() | st.floats() | st.none() | st.lists(st.text()))
def test_any_retry_after_has_a_verdict(value: Any) -> None:
    """A header is anybody's text: it gives seconds that are not negative, or nothing."""
    seconds = classify(AiohttpLike(429, {"Retry-After": value})).retry_after
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [(5, 5.0), ("5", 5.0), (timedelta(minutes=1), 60.0), ("soon", None), (math.nan, None), (-1, 0)],
    ids=repr,
)
def test_what_a_handler_asks_for_need_not_be_a_float(asked: Any, seconds: float | None) -> None:
    """TransientError takes a header's text as it came; a mistake costs the wait, not the job."""
    assert classify(TransientError("busy", retry_after=asked)) == Classified(
        Blame.TRANSIENT, seconds
    )


class Model(pydantic.BaseModel):
    n: int


def invalid() -> pydantic.ValidationError:
    with pytest.raises(pydantic.ValidationError) as caught:
        Model.model_validate({"n": "x"})
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        PermanentError("no"),
        UsageError("a", "b", "c"),
        ConfigurationError("a", "b", "c"),
        invalid(),
        FileNotFoundError(2, "no such file"),
        IsADirectoryError(),
        NotADirectoryError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_bad_input_is_permanent(error: Exception) -> None:
    """Bad input, not found, corrupt: no retry can help."""
    assert classify(error) == PERMANENT


@pytest.mark.parametrize(
    "error",
    [
        TransientError(),
        TimeoutError(),
        ConnectionResetError(),
        BrokenPipeError(),
        OSError(28, "disk full"),
        PermissionError(),
        MemoryError(),
        RecursionError(),
        KeyError("x"),
        ValueError("x"),
        SystemExit(3),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_not_in_the_table_is_transient(error: BaseException) -> None:
    """An unknown error is given its retries."""
    assert classify(error) == TRANSIENT


def test_the_engines_own_database_is_nobodys_fault() -> None:
    """DatabaseUnavailable is infrastructure."""
    assert classify(DatabaseUnavailable("away")) == Classified(Blame.INFRASTRUCTURE)


def test_a_handlers_own_table_goes_first() -> None:
    """`permanent=` and `transient=` overrule what is built in, and each other in that order."""
    assert classify(ValueError(), permanent=(ValueError,)) == PERMANENT
    assert classify(FileNotFoundError(), transient=(OSError,)) == TRANSIENT
    assert classify(HttpxLike(404), transient=(HttpxLike,)) == TRANSIENT
    assert classify(DatabaseUnavailable("x"), permanent=(DatabaseUnavailable,)) == PERMANENT
    assert classify(KeyError(), permanent=(KeyError,), transient=(KeyError,)) == PERMANENT


def test_a_group_is_permanent_only_if_all_of_it_is() -> None:
    """One that may pass makes the whole worth a retry, after the longest wait asked for."""
    gone, busy = HttpxLike(404), HttpxLike(429, {"Retry-After": "3"})
    slow = TransientError(retry_after=9)
    assert classify(ExceptionGroup("g", [gone, PermanentError()])) == PERMANENT
    assert classify(ExceptionGroup("g", [gone, ExceptionGroup("h", [gone])])) == PERMANENT
    assert classify(ExceptionGroup("g", [gone, busy, slow])) == Classified(Blame.TRANSIENT, 9)
    away = DatabaseUnavailable("x")
    assert classify(ExceptionGroup("g", [away])) == Classified(Blame.INFRASTRUCTURE)
    assert classify(ExceptionGroup("g", [away, gone])) == TRANSIENT


class Hostile(Exception):
    """Every property raises, as httpx's `request` does when there is none."""

    @property
    def response(self) -> NoReturn:
        raise RuntimeError("there is no response")

    status = code = headers = status_code = response


def test_an_error_whose_properties_raise_has_a_verdict_all_the_same() -> None:
    """Without one its job would go back to pending for ever."""
    assert classify(Hostile()) == TRANSIENT


@pytest.mark.parametrize("status", [True, "404", 4040, None, 99, object()])
def test_a_number_that_is_no_http_status_says_nothing(status: Any) -> None:
    """SystemExit has a code too; only 100 to 599 is a status."""
    assert classify(AiohttpLike(status)) == TRANSIENT
