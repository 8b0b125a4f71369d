"""Every statement against every state: it moves the row along its arrow, or leaves it as it was."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any, Final, NamedTuple

import asyncpg
import pytest

from fanout.errors import IdempotencyConflict, LostClaim, Refused
from fanout.statements import load_statements
from fanout.states import OPEN, TERMINAL, TRANSITIONS, Status
from fanout.store import Store
from fanout.values import Claim, Interrupted, NewJob, Retry
from tests.factories import (
    BROKEN,
    DONE,
    LEASE,
    LONG_AGO,
    ME,
    OTHER,
    add_children,
    claim_of,
    fan_out,
    insert_job,
    live_worker,
    row_of,
    whole_table,
)
from tests.machine.invariants import ARROWS, check

PENDING, PROCESSING, WAITING = Status.PENDING, Status.PROCESSING, Status.WAITING
COMPLETED, FAILED, CANCELLED = Status.COMPLETED, Status.FAILED, Status.CANCELLED

MY_ATTEMPT: Final = 3
MAX_DEATHS: Final = 3
_SOON: Final = datetime.now(UTC) + timedelta(hours=1)
_PAST: Final = datetime.now(UTC) - timedelta(hours=1)
_HELD: Final = {"claim_token": ME, "attempt": MY_ATTEMPT}
_OTHERS: Final = {"claim_token": OTHER, "attempt": MY_ATTEMPT}
_EXPIRED: Final = {"lease_expires_at": _PAST}
_POISON: Final = {"deaths": MAX_DEATHS}


class State(NamedTuple):
    """A state, in as many variants as some statement tells apart."""

    name: str
    status: Status
    columns: dict[str, Any]


STATES: Final = (
    State("pending", PENDING, {"attempt": MY_ATTEMPT}),
    State("pending, due later", PENDING, {"attempt": MY_ATTEMPT, "run_at": _SOON}),
    State("pending, to run alone", PENDING, {"attempt": MY_ATTEMPT, "deaths": 1}),
    State("pending, paused", PENDING, {"attempt": MY_ATTEMPT, "paused": True}),
    State(
        "pending, paused, to run alone",
        PENDING,
        {"attempt": MY_ATTEMPT, "deaths": 1, "paused": True},
    ),
    State("mine", PROCESSING, _HELD),
    State("mine, retries used up", PROCESSING, _HELD | {"failures": 3}),
    State("mine, lease run out", PROCESSING, _HELD | _EXPIRED),
    State("mine, lease run out, dying again", PROCESSING, _HELD | _EXPIRED | _POISON),
    State("another worker's", PROCESSING, _OTHERS),
    State("another worker's, lease run out", PROCESSING, _OTHERS | _EXPIRED),
    State("mine by a later claim", PROCESSING, _HELD | {"attempt": MY_ATTEMPT + 1}),
    State("waiting", WAITING, {"attempt": MY_ATTEMPT}),
    State("waiting, long without life", WAITING, {"attempt": MY_ATTEMPT, "updated_at": _PAST}),
    State("waiting, paused", WAITING, {"attempt": MY_ATTEMPT, "paused": True}),
    State("doomed to fail", WAITING, {"attempt": MY_ATTEMPT, "verdict": "failed"}),
    State("doomed to be cancelled", WAITING, {"attempt": MY_ATTEMPT, "verdict": "cancelled"}),
    State("completed", COMPLETED, {"attempt": MY_ATTEMPT}),
    State("failed", FAILED, {"attempt": MY_ATTEMPT, "error": "no"}),
    State("cancelled", CANCELLED, {"attempt": MY_ATTEMPT}),
)


class Family(NamedTuple):
    """Where the row stands: below a parent or not, above children of which one is open, or none."""

    name: str
    is_child: bool
    children: tuple[Status, ...]

    def fits(self, state: State) -> bool:
        has_open = PENDING in self.children
        return has_open if state.status is WAITING else not (has_open and state.status in TERMINAL)


FAMILIES: Final = (
    Family("root leaf", is_child=False, children=()),
    Family("child leaf", is_child=True, children=()),
    Family("root manager", is_child=False, children=(COMPLETED, FAILED, PENDING)),
    Family("child manager", is_child=True, children=(COMPLETED, FAILED, PENDING)),
    Family("root manager, all counted", is_child=False, children=(COMPLETED, FAILED)),
    Family("child manager, all counted", is_child=True, children=(COMPLETED, FAILED)),
)


class Subject(NamedTuple):
    """The row under test, the claim that the caller believes to hold on it, and its relatives."""

    state: State
    family: Family
    id: int
    claim: Claim
    parent: int | None
    children: list[int]

    @property
    def is_mine(self) -> bool:
        """Is the caller's claim the one that holds?"""
        return self.state.name.startswith("mine") and "later" not in self.state.name

    @property
    def has_open(self) -> bool:
        return PENDING in self.family.children

    @property
    def is_live(self) -> bool:
        """Open, and nobody is ending it."""
        return self.state.status in OPEN and "verdict" not in self.state.columns

    @property
    def is_paused(self) -> bool:
        return "paused" in self.state.columns


async def a_subject(conn: asyncpg.Connection, state: State, family: Family) -> Subject:
    """The row, its parent with an open and two ended siblings, its children; all counted."""
    await conn.execute("DELETE FROM fanout.job")
    parent = None
    if family.is_child:
        siblings = (COMPLETED, FAILED, PENDING, state.status)
        parent = await insert_job(conn, WAITING, kind="parent", **_counts(siblings))
        for status in siblings[:-1]:
            await insert_job(conn, status, parent=parent, kind="sibling", error="other")
    subject = await insert_job(
        conn,
        state.status,
        parent=parent,
        kind="subject",
        on_closed="report",
        idempotency_key="the-key",
        payload="1",
        **_counts(family.children),
        **state.columns,
    )
    if state.status in TERMINAL:
        await conn.execute(
            """INSERT INTO fanout.job (kind, follows_id, follows_generation)
               VALUES ('report', $1, 1)""",
            subject,
        )
    children = [
        await insert_job(conn, status, parent=subject, kind="child", error="child's")
        for status in family.children
    ]
    claim = await claim_of(conn, subject, attempt=MY_ATTEMPT)
    return Subject(state, family, subject, claim, parent, children)


def _counts(states: tuple[Status, ...]) -> dict[str, int]:
    return {"total": len(states)} | {
        str(s): states.count(s) for s in (COMPLETED, FAILED, CANCELLED)
    }


# --------------------------------------------------------------------------------------------------
# What each statement should do: the status that the row then has, or None: nobody writes anything.

Call = Callable[[Store, asyncpg.Connection, Subject], Awaitable[object]]
Expect = Callable[[Subject], Status | None]
Prepare = Callable[[asyncpg.Connection, Subject], Awaitable[object]]


class Case(NamedTuple):
    """A call of one statement, and the states in which it should move the row, and where to."""

    transition: str
    call: Call
    expect: Expect
    label: str = ""
    prepare: Prepare | None = None

    def __str__(self) -> str:
        return f"{self.transition} {self.label}".strip()


async def _submit(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    (again,) = await store.submit([NewJob("subject", "1", key="the-key")])
    assert (again.id, again.created, again.same) == (s.id, False, True)


async def _submit_other(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    with pytest.raises(IdempotencyConflict) as refused:
        await store.submit([NewJob("fresh", "2"), NewJob("subject", "2", key="the-key")])
    assert refused.value.job_id == s.id


async def _claim(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    claims, *_ = await store.claim([("subject", 5, LONG_AGO)], 10, OTHER, LEASE)
    assert [(c.id, c.attempt) for c in claims] in ([], [(s.id, MY_ATTEMPT + 1)])


async def _claim_limited(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    look = await store.claim_limited([("subject", 5, LONG_AGO)], 10, OTHER, LEASE, free=10)
    assert [(c.id, c.attempt) for c in look.claims] in ([], [(s.id, MY_ATTEMPT + 1)])


async def _limit(conn: asyncpg.Connection, _s: Subject) -> None:
    await conn.execute(
        """INSERT INTO fanout.limits (name, code) VALUES ('kind:subject', '{"concurrency": 3}')
           ON CONFLICT DO NOTHING"""
    )


async def _partition(conn: asyncpg.Connection, s: Subject) -> None:
    await conn.execute("UPDATE fanout.job SET partition = 'acme' WHERE id = $1", s.id)


async def _claim_alone(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    claim = await store.claim_alone(["subject"], OTHER, LEASE)
    assert claim is None or (claim.id, claim.attempt, claim.deaths) == (s.id, MY_ATTEMPT + 1, 1)


async def _claim_new(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.rows("claim_new", s.id, OTHER, timedelta(seconds=LEASE)) == []


async def _claim_children(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    claims = await store.claim_children([s.parent or 0], ["subject"], 10, OTHER, LEASE)
    assert [(c.id, c.attempt) for c in claims] in ([], [(s.id, MY_ATTEMPT + 1)])


async def _claim_children_alone(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    claims = await store.claim_children([s.parent or 0], ["subject"], 1, OTHER, LEASE, alone=True)
    assert [(c.id, c.attempt) for c in claims] in ([], [(s.id, MY_ATTEMPT + 1)])


async def _heartbeat(_store: Store, conn: asyncpg.Connection, s: Subject) -> None:
    lease = timedelta(seconds=LEASE)
    rows = await conn.fetch(load_statements()["heartbeat"], [s.id], [MY_ATTEMPT], ME, lease)
    assert [row["id"] for row in rows if row["lost"]] == ([] if s.is_mine else [s.id])
    assert len(rows) == (not s.is_mine or bool(s.children))


async def _heartbeat_manager(_store: Store, conn: asyncpg.Connection, s: Subject) -> None:
    lease = timedelta(seconds=LEASE)
    rows = await conn.fetch(load_statements()["heartbeat_manager"], s.id, MY_ATTEMPT, ME, lease)
    assert [row["id"] for row in rows] == ([s.id] if s.is_mine else [])


async def _save_checkpoint(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    await _fenced(s, store.save_checkpoint(s.claim, ME, '"page 7"'))


async def _fan_out(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    await _fenced(s, fan_out(store, s.claim, ["a", "b", "c"], gone=frozenset("b")))


async def _fan_out_nothing(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    await _fenced(s, fan_out(store, s.claim, []))


async def _fenced(s: Subject, writing: Awaitable[object]) -> None:
    if s.is_mine:
        await writing
    else:
        with pytest.raises(LostClaim):
            await writing


async def _complete(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    counted = await store.finish([(s.claim, DONE)], ME)
    assert [job.id for job in counted.moved] == ([s.id] if s.is_mine else [])
    assert await store.outcomes_of([s.claim], ME) == ({s.id} if s.is_mine else set())


async def _fail(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    counted = await store.finish([(s.claim, BROKEN)], ME)
    assert [job.id for job in counted.moved] == ([s.id] if s.is_mine else [])


async def _count_up(_store: Store, conn: asyncpg.Connection, s: Subject) -> None:
    # It counts what the step before it closed; of an open job there is nothing to count.
    up = s.children[2:] if s.has_open else [s.id] if s.state.status in OPEN else []
    while up:
        rows = await conn.fetch(load_statements()["count_up"], up)
        up = [r["ids"][0] for r in rows if r["what"] == "counted" and r["ended"] and r["parent_id"]]


async def _retry(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    back = await store.retry([(s.claim, Retry("timeout", "TimeoutError", 0))], ME)
    assert back == ({s.id} if s.is_mine and s.claim.failures < 3 else set())


async def _release(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.release([(s.claim, Interrupted())], ME) == ({s.id} if s.is_mine else set())


async def _release_unknown(store: Store, _conn: asyncpg.Connection, _s: Subject) -> None:
    await store.release_orphans(ME, [])


async def _release_known(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.release_orphans(ME, [s.id]) == set()


async def _rescue(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    for depth in (2, 1, 0):
        await store.rescue(depth, 100, MAX_DEATHS, 0, 0)


async def _rescue_after_start(store: Store, _conn: asyncpg.Connection, _s: Subject) -> None:
    for depth in (2, 1, 0):
        await store.rescue(depth, 100, MAX_DEATHS, 0, 1e6)


async def _cancel(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    await store.doom(s.id, CANCELLED, "somebody said so")


async def _doom_to_fail(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    await store.doom(s.id, FAILED, "too many failures")


async def _doom_chunk(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.parent is not None:
        await store.doom_chunk(s.parent, 100)


async def _lock_job(_store: Store, conn: asyncpg.Connection, s: Subject) -> None:
    row = await conn.fetchrow(load_statements()["lock_job"], s.id)
    assert row is not None
    assert row["closed"] is (s.state.status in TERMINAL)


async def _recount(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert (await store.recount(s.id)).moved == ()


async def _recount_drifted(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    await store.recount(s.id)


async def _give_up(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    may = s.state.name == "waiting, long without life"
    assert await store.give_up_candidates(10, 600) == ([s.id] if may else [])
    assert await store.give_up(s.id, 600, "no sign of life") is may


async def _retry_failed(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.parent is None:
        return
    try:
        await store.retry_failed(s.parent, error="no")
    except Refused:
        assert s.state.status is not FAILED or s.children


async def _retry_job(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.retry_job(s.id) is (_retried(s) is not None)


async def _reopen(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.children and _reopened(s) is not None:
        assert await store.retry_failed(s.id) == 1
    else:
        with pytest.raises(Refused):
            await store.retry_failed(s.id)


async def _pause(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.pause(s.id) is (_paused(s) is not None)


async def _resume(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.resume(s.id) == ("subject" if _resumed(s) is not None else None)


async def _pause_chunk(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.parent is not None:
        await store.pause_chunk(s.parent, s.parent, 0, 100)


async def _resume_chunk(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.parent is not None:
        await store.resume_chunk(s.parent, s.parent, 0, 100)


async def _set_priority(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    may = s.is_live and s.parent is None
    assert await store.set_priority(s.id, 2) == ("subject" if may else None)


async def _set_priority_chunk(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.parent is not None:
        await store.set_priority_chunk(s.parent, s.parent, 0, 100)


async def _follow_priority(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.follow_priority(s.id) is (_open_child(s) is not None)


async def _set_concurrency(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    assert await store.set_concurrency(s.id, 2) is s.is_live


async def _set_concurrency_chunk(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    if s.parent is not None:
        await store.set_concurrency_chunk(s.parent, 0, 100)


async def _add_children(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    adding = add_children(store, s.id, ["a", "b", "c"], gone=frozenset("b"))
    if s.is_live:
        assert await adding == (3, len(s.children) + 3)
    else:
        with pytest.raises(Refused):
            await adding


async def _doom_late(store: Store, _conn: asyncpg.Connection, s: Subject) -> None:
    may = s.is_live and s.id in await store.late(10)
    counted = await store.doom_late(s.id)
    assert [job.id for job in counted.moved] == ([s.id] if may else [])


async def _close_last_child(conn: asyncpg.Connection, s: Subject) -> None:
    """As within the transaction that closed a nested batch, between its two steps."""
    if s.has_open:
        await _end(conn, s.children[-1])


async def _doom_parent(conn: asyncpg.Connection, s: Subject) -> None:
    await conn.execute("UPDATE fanout.job SET verdict = 'failed' WHERE id = $1", s.parent)


async def _steer_parent(conn: asyncpg.Connection, s: Subject) -> None:
    """The root has been told, and what is below it is to follow."""
    await conn.execute(
        """UPDATE fanout.job SET paused = true, priority = 2, concurrency = 2 WHERE id = $1""",
        s.parent,
    )


async def _leave_paused(conn: asyncpg.Connection, s: Subject) -> None:
    """It was paused with its root, and the root goes on."""
    await conn.execute("UPDATE fanout.job SET paused = true WHERE id = $1", s.id)


async def _let_it_be_late(conn: asyncpg.Connection, s: Subject) -> None:
    await conn.execute("UPDATE fanout.job SET deadline = $2 WHERE id = $1", s.id, _PAST)


async def _let_it_have_time(conn: asyncpg.Connection, s: Subject) -> None:
    await conn.execute("UPDATE fanout.job SET deadline = $2 WHERE id = $1", s.id, _SOON)


async def _drift(conn: asyncpg.Connection, s: Subject) -> None:
    """As if the last child had ended without being counted."""
    if s.state.status in TERMINAL or not s.children:
        return
    await _end(conn, s.children[-1])
    if not s.has_open:
        await conn.execute("UPDATE fanout.job SET completed = 0 WHERE id = $1", s.id)


async def _let_idle(conn: asyncpg.Connection, s: Subject) -> None:
    """The children have long been due, and a worker that serves them has had free slots."""
    await conn.execute("UPDATE fanout.job SET run_at = $1 WHERE kind = 'child'", _PAST)
    await live_worker(conn, ["child"])


async def _end(conn: asyncpg.Connection, job_id: int) -> None:
    await conn.execute(
        """UPDATE fanout.job SET status = 'completed', finished_at = clock_timestamp()
            WHERE id = $1""",
        job_id,
    )


def _nobody(_s: Subject) -> None:
    return None


def _claimed(s: Subject) -> Status | None:
    return PROCESSING if s.state.name == "pending" else None


def _claimed_alone(s: Subject) -> Status | None:
    return PROCESSING if s.state.name == "pending, to run alone" else None


def _claimed_child(s: Subject) -> Status | None:
    return _claimed(s) if s.parent else None


def _claimed_child_alone(s: Subject) -> Status | None:
    return _claimed_alone(s) if s.parent else None


def _mine(s: Subject) -> Status | None:
    return PROCESSING if s.is_mine else None


def _finished(outcome: Status) -> Expect:
    return lambda s: (WAITING if s.has_open else outcome) if s.is_mine else None


def _counted_up(s: Subject) -> Status | None:
    if not s.has_open:
        return None
    return (
        Status(s.state.columns.get("verdict", COMPLETED))
        if s.state.status is WAITING
        else s.state.status
    )


def _retried_once(s: Subject) -> Status | None:
    return PENDING if s.is_mine and s.state.name != "mine, retries used up" else None


def _released(s: Subject) -> Status | None:
    return PENDING if s.is_mine else None


def _orphaned(s: Subject) -> Status | None:
    return PENDING if s.state.name.startswith("mine") else None


def _rescued(s: Subject) -> Status | None:
    if "lease run out" not in s.state.name:
        return None
    return PENDING if "dying" not in s.state.name else WAITING if s.has_open else FAILED


def _doomed(verdict: Status) -> Expect:
    def expect(s: Subject) -> Status | None:
        if s.state.status in TERMINAL or "verdict" in s.state.columns:
            return None
        return WAITING if s.has_open else verdict

    return expect


def _doomed_in_chunk(s: Subject) -> Status | None:
    return _doomed(CANCELLED)(s) if s.parent is not None else None


def _mended(s: Subject) -> Status | None:
    if s.state.status in TERMINAL or not s.children:
        return None
    return (
        Status(s.state.columns.get("verdict", COMPLETED))
        if s.state.status is WAITING
        else s.state.status
    )


def _given_up(s: Subject) -> Status | None:
    return WAITING if s.state.name == "waiting, long without life" else None


def _retried_in_batch(s: Subject) -> Status | None:
    return PENDING if s.state.status is FAILED and s.parent is not None and not s.children else None


def _retried(s: Subject) -> Status | None:
    return PENDING if s.state.status is FAILED and s.parent is None and not s.children else None


def _reopened(s: Subject) -> Status | None:
    if not s.children or s.state.status in {FAILED, CANCELLED} or "verdict" in s.state.columns:
        return None
    return WAITING if s.state.status is COMPLETED else s.state.status


def _paused(s: Subject) -> Status | None:
    return s.state.status if s.parent is None and s.is_live and not s.is_paused else None


def _resumed(s: Subject) -> Status | None:
    return s.state.status if s.parent is None and s.is_live and s.is_paused else None


def _paused_in_chunk(s: Subject) -> Status | None:
    may = s.state.status is PENDING and not s.is_paused
    return s.state.status if may and s.parent is not None else None


def _resumed_in_chunk(s: Subject) -> Status | None:
    return PENDING if s.state.status is PENDING and s.parent is not None else None


def _live_root(s: Subject) -> Status | None:
    return s.state.status if s.is_live and s.parent is None else None


def _open_child(s: Subject) -> Status | None:
    return s.state.status if s.state.status in OPEN and s.parent is not None else None


def _live(s: Subject) -> Status | None:
    return s.state.status if s.is_live else None


CASES: Final = (
    Case("submit", _submit, _nobody, "the same again"),
    Case("submit", _submit_other, _nobody, "other content under the key"),
    Case("claim", _claim, _claimed),
    Case("claim", _claim, _nobody, "under a limit", _limit),
    Case("claim", _claim, _nobody, "of a partition", _partition),
    Case("claim_limited", _claim_limited, _nobody, "of a kind without a limit"),
    Case("claim_limited", _claim_limited, _claimed, "of a kind with one", _limit),
    Case("claim_limited", _claim_limited, _claimed, "of a partition", _partition),
    Case("claim_alone", _claim_alone, _claimed_alone),
    Case("claim_alone", _claim_alone, _claimed_alone, "of a partition", _partition),
    Case("claim_new", _claim_new, _nobody, "of a job that was tried"),
    Case("claim_children", _claim_children, _claimed_child),
    Case("claim_children", _claim_children, _claimed_child, "under a limit", _limit),
    Case("claim_children", _claim_children_alone, _claimed_child_alone, "to run alone"),
    Case("heartbeat", _heartbeat, _mine),
    Case("heartbeat_manager", _heartbeat_manager, _mine),
    Case("save_checkpoint", _save_checkpoint, _mine),
    Case("fan_out", _fan_out, _mine),
    Case("fan_out", _fan_out_nothing, _mine, "an empty chunk"),
    Case("finish", _complete, _finished(COMPLETED), "as completed"),
    Case("finish", _fail, _finished(FAILED), "as failed"),
    Case("count_up", _count_up, _counted_up, prepare=_close_last_child),
    Case("retry", _retry, _retried_once),
    Case("release", _release, _released),
    Case("release_orphans", _release_unknown, _orphaned, "a claim it does not know of"),
    Case("release_orphans", _release_known, _nobody, "a claim that it holds"),
    Case("rescue", _rescue, _rescued),
    Case("rescue", _rescue_after_start, _nobody, "within a lease of the server's start"),
    Case("doom", _cancel, _doomed(CANCELLED), "cancel"),
    Case("doom", _doom_to_fail, _doomed(FAILED), "as failed"),
    Case("doom_chunk", _doom_chunk, _doomed_in_chunk, prepare=_doom_parent),
    Case("lock_job", _lock_job, _nobody),
    Case("recount", _recount, _nobody, "counters right"),
    Case("recount", _recount_drifted, _mended, "counters drifted", _drift),
    Case("give_up", _give_up, _given_up, prepare=_let_idle),
    Case("retry_failed", _retry_failed, _retried_in_batch),
    Case("retry_job", _retry_job, _retried),
    Case("reopen", _reopen, _reopened),
    Case("pause", _pause, _paused),
    Case("pause_chunk", _pause_chunk, _paused_in_chunk, prepare=_steer_parent),
    Case("pause_chunk", _pause_chunk, _nobody, "below a root that is not paused"),
    Case("resume", _resume, _resumed),
    Case("resume_chunk", _resume_chunk, _resumed_in_chunk, prepare=_leave_paused),
    Case("resume_chunk", _resume_chunk, _nobody, "below a paused root", _steer_parent),
    Case("set_priority", _set_priority, _live_root),
    Case("set_priority_chunk", _set_priority_chunk, _open_child, prepare=_steer_parent),
    Case("follow_priority", _follow_priority, _open_child, prepare=_steer_parent),
    Case("set_concurrency", _set_concurrency, _live),
    Case("set_concurrency_chunk", _set_concurrency_chunk, _open_child, prepare=_steer_parent),
    Case("add_children", _add_children, _live),
    Case("doom_late", _doom_late, _doomed(FAILED), prepare=_let_it_be_late),
    Case("doom_late", _doom_late, _nobody, "in time", _let_it_have_time),
)


def _shapes() -> Iterator[tuple[State, Family]]:
    return ((state, family) for state in STATES for family in FAMILIES if family.fits(state))


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_statement_moves_a_row_along_its_arrow_or_leaves_it(
    case: Case, store: Store, conn: asyncpg.Connection
) -> None:
    """In every state and family: to where it should, or not a byte of any row is written."""
    arrow = TRANSITIONS[case.transition]
    wrong: list[str] = []
    for state, family in _shapes():
        subject = await a_subject(conn, state, family)
        if case.prepare is not None:
            await case.prepare(conn, subject)
        before = await whole_table(conn)
        where = f"{case}: {family.name}, {state.name}"
        try:
            await case.call(store, conn, subject)
        except AssertionError as unexpected:
            wrong.append(f"{where}: {unexpected}")
        expected = case.expect(subject)
        after = await whole_table(conn)
        row = await row_of(conn, subject.id)
        if expected is None:
            mine_only = case.transition == "retry_failed" or "chunk" in case.transition
            # Of a chunk, siblings may move.
            if before[subject.id] != after[subject.id] or (not mine_only and before != after):
                wrong.append(f"{where}: somebody wrote; now {row['status']}")
        else:
            if before[subject.id] == after[subject.id]:
                wrong.append(f"{where}: nobody wrote, it should be {expected}")
            if row["status"] != expected:
                wrong.append(f"{where}: is {row['status']}, should be {expected}")
            if state.status not in arrow.source and row["status"] != state.status:
                wrong.append(f"{where}: the table of transitions knows no such source")
            if expected not in arrow.to and row["status"] != state.status:
                wrong.append(f"{where}: the table of transitions knows no such arrow")
        wrong += [f"{where}: {violation}" for violation in await check(conn, quiet=False)]
    assert not wrong, "\n".join(wrong)


async def test_a_chunk_of_a_batch_that_is_not_doomed_cancels_nobody(
    store: Store, conn: asyncpg.Connection
) -> None:
    """doom_chunk judges again that the batch is doomed: it may act on a list it read before."""
    healthy = await insert_job(conn, WAITING, kind="parent", total=1)
    await insert_job(conn, PENDING, parent=healthy)
    before = await whole_table(conn)

    counted = await store.doom_chunk(healthy, 10)

    assert counted.moved == ()
    assert await whole_table(conn) == before


# --------------------------------------------------------------------------------------------------


def _files() -> set[str]:
    folder = files("fanout").joinpath("sql", "transitions")
    return {
        entry.name.removesuffix(".sql") for entry in folder.iterdir() if entry.name.endswith(".sql")
    }


def test_files_table_matrix_and_store_agree() -> None:
    """A transition is a row of the table, a file, a line here, and a call in store or heartbeat."""
    statements = {name for name in _files() if not name.endswith(".inc")}
    assert statements == set(TRANSITIONS)
    assert {case.transition for case in CASES} == set(TRANSITIONS)

    store_calls = set(re.findall(r'_sql\["(\w+)"\]|_counting\(\s*"(\w+)"', _source("store.py")))
    called = {name for pair in store_calls for name in pair if name}
    assert set(TRANSITIONS) - called == {"heartbeat", "heartbeat_manager"}, "those are the thread's"
    by_name = set(TRANSITIONS) - {
        "heartbeat",
        "heartbeat_manager",
        "lock_job",
        "count_up",
        "reopen",
    }
    assert {name for name in by_name if not callable(getattr(Store, name, None))} == set()


def test_every_statement_that_the_store_names_exists() -> None:
    """The store asks for no statement that has no file, and no file waits in vain for a caller."""
    names = set(re.findall(r'_sql\["(\w+)"\]', _source("store.py")))
    names |= set(re.findall(r'_counting\(\s*"(\w+)"', _source("store.py")))
    assert names <= set(load_statements())


def test_the_history_allows_no_arrow_that_the_table_does_not_know() -> None:
    """Each legal pair of `invariants.ARROWS` is an arrow of some transition."""
    known = {
        (str(source), str(to))
        for t in TRANSITIONS.values()
        if t.name != "lock_job"
        for source in t.source
        for to in t.to
    }
    assert set(ARROWS) <= known
    assert set(Status) == OPEN | TERMINAL


@pytest.mark.parametrize("name", sorted(TRANSITIONS))
def test_no_transition_speaks_to_anyone(name: str) -> None:
    """No NOTIFY beside data, however short: it locks the whole database at commit."""
    sql = re.sub(r"--.*", "", load_statements()[name]).lower()
    assert "notify" not in sql


def _source(name: str) -> str:
    return files("fanout").joinpath(name).read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------

HALF_TRANSITIONS: Final = (
    ("pending", "status = 'processing'", "job_token_iff_processing"),
    ("pending", f"claim_token = '{ME}'", "job_token_iff_processing"),
    ("pending", "lease_expires_at = now()", "job_token_iff_processing"),
    ("processing", "claim_token = NULL", "job_token_iff_processing"),
    ("processing", "lease_expires_at = NULL", "job_token_iff_processing"),
    ("processing", "status = 'pending'", "job_token_iff_processing"),
    ("processing", "status = 'completed', finished_at = now()", "job_token_iff_processing"),
    ("processing", "status = 'waiting'", "job_token_iff_processing"),
    ("pending", "status = 'completed'", "job_finished_iff_terminal"),
    ("pending", "status = 'failed'", "job_finished_iff_terminal"),
    ("pending", "status = 'cancelled'", "job_finished_iff_terminal"),
    ("pending", "finished_at = now()", "job_finished_iff_terminal"),
    ("waiting", "finished_at = now()", "job_(finished_iff_terminal|closed_is_complete)"),
    ("completed", "finished_at = NULL", "job_finished_iff_terminal"),
    ("completed", "status = 'pending'", "job_finished_iff_terminal"),
    ("waiting", "completed = completed + 1", "job_waiting_is_incomplete"),
    ("pending", "status = 'waiting'", "job_waiting_is_incomplete"),
    ("waiting", "status = 'completed', finished_at = now()", "job_closed_is_complete"),
    ("completed", "total = total + 1", "job_closed_is_complete"),
    ("completed", "completed = completed - 1", "job_closed_is_complete"),
    ("completed", "failed = failed + 1", "job_(counters|closed_is_complete)"),
    ("waiting", "completed = completed + 2", "job_counters"),
    ("waiting", "total = 0", "job_counters"),
    ("pending", "total = -1", "job_counters"),
    ("pending", "completed = -1, total = 1", "job_counters"),
    ("pending", "failed = -1, total = 1", "job_counters"),
    ("pending", "cancelled = -1, total = 1", "job_counters"),
    ("pending", "status = 'paused'", "job_status"),
    ("waiting", "verdict = 'completed'", "job_verdict"),
    ("pending", "depth = 1", "job_root_iff_depth_0"),
    ("pending", "root_id = id", "job_root_iff_depth_0"),
    ("pending", "document_key = 'a'", "job_root_iff_depth_0"),
    ("pending", "priority = 10", "job_priority"),
    ("pending", "priority = -1", "job_priority"),
    ("pending", "kind = 'papers:extract'", "job_kind_name"),
    ("pending", "kind = 'papers.extract'", "job_kind_name"),
    ("pending", "kind = ''", "job_kind_name"),
    ("pending", "on_closed = 'papers:report'", "job_on_closed_name"),
    ("pending", "payload = to_json(repeat('x', 1023))", "job_payload_is_light"),
    ("pending", "idempotency_key = repeat('x', 513)", "job_key_lengths"),
)


async def test_the_table_refuses_every_half_transition(conn: asyncpg.Connection) -> None:
    """Whatever a program forgets: a row has the shape of its state, or the UPDATE fails."""
    accepted: list[str] = []
    for status, change, constraint in HALF_TRANSITIONS:
        await conn.execute("DELETE FROM fanout.job")
        counters = {
            "waiting": {"total": 3, "completed": 2},
            "completed": {"total": 3, "completed": 3},
        }
        job_id = await insert_job(conn, status, **counters.get(status, {}))
        try:
            await conn.execute(f"UPDATE fanout.job SET {change} WHERE id = $1", job_id)
        except asyncpg.CheckViolationError as refused:
            if not re.fullmatch(constraint, refused.constraint_name or ""):
                accepted.append(f"{status}, {change}: refused by {refused.constraint_name}")
        else:
            accepted.append(f"{status}, {change}: accepted")
    assert not accepted, "\n".join(accepted)


@pytest.mark.parametrize("name", ["papers report", "7"])
async def test_a_follow_up_is_named_as_a_kind_is(name: str, conn: asyncpg.Connection) -> None:
    """A kind that nobody can register would wait for ever: it is refused where it comes in."""
    with pytest.raises(asyncpg.PostgresError, match="on_closed"):
        await conn.fetchval("SELECT fanout.submit('papers_batch', on_closed => $1)", name)


async def test_a_document_that_is_gone_has_its_follow_up(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A child that is born failed has closed: its follow-up comes with it, exactly one."""
    manager = await insert_job(conn, PROCESSING, kind="manager")
    claim = await claim_of(conn, manager)

    await fan_out(store, claim, ["a", "b"], gone=frozenset("a"), on_closed="report")

    assert await check(conn, quiet=False) == []


async def test_the_table_refuses_a_second_child_of_a_document(conn: asyncpg.Connection) -> None:
    """Unique per manager and document, and so are idempotency keys and follow-ups a generation."""
    manager = await insert_job(conn, WAITING, total=1)
    await insert_job(conn, parent=manager, document_key="a")
    await insert_job(conn, idempotency_key="k")
    await insert_job(conn, follows_id=manager, follows_generation=1)

    with pytest.raises(asyncpg.UniqueViolationError, match="job_child"):
        await insert_job(conn, parent=manager, document_key="a")
    with pytest.raises(asyncpg.UniqueViolationError, match="job_idempotency"):
        await insert_job(conn, idempotency_key="k")
    with pytest.raises(asyncpg.UniqueViolationError, match="job_follow_up"):
        await insert_job(conn, follows_id=manager, follows_generation=1)
