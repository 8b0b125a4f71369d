"""What the jobs of one process share: the store, the fence, the registered handlers."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from .checks import check_kind
from .handlers import Handler
from .job import snapshot
from .settings import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from .handle import JobHandle
    from .held import Held
    from .publisher import Publisher
    from .settings import Settings
    from .slots import Slots
    from .store import Store
    from .values import Claim, Counted, Document, Snapshot

__all__ = ["Runtime"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """Handed to every job that runs in this process."""

    store: Store
    settings: Settings
    token: UUID
    """The boot id: the claim token of everything this process claims."""
    worker_name: str
    installation_id: UUID
    loop: asyncio.AbstractEventLoop
    handlers: Mapping[str, Handler[Any, Any]]
    held: Mapping[int, Held]
    wake: Callable[[str], None]
    """Hint that jobs of a kind are due."""
    publisher: Publisher
    slots: Slots
    """Of named limits."""
    handle: Callable[[int], JobHandle]
    """A handle on a job by its id."""
    counted: Callable[[Counted], None]
    """Called after a commit of a handler's own that ended jobs."""
    thread_id: int = field(default_factory=threading.get_ident)
    """Of the event loop: handlers may run in others."""

    def publish(
        self, claim: Claim, text: bytes, *, lifecycle: bool = False, latest: bool = False
    ) -> None:
        """Have an event of a claim stored and sent. From any thread; returns at once."""
        publish = partial(
            self.publisher.publish,
            claim.root_id or claim.id,
            text,
            (claim.id, claim.attempt),
            lifecycle=lifecycle,
            latest_of=claim.id if latest else None,
        )
        if threading.get_ident() == self.thread_id:
            publish()
        else:
            with suppress(RuntimeError):  # the loop has ended: nobody is left to tell
                self.loop.call_soon_threadsafe(publish)

    def handler_of(self, target: Handler[Any, Any] | str) -> Handler[Any, Any] | None:
        """The handler of a kind; None: it is served elsewhere."""
        return target if isinstance(target, Handler) else self.handlers.get(target)

    def kind_name(self, target: Handler[Any, Any] | str) -> str:
        """The kind of a target. Raises ConfigurationError for a name that cannot be one."""
        return target.name if isinstance(target, Handler) else check_kind(target)

    def fans_out(self, claim: Claim) -> None:
        """From now on children are counted on this claim's row."""
        if held := self.held.get(claim.id):
            held.fans_out = True

    def snapshot(self, document: Document, handler: Handler[Any, Any] | None) -> Snapshot:
        """A document, checked. Raises UsageError, naming it."""
        return snapshot(document, handler, MAX_PAYLOAD_BYTES, self.settings.max_error_bytes)
