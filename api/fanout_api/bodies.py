"""From bytes to a checked body, and from an address to checked parameters.

JSON that other parsers would read otherwise is refused, not guessed at: another encoding than
UTF-8, a byte-order mark, a name given twice, NaN, a number that no float can hold.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from fanout import UsageError
from fanout.wire import checked_text, encode

from .models import MAX_ID
from .problems import BadBody, NotHere, WrongMediaType

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = [
    "NAME",
    "body_of",
    "check_media_type",
    "endpoint_of",
    "job_id_of",
    "name_of",
    "number_of",
    "query_of",
]

M = TypeVar("M", bound=BaseModel)

MAX_ID_DIGITS: Final = 16
NAME: Final = re.compile(r"(kind:)?[A-Za-z][A-Za-z0-9_]{0,62}")
"""Of a limit, which may be a kind's, or of a schedule."""
SEE: Final = "See /openapi.json"
MAX_SHOWN: Final = 80
MAX_ENDPOINT: Final = 128


def check_media_type(request: Request) -> None:
    """A write is JSON: a browser sends other types to other sites without asking first.

    Raises:
        WrongMediaType.
    """
    given = request.headers.get("content-type")
    if given is None and request.method == "DELETE":  # which always asks first
        return
    kind, _, parameters = (given or "").partition(";")
    if kind.strip().lower() != "application/json":
        raise WrongMediaType("a write is application/json", "Set Content-Type: application/json")
    if parameters.strip().lower().replace('"', "") not in ("", "charset=utf-8"):
        raise WrongMediaType("JSON is UTF-8", "Leave the charset out")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongMediaType("a compressed body is not read", "Send it as it is")


async def body_of(request: Request, model: type[M]) -> M:
    """The body as a `model`.

    Raises:
        BadBody: it is not JSON, or not one that could be stored.
        UsageError: a field is wrong.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise BadBody("the connection ended within the body") from None
    value = _json(raw)
    _check_storable(value, len(raw))
    if not isinstance(value, dict):
        raise UsageError("body", "is not an object", 'Send {"name": value, …}')
    try:
        # From the text, so that a time may be a string and a number may not.
        return model.model_validate_json(raw)
    except ValidationError as invalid:
        raise _told(invalid) from None


def _json(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadBody(f"byte {error.start} is not UTF-8", "Send UTF-8") from None
    if text.startswith("\ufeff"):
        raise BadBody("it begins with a byte-order mark", "Send it without")
    if not text.strip():
        raise BadBody("it is empty", "Send at least {}")
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        raise BadBody("it is nested too deeply", "Flatten it") from None
    except ValueError as error:
        raise BadBody(f"{_first_line(error)}", "Send one JSON object") from None


def _check_storable(value: Any, size: int) -> None:
    """Raises UsageError with the path of what PostgreSQL or Python could not read back."""
    try:
        encode(value, "body", 8 * size + 1024)
    except UsageError as error:
        raise UsageError(error.field.removeprefix("body."), error.problem, error.remedy) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:MAX_SHOWN]} is beyond what a number can hold")
    return value


def query_of(request: Request, model: type[M]) -> M:
    """The parameters in the address as a `model`. Raises UsageError."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        field = model.model_fields.get(name)
        if field is None:
            raise UsageError(
                _shown(name),
                "is not a parameter here",
                f"There is {', '.join(model.model_fields) or 'none'}",
            )
        if _is_list(field.annotation):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise UsageError(name, "is given twice", "Give it once")
        else:
            values[name] = value
    try:
        return model.model_validate(values)
    except ValidationError as invalid:
        raise _told(invalid) from None


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list


def job_id_of(request: Request) -> int:
    """The job that the path names. Raises NotHere for what cannot be one."""
    return number_of(request, "job_id")


def number_of(request: Request, name: str) -> int:
    """A number of the path. Raises NotHere for what cannot be one."""
    text: str = request.path_params[name]
    return positive(text)


def name_of(request: Request) -> str:
    """The name in the path. Raises NotHere for what cannot be one."""
    name: str = request.path_params["name"]
    if not NAME.fullmatch(name):
        raise NotHere("what stands there is not a name of ours")
    return name


def endpoint_of(request: Request) -> str:
    """The webhooks' endpoint in the path, which may be called as its maker likes. Raises NotHere
    for what cannot be one.
    """
    text: str = request.path_params["endpoint"]
    try:
        return checked_text(text, "endpoint", MAX_ENDPOINT)
    except UsageError:
        raise NotHere("what stands there is not a name of ours") from None


def positive(text: str) -> int:
    """An id. Raises NotHere for what cannot be one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_ID_DIGITS):
        raise NotHere("what stands there is not a number of ours")
    number = int(text)
    if not 0 < number <= MAX_ID:
        raise NotHere("what stands there is not a number of ours")
    return number


def _told(invalid: ValidationError) -> UsageError:
    first = invalid.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    got = (
        "" if first["type"] in ("missing", "extra_forbidden") else f", got {_repr(first['input'])}"
    )
    message = first["msg"].removeprefix("Value error, ")
    return UsageError(_shown(field), f"{message}{got}", SEE)


def _repr(value: Any) -> str:
    return _shown(json.dumps(value, default=str))


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
