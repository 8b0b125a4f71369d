"""Verbs on a batch, spread to what is below it: one row says what holds, chunks of children follow.

Every chunk decides on what the row says by then, under its lock, so that of two people who steer at
once the later one's word is what all children end with. What a crash leaves half done, a sweeper
goes on with.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from .store import Store
    from .values import Chunk

__all__ = [
    "pause_below",
    "resume_below",
    "resume_children",
    "spread_concurrency",
    "spread_priority",
]

CHUNK: Final = 500
"""Children that one statement writes, while it holds the batch's row: some 10 ms."""
MOST_PASSES: Final = 5
MOST_WAITS: Final = 200
WAIT_SECONDS: Final = 0.02


async def pause_below(store: Store, root_id: int) -> int:
    """Keep from being claimed what is below a paused root. Returns how many children changed."""
    changed = 0
    async for parent_id in _batches(store, root_id):
        step = partial(store.pause_chunk, root_id, parent_id)
        changed += (await _in_chunks(step))[0]
    return changed


async def resume_below(store: Store, root_id: int) -> frozenset[str]:
    """Let be claimed what is below a root that is not paused any more. Returns their kinds."""
    kinds: frozenset[str] = frozenset()
    async for parent_id in _batches(store, root_id):
        kinds |= await resume_children(store, root_id, parent_id)
    return kinds


async def resume_children(store: Store, root_id: int, parent_id: int) -> frozenset[str]:
    """The same for the children of one batch."""
    return (await _in_chunks(partial(store.resume_chunk, root_id, parent_id)))[1]


async def spread_priority(store: Store, root_id: int) -> frozenset[str]:
    """Give the root's priority to what is below it. Returns the kinds of what can be claimed."""
    kinds: frozenset[str] = frozenset()
    async for parent_id in _batches(store, root_id):
        if parent_id != root_id:
            await store.follow_priority(parent_id)
        kinds |= await _until_settled(partial(store.set_priority_chunk, root_id, parent_id))
    return kinds


async def spread_concurrency(store: Store, job_id: int) -> frozenset[str]:
    """Put the children of a batch with a concurrency among those whose claims are limited.

    Returns their kinds. One that is locked may be in the midst of being put back, and no sweep
    looks for it later: again, until none is left.
    """
    kinds: frozenset[str] = frozenset()
    for _ in range(MOST_WAITS):
        kinds |= (await _in_chunks(partial(store.set_concurrency_chunk, job_id)))[1]
        if not await store.has_outside_concurrency(job_id):
            break
        await asyncio.sleep(WAIT_SECONDS)
    return kinds


async def _batches(store: Store, job_id: int) -> AsyncIterator[int]:
    """A job and all open batches below it, each before its own children."""
    found = [job_id]
    while found:
        parent_id = found.pop()
        yield parent_id
        found += await store.nested(parent_id)


async def _until_settled(step: Callable[[int, int], Awaitable[Chunk]]) -> frozenset[str]:
    """Again while children change: one that was locked was being put back, perhaps as it had been.

    No sweep looks for those. Returns the kinds of what changed.
    """
    kinds: frozenset[str] = frozenset()
    for _ in range(MOST_PASSES):
        changed, some = await _in_chunks(step)
        kinds |= some
        if not changed:
            break
    return kinds


async def _in_chunks(
    step: Callable[[int, int], Awaitable[Chunk]],
) -> tuple[int, frozenset[str]]:
    """`step(after_id, limit)` until there is no more: how many children changed, of which kinds."""
    changed, kinds, after_id = 0, frozenset[str](), 0
    while True:
        chunk = await step(after_id, CHUNK)
        changed, kinds = changed + chunk.changed, kinds | chunk.kinds
        if chunk.last_id is None:
            return changed, kinds
        after_id = chunk.last_id
