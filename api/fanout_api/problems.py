"""Errors as RFC 9457 problems. One table says which error of the engine is which status."""

from __future__ import annotations

import logging
from typing import Any, Final

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fanout import (
    ConfigurationError,
    DatabaseUnavailable,
    FanoutError,
    IdempotencyConflict,
    JobNotFound,
    Refused,
    SchemaMismatch,
    UsageError,
)
from fanout.embedded import EmbeddedPostgresError

__all__ = [
    "ApiError",
    "BadBody",
    "Forbidden",
    "NotHere",
    "Problem",
    "Unauthenticated",
    "problem_of",
]

_log = logging.getLogger("fanout.api")


class ApiError(Exception):
    """What HTTP itself has to complain about."""

    status = 400
    kind = "bad-request"
    title = "The request cannot be understood"
    headers: Final[dict[str, str]] = {}
    field: str | None = None

    def __init__(self, detail: str | None = None, remedy: str | None = None) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.remedy = remedy


class BadBody(ApiError):
    """The body is no JSON that could be stored."""

    kind = "bad-body"
    title = "The body is not usable JSON"


class Unauthenticated(ApiError):
    """Nobody is known by what the request carries."""

    status = 401
    kind = "unauthenticated"
    title = "Who are you?"

    def __init__(self) -> None:
        super().__init__(
            "no valid key or session came with the request",
            "Send Authorization: Bearer KEY, or log in with POST /v1/session",
        )


class Forbidden(ApiError):
    """The caller is known, and may not."""

    status = 403
    kind = "forbidden"
    title = "This is not allowed"


class NotHere(ApiError):
    """There is no such thing, or it is not the caller's: nobody can tell which."""

    status = 404
    kind = "not-found"
    title = "There is no such thing"


class NotInUse(ApiError):
    """Keys are not in use here."""

    status = 409
    kind = "not-in-use"
    title = "Keys are not in use here"


class TooSlow(ApiError):
    """The request did not arrive in time."""

    status = 408
    kind = "too-slow"
    title = "The request did not arrive in time"


class TooLarge(ApiError):
    """The body is over the limit."""

    status = 413
    kind = "too-large"
    title = "The body is too large"


class WrongMediaType(ApiError):
    """A body that is not declared as JSON."""

    status = 415
    kind = "wrong-media-type"
    title = "Only application/json is read"


class Problem(BaseModel):
    """What went wrong, as RFC 9457 has it."""

    type: str = Field(description="A name of the problem that does not change.")
    title: str
    status: int
    detail: str
    request_id: str = Field(description="The same as in the server's log.")
    field: str | None = Field(None, description="What was wrong.")
    remedy: str | None = Field(None, description="What would be right.")


TABLE: Final[tuple[tuple[type[BaseException], int, str, str], ...]] = (
    (ConfigurationError, 409, "not-set-up", "The server is not set up for this"),
    (UsageError, 422, "bad-input", "Something in the request is not right"),
    (JobNotFound, 404, "job-not-found", "There is no such job"),
    (IdempotencyConflict, 409, "key-conflict", "The key belongs to a job with other content"),
    (Refused, 409, "refused", "The job's state does not allow this"),
    (SchemaMismatch, 503, "schema-mismatch", "The database is not this version's"),
    (DatabaseUnavailable, 503, "database-unavailable", "The database does not answer"),
    (EmbeddedPostgresError, 503, "database-unavailable", "The database does not answer"),
    (FanoutError, 409, "refused", "The job's state does not allow this"),
)
"""Error → status, kind, title. The first that fits."""

SAID: Final = (UsageError, JobNotFound, IdempotencyConflict, Refused)
"""Whose texts are for the caller; others' may name hosts and users."""


def problem_of(error: BaseException, request_id: str) -> Problem:
    """The problem to tell of `error`; a defect tells only its id, and is logged here."""
    if isinstance(error, ApiError):
        return _problem(error.status, error.kind, error.title, error.detail, request_id).model_copy(
            update={"remedy": error.remedy, "field": error.field}
        )
    if isinstance(error, HTTPException):
        return _of_http(error, request_id)
    for kind, status, name, title in TABLE:
        if isinstance(error, kind):
            return _of_engine(error, status, name, title, request_id)
    _log.error("request %s met a defect", request_id, exc_info=error)
    return _problem(
        500,
        "defect",
        "This is a defect of the server",
        f"The server's log says more under {request_id}.",
        request_id,
    )


def _of_engine(
    error: BaseException, status: int, name: str, title: str, request_id: str
) -> Problem:
    if not isinstance(error, SAID):
        _log.warning("request %s: %s", request_id, error)
        return _problem(status, name, title, "Try again in a moment.", request_id)
    if isinstance(error, UsageError):
        return _problem(status, name, title, error.problem, request_id).model_copy(
            update={"field": error.field, "remedy": error.remedy}
        )
    return _problem(status, name, title, str(error), request_id)


def _of_http(error: HTTPException, request_id: str) -> Problem:
    name, title = {
        404: ("not-found", "There is no such page"),
        405: ("method-not-allowed", "This method is not for this page"),
    }.get(error.status_code, ("http", str(error.detail)))
    return _problem(error.status_code, name, title, title, request_id)


def _problem(status: int, name: str, title: str, detail: str, request_id: str) -> Problem:
    return Problem(
        type=f"urn:fanout:{name}",
        title=title,
        status=status,
        detail=detail,
        request_id=request_id,
        field=None,
        remedy=None,
    )


def problem_response(error: BaseException, request_id: str) -> Response:
    """The answer that tells of `error`."""
    problem = problem_of(error, request_id)
    headers: dict[str, str] = dict(getattr(error, "headers", None) or {})
    if problem.status == Unauthenticated.status:
        headers["WWW-Authenticate"] = 'Bearer realm="fanout"'
    if problem.status == 503:  # noqa: PLR2004 - the one status that says when
        headers["Retry-After"] = "2"
    if problem.status in (408, 413):
        headers["Connection"] = "close"  # what is still to come is not read
    return Response(
        problem.model_dump_json(exclude_none=True),
        problem.status,
        headers,
        "application/problem+json",
    )


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown page, a wrong method."""
    return problem_response(error, request_id_of(request.scope))


def request_id_of(scope: Any) -> str:
    """The id that `guards` gave the request."""
    return str(scope.get("fanout.request_id", "unknown"))
