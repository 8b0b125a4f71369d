"""The store against a plain model: any order of calls, by the living and the dead, ends alike.

The model lives outside the database, and so does its log of who held which claim: with the fence
dropped every query inside the database would stay content.

FANOUT_MODEL_EXAMPLES=1000 runs longer; a failure prints a blob for `@reproduce_failure`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fanout.errors import LostClaim, Refused
from fanout.limits import Limits
from fanout.statements import load_statements
from fanout.states import TERMINAL, Status
from fanout.steering import pause_below, resume_below, spread_concurrency, spread_priority
from fanout.store import Store
from fanout.values import Claim, Completed, Counted, Failed, Retry
from tests import factories
from tests.factories import BROKEN, DONE, GONE, LEASE, LONG_AGO, ME, OTHER
from tests.machine.invariants import History, check

T = TypeVar("T")

PENDING, PROCESSING, WAITING = Status.PENDING, Status.PROCESSING, Status.WAITING
COMPLETED, FAILED, CANCELLED = Status.COMPLETED, Status.FAILED, Status.CANCELLED

MANAGER, LEAF, REPORT = "manager", "leaf", "report"
KINDS: Final = (MANAGER, LEAF, REPORT)
MAX_DEATHS: Final = 2
MAX_RETRIES: Final = 1
DEEPEST: Final = 2
DOCUMENTS: Final = "abcd"
MORE_DOCUMENTS: Final = "efgh"
PRIORITIES: Final = (2, 5)
WHOLE_LINES: Final = 4
"""Partitions and priorities, at most, of which a claim under limits looks at as many as it may."""
RETRY: Final = Retry("timeout", "TimeoutError", 0)


@dataclass
class Job:
    """What the model knows of a job."""

    id: int
    kind: str
    parent: int | None = None
    document: str | None = None
    depth: int = 0
    max_retries: int = MAX_RETRIES
    on_closed: str | None = None
    status: Status = PENDING
    verdict: Status | None = None
    attempt: int = 0
    token: UUID | None = None
    lease_gone: bool = False
    failures: int = 0
    deaths: int = 0
    generation: int = 1
    priority: int = 5
    paused: bool = False
    """Of a root: the truth for all that is below it. Of what is pending: it cannot be claimed."""
    late: bool = False
    """Its deadline has passed."""
    partition: str | None = None
    concurrency: int | None = None
    """Of a batch: how many of its children may run at once."""
    total: int = 0
    counted: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(sorted(TERMINAL), 0))

    @property
    def is_open(self) -> bool:
        return self.status not in TERMINAL

    @property
    def is_live(self) -> bool:
        """Open, and nobody is ending it."""
        return self.is_open and self.verdict is None

    @property
    def is_due(self) -> bool:
        return self.status is PENDING and not self.paused

    @property
    def has_open(self) -> bool:
        return sum(self.counted.values()) < self.total

    def row(self) -> tuple[object, ...]:
        """What the database must say of it."""
        return (
            self.status,
            self.verdict if self.status is WAITING else None,
            *(self.attempt, self.token, self.failures, self.deaths, self.generation, self.total),
            *(self.counted[s] for s in (COMPLETED, FAILED, CANCELLED)),
            self.priority if self.is_open else None,
            self.paused
            if self.status is PENDING or (self.is_open and self.parent is None)
            else None,
            self.partition,
            self.concurrency,
        )


class Model:
    """The machine as design.md tells it: plain code, one job at a time, no database."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.expected_follow_ups: set[tuple[int, int]] = set()
        self.ends: dict[tuple[int, int], tuple[int, UUID]] = {}
        self.limits: dict[str, int | None] = {}
        """Kinds that somebody has set a limit of; None: and has lifted it."""

    def add(self, job: Job) -> None:
        self.jobs[job.id] = job

    def children(self, job: Job) -> list[Job]:
        return sorted((c for c in self.jobs.values() if c.parent == job.id), key=lambda c: c.id)

    def root(self, job: Job) -> Job:
        while job.parent is not None:
            job = self.jobs[job.parent]
        return job

    def below(self, job: Job) -> list[Job]:
        """Everything open below it that a walk over open batches reaches."""
        found: list[Job] = []
        for child in self.children(job):
            if child.is_open:
                found += [child, *self.below(child)]
        return found

    def is_limited(self, job: Job) -> bool:
        """It is claimed under limits: an ordinary claim leaves it out."""
        return job.partition is not None or self.limits.get(job.kind) is not None

    def room_of_kind(self, kind: str) -> float:
        running = [j for j in self.jobs.values() if j.kind == kind and j.status is PROCESSING]
        return _room(self.limits.get(kind), len(running))

    def room_of_batch(self, job_id: int | None) -> float:
        if job_id is None:
            return math.inf
        batch = self.jobs[job_id]
        running = [c for c in self.children(batch) if c.status is PROCESSING]
        return _room(batch.concurrency, len(running))

    def has_room(self, job: Job) -> bool:
        return self.room_of_kind(job.kind) > 0 and self.room_of_batch(job.parent) > 0

    def keep_within(self, batch: Job, children: list[Job]) -> None:
        """Children of a batch with a concurrency are claimed under limits."""
        for child in children:
            if batch.concurrency is not None and child.partition is None:
                child.partition = f"#{batch.id}"

    def holds(self, claim: Claim, token: UUID) -> bool:
        job = self.jobs[claim.id]
        return (job.attempt, job.token) == (claim.attempt, token)

    def claimed(self, job: Job, token: UUID, *, lease_gone: bool) -> None:
        job.status, job.attempt, job.token, job.lease_gone = (
            PROCESSING,
            job.attempt + 1,
            token,
            lease_gone,
        )

    def put_back(self, job: Job) -> None:
        job.status, job.token, job.paused = PENDING, None, self.root(job).paused

    def end(self, job: Job, outcome: Status) -> None:
        """As `outcome`, or, if children are open, once they have ended."""
        job.token = None
        if job.has_open:
            job.status, job.verdict = WAITING, None if outcome is COMPLETED else outcome
            return
        job.status = outcome
        self.closed(job)

    def closed(self, job: Job) -> None:
        """Its follow-up is due, exactly one a generation, and its parent counts it."""
        if job.on_closed is not None:
            assert (job.id, job.generation) not in self.expected_follow_ups, "closed twice"
            self.expected_follow_ups.add((job.id, job.generation))
        if job.parent is not None:
            self._count(self.jobs[job.parent], job.status)

    def _count(self, parent: Job, outcome: Status) -> None:
        parent.counted[outcome] += 1
        if parent.status is WAITING and not parent.has_open:
            parent.status = parent.verdict or COMPLETED
            self.closed(parent)

    def reopen(self, parent: Job, outcome: Status) -> None:
        """One child that counted as `outcome` is open again; so are the batches it had closed."""
        parent.counted[outcome] -= 1
        if parent.status is COMPLETED:
            parent.status, parent.generation = WAITING, parent.generation + 1
            parent.paused = parent.late = False
            if parent.parent is not None:
                self.reopen(self.jobs[parent.parent], COMPLETED)

    def may_reopen(self, parent: Job) -> bool:
        if parent.is_open:
            return parent.verdict is None
        if parent.status is not COMPLETED:
            return False
        return parent.parent is None or self.may_reopen(self.jobs[parent.parent])


def _room(most: int | None, running: int) -> float:
    return math.inf if most is None else max(0, most - running)


class Bridge:
    """A loop in a thread of its own, for a machine that Hypothesis drives without one."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self.store, self.conn = self.run(self._open(dsn))

    async def _open(self, dsn: str) -> tuple[Store, asyncpg.Connection]:
        store = await self._stack.enter_async_context(factories.a_store(dsn, pool_size=2))
        conn = await asyncpg.connect(dsn)
        self._stack.push_async_callback(conn.close)
        await History.install(conn)
        await factories.live_worker(conn, KINDS)
        return store, conn

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Held = tuple[Claim, UUID]
OUTCOMES: Final = st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=4)


def wanted(kinds: Sequence[str]) -> list[tuple[str, int, datetime]]:
    return [(kind, priority, LONG_AGO) for priority in PRIORITIES for kind in kinds]


class Machine(RuleBasedStateMachine):
    """Two workers, some zombies, a sweeper, and people who pause, limit, add, cancel and retry."""

    bridge: ClassVar[Bridge]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.held: list[Held] = []
        """Claims that a worker believes in, the true and the lost ones, as they were given out."""
        self.run(self.conn.execute("TRUNCATE fanout.job, public.test_history"))
        self.run(self.conn.execute("DELETE FROM fanout.limits WHERE kind IS NOT NULL"))

    @property
    def store(self) -> Store:
        return self.bridge.store

    @property
    def conn(self) -> asyncpg.Connection:
        return self.bridge.conn

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.bridge.run(work)

    # -- choosing ---------------------------------------------------------------------------------

    def a_claim(self, data: st.DataObject, *kinds: str) -> Held:
        return data.draw(st.sampled_from(self.claims(*kinds)), "claim")

    def claims(self, *kinds: str) -> list[Held]:
        return [h for h in self.held if not kinds or h[0].kind in kinds]

    def a_job(self, data: st.DataObject, *kinds: str) -> Job:
        return data.draw(st.sampled_from(self.of_kind(*kinds)), "job")

    def of_kind(self, *kinds: str) -> list[Job]:
        return [j for j in self.model.jobs.values() if not kinds or j.kind in kinds]

    # -- what callers do --------------------------------------------------------------------------

    @initialize(
        data=st.data(),
        nested=st.booleans(),
        sealed=st.booleans(),
        leaves=st.sampled_from([None, None, 1, 2]),
        children=st.sampled_from([None, None, 1]),
    )
    def first(
        self,
        data: st.DataObject,
        nested: bool,
        sealed: bool,
        leaves: int | None,
        children: int | None,
    ) -> None:
        """A batch to begin with, dispatching or sealed, perhaps under limits."""
        self.submit(MANAGER, REPORT)
        self.claim([MANAGER], 1, ME, LEASE)
        if leaves is not None:
            self.set_limit(LEAF, leaves)
        if children is not None:
            self.set_concurrency(data, children)
        self.fan_out(data, set("abc"), set("a"), nested=False, lease=LEASE)
        self.fan_out(data, set("d"), set(), nested=nested, lease=LEASE)
        if sealed:
            self.flush(self.held, [True], ME)
        if nested:
            claim = self.claim if children is None else self.claim_limited
            claim([MANAGER], 1, OTHER, LEASE)
            self.fan_out(data, set("ab"), set(), nested=True, lease=LEASE)

    @precondition(lambda self: sum(job.is_open for job in self.of_kind()) < 8)
    @rule(
        kind=st.sampled_from(KINDS),
        on_closed=st.sampled_from([None, REPORT]),
        partition=st.sampled_from([None, None, None, "acme"]),
    )
    def submit(self, kind: str, on_closed: str | None, partition: str | None = None) -> None:
        options = None if partition is None else json.dumps({"partition": partition})
        work = factories.submit(
            self.store, kind, max_retries=MAX_RETRIES, on_closed=on_closed, options=options
        )
        self.model.add(Job(self.run(work), kind, on_closed=on_closed, partition=partition))
        self.compare()

    @precondition(lambda self: sum(job.is_open for job in self.of_kind()) > 6)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.a_job(data)
        may = job.is_open and job.verdict is None
        counted = self.run(self.store.doom(job.id, CANCELLED, "somebody said so"))
        self.moved(counted, [job] if may else [])
        if may:
            self.model.end(job, CANCELLED)
        self.compare()

    @precondition(lambda self: any(job.counted[FAILED] for job in self.of_kind()))
    @rule(data=st.data())
    def retry_failed(self, data: st.DataObject) -> None:
        job = self.a_job(data, MANAGER)
        failed = [c for c in self.model.children(job) if c.status is FAILED and not c.total]
        if failed and self.model.may_reopen(job):
            assert self.run(self.store.retry_failed(job.id)) == len(failed)
            root = self.model.root(job)
            paused = root.paused and root.is_open
            for child in failed:
                self.open_again(child)
                child.paused = paused
                self.model.reopen(job, FAILED)
            # What had closed before the batch had a concurrency, and a retry below has opened.
            first = min(child.id for child in failed)
            idle = [c for c in self.model.children(job) if c.status in {PENDING, WAITING}]
            self.model.keep_within(job, [c for c in idle if c.id >= first])
        else:
            with pytest.raises(Refused):
                self.run(self.store.retry_failed(job.id))
        self.compare()

    @precondition(lambda self: any(job.status is FAILED for job in self.of_kind()))
    @rule(data=st.data())
    def retry_job(self, data: st.DataObject) -> None:
        job = self.a_job(data)
        may = job.status is FAILED and not job.total and job.parent is None
        assert self.run(self.store.retry_job(job.id)) is may
        if may:
            self.open_again(job)
        self.compare()

    def open_again(self, job: Job) -> None:
        job.status, job.failures, job.deaths, job.generation = PENDING, 0, 0, job.generation + 1
        job.paused = job.late = False

    # -- what people tell a batch -----------------------------------------------------------------

    @rule(data=st.data(), how_far=st.sampled_from(["said", "a chunk", "all"]))
    def pause(self, data: st.DataObject, how_far: str) -> None:
        """Said, and spread as far as its caller came before it died."""
        job = self.a_job(data, MANAGER, LEAF)
        may = job.is_live and job.parent is None and not job.paused
        assert self.run(self.store.pause(job.id)) is may
        if may:
            job.paused = True
        self.spread_pause(data, job, how_far)

    @precondition(lambda self: any(job.paused for job in self.of_kind()))
    @rule(data=st.data(), how_far=st.sampled_from(["said", "a chunk", "all"]))
    def resume(self, data: st.DataObject, how_far: str) -> None:
        job = data.draw(st.sampled_from([job for job in self.of_kind() if job.paused]), "job")
        may = job.is_live and job.parent is None
        assert self.run(self.store.resume(job.id)) == (job.kind if may else None)
        if may:
            job.paused = False
        self.spread_pause(data, job, how_far)

    def spread_pause(self, data: st.DataObject, job: Job, how_far: str) -> None:
        root = self.model.root(job)
        if how_far == "a chunk":
            parent = data.draw(st.sampled_from([root, *self.model.below(root)]), "parent")
            limit = data.draw(st.integers(1, 3), "limit")
            step = self.store.pause_chunk if root.paused else self.store.resume_chunk
            chunk = self.run(step(root.id, parent.id, 0, limit))
            turned = self.unlike_root(root, self.model.children(parent))[:limit]
            assert chunk.changed == len(turned)
            for child in turned:
                child.paused = root.paused
        elif how_far == "all":
            self.converge(root)
        self.compare()

    @rule(data=st.data())
    def sweep_pauses(self, data: st.DataObject) -> None:
        """What a sweeper does about pauses and resumes that were left half done."""
        self.converge(self.model.root(self.a_job(data)))
        self.compare()

    def converge(self, root: Job) -> None:
        """Then below a paused root nothing can be claimed, and below another nothing is paused."""
        spread = pause_below if root.paused else resume_below
        self.run(spread(self.store, root.id))
        if not root.is_open or (root.paused and root.verdict is not None):
            return
        for child in self.unlike_root(root, self.model.below(root)):
            child.paused = root.paused

    def unlike_root(self, root: Job, jobs: list[Job]) -> list[Job]:
        if root.paused and not root.is_live:
            return []
        return [j for j in jobs if j.status is PENDING and j.paused is not root.paused]

    @rule(data=st.data(), priority=st.sampled_from(PRIORITIES), all_of_it=st.booleans())
    def set_priority(self, data: st.DataObject, priority: int, all_of_it: bool) -> None:
        job = self.a_job(data)
        may = job.is_live and job.parent is None
        told = self.run(self.store.set_priority(job.id, priority))
        assert told == (job.kind if may else None)
        if may:
            job.priority = priority
            if all_of_it:
                self.run(spread_priority(self.store, job.id))
                for below in self.model.below(job):
                    below.priority = priority
        self.compare()

    @rule(data=st.data(), concurrency=st.sampled_from([None, 1, 2]))
    def set_concurrency(self, data: st.DataObject, concurrency: int | None) -> None:
        """Of a batch at any depth; what runs goes on, if more than that do."""
        job = self.a_job(data, MANAGER)
        assert self.run(self.store.set_concurrency(job.id, concurrency)) is job.is_live
        if job.is_live:
            job.concurrency = concurrency
            self.run(spread_concurrency(self.store, job.id))
            self.model.keep_within(job, [c for c in self.model.children(job) if c.is_open])
        self.compare()

    @rule(kind=st.sampled_from(KINDS), most=st.sampled_from([None, 0, 1, 2, 3]))
    def set_limit(self, kind: str, most: int | None) -> None:
        row = self.run(Limits(self.store).set(f"kind:{kind}", concurrency=most))
        self.model.limits[kind] = most
        assert row.concurrency == most
        self.compare()

    @precondition(lambda self: self.model.limits)
    @rule(kind=st.sampled_from(KINDS))
    def reset_limit(self, kind: str) -> None:
        was_set = kind in self.model.limits
        assert self.run(Limits(self.store).reset(f"kind:{kind}")) is was_set
        self.model.limits.pop(kind, None)
        self.compare()

    @rule(
        data=st.data(),
        documents=st.sets(st.sampled_from(DOCUMENTS + MORE_DOCUMENTS), max_size=3),
        gone=st.sets(st.sampled_from(MORE_DOCUMENTS), max_size=1),
    )
    def add(self, data: st.DataObject, documents: set[str], gone: set[str]) -> None:
        """Documents for a batch that is open, from outside; it has the last word on its close."""
        job = self.a_job(data, MANAGER)
        call = factories.add_children(self.store, job.id, sorted(documents), gone=frozenset(gone))
        if not job.is_live:
            with pytest.raises(Refused):
                self.run(call)
            self.compare()
            return
        fresh = documents - {c.document for c in self.model.children(job)}
        assert self.run(call) == (len(fresh), job.total + len(fresh))
        self.bear(job, LEAF, fresh, gone, on_closed=None, priority=job.priority)
        self.compare()

    @rule(data=st.data(), passes=st.booleans())
    def deadline(self, data: st.DataObject, passes: bool) -> None:
        """It passes, and a sweeper comes by; it comes by as well when nothing is late."""
        job = self.a_job(data)
        if passes:
            self.run(
                self.conn.execute(
                    """UPDATE fanout.job SET deadline = clock_timestamp() - interval '1 s'
                        WHERE id = $1""",
                    job.id,
                )
            )
            job.late = True
        late = sorted(j.id for j in self.of_kind() if j.late and j.is_live)
        assert self.run(self.store.late(1000)) == late
        may = job.late and job.is_live
        counted = self.run(self.store.doom_late(job.id))
        self.moved(counted, [job] if may else [])
        if may:
            self.model.end(job, FAILED)
        self.compare()

    # -- what workers do --------------------------------------------------------------------------

    @rule(
        kinds=st.permutations(KINDS),
        limit=st.integers(1, 8),
        token=st.sampled_from([ME, OTHER]),
        lease=st.sampled_from([LEASE, LEASE, GONE]),
    )
    def claim(self, kinds: list[str], limit: int, token: UUID, lease: float) -> None:
        """Whatever is under no limit; and what it leaves to others is told."""
        due = [j for j in self.of_kind(*kinds) if j.is_due and not j.deaths]
        free = [j for j in due if not self.model.is_limited(j)]
        suspects = [j for j in self.of_kind(*kinds) if j.is_due and j.deaths]
        any_alone = any(self.model.has_room(j) for j in suspects)
        look = self.run(self.store.claim(wanted(kinds), limit, token, lease))
        claims = look.claims
        assert len(claims) == min(limit, len(free))
        assert {c.id for c in claims} <= {j.id for j in free}
        assert [c.priority for c in claims] == sorted(c.priority for c in claims)
        assert look.limited == {j.kind for j in due if self.model.is_limited(j)}
        # No snapshot shows a statement its own claims: it is told of room that they use.
        assert (look.suspect_age is not None) == any_alone
        for claim in claims:
            self.took(claim, token, lease)
        self.compare()

    @precondition(
        lambda self: any(job.is_due and self.model.is_limited(job) for job in self.of_kind())
    )
    @rule(
        kinds=st.permutations(KINDS),
        limit=st.sampled_from([1, 3, 8]),
        token=st.sampled_from([ME, OTHER]),
        lease=st.sampled_from([LEASE, LEASE, GONE]),
    )
    def claim_limited_twice(self, kinds: list[str], limit: int, token: UUID, lease: float) -> None:
        """The second one counts what the first one took."""
        self.claim_limited(kinds, limit, token, lease)
        self.claim_limited(kinds, limit, OTHER, lease)

    def claim_limited(self, kinds: list[str], limit: int, token: UUID, lease: float) -> None:
        """No more than there is room for, and something if there is room for anything."""
        due = [j for j in self.of_kind(*kinds) if j.is_due and not j.deaths]
        due = [j for j in due if self.model.is_limited(j)]
        may = [j for j in due if self.model.has_room(j)]
        room_of_kind = {kind: self.model.room_of_kind(kind) for kind in kinds}
        room_of_batch = {j.parent: self.model.room_of_batch(j.parent) for j in due}
        look = self.run(self.store.claim_limited(wanted(kinds), limit, token, lease, free=limit))
        taken = [self.model.jobs[claim.id] for claim in look.claims]
        assert len({j.id for j in taken}) == len(taken) <= limit
        assert {j.id for j in taken} <= {j.id for j in may}
        assert bool(taken) == bool(may)
        assert look.of_partitions == {j.id for j in taken if j.partition is not None}
        of_kind = Counter(j.kind for j in taken)
        assert all(n <= room_of_kind[kind] for kind, n in of_kind.items())
        assert all(n <= room_of_batch[b] for b, n in Counter(j.parent for j in taken).items())
        # Of many lines it looks at the first few of each, and a batch may have those.
        lines = {(j.kind, j.partition, j.priority) for j in due}
        if len(lines) <= WHOLE_LINES and set(room_of_batch.values()) <= {math.inf}:
            waiting = Counter(j.kind for j in due)
            fit = sum(min(n, room_of_kind[kind]) for kind, n in waiting.items())
            assert len(taken) == min(limit, fit)
        for claim in look.claims:
            self.took(claim, token, lease)
        self.compare()

    @precondition(lambda self: any(j.status is PENDING and j.deaths for j in self.of_kind()))
    @rule(token=st.sampled_from([ME, OTHER]), lease=st.sampled_from([LEASE, GONE]))
    def claim_alone(self, token: UUID, lease: float) -> None:
        suspects = {
            j.id for j in self.of_kind() if j.is_due and j.deaths and self.model.has_room(j)
        }
        claim = self.run(self.store.claim_alone(KINDS, token, lease))
        assert (claim is not None) == bool(suspects)
        if claim is not None:
            assert claim.id in suspects
            self.took(claim, token, lease)
        self.compare()

    def took(self, claim: Claim, token: UUID, lease: float) -> None:
        job = self.model.jobs[claim.id]
        self.model.claimed(job, token, lease_gone=lease == GONE)
        assert (claim.attempt, claim.deaths, claim.failures) == (
            job.attempt,
            job.deaths,
            job.failures,
        )
        assert (claim.total, claim.depth, claim.document_key) == (
            job.total,
            job.depth,
            job.document,
        )
        self.held.append((claim, token))

    @precondition(lambda self: self.claims(MANAGER))
    @rule(
        data=st.data(),
        documents=st.sets(st.sampled_from(DOCUMENTS)),
        gone=st.sets(st.sampled_from(DOCUMENTS), max_size=1),
        nested=st.booleans(),
        lease=st.sampled_from([LEASE, LEASE, GONE]),
    )
    def fan_out(
        self, data: st.DataObject, documents: set[str], gone: set[str], nested: bool, lease: float
    ) -> None:
        # The newest claims are the likeliest to hold.
        claim, token = data.draw(st.sampled_from(self.claims(MANAGER)[::-1]), "claim")
        kind = MANAGER if nested and claim.depth < DEEPEST else LEAF
        on_closed = REPORT if kind == MANAGER else None
        call = factories.fan_out(
            self.store,
            claim,
            sorted(documents),
            token=token,
            kind=kind,
            gone=frozenset(gone),
            lease=lease,
            max_retries=MAX_RETRIES,
            on_closed=on_closed,
        )
        if not self.model.holds(claim, token):
            with pytest.raises(LostClaim):
                self.run(call)
            self.compare()
            return
        job = self.model.jobs[claim.id]
        fresh = documents - {c.document for c in self.model.children(job)}
        assert self.run(call) == (len(fresh), job.total + len(fresh))
        job.lease_gone = lease == GONE
        self.bear(job, kind, fresh, gone, on_closed=on_closed, priority=5)
        self.compare()

    def bear(
        self,
        job: Job,
        kind: str,
        documents: set[str],
        gone: set[str],
        *,
        on_closed: str | None,
        priority: int,
    ) -> None:
        paused = self.model.root(job).paused
        for child_id, document in self.run(self.born(job.id, documents)):
            child = Job(child_id, kind, job.id, document, job.depth + 1, on_closed=on_closed)
            child.priority, child.paused, child.partition = priority, paused, job.partition
            self.model.keep_within(job, [child])
            self.model.add(child)
            job.total += 1
            if document in gone:
                child.status = FAILED
                self.model.closed(child)

    async def born(self, parent: int, documents: set[str]) -> list[tuple[int, str]]:
        rows = await self.conn.fetch(
            """SELECT id, document_key FROM fanout.job
                WHERE parent_id = $1 AND document_key = ANY ($2) ORDER BY id""",
            parent,
            list(documents),
        )
        assert len(rows) == len(documents)
        return [(row[0], row[1]) for row in rows]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcomes=OUTCOMES, everything=st.booleans(), keep=st.booleans())
    def finish(
        self, data: st.DataObject, outcomes: list[bool], everything: bool, keep: bool
    ) -> None:
        """A flush of one worker: of several depths, true claims and lost ones, as they come."""
        _, token = self.a_claim(data)
        mine = [held for held in self.held if held[1] == token]
        flush = mine if everything else data.draw(st.lists(st.sampled_from(mine), unique=True))
        self.flush(flush, outcomes, token)
        if not keep:
            self.held = [held for held in self.held if held not in flush]

    @precondition(lambda self: any(job.status is PENDING for job in self.of_kind()))
    @rule(
        kind=st.sampled_from([LEAF, MANAGER]),
        limit=st.sampled_from([1, 3, 8]),
        token=st.sampled_from([ME, OTHER]),
        outcomes=OUTCOMES,
    )
    def work(self, kind: str, limit: int, token: UUID, outcomes: list[bool]) -> None:
        """A worker as it should be: claims, runs, finishes."""
        before = len(self.held)
        self.claim([kind], limit, token, LEASE)
        free = limit - (len(self.held) - before)
        if free:
            self.claim_limited([kind], free, token, LEASE)
        claimed = self.held[before:]
        self.flush(claimed, outcomes, token)
        self.held = [held for held in self.held if held not in claimed[1:]]

    def flush(self, flush: list[Held], outcomes: list[bool], token: UUID) -> None:
        ended: list[tuple[Claim, Completed | Failed]] = [
            (claim, DONE if outcomes[n % len(outcomes)] else BROKEN)
            for n, (claim, _) in enumerate(flush)
        ]
        truly = [(c, outcome) for c, outcome in ended if self.model.holds(c, token)]
        counted = self.run(self.store.finish(ended, token))
        self.moved(counted, [self.model.jobs[c.id] for c, _ in truly])
        for claim, outcome in sorted(truly, key=lambda item: -item[0].depth):
            job = self.model.jobs[claim.id]
            one_end = self.model.ends.setdefault((job.id, job.generation), (claim.attempt, token))
            assert one_end == (claim.attempt, token), "two results of one generation were accepted"
            job.failures += isinstance(outcome, Failed)
            self.model.end(job, COMPLETED if isinstance(outcome, Completed) else FAILED)
        self.compare()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), at_no_cost=st.booleans())
    def put_back(self, data: st.DataObject, at_no_cost: bool) -> None:
        """Released at shutdown, or failed for now, while the budget lasts."""
        claim, token = self.a_claim(data)
        job = self.model.jobs[claim.id]
        may = self.model.holds(claim, token) and (at_no_cost or job.failures < job.max_retries)
        if at_no_cost:
            back = self.run(self.store.release([(claim, None)], token))
        else:
            back = self.run(self.store.retry([(claim, RETRY)], token))
        assert back == ({job.id} if may else set())
        if may:
            job.failures += not at_no_cost
            self.model.put_back(job)
        self.compare()

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        call=st.sampled_from(["heartbeat", "heartbeat_manager", "save_checkpoint"]),
        lease=st.sampled_from([LEASE, GONE]),
    )
    def beat(self, data: st.DataObject, call: str, lease: float) -> None:
        claim, token = self.a_claim(data)
        may = self.model.holds(claim, token)
        if call == "save_checkpoint":
            checkpoint = self.store.save_checkpoint(claim, token, "1")
            if may:
                self.run(checkpoint)
            else:
                with pytest.raises(LostClaim):
                    self.run(checkpoint)
        else:
            is_leaf = call == "heartbeat"  # it answers with what is lost
            fence = ([claim.id], [claim.attempt]) if is_leaf else (claim.id, claim.attempt)
            work = self.conn.fetch(load_statements()[call], *fence, token, timedelta(seconds=lease))
            rows = [row for row in self.run(work) if not is_leaf or row["lost"]]
            assert bool(rows) is (may is not is_leaf)
            if may:
                self.model.jobs[claim.id].lease_gone = lease == GONE
        self.compare()

    @precondition(lambda self: self.held)
    @rule(token=st.sampled_from([ME, OTHER]), asleep=st.sampled_from([True, True, False]))
    def crash(self, token: UUID, asleep: bool) -> None:
        """A worker is gone with all it held, or will wake up as a zombie; its leases run out."""
        self.run(
            self.conn.execute(
                """UPDATE fanout.job SET lease_expires_at = clock_timestamp() - interval '1 s'
                    WHERE claim_token = $1""",
                token,
            )
        )
        for job in self.of_kind():
            job.lease_gone |= job.token == token
        if not asleep:
            self.held = [held for held in self.held if held[1] != token]

    @precondition(lambda self: any(job.token for job in self.of_kind()))
    @rule(data=st.data())
    def release_orphans(self, data: st.DataObject) -> None:
        """The answer to a claim was lost: what its worker does not know of goes back."""
        token = data.draw(st.sampled_from([job.token for job in self.of_kind() if job.token]))
        mine = {job.id for job in self.of_kind() if job.token == token}
        known = data.draw(st.sets(st.sampled_from(sorted(mine))))
        assert self.run(self.store.release_orphans(token, known)) == mine - known
        for job_id in mine - known:
            self.model.put_back(self.model.jobs[job_id])
        self.compare()

    # -- what sweepers do -------------------------------------------------------------------------

    @rule(data=st.data(), limit=st.integers(1, 4))
    def sweep(self, data: st.DataObject, limit: int) -> None:
        """What every pod does every few seconds, in small steps."""
        dead = [j for j in self.of_kind() if j.token and j.lease_gone]
        depths = sorted({j.depth for j in dead}, reverse=True)
        assert self.run(self.store.expired_depths()) == depths
        for depth in depths:
            self.rescue(sorted((j for j in dead if j.depth == depth), key=lambda j: j.id)[:limit])
        doomed = sorted(j.id for j in self.of_kind() if j.status is WAITING and j.verdict)
        assert self.run(self.store.doomed(100)) == doomed
        for job_id in doomed:
            self.doom_chunk(self.model.jobs[job_id], limit)
        assert self.run(self.store.incomplete_without_open(10)) == []
        assert self.run(self.store.recount(self.a_job(data).id)) == Counted()
        self.compare()

    def rescue(self, dead: list[Job]) -> None:
        depth = dead[0].depth
        self.moved(self.run(self.store.rescue(depth, len(dead), MAX_DEATHS, 0, 0)), dead)
        for job in dead:
            job.deaths += 1
            if job.deaths <= MAX_DEATHS:
                self.model.put_back(job)
            else:
                self.model.end(job, FAILED)

    def doom_chunk(self, job: Job, limit: int) -> None:
        if job.status is not WAITING:  # a chunk above closed it
            return
        can = {c.id: c for c in self.model.children(job) if c.is_open and c.verdict is None}
        counted = self.run(self.store.doom_chunk(job.id, limit))
        ended = [can[moved.id] for moved in counted.moved]
        assert len(ended) == min(limit, len(can))
        for child in ended:
            self.model.end(child, CANCELLED)

    @precondition(lambda self: any(job.status is WAITING for job in self.of_kind()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """At once: any job that is sealed and has nobody at work below it."""
        job = self.a_job(data, MANAGER)
        excused = any(
            c.status is WAITING
            or (c.token is not None and not c.lease_gone)
            or (c.status is PENDING and (c.paused or not self.model.room_of_kind(c.kind)))
            for c in self.model.children(job)
        )
        may = job.status is WAITING and job.verdict is None and not (excused or job.paused)
        assert self.run(self.store.give_up(job.id, 0, "no sign of life")) is may
        if may:
            job.verdict = FAILED
        self.compare()

    # -- comparing --------------------------------------------------------------------------------

    def moved(self, counted: Counted, expected: list[Job]) -> None:
        assert sorted(job.id for job in counted.moved) == sorted(job.id for job in expected)

    def compare(self) -> None:
        """Every row is what the model says, and the invariants hold."""
        rows = self.run(
            self.conn.fetch(
                """SELECT id, follows_id, follows_generation, kind, on_closed, max_retries, status,
                          CASE WHEN status = 'waiting' THEN verdict END AS verdict,
                          attempt, claim_token, failures, deaths, generation,
                          total, completed, failed, cancelled,
                          CASE WHEN finished_at IS NULL THEN priority END AS priority,
                          CASE WHEN status = 'pending'
                                 OR finished_at IS NULL AND parent_id IS NULL THEN paused END
                          AS paused, partition, concurrency FROM fanout.job ORDER BY id"""
            )
        )
        for row in rows:
            if row["follows_id"] is not None and row["id"] not in self.model.jobs:
                self.model.add(
                    Job(
                        row["id"],
                        row["kind"],
                        max_retries=row["max_retries"],
                        priority=self.model.jobs[row["follows_id"]].priority,
                    )
                )
        followed = [(r["follows_id"], r["follows_generation"]) for r in rows if r["follows_id"]]
        assert sorted(followed) == sorted(self.model.expected_follow_ups)
        actual = {row["id"]: tuple(row.values())[6:] for row in rows}
        expected = {job.id: job.row() for job in self.of_kind()}
        assert actual == expected
        assert self.run(check(self.conn, quiet=False)) == []

    def teardown(self) -> None:
        """Whatever happened: sweepers and one worker bring all of it to an end."""
        try:
            self.run(self.drain())
        finally:
            self.held.clear()

    async def drain(self) -> None:
        await self.conn.execute(
            "UPDATE fanout.job SET lease_expires_at = clock_timestamp() - interval '1 s' "
            "WHERE status = 'processing'"
        )
        await self.conn.execute(
            "UPDATE fanout.job SET paused = false, priority = 5 WHERE priority <> 5 OR paused"
        )
        await self.conn.execute("DELETE FROM fanout.limits WHERE kind IS NOT NULL")
        for _ in range(100):
            for depth in await self.store.expired_depths():
                await self.store.rescue(depth, 100, MAX_DEATHS, 0, 0)
            for job_id in await self.store.doomed(100):
                await self.store.doom_chunk(job_id, 100)
            claims = await factories.claim(self.store, KINDS)
            under = await self.store.claim_limited(wanted(KINDS), 100, ME, LEASE, free=100)
            claims += under.claims
            alone = await self.store.claim_alone(KINDS, ME, LEASE)
            claims += [alone] if alone is not None else []
            await self.store.finish([(claim, DONE) for claim in claims], ME)
            if not claims and not await self.store.doomed(1):
                break
        assert await check(self.conn, quiet=True) == []


EXAMPLES: Final = int(os.environ.get("FANOUT_MODEL_EXAMPLES", "60"))
# A mutant is to be found, not explained.
PHASES: Final = [Phase.generate] if "FANOUT_TEST_MUTANT" in os.environ else list(Phase)
SETTINGS: Final = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    database=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def bridge(database: str) -> Iterator[Bridge]:
    """The machine's own connections, on its own loop."""
    it = Bridge(database)
    try:
        yield it
    finally:
        it.close()


@pytest.mark.timeout(60 + 5 * EXAMPLES)
def test_any_order_of_calls_ends_where_the_model_says(bridge: Bridge) -> None:
    """Submit, dispatch, add, claim, beat, end, release, crash, sweep, pause, resume, lift, cancel,
    retry, be late, be limited: in any order.
    """
    machine = type("BoundMachine", (Machine,), {"bridge": bridge})
    run_state_machine_as_test(machine, settings=SETTINGS)
