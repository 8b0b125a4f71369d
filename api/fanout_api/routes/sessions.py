"""A browser's session: a key in exchange for a cookie that scripts cannot read."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from fanout.access import Access
from fanout_api.callers import COOKIE, session_text
from fanout_api.models import SessionBody
from fanout_api.problems import NotInUse, Unauthenticated
from fanout_api.table import Call, NoQuery, Nothing, Table

__all__ = ["routes"]

routes = Table()


@routes.post(
    "/v1/session",
    body=SessionBody,
    answers={204: None},
    scope=None,
    is_open=True,
    problems=frozenset({401, 409}),
    tag="session",
)
async def log_in(call: Call[NoQuery, SessionBody]) -> Response:
    """Log in: a key in exchange for an HttpOnly cookie."""
    if call.service.auth != "key":
        raise NotInUse
    seconds = call.service.settings.session_seconds
    text = await Access(call.store).open_session(call.body.key, seconds)
    if text is None:
        raise Unauthenticated
    response = Response(status_code=204)
    _set(response, call, text, int(seconds))
    return response


@routes.delete("/v1/session", answers={204: None}, scope=None, tag="session")
async def log_out(call: Call[NoQuery, Nothing]) -> Response:
    """Log out: end the session, and take the cookie back."""
    text = session_text(call.request)
    if text is not None and call.service.auth == "key":
        await Access(call.store).close_session(text)
    response = Response(status_code=204)
    _set(response, call, "", 0)
    return response


def _set(response: Response, call: Call[Any, Any], text: str, seconds: int) -> None:
    request = call.request
    response.set_cookie(
        COOKIE,
        text,
        max_age=seconds,
        path=request.scope.get("root_path") or "/",
        httponly=True,
        samesite="strict",
        # Over plain HTTP, which only loopback should be, a browser would not send it back.
        secure=call.service.settings.https or request.url.scheme == "https",
    )
