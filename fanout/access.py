"""Keys and sessions of the HTTP API: random texts, of which the database holds only hashes."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from .errors import UsageError
from .wire import checked_text

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from .store import Store

__all__ = ["Access", "ApiKey", "Scope"]

KEY_PREFIX: Final = "fo_"
"""So that a scanner for leaked secrets knows one when it sees it."""
RANDOM_BYTES: Final = 32
MAX_NAME_BYTES: Final = 128


class Scope(StrEnum):
    """What a key is good for; none holds another."""

    READ = "read"
    """Look at jobs, children, events, workers."""
    SUBMIT = "submit"
    """Submit jobs."""
    OPERATE = "operate"
    """Cancel, retry, pause."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, without the key itself: that is shown once, when it is made."""

    id: int
    name: str
    scopes: frozenset[Scope]
    tenant: str | None
    """The one tenant it sees; None: all."""
    created_at: datetime
    last_used_at: datetime | None
    """To the minute."""
    revoked_at: datetime | None


class Access:
    """The statements of keys and sessions. Raises DatabaseUnavailable from every method."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add_key(
        self, name: str, scopes: Collection[Scope | str], tenant: str | None = None
    ) -> tuple[ApiKey, str]:
        """Make a key. Returns it and its text, which is kept nowhere.

        Raises:
            UsageError: a live key has this name, or there is no such scope.
        """
        checked_text(name, "name", MAX_NAME_BYTES)
        if tenant is not None:
            checked_text(tenant, "tenant", MAX_NAME_BYTES)
        text = KEY_PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
        rows = await self._store.rows("add_key", name, _hash(text), _scopes(scopes), tenant)
        if not rows:
            raise UsageError(
                "name", f"there is a key {name!r} already", "Revoke it, or give another name"
            )
        return _key(rows[0]), text

    async def keys(self) -> list[ApiKey]:
        """All keys, those that are revoked too, oldest first."""
        return [_key(row) for row in await self._store.rows("keys")]

    async def revoke_key(self, name: str) -> ApiKey:
        """End a key and its sessions.

        Raises:
            UsageError: no live key has this name.
        """
        rows = await self._store.rows("revoke_key", checked_text(name, "name", MAX_NAME_BYTES))
        if not rows:
            raise UsageError(
                "name", f"there is no live key {name!r}", "See those there are: fanout keys list"
            )
        return _key(rows[0])

    async def key_of(self, text: str) -> ApiKey | None:
        """The live key of this text."""
        return _key_or_none(await self._store.rows("key_of", _hash(text)))

    async def open_session(self, text: str, seconds: float) -> str | None:
        """A session for the holder of a key: the text of its cookie; None: it is no live key."""
        session = secrets.token_urlsafe(RANDOM_BYTES)
        rows = await self._store.rows(
            "open_session", _hash(text), _hash(session), timedelta(seconds=seconds)
        )
        return session if rows else None

    async def session_of(self, text: str) -> ApiKey | None:
        """The live key that opened this session, while it lasts."""
        return _key_or_none(await self._store.rows("session_of", _hash(text)))

    async def close_session(self, text: str) -> None:
        """End a session. Again is fine."""
        await self._store.rows("close_session", _hash(text))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _scopes(scopes: Collection[Scope | str]) -> list[str]:
    known = {str(scope) for scope in Scope}
    wrong = sorted({str(scope) for scope in scopes} - known)
    if wrong or not scopes:
        raise UsageError(
            "scopes",
            f"there is no scope {wrong[0]!r}" if wrong else "are none",
            f"Give one or more of {', '.join(Scope)}",
        )
    return sorted({str(scope) for scope in scopes})


def _key_or_none(rows: list[Any]) -> ApiKey | None:
    return _key(rows[0]) if rows else None


def _key(row: Any) -> ApiKey:
    values = dict(row)
    return ApiKey(scopes=frozenset(Scope(name) for name in values.pop("scopes")), **values)
