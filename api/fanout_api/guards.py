"""What stands before every route, as plain ASGI: no task and no copy for a request that streams.

Envelope     an id, security headers, one line of log; an error is told by its id
Hosts        a name that is not ours gets 421: before routing, before anybody is asked who they are
Origins      writes from other sites are refused
Bodies       a limit in bytes and in seconds, while the body arrives
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from .problems import (
    ApiError,
    Forbidden,
    TooLarge,
    TooSlow,
    problem_response,
    request_id_of,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .settings import ApiSettings

__all__ = ["Bodies", "Envelope", "Hosts", "Origins"]

_access = logging.getLogger("fanout.access")
_log = logging.getLogger("fanout.api")

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
MAX_LOGGED_PATH: Final = 200

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; manifest-src 'self'; worker-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def path_of(scope: Scope) -> str:
    """The path below the prefix that this app is mounted under."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    return path.removeprefix(root_path)


class Envelope:
    """Around everything: nothing leaves without an id and the headers, and no trace ever does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every request gets an id, and its line in the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope["fanout.request_id"] = request_id
        started = time.perf_counter()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
                headers["X-Request-ID"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:  # noqa: BLE001 - the last one to catch it; it is logged with its id
            response = problem_response(error, request_id)
            if (
                status
            ):  # too late to say it: the connection is cut, so that nobody takes it for whole
                raise _Broken(request_id) from None
            await response(scope, receive, sending)
        finally:
            _access.info(
                "%s %s %d %.1f ms %s",
                scope["method"],
                _shown(scope),
                status,
                (time.perf_counter() - started) * 1000,
                request_id,
            )


class _Broken(RuntimeError):
    """An answer broke off in the middle; the log has it under this id."""


def _shown(scope: Scope) -> str:
    """The path for a log: never the query, never a control character."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    text = raw.partition(b"?")[0].decode("latin-1")[:MAX_LOGGED_PATH]
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


class Hosts:
    """Answers only to its own names.

    Browsers send no Origin with a GET to the same origin: against a rebound name only Host helps.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._names = {name.lower() for name in settings.allowed_hosts}
        self._said = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, or passes on."""
        if scope["type"] == "http" and not self._is_ours(scope):
            self._say()
            await Response(status_code=421)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        if "*" in self._names:
            return True
        given = Headers(scope=scope).getlist("host")
        if len(given) != 1:
            return False
        # The address itself is no name that could be rebound; probes of a cluster use it.
        address = str((scope.get("server") or ("",))[0])
        own = f"[{address}]" if ":" in address else address
        return _host_of(given[0]) in (self._names | ({own} if _is_address(address) else set()))

    def _say(self) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "a request for another host was refused; ours are %s (FANOUT_API_ALLOWED_HOSTS)",
                ", ".join(sorted(self._names)),
            )


def _is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def _host_of(given: str) -> str:
    """A Host header without its port, in lower case."""
    name, _, port = given.rpartition(":") if not given.endswith("]") else (given, "", "")
    return (name if name and port.isascii() and port.isdigit() else given).lower()


class Origins:
    """Refuses what other sites make a browser do; lets those read that are listed."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._allowed = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, or passes on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        is_listed = origin is not None and origin in self._allowed
        if is_listed:
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(str(origin))(scope, receive, send)
                return
            send = _readable(str(origin), send)
        elif (error := _refusal(scope, headers, origin)) is not None:
            await problem_response(error, request_id_of(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(scope: Scope, headers: Headers, origin: str | None) -> ApiError | None:
    site = headers.get("sec-fetch-site")
    if scope["method"] in SAFE_METHODS:
        # Nothing is changed, and nobody else can read it; but a stream takes a place.
        is_embedded = site == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        return Forbidden("another site asked for this") if is_embedded else None
    if site is not None and site not in ("same-origin", "none"):
        return Forbidden("another site asked for this")
    if origin is not None and not _is_same(origin, headers.get("host", "")):
        return Forbidden("another site asked for this")
    return None


def _is_same(origin: str, host: str) -> bool:
    """By host and port; the scheme may have ended at a proxy."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def _preflight(origin: str) -> Response:
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, Idempotency-Key, "
            "Last-Event-ID, X-Request-ID",
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        },
    )


def _readable(origin: str, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Allow-Credentials"] = "true"
            headers["Access-Control-Expose-Headers"] = "Location, X-Request-ID"
            headers["Cross-Origin-Resource-Policy"] = "cross-origin"
            headers.add_vary_header("Origin")
        await send(message)

    return sending


class Bodies:
    """A body has so many bytes, and so many seconds to arrive.

    Raises TooLarge, TooSlow in whoever reads it.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._most = settings.max_body_bytes
        self._seconds = settings.receive_deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what counts and what watches the clock."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self._most:
            await problem_response(self._too_large(), request_id_of(scope))(scope, receive, send)
            return
        ends_at = asyncio.get_running_loop().time() + self._seconds
        size, whole = 0, False

        async def receiving() -> Message:
            nonlocal size, whole
            if whole:  # waits for the client to leave, for as long as it stays
                return await receive()
            try:
                async with asyncio.timeout_at(ends_at):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(f"the body took longer than {self._seconds:g} s") from None
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._most:
                raise self._too_large()
            return message

        await self._app(scope, receiving, send)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the limit is {self._most} bytes", "Submit ids, not bodies")
