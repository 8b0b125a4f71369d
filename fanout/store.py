"""The only caller of SQL. One method a statement; "no row" has a name.

Locks, in every method: rows of the child level first, by ascending id, then parents by ascending
id. One transaction ends jobs of ONE depth and cascades upwards a level a step, so all paths take
locks in the same order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .errors import IdempotencyConflict, JobNotFound, LostClaim, Refused
from .progress import progress_from
from .statements import load_statements
from .states import Status
from .tree import tree_from
from .values import (
    Attempt,
    Child,
    Chunk,
    Claim,
    Completed,
    Counted,
    Failed,
    FailureReason,
    Group,
    JobRow,
    JobSummary,
    LimitedLook,
    Look,
    Settled,
    SlotKey,
    Submitted,
    WorkerRow,
)
from .wire import decode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    import asyncpg

    from .pool import Connection, Pool
    from .tree import Tree
    from .values import Interrupted, NewJob, Progress, Retry, Snapshot

__all__ = ["Store"]

T = TypeVar("T")

CLAIM_COLUMNS = len(Claim._fields)

PRUNED = "its retention has passed and it is being deleted; submit it again instead"


class Store:
    """The statements of one schema over one pool. Raises DatabaseUnavailable from every method."""

    def __init__(self, pool: Pool, schema: str = "fanout") -> None:
        self._pool = pool
        self._schema = schema
        self._sql = load_statements(schema)

    # -- in ---------------------------------------------------------------------------------------

    async def submit(
        self, jobs: Sequence[NewJob], connection: asyncpg.Connection | None = None
    ) -> list[Submitted]:
        """Insert `jobs` in one round trip, all or none; in the order given.

        With `connection`, within its transaction.

        Raises:
            IdempotencyConflict: a key belongs to a job with other content; nothing was inserted.
        """
        order = sorted(range(len(jobs)), key=lambda n: (jobs[n].key is not None, jobs[n].key or ""))
        picked = [jobs[n] for n in order]
        arguments = (
            [j.kind for j in picked],
            [j.payload for j in picked],
            [j.key for j in picked],
            [j.priority for j in picked],
            [j.run_at for j in picked],
            [j.delay for j in picked],
            [j.max_retries for j in picked],
            [j.on_closed for j in picked],
            [j.tenant for j in picked],
            [j.options for j in picked],
        )

        async def body(connection: asyncpg.Connection) -> list[Submitted]:
            rows = await connection.fetch(self._sql["submit"], *arguments)
            submitted = {
                n: Submitted(row["id"], row["created"], row["same"])
                for n, row in zip(order, rows, strict=True)
            }
            for n, one in submitted.items():
                if not one.same:
                    raise IdempotencyConflict(jobs[n].key or "", one.id)
            return [submitted[n] for n in range(len(jobs))]

        if connection is None:
            return await self._pool.transaction(body)
        # A savepoint: a conflict must not abort the caller's transaction.
        async with connection.transaction():
            return await body(connection)

    async def together(self, body: Callable[[Store], Awaitable[T]]) -> T:
        """Run `body` with a store all of whose statements are one transaction; the whole of it
        again after a deadlock.
        """

        async def run(connection: Connection) -> T:
            return await body(Store(cast("Pool", _OneTransaction(connection)), self._schema))

        return await self._pool.transaction(run)

    # -- claims -----------------------------------------------------------------------------------

    async def claim(
        self,
        wanted: Sequence[tuple[str, int, datetime]],
        limit: int,
        token: UUID,
        lease_seconds: float,
        most: Sequence[int] | None = None,
        *,
        aged: int = 0,
        ageing_seconds: float = 60,
        partitions: bool = True,
    ) -> Look:
        """At most `limit` due jobs, and what else is due.

        `wanted`: (kind, priority, floor), the best first; `most`: how many of each at most (None:
        `limit`). `aged` of them come first because they have been due for longer than
        `ageing_seconds` times their priority. `partitions`: tell of jobs that have one.
        """
        kinds, priorities, floors = (list(column) for column in zip(*wanted, strict=True))
        rows = await self._pool.fetch(
            self._sql["claim"],
            kinds,
            priorities,
            floors,
            limit,
            token,
            timedelta(seconds=lease_seconds),
            [limit] * len(kinds) if most is None else list(most),
            aged,
            timedelta(seconds=ageing_seconds),
            partitions,
        )
        told = rows.pop() if rows and rows[-1]["id"] is None else None
        claims = [Claim._make(row[:CLAIM_COLUMNS]) for row in rows]
        if told is None:
            return Look(claims, None)
        return Look(claims, told["suspect_age"], frozenset(told["limited"] or ()))

    async def claim_limited(
        self,
        wanted: Sequence[tuple[str, int, datetime]],
        limit: int,
        token: UUID,
        lease_seconds: float,
        *,
        free: int,
        ahead: Mapping[str, int] | None = None,
        behind: Mapping[str, str] | None = None,
        aged: int = 0,
        ageing_seconds: float = 60,
        depth: int | None = None,
    ) -> LimitedLook:
        """At most `limit` due jobs that are under a limit of their kind, or have a partition: as
        many as their limits leave, and no more than `free` of a limit that is half used.

        `ahead`: how many of each kind may be held beyond free slots; `behind`: after which
        partition of each kind the walk begins, of those that were told last time; `depth`: how many
        of each partition and priority to look at (None: all), of which a batch that is full may
        have the first ones.
        """
        kinds, priorities, floors = (list(column) for column in zip(*wanted, strict=True))
        names = list(dict.fromkeys(kinds))
        ahead, behind = ahead or {}, behind or {}

        async def body(connection: Connection) -> list[Any]:
            locked = await connection.fetch(self._sql["lock_limits"], names)
            rows: list[Any] = await connection.fetch(
                self._sql["claim_limited"],
                kinds,
                priorities,
                floors,
                limit,
                token,
                timedelta(seconds=lease_seconds),
                names,
                [ahead.get(kind, 0) for kind in names],
                [behind.get(kind, "") for kind in names],
                [row["kind"] for row in locked if row["kind"] is not None],
                free,
                aged,
                timedelta(seconds=ageing_seconds),
                depth,
            )
            return rows

        rows = await self._pool.transaction(body)
        claimed = [row for row in rows if row["id"] is not None]
        return LimitedLook(
            [Claim._make(row[:CLAIM_COLUMNS]) for row in claimed],
            frozenset(row["id"] for row in claimed if row["partition"] is not None),
            {row["kind"]: row["partition"] for row in rows if row["id"] is None},
        )

    async def claim_alone(
        self, kinds: Sequence[str], token: UUID, lease_seconds: float
    ) -> Claim | None:
        """One due job that must run alone and has room under its limits; None: there is none."""

        async def body(connection: Connection) -> list[Any]:
            await connection.fetch(self._sql["lock_limits"], list(kinds))
            rows: list[Any] = await connection.fetch(
                self._sql["claim_alone"], list(kinds), token, timedelta(seconds=lease_seconds)
            )
            return rows

        rows = await self._pool.transaction(body)
        return Claim._make(rows[0]) if rows else None

    async def claim_new(self, job_id: int, token: UUID, lease_seconds: float) -> Claim:
        """Claim a root job that was submitted in this transaction, which nobody else can see."""
        rows = await self._pool.fetch(
            self._sql["claim_new"], job_id, token, timedelta(seconds=lease_seconds)
        )
        return Claim._make(rows[0])

    async def claim_children(
        self,
        parents: Sequence[int],
        kinds: Sequence[str],
        limit: int,
        token: UUID,
        lease_seconds: float,
        *,
        alone: bool = False,
    ) -> list[Claim]:
        """At most `limit` due children of these batches, by id, as many as their limits leave; with
        `alone` one that must run alone.
        """

        async def body(connection: Connection) -> list[Claim]:
            locked = await connection.fetch(self._sql["lock_limits"], list(kinds))
            is_limited = any(row["kind"] is not None for row in locked)
            claims: list[Claim] = []
            while len(claims) < limit:
                rows = await connection.fetch(
                    self._sql["claim_children"],
                    list(parents),
                    list(kinds),
                    limit - len(claims),
                    token,
                    timedelta(seconds=lease_seconds),
                    alone,
                    is_limited,
                )
                if not rows:
                    break
                claims += [Claim._make(row) for row in rows]
            return sorted(claims, key=attrgetter("id"))

        return await self._pool.transaction(body)

    async def save_checkpoint(self, claim: Claim, token: UUID, checkpoint: str) -> None:
        """Keep `checkpoint` (JSON text) for later attempts. Raises LostClaim."""
        if not await self._pool.fetch(
            self._sql["save_checkpoint"], claim.id, claim.attempt, token, checkpoint
        ):
            raise LostClaim(claim.id, claim.attempt)

    async def fan_out(
        self,
        claim: Claim,
        token: UUID,
        lease_seconds: float,
        *,
        documents: Sequence[Snapshot],
        kind: str,
        max_retries: int | None,
        priority: int | None,
        on_closed: str | None,
        on_counted: Callable[[Counted], None] = lambda _: None,
    ) -> tuple[int, int]:
        """Dispatch one chunk of children.

        `priority` None: the parent's. Returns (children made, total now). `on_counted` is told if
        the batch failed by documents that are gone, before LostClaim is raised.

        Raises:
            LostClaim: nothing was dispatched; or this chunk was, and the batch failed by it.
        """
        ordered = sorted(documents, key=attrgetter("key"))  # of equal keys the first one counts

        async def body(connection: Connection) -> tuple[int, int, Counted]:
            rows = await connection.fetch(
                self._sql["fan_out"],
                claim.id,
                claim.attempt,
                token,
                timedelta(seconds=lease_seconds),
                [document.key for document in ordered],
                [document.payload for document in ordered],
                _or_empty([document.error for document in ordered]),
                kind,
                max_retries,
                priority,
                on_closed,
                _or_empty([document.partition for document in ordered]),
            )
            if not rows:
                raise LostClaim(claim.id, claim.attempt)
            [row] = [row for row in rows if row["what"] == "born"]
            await self._steer_born(connection, row, claim.id, priority)
            born, total, *_ = row["ids"]
            return born, total, await self._with_cascade(connection, rows)

        born, total, counted = await self._pool.transaction(body)
        if any(group.status is not Status.PROCESSING for group in counted.groups):
            on_counted(counted)
            raise LostClaim(claim.id, claim.attempt)
        return born, total

    async def finish(
        self, ended: Iterable[tuple[Claim, Completed | Failed]], token: UUID
    ) -> Counted:
        """End claims, count them on their parents, close what is complete and enqueue follow-ups.

        A claim that is not among `moved` is lost. Depths are written deepest first, a transaction
        each.
        """
        result = Counted()
        for items in _by_depth(ended):
            depth = items[0][0].depth
            some_failed = any(isinstance(outcome, Failed) for _, outcome in items)
            counted = await self._counting(
                "finish",
                depth,
                [claim.id for claim, _ in items],
                [claim.attempt for claim, _ in items],
                token,
                [
                    outcome.result if isinstance(outcome, Completed) else None
                    for _, outcome in items
                ],
                # asyncpg looks at every element of an array three times: an empty one says all
                # NULL.
                [outcome.error if isinstance(outcome, Failed) else None for _, outcome in items]
                if some_failed
                else [],
                [
                    outcome.error_type if isinstance(outcome, Failed) else None
                    for _, outcome in items
                ]
                if some_failed
                else [],
                _or_empty([outcome.added for _, outcome in items]),
            )
            result = Counted(
                result.groups + counted.groups,
                result.closed + counted.closed,
                counted.locked_at or result.locked_at,
                result.doomed + counted.doomed,
            )
        return result

    async def retry(self, retries: Iterable[tuple[Claim, Retry]], token: UUID) -> set[int]:
        """Put claims back after a transient error, where the budget lasts.

        Returns the ids that went back.
        """
        back: set[int] = set()
        for items in _by_depth(retries):
            rows = await self._pool.fetch(
                self._sql["retry"],
                [claim.id for claim, _ in items],
                [claim.attempt for claim, _ in items],
                token,
                [retry.delay for _, retry in items],
                [retry.error for _, retry in items],
                [retry.error_type for _, retry in items],
                _or_empty([retry.added for _, retry in items]),
            )
            back |= {row["id"] for row in rows}
        return back

    async def release(
        self, claims: Iterable[tuple[Claim, Interrupted] | tuple[Claim, None]], token: UUID
    ) -> set[int]:
        """Put claims back at no cost. Returns the ids that went back."""
        back: set[int] = set()
        for items in _by_depth(claims):
            rows = await self._pool.fetch(
                self._sql["release"],
                [claim.id for claim, _ in items],
                [claim.attempt for claim, _ in items],
                token,
                _or_empty([outcome.added if outcome else None for _, outcome in items]),
            )
            back |= {row["id"] for row in rows}
        return back

    async def release_orphans(self, token: UUID, held: Iterable[int]) -> set[int]:
        """Put back claims of `token` that are not among `held`: the answer to a claim was lost.

        Returns their ids.

        Only for the one loop that claims with `token`, between two of its claims.
        """
        rows = await self._pool.fetch(self._sql["release_orphans"], token, list(held))
        return {row["id"] for row in rows}

    async def outcomes_of(self, claims: Iterable[Claim], token: UUID) -> set[int]:
        """After an unknown outcome: the ids of the claims that this worker's own finish did end."""
        items = list(claims)
        rows = await self._pool.fetch(
            self._sql["outcome_of"], [c.id for c in items], [c.attempt for c in items], token
        )
        return {row["id"] for row in rows}

    # -- sweeping ---------------------------------------------------------------------------------

    async def expired_depths(self) -> list[int]:
        """Depths at which leases have run out, deepest first."""
        return [row["depth"] for row in await self._pool.fetch(self._sql["expired_depths"])]

    async def expired(self, depth: int, after_id: int, limit: int) -> list[int]:
        """Ids above `after_id` of jobs of `depth` whose leases have run out."""
        rows = await self._pool.fetch(self._sql["expired"], depth, after_id, limit)
        return [row["id"] for row in rows]

    async def rescue(
        self, depth: int, limit: int, max_deaths: int, after_id: int, lease_seconds: float
    ) -> Counted:
        """Take at most `limit` jobs of `depth` with ids above `after_id` away from workers that let
        their lease run out.
        """
        return await self._counting(
            "rescue", depth, depth, limit, max_deaths, after_id, timedelta(seconds=lease_seconds)
        )

    async def doomed(self, limit: int, after_id: int = 0) -> list[int]:
        """Jobs with a verdict whose children have not all ended."""
        return [row["id"] for row in await self._pool.fetch(self._sql["doomed"], limit, after_id)]

    async def doom(self, job_id: int, verdict: Status, reason: str) -> Counted:
        """End one open job as `verdict`, now or once its open children have been ended by
        `doom_chunk`.

        Nothing moved: it is closed, or doomed, already.
        """
        return await self._counting("doom", 0, job_id, str(verdict), reason, cascade=True)

    async def doom_chunk(self, job_id: int, limit: int) -> Counted:
        """Cancel at most `limit` open children of a doomed job."""
        return await self._counting("doom_chunk", 0, job_id, limit, cascade=True)

    async def incomplete_without_open(self, limit: int, after_id: int = 0) -> list[int]:
        """Waiting jobs without an open child: their counters must be wrong."""
        return [
            row["id"]
            for row in await self._pool.fetch(self._sql["incomplete_without_open"], limit, after_id)
        ]

    async def open_aggregates(self, limit: int, after_id: int = 0) -> list[int]:
        """Open batches whose children leave their row alone."""
        rows = await self._pool.fetch(self._sql["open_aggregates"], limit, after_id)
        return [row["id"] for row in rows]

    async def recount(self, job_id: int) -> Counted:
        """Mend the counters of an open job from its children. Nothing moved: they were right."""

        async def body(connection: Connection) -> Counted:
            row = await connection.fetchrow(self._sql["lock_job"], job_id)
            if row is None:
                return Counted()
            counted = await self._with_cascade(
                connection, await connection.fetch(self._sql["recount"], job_id)
            )
            return replace(counted, mended=bool(counted.groups) and row["closing"] is None)

        return await self._pool.transaction(body)

    async def give_up_candidates(
        self, limit: int, after_seconds: float, after_id: int = 0
    ) -> list[int]:
        """Sealed batches without a sign of life for `after_seconds`, and without an excuse."""
        rows = await self._pool.fetch(
            self._sql["give_up_candidates"], limit, timedelta(seconds=after_seconds), after_id
        )
        return [row["id"] for row in rows]

    async def give_up(self, job_id: int, after_seconds: float, reason: str) -> bool:
        """Doom a batch without a sign of life, judged again under its lock. False: it lives."""

        async def body(connection: Connection) -> bool:
            await connection.fetchrow(self._sql["lock_job"], job_id)
            return bool(
                await connection.fetch(
                    self._sql["give_up"], job_id, timedelta(seconds=after_seconds), reason
                )
            )

        return await self._pool.transaction(body)

    # -- steering ---------------------------------------------------------------------------------

    async def pause(self, root_id: int) -> bool:
        """Pause an open root. False: it is paused, no root, closed, or being ended."""
        return bool(await self._pool.fetch(self._sql["pause"], root_id))

    async def resume(self, root_id: int) -> str | None:
        """Let a paused root go on. Returns its kind; None: it is not paused, or being ended."""
        rows = await self._pool.fetch(self._sql["resume"], root_id)
        return rows[0]["kind"] if rows else None

    async def pause_chunk(self, root_id: int, parent_id: int, after_id: int, limit: int) -> Chunk:
        """Keep children of `parent_id` from being claimed, if their root is paused."""
        sql = self._sql["pause_chunk"]
        return await self._chunk(root_id, limit, sql, root_id, parent_id, after_id, limit)

    async def resume_chunk(self, root_id: int, parent_id: int, after_id: int, limit: int) -> Chunk:
        """Let paused children of `parent_id` be claimed, if their root is not paused."""
        sql = self._sql["resume_chunk"]
        return await self._chunk(root_id, limit, sql, root_id, parent_id, after_id, limit)

    async def set_priority(self, root_id: int, priority: int) -> str | None:
        """Give an open root another priority. Returns its kind; None: no root, or not open."""
        rows = await self._pool.fetch(self._sql["set_priority"], root_id, priority)
        return rows[0]["kind"] if rows else None

    async def set_priority_chunk(
        self, root_id: int, parent_id: int, after_id: int, limit: int
    ) -> Chunk:
        """Give open children of `parent_id` the priority of their root."""
        sql = self._sql["set_priority_chunk"]
        return await self._chunk(root_id, limit, sql, root_id, parent_id, after_id, limit)

    async def follow_priority(self, job_id: int) -> bool:
        """Give one open batch the priority of its root; waits for its row. False: it has it."""

        async def body(connection: Connection) -> bool:
            await connection.fetchrow(self._sql["lock_job"], job_id)
            return bool(await connection.fetch(self._sql["follow_priority"], job_id))

        return await self._pool.transaction(body)

    async def set_concurrency(self, job_id: int, concurrency: int | None) -> bool:
        """Say how many children of an open batch may run at once; None: as many as may.

        False: it is not open.
        """
        return bool(await self._pool.fetch(self._sql["set_concurrency"], job_id, concurrency))

    async def set_concurrency_chunk(self, job_id: int, after_id: int, limit: int) -> Chunk:
        """Have open children of a batch with a concurrency claimed within it."""
        sql = self._sql["set_concurrency_chunk"]
        return await self._chunk(job_id, limit, sql, job_id, after_id, limit)

    async def has_outside_concurrency(self, job_id: int) -> bool:
        """Has a batch with a concurrency open children that are not claimed within it?"""
        rows = await self._pool.fetch(self._sql["outside_concurrency"], job_id)
        return bool(rows and rows[0]["some"])

    async def _chunk(self, lock_id: int, limit: int, sql: str, *arguments: object) -> Chunk:
        """A statement over some children, by id, that decides on what a locked row says."""

        async def body(connection: Connection) -> Sequence[Any]:
            await connection.fetchrow(self._sql["lock_job"], lock_id)
            rows: Sequence[Any] = await connection.fetch(sql, *arguments)
            return rows

        rows = await self._pool.transaction(body)
        idle = [row["id"] for row in rows if row.get("idle", True)]
        return Chunk(
            len(rows),
            frozenset(row["kind"] for row in rows),
            max(idle) if len(idle) >= limit else None,
        )

    async def add_children(
        self,
        job_id: int,
        *,
        documents: Sequence[Snapshot],
        kind: str,
        max_retries: int | None,
        priority: int | None,
        on_closed: str | None,
        on_counted: Callable[[Counted], None] = lambda _: None,
    ) -> tuple[int, int]:
        """Add a chunk of children to an open batch; arguments and result as those of `fan_out`.

        Raises:
            JobNotFound.
            Refused: it has closed, or is being ended, and nothing was added; or it was added, and
                the batch failed by documents that are gone.
        """
        ordered = sorted(documents, key=attrgetter("key"))

        async def body(connection: Connection) -> tuple[Any, Counted]:
            rows = await connection.fetch(
                self._sql["add_children"],
                job_id,
                [document.key for document in ordered],
                [document.payload for document in ordered],
                _or_empty([document.error for document in ordered]),
                kind,
                max_retries,
                priority,
                on_closed,
                _or_empty([document.partition for document in ordered]),
            )
            if not rows:
                raise _NotOpen
            [row] = [row for row in rows if row["what"] == "born"]
            await self._steer_born(connection, row, job_id, priority)
            return row, await self._with_cascade(connection, rows)

        while True:
            try:
                row, counted = await self._pool.transaction(body)
                break
            except _NotOpen:
                job = await self.job(job_id)
                if job.finished_at is None and job.verdict is None:
                    continue  # it was opened again meanwhile
                state = (
                    "is being ended" if job.finished_at is None else f"has closed ({job.status})"
                )
                raise Refused(
                    job_id, f"it {state}, and only an open batch takes more documents"
                ) from None
        if row["on_closed"] is not None:
            on_counted(counted)
            raise Refused(job_id, f"it failed by documents that are gone: {row['on_closed']}")
        born, total, *_ = row["ids"]
        return born, total

    async def _steer_born(
        self, connection: Connection, row: Any, parent_id: int, priority: int | None
    ) -> None:
        """Children that were just born follow what was said of their batch while they were being
        inserted; its row is locked now, so what is said later finds them.
        """
        born, _, first_id, root_id, has_other_concurrency, has_other_priority = row["ids"]
        if not born:
            return
        after_id = first_id - 1
        if row["ended"]:
            name = "pause_chunk" if row["webhook"] else "resume_chunk"
            await connection.fetch(self._sql[name], root_id, parent_id, after_id, born)
        if has_other_concurrency:
            await connection.fetch(self._sql["set_concurrency_chunk"], parent_id, after_id, born)
        if has_other_priority and priority is None:
            sql = self._sql["set_priority_chunk"]
            await connection.fetch(sql, root_id, parent_id, after_id, born)

    async def doom_late(self, job_id: int) -> Counted:
        """End a job whose deadline has passed as failed. No moved job: it is not late."""
        return await self._counting("doom_late", 0, job_id, cascade=True)

    async def late(self, limit: int, after_id: int = 0) -> list[int]:
        """Open jobs whose deadline has passed."""
        return [row["id"] for row in await self._pool.fetch(self._sql["late"], limit, after_id)]

    async def nested(self, job_id: int) -> list[int]:
        """Open children of a job that are batches themselves."""
        return [row["id"] for row in await self._pool.fetch(self._sql["nested"], job_id)]

    async def paused_batches(self, limit: int, after_id: int = 0) -> list[int]:
        """Paused roots that have children."""
        rows = await self._pool.fetch(self._sql["paused_batches"], limit, after_id)
        return [row["id"] for row in rows]

    async def left_paused(self, limit: int, after_id: int = 0) -> list[int]:
        """Batches with children that are paused although their root is not."""
        rows = await self._pool.fetch(self._sql["left_paused"], limit, after_id)
        return [row["id"] for row in rows]

    # -- opening again ----------------------------------------------------------------------------

    async def retry_failed(
        self, job_id: int, keys: Sequence[str] | None = None, error: str | None = None
    ) -> int:
        """Open the failed children of a batch again, as a new generation; the batch too, and what
        it had closed.

        Returns how many.

        Raises:
            JobNotFound, Refused: nothing to retry, or the batch ended as failed or cancelled.
                Nothing was changed.
        """

        async def body(connection: Connection) -> int:
            ids = await connection.fetch(
                self._sql["retry_failed"], job_id, list(keys) if keys is not None else None, error
            )
            if not ids:
                row = await connection.fetchrow(self._sql["lock_job"], job_id)
                raise Refused(
                    job_id, PRUNED if row and row["pruned"] else "no failed child to retry"
                )
            completed, failed, cancelled, current = 0, len(ids), 0, job_id
            while True:
                row = await connection.fetchrow(self._sql["lock_job"], current)
                if row is None or not await connection.fetch(
                    self._sql["reopen"], current, completed, failed, cancelled
                ):
                    raise Refused(
                        current,
                        PRUNED
                        if row and row["pruned"]
                        else "it was cancelled or has failed as a whole; submit it again instead",
                    )
                if current == job_id:  # its concurrency may be younger than their failures
                    first = min(one["id"] for one in ids)
                    sql = self._sql["set_concurrency_chunk"]
                    await connection.fetch(sql, job_id, first - 1, None)  # all, however many
                if row["closed"] and row["parent_id"] is None:
                    await connection.execute(self._sql["reopen_stream"], current)
                if not row["closed"] or row["parent_id"] is None:
                    return len(ids)
                completed, failed, cancelled = (
                    int(row["status"] == status) for status in ("completed", "failed", "cancelled")
                )
                current = row["parent_id"]

        return await self._pool.transaction(body)

    async def retry_job(self, job_id: int) -> bool:
        """Open a failed job without children again. False: it is not one."""

        async def body(connection: Connection) -> bool:
            if not await connection.fetch(self._sql["retry_job"], job_id):
                return False
            await connection.execute(self._sql["reopen_stream"], job_id)
            return True

        return await self._pool.transaction(body)

    # -- workers ----------------------------------------------------------------------------------

    async def register_kinds(
        self, kinds: Sequence[tuple[str, int, float, str | None, str | None, str | None]]
    ) -> None:
        """Tell the database about kinds.

        (name, max retries, timeout in seconds, on_closed, payload schema, options).
        """
        columns = [
            list(column) for column in zip(*sorted(kinds, key=lambda kind: kind[0]), strict=True)
        ]
        if columns:
            await self._pool.fetch(self._sql["register_kinds"], *columns)

    async def declare_limits(self, limits: Sequence[tuple[str, str | None]]) -> None:
        """What this program's code says of limits: (name, JSON text or None)."""
        ordered = sorted(limits)
        await self._pool.fetch(
            self._sql["declare_limits"], [n for n, _ in ordered], [code for _, code in ordered]
        )

    async def prune_workers(self) -> None:
        """Forget workers that were lost more than a day ago."""
        await self._pool.fetch(self._sql["prune_workers"])

    async def wake(self, channel: str, payload: str) -> None:
        """Hint to idle workers. A statement of its own, never beside data."""
        await self._pool.fetch(self._sql["wake"], channel, payload)

    # -- slots of named limits --------------------------------------------------------------------

    async def open_limits(self, limits: Sequence[tuple[str, str | None]]) -> None:
        """Have a row for each limit: (name, what the code says of it, as JSON text, or None)."""
        ordered = sorted(limits)
        await self._pool.fetch(
            self._sql["open_limits"], [n for n, _ in ordered], [code for _, code in ordered]
        )

    async def settle_slots(
        self,
        token: UUID,
        *,
        asked: Sequence[tuple[SlotKey, float]] = (),
        left: Sequence[SlotKey] = (),
        corrected: Mapping[str, float] | None = None,
    ) -> Settled:
        """Leave slots, ask for others with their weights, and give what there is to whose turn it
        is, all in one transaction. `asked`: all that wait here, the longest first.
        """
        corrected = corrected or {}
        names = sorted({k.name for k, _ in asked} | {k.name for k in left} | set(corrected))

        async def body(connection: Connection) -> tuple[list[Any], list[Any]]:
            locked = await connection.fetch(self._sql["lock_slots"], names)
            await connection.execute(
                self._sql["ask_slots"],
                token,
                names,
                *_columns(4, [key for key, _ in asked]),
                [weight for _, weight in asked],
                *_columns(4, left),
                list(corrected),
                list(corrected.values()),
            )
            # Only under its lock: of a row that was made in this moment others may be giving.
            held = [row["name"] for row in locked]
            return locked, await connection.fetch(self._sql["grant_slots"], token, held)

        locked, rows = await self._pool.transaction(body)
        slots = [row for row in rows if row["job_id"] is not None]
        limits = [row for row in rows if row["job_id"] is None]
        waits = [row["wait_seconds"] for row in limits if row["wait_seconds"] is not None]
        return Settled(
            granted=frozenset(SlotKey(*row[:4]) for row in slots if row["granted"]),
            waiting=frozenset(SlotKey(*row[:4]) for row in slots if not row["granted"]),
            missing=frozenset(names) - {row["name"] for row in locked},
            others=frozenset(token for row in limits for token in row["others"]),
            wait_seconds=min(waits, default=None),
        )

    # -- reading ----------------------------------------------------------------------------------

    async def progress(self, job_id: int) -> Progress:
        """What is true of a job now. Raises JobNotFound."""
        rows = await self._pool.fetch(self._sql["progress"], job_id)
        if not rows:
            raise JobNotFound(job_id)
        return progress_from(rows[0])

    async def progress_many(self, job_ids: Sequence[int]) -> dict[int, Progress]:
        """The counters of several jobs, without reasons; a job that is not there is missing."""
        rows = await self._pool.fetch(self._sql["progress_many"], list(job_ids))
        return {row["id"]: progress_from(row) for row in rows}

    async def job(self, job_id: int, tenant: str | None = None) -> JobRow:
        """One job, whole; with `tenant`, only if it is that tenant's. Raises JobNotFound."""
        rows = await self._pool.fetch(self._sql["job"], job_id, tenant)
        if not rows:
            raise JobNotFound(job_id)
        return _job_row(rows[0])

    async def tree(self, job_id: int, most: int, most_up: int, tenant: str | None = None) -> Tree:
        """The chain that a job belongs to; with `tenant`, only if it is that tenant's.

        Raises JobNotFound.
        """
        rows = await self._pool.fetch(self._sql["tree"], job_id, most, most_up, tenant)
        if not rows:
            raise JobNotFound(job_id)
        return tree_from(job_id, rows)

    async def find_by_key(self, key: str, tenant: str = "") -> int | None:
        """The id of the job that holds an idempotency key of a tenant."""
        rows = await self._pool.fetch(self._sql["find_by_key"], key, tenant)
        return rows[0]["id"] if rows else None

    async def jobs(
        self,
        kind: str | None,
        status: Status | None,
        before_id: int | None,
        limit: int,
        tenant: str | None = None,
    ) -> list[JobSummary]:
        """A page of root jobs, newest first; with `tenant`, only that tenant's."""
        rows = await self._pool.fetch(
            self._sql["jobs"], kind, status and str(status), before_id, limit, tenant
        )
        return [_summary(row) for row in rows]

    async def children(
        self,
        job_id: int,
        status: Status | None,
        after_key: str | None,
        limit: int,
        error: str | None = None,
    ) -> list[Child]:
        """A page of a batch's children, by document key. `error`: of those that failed, those with
        exactly this one.
        """
        if status is Status.FAILED:  # has an index of its own
            rows = await self._pool.fetch(self._sql["failures"], job_id, after_key, limit, error)
        else:
            rows = await self._pool.fetch(
                self._sql["children"], job_id, status and str(status), after_key, limit
            )
        return [_child(row) for row in rows]

    async def attempts(self, job_id: int) -> list[Attempt]:
        """The runs of a job, the first one first, with the one that runs now."""
        return [Attempt(**row) for row in await self._pool.fetch(self._sql["attempts"], job_id)]

    async def failure_reasons(self, job_id: int, limit: int) -> list[FailureReason]:
        """Failed children grouped by reason, most frequent first."""
        rows = await self._pool.fetch(self._sql["failure_reasons"], job_id, limit)
        return [
            FailureReason(
                row["error"] or "no reason was kept", row["error_type"], row["n"], row["example"]
            )
            for row in rows
        ]

    async def slowest(self, job_id: int, limit: int) -> list[tuple[str, Status, float]]:
        """(document key, status, seconds) of the children whose last attempt took longest."""
        rows = await self._pool.fetch(self._sql["slowest"], job_id, limit)
        return [
            (row["document_key"], Status(row["status"]), row["took"].total_seconds())
            for row in rows
        ]

    async def workers(self) -> list[WorkerRow]:
        """Worker processes that live, or were lost within the last day."""
        return [
            WorkerRow(**{**row, "kinds": tuple(row["kinds"])})
            for row in await self._pool.fetch(self._sql["workers"])
        ]

    async def stuck(self, limit: int) -> list[dict[str, Any]]:
        """What does not move, and why: id, parent_id, kind, why, since."""
        return [dict(row) for row in await self._pool.fetch(self._sql["stuck"], limit)]

    async def queue(self) -> list[dict[str, Any]]:
        """Open jobs by kind and status: kind, status, n, oldest_run_at."""
        return [dict(row) for row in await self._pool.fetch(self._sql["queue"])]

    async def health(self) -> dict[str, Any]:
        """Facts about the server, for the doctor."""
        return dict((await self._pool.fetch(self._sql["health"]))[0])

    async def installation_id(self) -> UUID:
        """What makes this installation's job keys unlike every other one's."""
        value: UUID = (await self._pool.fetch(self._sql["installation"]))[0]["id"]
        return value

    async def grid(self, job_id: int, limit: int) -> tuple[str, int]:
        """A letter a child by document key, of the first `limit`: pending, r(unning), waiting,
        completed, failed, x (cancelled); and how many they are.
        """
        row = (await self._pool.fetch(self._sql["grid"], job_id, limit))[0]
        return row["states"] or "", row["n"]

    async def child_keys(self, job_id: int, first: int, limit: int) -> list[dict[str, Any]]:
        """Id and key of children by document key: of `limit`, after the `first` that are passed."""
        rows = await self._pool.fetch(self._sql["child_keys"], job_id, first, limit)
        return [dict(row) for row in rows]

    async def density(self, job_id: int, per_bucket: int) -> list[dict[str, Any]]:
        """Children by document key, `per_bucket` at a time: first_key, p, r, w, c, f, x."""
        return [
            dict(row) for row in await self._pool.fetch(self._sql["density"], job_id, per_bucket)
        ]

    async def history(self, job_id: int, bucket_seconds: float) -> list[dict[str, Any]]:
        """Children that ended, by time since the job was made: bucket, completed, failed,
        cancelled; buckets in which none ended are missing.
        """
        rows = await self._pool.fetch(self._sql["history"], job_id, float(bucket_seconds))
        return [dict(row) for row in rows]

    async def kinds(self) -> list[dict[str, Any]]:
        """Kinds that workers registered: name, max_retries, timeout_seconds, on_closed,
        payload_schema, workers (that live and serve it).
        """
        return [
            {**row, "payload_schema": decode(row["payload_schema"])}
            for row in await self._pool.fetch(self._sql["kinds"])
        ]

    async def about(self) -> dict[str, Any]:
        """server_version, schema_version, live_workers."""
        return dict((await self._pool.fetch(self._sql["about"]))[0])

    async def rows(self, name: str, *arguments: object) -> list[Any]:
        """Rows of a statement by its name, for a store of other tables (`access`)."""
        return await self._pool.fetch(self._sql[name], *arguments)

    # -- counting ---------------------------------------------------------------------------------

    async def _counting(
        self, name: str, depth: int, *arguments: object, cascade: bool = False
    ) -> Counted:
        """Run a statement that ends jobs.

        What closes at depth 0 has no parent to count on, so children of roots, which is nearly
        everything, need one autocommit statement; deeper ones a transaction with a loop.
        """
        if depth <= 1 and not cascade:
            return _counted(await self._pool.fetch(self._sql[name], *arguments))

        async def body(connection: Connection) -> Counted:
            return await self._with_cascade(
                connection, await connection.fetch(self._sql[name], *arguments)
            )

        return await self._pool.transaction(body)

    async def _with_cascade(self, connection: Connection, rows: Sequence[Any]) -> Counted:
        result = step = _counted(rows)
        while up := sorted(job.id for job in step.closed if job.parent_id is not None):
            step = _counted(await connection.fetch(self._sql["count_up"], up))
            result = replace(
                result, closed=result.closed + step.closed, doomed=result.doomed + step.doomed
            )
        return result


def _by_depth(items: Iterable[tuple[Claim, T]]) -> Iterator[list[tuple[Claim, T]]]:
    """Claims with what became of them, the deepest first, a depth at a time by ascending id: a
    manager and its children in one statement would be locked the wrong way round.
    """
    ordered = sorted(items, key=lambda item: (-item[0].depth, item[0].id))
    for _, group in groupby(ordered, key=lambda item: item[0].depth):
        yield list(group)


def _columns(width: int, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows as columns; `width` empty ones where there is no row."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


class _OneTransaction:
    """A pool that is one connection, in a transaction that somebody else ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetch(self, sql: str, *arguments: object) -> list[Any]:
        rows: list[Any] = await self._connection.fetch(sql, *arguments)
        return rows

    async def transaction(self, body: Callable[[Connection], Awaitable[T]]) -> T:
        return await body(self._connection)


class _NotOpen(Exception):
    """Rolls back: the batch has closed, or is being ended."""


def _group(row: Any) -> Group:
    return Group(
        tuple(row["ids"]),
        row["parent_id"],
        row["depth"],
        Status(row["status"]),
        row["on_closed"],
        row["webhook"],
    )


def _counted(rows: Sequence[Any]) -> Counted:
    groups = tuple(_group(row) for row in rows if row["what"] == "moved")
    parents = [row for row in rows if row["what"] in {"counted", "doomed"}]
    return Counted(
        groups,
        tuple(job for row in parents if row["ended"] for job in _group(row).each()),
        parents[0]["locked_at"] if parents else None,
        tuple(job_id for row in parents if row["what"] == "doomed" for job_id in row["ids"]),
    )


def _or_empty(values: list[str | None]) -> list[str | None]:
    """An empty array for all NULL: asyncpg looks at every element of one three times."""
    return values if any(value is not None for value in values) else []


def _sums(text: str | None) -> dict[str, float] | None:
    return None if text is None else json.loads(text)


def _job_row(row: Any) -> JobRow:
    return JobRow(
        id=row["id"],
        tenant=row["tenant"],
        kind=row["kind"],
        status=Status(row["status"]),
        parent_id=row["parent_id"],
        root_id=row["root_id"],
        follows_id=row["follows_id"],
        document_key=row["document_key"],
        key=row["idempotency_key"],
        verdict=row["verdict"],
        reason=row["reason"],
        error=row["error"],
        error_type=row["error_type"],
        attempt=row["attempt"],
        failures=row["failures"],
        deaths=row["deaths"],
        max_retries=row["max_retries"],
        generation=row["generation"],
        priority=row["priority"],
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        cancelled=row["cancelled"],
        on_closed=row["on_closed"],
        payload=decode(row["payload"]),
        result=decode(row["result"]),
        paused=row["paused"],
        concurrency=row["concurrency"],
        deadline=row["deadline"],
        run_at=row["run_at"],
        created_at=row["created_at"],
        claimed_at=row["claimed_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        sums=_sums(row["sums"]),
        budget=_sums(row["budget"]),
        fail_after=row["fail_after"],
        fail_after_percent=row["fail_after_percent"],
        closing=row["closing"],
    )


def _summary(row: Any) -> JobSummary:
    values = dict(row)
    return JobSummary(
        key=values.pop("idempotency_key"), status=Status(values.pop("status")), **values
    )


def _child(row: Any) -> Child:
    values = dict(row)
    return Child(
        status=Status(values.pop("status")),
        payload=decode(values.pop("payload")),
        result=decode(values.pop("result")),
        sums=_sums(values.pop("sums")),
        **values,
    )
