"""Retention: closed jobs go, `job_retention` seconds after their end, with all that hangs on them.

    closed ──mark──▶ on its way out: nothing opens it again ──▶ children, deepest first ──▶ events
    ──▶ the root itself

Every arrow is many short statements, of which none holds a lock for long, none waits for one, and
none decides on what was read before: any worker may do any of them, and go on where another one
stopped. An open batch is never touched, nor is a job whose follow-up is open. Results are a part of
their jobs, and are kept as long.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from .loop import Loop

if TYPE_CHECKING:
    from .settings import Settings
    from .store import Store

__all__ = ["Retention"]

_log = logging.getLogger("fanout.retention")

LOOK_SECONDS: Final = 60.0
ROOTS: Final = 200
"""Roots that one statement looks at."""
STEP: Final = 500
"""Rows that one statement deletes."""
EVENTS: Final = 100
"""Batches of events that one statement deletes: a few MiB."""
PAUSE_SECONDS: Final = 0.02
"""Between two of them: at most some ten thousand rows a second leave, and vacuum keeps up."""


class Retention:
    """The loop, on every worker; tests call `prune`."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._keep = timedelta(seconds=settings.job_retention)
        self.looks = Loop("retention", self._look, LOOK_SECONDS, jitter=0.5)
        self.pruned = 0
        """Root jobs that this process deleted."""

    def start(self) -> None:
        """Begin, unless jobs are kept for ever; again is fine."""
        if self._keep:
            self.looks.start()

    async def stop(self) -> None:
        """End. Again is fine."""
        await self.looks.stop()

    async def _look(self) -> None:
        await self.prune()

    async def prune(self) -> int:
        """Delete all that is old enough. Returns how many root jobs went."""
        before, after_id, more = self.pruned, 0, True
        while more:
            [row] = await self._store.rows("prunable", self._keep, after_id, ROOTS)
            after_id, more = row["last_id"], row["more"]
            if row["ids"]:
                await self._prune(row["ids"])
            await asyncio.sleep(PAUSE_SECONDS)
        return self.pruned - before

    async def _prune(self, ids: list[int]) -> None:
        gone = {row["id"] for row in await self._store.rows("prune_singles", ids, self._keep)}
        self.pruned += len(gone)
        for root in ids:
            if root not in gone and await self._store.rows("mark_pruned", root, self._keep):
                await self._clear(root, root)
                await self._end(root)

    async def _clear(self, root: int, parent: int) -> None:
        """Delete what is below `parent`, deepest first; what is locked waits for the next look."""
        key = ""
        while nested := await self._store.rows("parents_below", parent, key, ROOTS):
            for child in nested:
                await self._clear(root, child["id"])
            key = nested[-1]["document_key"]
        key = ""
        while True:
            [row] = await self._store.rows("prune_children", root, parent, key, STEP)
            if row["last_key"] is None:
                return
            key = row["last_key"]
            await asyncio.sleep(PAUSE_SECONDS)

    async def _end(self, root: int) -> None:
        gone = EVENTS
        while gone == EVENTS:
            gone = (await self._store.rows("prune_stream", root, EVENTS))[0]["gone"]
            await asyncio.sleep(PAUSE_SECONDS)
        if await self._store.rows("prune_root", root):
            self.pruned += 1
            _log.info("job %d and all below it were deleted", root, extra={"job_id": root})
