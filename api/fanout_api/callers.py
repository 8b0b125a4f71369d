"""Who asks: by bearer key, by the cookie of a session, or as somebody on this machine."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from fanout.access import Access, Scope

from .problems import Forbidden, Unauthenticated

if TYPE_CHECKING:
    from fanout import Engine
    from fanout.access import ApiKey

__all__ = ["Authenticate", "Caller", "anonymous", "authenticated", "by_key", "session_text"]

COOKIE: Final = "fanout_session"
MAX_KEY_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what they may."""

    name: str
    """For logs and limits."""
    scopes: frozenset[Scope] = frozenset(Scope)
    tenant: str | None = None
    """The one tenant they see; None: all."""


Authenticate = Callable[[Request], Caller | Awaitable[Caller | None] | None]
"""An embedder's own: the caller of a request, or None for nobody."""


async def authenticated(authenticate: Authenticate, request: Request) -> Caller:
    """The caller.

    Raises:
        Unauthenticated: nobody.
    """
    found = authenticate(request)
    caller = await found if inspect.isawaitable(found) else found
    if caller is None:
        raise Unauthenticated
    return caller


def anonymous(request: Request) -> Caller:
    """Everybody on this machine.

    A second wall beside the address that the server listens on: an app that is mounted in
    another one does not choose that.

    Raises:
        Forbidden: the request came over the network.
    """
    host = request.client.host if request.client is not None else None
    if host is not None and not _is_loopback(host):
        raise Forbidden(
            "this server answers only its own machine while it asks for no keys",
            "Set FANOUT_API_AUTH=key and make one: fanout keys create NAME --scope read",
        )
    return Caller("local")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a unix socket, or a test's client
        return host in ("", "localhost")


def by_key(engine: Engine) -> Authenticate:
    """Callers by the keys of the engine's database."""

    async def find(request: Request) -> Caller | None:
        access = Access(engine.store)
        header = request.headers.get("authorization")
        if header is None:
            session = session_text(request)
            return _caller(await access.session_of(session)) if session else None
        kind, _, text = header.partition(" ")
        if kind.lower() != "bearer" or not _is_plausible(text.strip()):
            return None
        return _caller(await access.key_of(text.strip()))

    return find


def session_text(request: Request) -> str | None:
    """The text of the session's cookie, if there is one."""
    text = request.cookies.get(COOKIE)
    return text if text and _is_plausible(text) else None


def _is_plausible(text: str) -> bool:
    return text.isascii() and text.isprintable() and 0 < len(text) <= MAX_KEY_CHARACTERS


def _caller(key: ApiKey | None) -> Caller | None:
    return None if key is None else Caller(f"key {key.id}", key.scopes, key.tenant)
