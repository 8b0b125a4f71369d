"""Handlers: a function with a kind's name, what it takes and gives, and how it is to be run."""

from __future__ import annotations

import inspect
import math
import reprlib
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Never,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_json

from .checks import check_kind, check_max_retries
from .errors import ConfigurationError, UsageError
from .job import Job
from .limits import encode_kind_bounds
from .options import Options, encode_options
from .wire import encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .settings import Settings

__all__ = ["Handler", "make_handler"]

P = TypeVar("P")
R = TypeVar("R")

ANYTHING: Final = (Any, None, type(None), NoReturn, Never)
MANAGER_TIMEOUT_SECONDS: Final = 3600.0
MANAGER_MAX_RETRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Handler(Generic[P, R]):
    """A registered handler. Calling it calls the function: it can be tested without an engine."""

    name: str
    """The kind of its jobs."""
    function: Callable[[Job[P]], Awaitable[R] | R]
    is_async: bool
    timeout: float
    """Seconds one run may take."""
    max_retries: int
    """Retries after transient errors."""
    on_closed: str | None
    """The kind of the follow-up job."""
    permanent: tuple[type[BaseException], ...]
    transient: tuple[type[BaseException], ...]
    options: str | None
    """Defaults of its batches, as JSON text (`fanout.options`)."""
    limit: str | None
    """How many of its jobs run at once, over all pods, as JSON text (`fanout.limits`)."""
    payload_type: TypeAdapter[Any] | None
    """None: plain JSON."""
    result_type: TypeAdapter[Any] | None
    """None: plain JSON."""

    def __call__(self, job: Job[P]) -> Awaitable[R] | R:
        """Run the function itself."""
        return self.function(job)

    def encode_payload(self, payload: Any, field: str, limit: int) -> str:
        """JSON text of a payload of this kind. Raises UsageError, naming the field."""
        return _encode(self.payload_type, payload, field, limit)

    def encode_result(self, result: Any, limit: int) -> str | None:
        """JSON text of what the function returned; None for None. Raises UsageError."""
        return None if result is None else _encode(self.result_type, result, "result", limit)

    def payload_schema(self) -> str | None:
        """JSON schema of the payload, as JSON text; None where anything goes."""
        return (
            None if self.payload_type is None else to_json(self.payload_type.json_schema()).decode()
        )


def _encode(adapter: TypeAdapter[Any] | None, value: Any, field: str, limit: int) -> str:
    if adapter is None:
        return encode(value, field, limit)
    # The checked value, so that what a caller hands over and what the handler will read are the
    # same thing.
    try:
        checked = adapter.validate_python(value)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join((field, *(str(part) for part in first["loc"])))
        raise UsageError(
            where, f"{first['msg']}, got {_shown(first['input'])}", "See the handler's annotation"
        ) from None
    return encode(checked, field, limit, adapter)


def _shown(value: object) -> str:
    """A value in few words; it may be 200,000 levels deep, or have a broken __repr__."""
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 - the error that is told of must not be lost to another one
        return f"a {type(value).__name__}"


def _is_time(seconds: object) -> bool:
    return (
        isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and math.isfinite(seconds)
        and seconds > 0
    )


def make_handler(
    function: Callable[[Job[P]], Awaitable[R] | R],
    settings: Settings,
    *,
    name: str | None,
    timeout: float | None,
    max_retries: int | None,
    on_closed: str | Handler[Any, Any] | None,
    permanent: tuple[type[BaseException], ...],
    transient: tuple[type[BaseException], ...],
    options: Options,
    limit: int | None = None,
    limit_per_partition: int | None = None,
) -> Handler[P, R]:
    """Read a function's annotations into a handler. Raises ConfigurationError."""
    kind = check_kind(name if name is not None else getattr(function, "__name__", None), "name")
    follow_up = on_closed.name if isinstance(on_closed, Handler) else on_closed
    if follow_up is not None:
        check_kind(follow_up, "on_closed")
    if timeout is not None and not _is_time(timeout):
        raise ConfigurationError(
            "timeout",
            f"{timeout!r} s is not a time to run",
            "Give seconds above 0; every handler has a timeout",
        )
    check_max_retries(max_retries)
    payload, result = _types(function, kind)
    # Who names a follow-up fans out: it dispatches for minutes, and a crash of it costs more.
    is_manager = follow_up is not None
    return Handler(
        name=kind,
        function=function,
        is_async=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(type(function).__call__),
        timeout=float(
            timeout
            if timeout is not None
            else MANAGER_TIMEOUT_SECONDS
            if is_manager
            else settings.timeout
        ),
        max_retries=max_retries
        if max_retries is not None
        else MANAGER_MAX_RETRIES
        if is_manager
        else settings.max_retries,
        on_closed=follow_up,
        permanent=tuple(permanent),
        transient=tuple(transient),
        options=encode_options(options),
        limit=encode_kind_bounds(limit, limit_per_partition),
        payload_type=payload,
        result_type=result,
    )


def _types(
    function: Callable[..., Any], kind: str
) -> tuple[TypeAdapter[Any] | None, TypeAdapter[Any] | None]:
    """Adapters for the P of `Job[P]` and for the return annotation."""
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    if len(parameters) != 1:
        raise ConfigurationError(
            kind,
            f"the handler takes {len(parameters)} arguments",
            "A handler takes one: the job, like (job: Job[Paper])",
        )
    try:
        hints = get_type_hints(
            function if inspect.isfunction(function) else type(function).__call__
        )
    except (NameError, TypeError) as unknown:
        raise ConfigurationError(
            kind,
            f"its annotations cannot be read: {unknown}",
            "Import the types it names, also at run time",
        ) from None
    annotation = hints.get(parameters[0].name)
    payload = get_args(annotation)[0] if get_origin(annotation) is Job else Any
    result = hints.get("return", Any)
    return _adapter(payload, kind), _adapter(result, kind)


def _adapter(annotation: Any, kind: str) -> TypeAdapter[Any] | None:
    if annotation in ANYTHING or isinstance(annotation, TypeVar):
        return None
    try:
        return TypeAdapter(annotation)
    except PydanticUserError as refused:
        raise ConfigurationError(
            kind,
            f"its annotation {annotation!r} cannot be turned into JSON: "
            f"{str(refused).splitlines()[0]}",
            "Annotate with pydantic models, dataclasses, or what JSON can say",
        ) from None
