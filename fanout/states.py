"""The state machine of a job, drawn once.

     pending ──claim──▶ processing ──finish, no child open──▶ completed │ failed
        ▲                 │  │  │
        ├─retry, release──┘  │  └──finish, children open──▶ waiting ──last child──▶ completed, or
        its verdict
        └─rescue (lease gone)┘
     any open state ──doom──▶ cancelled │ failed, or waiting with that verdict until its open
     children have ended
     completed ──reopen──▶ waiting        failed ──retry_failed, retry_job──▶ pending        (a new
     generation)

A transition is one row of `TRANSITIONS`, one file in `sql/transitions/` and one method of the
store; the CHECKs of `sql/schema/0001_jobs.sql` hold the shape of a row in each state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

__all__ = ["OPEN", "TERMINAL", "TRANSITIONS", "Status", "Transition"]


class Status(StrEnum):
    """Where a job is; what a crash of its worker does to it."""

    PENDING = "pending"
    """Due now or at `run_at`. A crash does nothing: nobody holds it."""
    PROCESSING = "processing"
    """Claimed, with a token and a lease.

    A crash: rescue puts it back, to be run alone, when the lease has run out.
    """
    WAITING = "waiting"
    """A manager that is sealed, or doomed, while children are open.

    A crash does nothing: its last child closes it.
    """
    COMPLETED = "completed"
    """Ended well.

    Of a batch: sealed and all children counted, also when some or all of them failed.
    """
    FAILED = "failed"
    """Ended badly: a permanent error, retries used up, poison; of a batch: its manager failed, or
    it was given up.
    """
    CANCELLED = "cancelled"
    """Ended because somebody said so, or because its batch ended."""

    @property
    def is_terminal(self) -> bool:
        """True for the three states in which `finished_at` is set."""
        return self in TERMINAL


OPEN: Final = frozenset({Status.PENDING, Status.PROCESSING, Status.WAITING})
TERMINAL: Final = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})


class Transition(NamedTuple):
    """One statement that moves jobs: where from, where to.

    `to` holds `source` too where a row may stay.
    """

    name: str
    source: frozenset[Status]
    to: frozenset[Status]


_P, _R, _W = Status.PENDING, Status.PROCESSING, Status.WAITING
_C, _F, _X = Status.COMPLETED, Status.FAILED, Status.CANCELLED


def _t(name: str, source: set[Status], to: set[Status]) -> Transition:
    return Transition(name, frozenset(source), frozenset(to))


TRANSITIONS: Final[dict[str, Transition]] = {
    t.name: t
    for t in (
        _t("submit", set(), {_P}),
        _t("claim", {_P}, {_R}),
        _t("claim_limited", {_P}, {_R}),
        _t("claim_alone", {_P}, {_R}),
        _t("claim_new", {_P}, {_R}),
        _t("claim_children", {_P}, {_R}),
        _t("heartbeat", {_R}, {_R}),
        _t("heartbeat_manager", {_R}, {_R}),
        _t("save_checkpoint", {_R}, {_R}),
        _t("fan_out", {_R}, {_R, _W, _F}),
        _t("finish", {_R}, {_C, _F, _W}),
        _t("count_up", {_W}, {_C, _F, _X, _W}),
        _t("retry", {_R}, {_P}),
        _t("release", {_R}, {_P}),
        _t("release_orphans", {_R}, {_P}),
        _t("rescue", {_R}, {_P, _F, _W}),
        _t("doom", {_P, _R, _W}, {_X, _F, _W}),
        _t("doom_chunk", {_P, _R, _W}, {_X, _W}),
        _t("lock_job", set(Status), set(Status)),
        _t("recount", {_P, _R, _W}, {_P, _R, _W, _C, _F, _X}),
        _t("give_up", {_W}, {_W}),
        _t("retry_failed", {_F}, {_P}),
        _t("retry_job", {_F}, {_P}),
        _t("pause", {_P, _R, _W}, {_P, _R, _W}),
        _t("pause_chunk", {_P}, {_P}),
        _t("resume", {_P, _R, _W}, {_P, _R, _W}),
        _t("resume_chunk", {_P}, {_P}),
        _t("set_priority", {_P, _R, _W}, {_P, _R, _W}),
        _t("set_priority_chunk", {_P, _R, _W}, {_P, _R, _W}),
        _t("follow_priority", {_P, _R, _W}, {_P, _R, _W}),
        _t("set_concurrency", {_P, _R, _W}, {_P, _R, _W}),
        _t("set_concurrency_chunk", {_P, _R, _W}, {_P, _R, _W}),
        _t("add_children", {_P, _R, _W}, {_P, _R, _W, _F}),
        _t("doom_late", {_P, _R, _W}, {_F, _W}),
        _t("reopen", {_C, _P, _R, _W}, {_W, _P, _R}),
    )
}
