"""From a function's annotations to a handler."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn, TypeVar

import pydantic
import pytest

from fanout import ConfigurationError, Engine, Handler, Job, Settings, UsageError

T = TypeVar("T")


class Paper(pydantic.BaseModel):
    storage_key: str
    pages: int = 0
    score: float = 0.0


@dataclasses.dataclass
class Extracted:
    words: int


async def papers_extract(job: Job[Paper]) -> Extracted:
    return Extracted(job.payload.pages)


@pytest.fixture
def engine() -> Engine:
    return Engine("postgresql://nowhere", settings=Settings())


def test_a_bare_decorator_takes_everything_from_the_function(engine: Engine) -> None:
    """Name, types, defaults."""
    handler = engine.job(papers_extract)
    assert (handler.name, handler.is_async) == ("papers_extract", True)
    assert (handler.timeout, handler.max_retries, handler.on_closed) == (1800, 3, None)
    assert engine.handlers == {"papers_extract": handler}


def test_a_manager_has_other_defaults(engine: Engine) -> None:
    """Whoever names a follow-up fans out: an hour, and two retries."""
    report = engine.job(name="papers_report")(papers_extract)
    handler = engine.job(on_closed=report, name="papers_batch")(papers_extract)
    assert (handler.timeout, handler.max_retries) == (3600, 2)
    assert handler.on_closed == "papers_report"


def test_what_is_given_wins(engine: Engine) -> None:
    """Over the settings, and over what a manager has."""
    handler = engine.job(timeout=5, max_retries=0, on_closed="x", name="y")(papers_extract)
    assert (handler.name, handler.timeout, handler.max_retries) == ("y", 5.0, 0)


async def test_a_handler_is_still_the_function(engine: Engine) -> None:
    """It can be called in a test without an engine."""

    class Fake:
        payload = Paper(storage_key="a", pages=3)

    handler: Handler[Any, Any] = engine.job(papers_extract)
    fake: Any = Fake()
    outcome: Any = handler(fake)
    assert await outcome == Extracted(3)


@pytest.mark.parametrize(
    "name",
    ["", "a:b", "a.b", "a-b", "1a", "_a", "ä", "a b", "x" * 64, "a\n", "a\0", "٣a", None, 7],
    ids=repr,
)
def test_a_kind_is_letters_digits_and_underscores(engine: Engine, name: Any) -> None:
    """A colon or a dot is refused, and so is all else."""
    with pytest.raises(ConfigurationError, match="papers_extract") as caught:
        engine.job(name=name)(functools.partial(papers_extract))
    assert caught.value.field == "name"
    if name is not None:
        with pytest.raises(ConfigurationError) as caught:
            engine.job(on_closed=name)(papers_extract)
        assert caught.value.field == "on_closed"
    assert not engine.handlers


def test_a_lambda_has_no_name(engine: Engine) -> None:
    """`<lambda>` is not a kind."""
    with pytest.raises(ConfigurationError, match="<lambda>"):
        engine.job(lambda job: None)


def test_two_handlers_of_one_name_are_refused(engine: Engine) -> None:
    """The second would silently take the first one's jobs."""
    engine.job(papers_extract)
    with pytest.raises(ConfigurationError, match="already"):
        engine.job(papers_extract)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "30", True])
def test_every_handler_has_a_timeout(engine: Engine, timeout: Any) -> None:
    """For ever is not a time to run."""
    with pytest.raises(ConfigurationError, match="timeout") as caught:
        engine.job(timeout=timeout)(papers_extract)
    assert caught.value.field == "timeout"


@pytest.mark.parametrize("count", [-1, 1.5, "3", True, float("inf"), 10**9])
def test_retries_are_a_count(engine: Engine, count: Any) -> None:
    """Not a text, not a truth value, not without end."""
    with pytest.raises(UsageError, match=f"max_retries: {count!r}"):
        engine.job(max_retries=count)(papers_extract)


async def no_argument() -> None: ...
async def two_arguments(job: Job[Any], more: int) -> None: ...
async def one_more_with_a_default(job: Job[Any], more: int = 0, **rest: Any) -> None: ...


def test_a_handler_takes_the_job_and_nothing_else(engine: Engine) -> None:
    """What has a default is the function's own business."""
    broken: Any
    for broken, count in ((no_argument, 0), (two_arguments, 2)):
        with pytest.raises(ConfigurationError, match=f"takes {count} arguments"):
            engine.job(broken)
    assert engine.job(one_more_with_a_default).name == "one_more_with_a_default"


async def unknown_type(job: Job[Nowhere]) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_an_annotation_that_cannot_be_read_is_an_error_at_once(engine: Engine) -> None:
    """Not at the first job."""
    with pytest.raises(ConfigurationError, match=r"unknown_type: .*Nowhere"):
        engine.job(unknown_type)


class Opaque:
    """Nothing that JSON could say."""


async def takes_opaque(job: Job[Opaque]) -> None: ...
async def gives_opaque(job: Job[None]) -> list[Opaque]:
    return [Opaque()]


def test_a_type_that_json_cannot_say_is_an_error_at_once(engine: Engine) -> None:
    """The error names handler, type and remedy."""
    handler: Any
    for handler in (takes_opaque, gives_opaque):
        with pytest.raises(ConfigurationError, match=r"_opaque: its annotation .*Opaque.*pydantic"):
            engine.job(handler)


async def never(job: Job[None]) -> NoReturn:
    raise RuntimeError


def test_a_handler_may_say_that_it_never_returns(engine: Engine) -> None:
    """There is no result to check then."""
    assert engine.job(never).result_type is None


class Extractor:
    async def __call__(self, job: Job[Paper]) -> int:
        return job.payload.pages


def sync_one(job: Job[list[int]]) -> dict[str, int]:
    return {"n": sum(job.payload)}


async def bare(job: Job) -> None: ...  # type: ignore[type-arg]
async def untyped(job):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    ...
async def generic(job: Job[T]) -> T:
    return job.payload


def test_types_are_read_wherever_they_stand(engine: Engine) -> None:
    """Coroutine functions, plain ones, objects with __call__; no annotation means plain JSON."""
    handler: Handler[Any, Any] = engine.job(name="callable")(Extractor())
    assert handler.is_async
    assert handler.encode_payload({"storage_key": "a"}, "payload", 1024).startswith("{")
    plain: Handler[Any, Any] = engine.job(sync_one)
    assert not plain.is_async
    assert plain.encode_payload([1, 2], "payload", 1024) == "[1,2]"
    with pytest.raises(UsageError, match=r"payload\.0"):
        plain.encode_payload(["x"], "payload", 1024)
    anything: Any
    for anything in (bare, untyped, generic):
        handler = engine.job(anything)
        assert handler.encode_payload([{"a": None}], "payload", 1024) == '[{"a":null}]'
        assert handler.payload_schema() is None


def test_a_payload_is_checked_when_it_is_handed_in(engine: Engine) -> None:
    """The error names field, what is wrong, and the value got, however that value looks."""
    handler = engine.job(papers_extract)
    deep: Any = []
    for _ in range(200_000):
        deep = [deep]

    class Unspeakable:
        def __repr__(self) -> str:
            raise RuntimeError

    for wrong in ("many", deep, 10**5000, "x" * 10**6, Unspeakable()):
        with pytest.raises(UsageError) as caught:
            handler.encode_payload({"storage_key": wrong, "pages": "many"}, "payload", 1024)
        assert caught.value.field in {"payload.storage_key", "payload.pages"}
        assert len(str(caught.value)) < 400
    while deep:
        deep = deep[0]  # freed level by level: no deep recursion in the collector either


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_say_is_refused_in_a_model_too(
    engine: Engine, wrong: float
) -> None:
    """A model would write it as null, which the handler could not read back."""
    handler = engine.job(papers_extract)
    with pytest.raises(UsageError, match=r"payload\.score: is (nan|-?inf)"):
        handler.encode_payload(Paper(storage_key="a", score=wrong), "payload", 1024)


def test_a_result_is_checked_against_its_annotation(engine: Engine) -> None:
    """None is no result, whatever the annotation says."""
    handler = engine.job(papers_extract)
    assert handler.encode_result(Extracted(3), 1024) == '{"words":3}'
    assert handler.encode_result(None, 1024) is None
    with pytest.raises(UsageError, match="result"):
        handler.encode_result({"words": "many"}, 1024)


def test_the_payloads_schema_is_told(engine: Engine) -> None:
    """JSON schema, for callers elsewhere."""
    schema = engine.job(papers_extract).payload_schema()
    assert schema is not None
    assert '"storage_key"' in schema
