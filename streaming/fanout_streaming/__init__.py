"""The relay: every log line to everybody who watches, on whichever process. Knows no web framework.

async with Relay(engine) as relay:
subscription = await relay.subscribe({job_id: None})
async for event in subscription.events(): ...
"""

from __future__ import annotations

from fanout.events import Event

from .cursor import Cursor, parse_cursor, parse_cursors
from .looking import Found, Looking, search
from .relay import Relay
from .settings import RelaySettings
from .subscription import PROGRESS_ONLY, Subscription

__all__ = [
    "PROGRESS_ONLY",
    "Cursor",
    "Event",
    "Found",
    "Looking",
    "Relay",
    "RelaySettings",
    "Subscription",
    "parse_cursor",
    "parse_cursors",
    "search",
]
