"""Two statements meet on one row: A acts in an open transaction, B waits for it, A commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg
import pytest

from fanout.errors import LostClaim, Refused
from fanout.statements import load_statements
from fanout.states import Status
from fanout.store import Store
from fanout.values import Claim, NewJob, Retry
from tests.factories import (
    BROKEN,
    DONE,
    GONE,
    LEASE,
    ME,
    OTHER,
    Held,
    a_store,
    claim,
    claim_of,
    counters_of,
    fan_out,
    follow_ups_of,
    held,
    insert_batch,
    insert_job,
    live_worker,
    row_of,
    status_of,
    submit,
    until_blocked,
    whole_table,
)
from tests.machine.invariants import History, check

T = TypeVar("T")

PENDING, PROCESSING, WAITING = Status.PENDING, Status.PROCESSING, Status.WAITING
COMPLETED, FAILED, CANCELLED = Status.COMPLETED, Status.FAILED, Status.CANCELLED
MAX_DEATHS: Final = 3
PAST: Final = "clock_timestamp() - interval '1 hour'"
ERROR: Final = Retry("timeout", "TimeoutError", 0)


@pytest.fixture(autouse=True)
async def sound(conn: asyncpg.Connection, history: type[History]) -> AsyncIterator[None]:
    """Whatever a test makes meet, the invariants hold when it is over."""
    yield
    assert await check(conn, quiet=False) == []


async def behind(a: Held, watcher: asyncpg.Connection, rival: Coroutine[Any, Any, T]) -> T:
    """Start `rival`, see it wait for a lock of `a`, let `a` commit: what `rival` then got."""
    task = asyncio.create_task(rival)
    await until_blocked(watcher, task)
    await a.commit()
    return await task


async def expire(conn: asyncpg.Connection, *job_ids: int) -> None:
    """Let the leases run out."""
    await conn.execute(
        f"UPDATE fanout.job SET lease_expires_at = {PAST} WHERE id = ANY ($1)", job_ids
    )


async def rescue(store: Store, depth: int = 1) -> list[int]:
    """The ids that rescue took away."""
    return [job.id for job in (await store.rescue(depth, 100, MAX_DEATHS, 0, 0)).moved]


async def finish(store: Store, claim: Claim, token: UUID = ME) -> bool:
    """End a claim as completed; False: it was lost."""
    return [job.id for job in (await store.finish([(claim, DONE)], token)).moved] == [claim.id]


async def a_batch(
    conn: asyncpg.Connection, *children: Status, status: Status = WAITING, parent: int | None = None
) -> tuple[int, list[Claim]]:
    """A batch with a follow-up, and the claims on its children in the order given."""
    manager, ids = await insert_batch(conn, status, children, parent=parent, on_closed="report")
    return manager, [await claim_of(conn, job_id) for job_id in ids]


# -- closing --------------------------------------------------------------------------------------


async def test_of_two_last_children_the_second_closes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Both end at once: one waits for the parent's row, finds the other counted, and closes."""
    manager, (one, two) = await a_batch(conn, PROCESSING, PROCESSING)
    async with held(database) as a:
        first = await a.store.finish([(one, DONE)], ME)

        second = await behind(a, conn, store.finish([(two, BROKEN)], ME))

    assert first.closed == ()
    assert [job.id for job in second.closed] == [manager]
    assert await counters_of(conn, manager) == (2, 1, 1, 0)
    assert await follow_ups_of(conn, manager) == [1]


async def test_if_the_first_of_two_last_children_is_rolled_back_nobody_closes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A worker that dies before its commit has counted nothing; its child is there for rescue."""
    manager, (one, two) = await a_batch(conn, PROCESSING, PROCESSING)
    async with held(database) as a:
        await a.store.finish([(one, DONE)], ME)
        task = asyncio.create_task(store.finish([(two, DONE)], ME))
        await until_blocked(conn, task)
        await a.rollback()
        second = await task

    assert second.closed == ()
    assert await status_of(conn, manager) is WAITING
    assert await counters_of(conn, manager) == (2, 1, 0, 0)


async def test_two_last_nested_batches_meet_at_the_root(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Each cascades up in its own transaction; the second finds both counted and closes."""
    root = await insert_job(conn, WAITING, kind="manager", total=2, on_closed="report")
    one, (last_of_one,) = await a_batch(conn, PROCESSING, parent=root)
    two, (last_of_two,) = await a_batch(conn, PROCESSING, parent=root)
    async with held(database) as a:
        first = await a.store.finish([(last_of_one, DONE)], ME)

        second = await behind(a, conn, store.finish([(last_of_two, DONE)], ME))

    assert [job.id for job in first.closed] == [one]
    assert [job.id for job in second.closed] == [two, root]
    assert [await follow_ups_of(conn, job) for job in (one, two, root)] == [[1], [1], [1]]


async def test_a_manager_and_its_own_child_in_one_flush_are_both_counted(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A row's second UPDATE within a statement would be dropped; depths go one by one."""
    root = await insert_job(conn, WAITING, kind="manager", total=1, on_closed="report")
    nested, (child,) = await a_batch(conn, PROCESSING, status=PROCESSING, parent=root)
    manager = await claim_of(conn, nested)

    counted = await store.finish([(manager, DONE), (child, DONE)], ME)

    assert {job.id for job in counted.moved} == {nested, child.id}
    assert [await status_of(conn, job) for job in (root, nested)] == [COMPLETED, COMPLETED]
    assert await counters_of(conn, nested) == (1, 1, 0, 0)


async def test_a_child_is_never_seen_as_ended_and_not_yet_counted(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """While its parent's row is locked by someone else, nobody sees the child's end either."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    async with held(database) as a:
        await a.lock(manager)
        task = asyncio.create_task(store.finish([(child, DONE)], ME))
        await until_blocked(conn, task)

        assert await status_of(conn, child.id) is PROCESSING
        assert await check(conn, quiet=False) == []

        await a.commit()
        await task
    assert await status_of(conn, manager) is COMPLETED


# -- sealing --------------------------------------------------------------------------------------


async def test_the_seal_comes_first_and_the_last_child_closes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The child waits for the sealed row, finds it waiting, and closes it."""
    manager, (child,) = await a_batch(conn, PROCESSING, status=PROCESSING)
    async with held(database) as a:
        sealed = await a.store.finish([(await claim_of(conn, manager), DONE)], ME)

        counted = await behind(a, conn, store.finish([(child, DONE)], ME))

    assert [job.status for job in sealed.moved] == [WAITING]
    assert [job.id for job in counted.closed] == [manager]
    assert await follow_ups_of(conn, manager) == [1]


async def test_the_last_child_comes_first_and_the_seal_closes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A child counts on a manager that still dispatches, and does not close it; sealing does."""
    manager, (child,) = await a_batch(conn, PROCESSING, status=PROCESSING)
    seal = await claim_of(conn, manager)
    async with held(database) as a:
        counted = await a.store.finish([(child, DONE)], ME)

        sealed = await behind(a, conn, store.finish([(seal, DONE)], ME))

    assert counted.closed == ()
    assert [job.status for job in sealed.moved] == [COMPLETED]
    assert await follow_ups_of(conn, manager) == [1]


async def test_an_unsealed_batch_stays_open_however_many_have_ended(
    store: Store, conn: asyncpg.Connection
) -> None:
    """All children that exist have ended, the manager goes on dispatching: nothing may close."""
    manager, (child,) = await a_batch(conn, PROCESSING, status=PROCESSING)

    await finish(store, child)

    assert await status_of(conn, manager) is PROCESSING
    assert await fan_out(store, await claim_of(conn, manager), ["one more"]) == (1, 2)


async def test_a_manager_that_was_put_back_stays_open_however_many_have_ended(
    store: Store, conn: asyncpg.Connection
) -> None:
    """It has not sealed: its next run dispatches the rest."""
    manager, (child,) = await a_batch(conn, PROCESSING, status=PENDING)

    await finish(store, child)

    assert await status_of(conn, manager) is PENDING
    assert await follow_ups_of(conn, manager) == []


# -- the last child and the sweeper ---------------------------------------------------------------


async def test_rescue_then_the_last_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Its lease was taken while it finished: the result is lost, the child runs again."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    await expire(conn, child.id)
    async with held(database) as a:
        assert await rescue(a.store) == [child.id]

        assert await behind(a, conn, finish(store, child)) is False

    assert await status_of(conn, child.id) is PENDING
    assert await counters_of(conn, manager) == (1, 0, 0, 0)


async def test_the_last_child_then_rescue(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Rescue does not wait for a child that is ending, and has nothing to take once it has."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    await expire(conn, child.id)
    async with held(database) as a:
        await a.store.finish([(child, DONE)], ME)

        assert await rescue(store) == []
        await a.commit()

    assert await rescue(store) == []
    assert await status_of(conn, manager) is COMPLETED
    assert (await row_of(conn, child.id))["deaths"] == 0


async def test_rescue_as_poison_then_the_last_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The sweeper ends it, counts it and closes; its worker wakes up and adds nothing."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    await conn.execute("UPDATE fanout.job SET deaths = $2 WHERE id = $1", child.id, MAX_DEATHS)
    await expire(conn, child.id)
    async with held(database) as a:
        assert await rescue(a.store) == [child.id]

        assert await behind(a, conn, finish(store, child)) is False

    assert await status_of(conn, manager) is COMPLETED
    assert await counters_of(conn, manager) == (1, 0, 1, 0)
    assert await follow_ups_of(conn, manager) == [1]
    assert await store.outcomes_of([child], ME) == set(), "the sweeper ended it, not this worker"


async def test_recount_then_the_last_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The child waits for the mended row and adds to what stands there then."""
    manager, (child, *_) = await a_batch(conn, PROCESSING, COMPLETED)
    await conn.execute("UPDATE fanout.job SET completed = 0 WHERE id = $1", manager)
    async with held(database) as a:
        assert [job.id for job in (await a.store.recount(manager)).moved] == [manager]

        counted = await behind(a, conn, store.finish([(child, DONE)], ME))

    assert [job.id for job in counted.closed] == [manager]
    assert await counters_of(conn, manager) == (2, 2, 0, 0)


@pytest.mark.parametrize("siblings", [(), (PROCESSING,)], ids=["the last", "not the last"])
async def test_a_child_then_recount(
    siblings: tuple[Status, ...], database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Recount waits for the finish in flight and counts it: it never overwrites what it did."""
    manager, (child, *_) = await a_batch(conn, PROCESSING, *siblings)
    async with held(database) as a:
        await a.store.finish([(child, DONE)], ME)

        mended = await behind(a, conn, store.recount(manager))

    assert mended.moved == ()
    assert await counters_of(conn, manager) == (1 + len(siblings), 1, 0, 0)


async def test_a_chunk_of_children_then_recount(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The same for `total`: a chunk in flight is counted whole or not at all."""
    manager, _ = await a_batch(conn, PROCESSING, status=PROCESSING)
    async with held(database) as a:
        await fan_out(a.store, await claim_of(conn, manager), ["a", "b"], gone=frozenset("b"))

        assert (await behind(a, conn, store.recount(manager))).moved == ()

    assert await counters_of(conn, manager) == (3, 0, 1, 0)


async def test_recount_closes_a_batch_whose_last_child_was_never_counted(
    store: Store, conn: asyncpg.Connection
) -> None:
    """The drift is mended, the batch and the one above it close, each with its follow-up."""
    root = await insert_job(conn, WAITING, kind="manager", total=1, on_closed="report")
    nested, (_, uncounted) = await a_batch(conn, COMPLETED, PENDING, parent=root)
    await conn.execute(
        "UPDATE fanout.job SET status = 'failed', finished_at = now() WHERE id = $1", uncounted.id
    )
    assert await store.incomplete_without_open(10) == [nested]

    mended = await store.recount(nested)

    assert [(job.id, job.status) for job in mended.moved] == [(nested, COMPLETED)]
    assert [job.id for job in mended.closed] == [root]
    assert [await follow_ups_of(conn, job) for job in (nested, root)] == [[1], [1]]


# -- rescue and release ---------------------------------------------------------------------------


async def test_release_then_rescue(database: str, store: Store, conn: asyncpg.Connection) -> None:
    """A pod that stops in good order: no death, whoever looks meanwhile."""
    _, (child,) = await a_batch(conn, PROCESSING)
    await expire(conn, child.id)
    async with held(database) as a:
        assert await a.store.release([(child, None)], ME) == {child.id}

        assert await rescue(store) == []
        await a.commit()

    assert await rescue(store) == []
    row = await row_of(conn, child.id)
    assert (row["status"], row["deaths"], row["failures"]) == (PENDING, 0, 0)


async def test_rescue_then_release(database: str, store: Store, conn: asyncpg.Connection) -> None:
    """Its claim was taken first: the release finds nothing of its own, the death stands."""
    _, (child,) = await a_batch(conn, PROCESSING)
    await expire(conn, child.id)
    async with held(database) as a:
        assert await rescue(a.store) == [child.id]

        assert await behind(a, conn, store.release([(child, None)], ME)) == set()

    assert (await row_of(conn, child.id))["deaths"] == 1


async def test_two_sweepers_take_different_jobs(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Neither waits for the other, and a death is counted once."""
    _, (one, two) = await a_batch(conn, PROCESSING, PROCESSING)
    await expire(conn, one.id, two.id)
    async with held(database) as a:
        assert [job.id for job in (await a.store.rescue(1, 1, MAX_DEATHS, 0, 0)).moved] == [one.id]

        assert await rescue(store) == [two.id]
        await a.commit()

    assert [(await row_of(conn, c.id))["deaths"] for c in (one, two)] == [1, 1]


async def test_a_heartbeat_then_rescue(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A lease that is renewed at the last moment is not taken: rescue judges under the lock."""
    _, (child,) = await a_batch(conn, PROCESSING)
    await expire(conn, child.id)
    async with held(database) as a:
        assert await beat(a.store, child) is True

        assert await rescue(store) == []
        await a.commit()

    assert await rescue(store) == []


# -- cancelling, at each step ---------------------------------------------------------------------


async def cancel(store: Store, job_id: int) -> list[tuple[int, Status]]:
    """Doom the job: what moved, and to where."""
    counted = await store.doom(job_id, CANCELLED, "somebody said so")
    return [(job.id, job.status) for job in counted.moved]


async def test_cancel_while_a_child_is_being_claimed(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The chunk passes by the locked row; the next one ends it, and its worker has lost it."""
    manager, (one, two) = await a_batch(conn, PENDING, PENDING)
    async with held(database) as a:
        (claimed,) = await claim(a.store, limit=1)
        assert await cancel(store, manager) == [(manager, WAITING)]

        chunk = await store.doom_chunk(manager, 10)
        await a.commit()

    assert claimed.id == one.id
    assert [job.id for job in chunk.moved] == [two.id]
    last = await store.doom_chunk(manager, 10)
    assert [job.id for job in last.moved] == [one.id]
    assert [(job.id, job.status) for job in last.closed] == [(manager, CANCELLED)]
    assert await finish(store, claimed) is False


async def test_no_claim_after_a_childs_chunk(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """While the chunk commits, a claim passes by; afterwards there is nothing to claim."""
    manager, _ = await a_batch(conn, PENDING, PENDING)
    await cancel(store, manager)
    async with held(database) as a:
        await a.store.doom_chunk(manager, 10)

        assert await claim(store) == []
        await a.commit()

    assert await claim(store) == []
    assert await counters_of(conn, manager) == (2, 0, 0, 2)


async def test_cancel_reaches_a_child_before_its_finish(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It was cancelled while it ran: its late result neither counts nor reopens anything."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    await cancel(store, manager)
    async with held(database) as a:
        await a.store.doom_chunk(manager, 10)

        assert await behind(a, conn, finish(store, child)) is False

    assert await status_of(conn, manager) is CANCELLED
    assert await counters_of(conn, manager) == (1, 0, 0, 1)
    assert await follow_ups_of(conn, manager) == [1]


async def test_cancel_while_a_child_finishes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The one that finished is counted as completed, the others as cancelled."""
    manager, (child, *_) = await a_batch(conn, PROCESSING, PROCESSING, PENDING)
    async with held(database) as a:
        await a.store.finish([(child, DONE)], ME)

        assert await behind(a, conn, cancel(store, manager)) == [(manager, WAITING)]

    await store.doom_chunk(manager, 10)
    assert await status_of(conn, manager) is CANCELLED
    assert await counters_of(conn, manager) == (3, 1, 0, 2)


async def test_a_chunk_is_counted_behind_a_child_that_finishes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The chunk skips the child, waits for the parent's row, and closes with both counted."""
    manager, (child, other) = await a_batch(conn, PROCESSING, PENDING)
    await cancel(store, manager)
    async with held(database) as a:
        await a.store.finish([(child, DONE)], ME)

        chunk = await behind(a, conn, store.doom_chunk(manager, 10))

    assert [job.id for job in chunk.moved] == [other.id]
    assert [(job.id, job.status) for job in chunk.closed] == [(manager, CANCELLED)]
    assert await counters_of(conn, manager) == (2, 1, 0, 1)


async def test_cancel_comes_after_the_last_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The batch has closed by then: it stays completed, and nothing moves."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    async with held(database) as a:
        await a.store.finish([(child, DONE)], ME)

        assert await behind(a, conn, cancel(store, manager)) == []

    assert await status_of(conn, manager) is COMPLETED
    assert await follow_ups_of(conn, manager) == [1]


async def test_cancel_comes_before_the_last_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The child still counts as what it was; the batch closes with the verdict."""
    manager, (child,) = await a_batch(conn, PROCESSING)
    async with held(database) as a:
        await cancel(a.store, manager)

        counted = await behind(a, conn, store.finish([(child, DONE)], ME))

    assert [(job.id, job.status) for job in counted.closed] == [(manager, CANCELLED)]
    assert await counters_of(conn, manager) == (1, 1, 0, 0)


async def test_cancel_comes_before_the_seal(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The manager has lost its claim: it can neither seal nor complete what was cancelled."""
    manager, _ = await a_batch(conn, PENDING, status=PROCESSING)
    seal = await claim_of(conn, manager)
    async with held(database) as a:
        await cancel(a.store, manager)

        assert await behind(a, conn, finish(store, seal)) is False

    row = await row_of(conn, manager)
    assert (row["status"], row["verdict"]) == (WAITING, CANCELLED)


async def test_cancel_comes_after_the_seal(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A sealed batch with open children is doomed like any other."""
    manager, _ = await a_batch(conn, PENDING, status=PROCESSING)
    seal = await claim_of(conn, manager)
    async with held(database) as a:
        await a.store.finish([(seal, DONE)], ME)

        assert await behind(a, conn, cancel(store, manager)) == [(manager, WAITING)]

    assert (await row_of(conn, manager))["verdict"] == CANCELLED


async def test_cancel_comes_before_a_chunk_of_children(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Children of a cancelled batch are never born: the chunk in flight is rolled back whole."""
    manager, _ = await a_batch(conn, status=PROCESSING)
    dispatching = await claim_of(conn, manager)
    async with held(database) as a:
        await cancel(a.store, manager)

        with pytest.raises(LostClaim):
            await behind(a, conn, fan_out(store, dispatching, ["a", "b"]))

    assert await status_of(conn, manager) is CANCELLED
    assert await counters_of(conn, manager) == (0, 0, 0, 0)


async def test_cancel_comes_after_a_chunk_of_children(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It waits for the chunk and then reaches the children that it made."""
    manager, _ = await a_batch(conn, status=PROCESSING)
    dispatching = await claim_of(conn, manager)
    async with held(database) as a:
        await fan_out(a.store, dispatching, ["a", "b"])

        assert await behind(a, conn, cancel(store, manager)) == [(manager, WAITING)]

    await store.doom_chunk(manager, 10)
    assert await status_of(conn, manager) is CANCELLED
    assert await counters_of(conn, manager) == (2, 0, 0, 2)


async def test_cancel_of_the_root_while_a_nested_batch_closes(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Its last child has it locked, so the chunk passes it by; it counts, and the root closes."""
    root = await insert_job(conn, WAITING, kind="manager", total=1, on_closed="report")
    nested, (last,) = await a_batch(conn, PROCESSING, parent=root)
    await cancel(store, root)
    async with held(database) as a:
        await a.store.finish([(last, DONE)], ME)

        assert (await store.doom_chunk(root, 10)).moved == ()
        await a.commit()

    assert [await status_of(conn, job) for job in (nested, root)] == [COMPLETED, CANCELLED]


async def test_cancel_of_the_root_dooms_a_nested_batch_first(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Its last child waits for the doomed row, closes it as cancelled, and the root behind it."""
    root = await insert_job(conn, WAITING, kind="manager", total=1, on_closed="report")
    nested, (last,) = await a_batch(conn, PROCESSING, parent=root)
    await cancel(store, root)
    async with held(database) as a:
        chunk = await a.store.doom_chunk(root, 10)

        counted = await behind(a, conn, store.finish([(last, DONE)], ME))

    assert [(job.id, job.status) for job in chunk.moved] == [(nested, WAITING)]
    assert [job.id for job in counted.closed] == [nested, root]
    assert [await status_of(conn, job) for job in (nested, root)] == [CANCELLED, CANCELLED]
    assert await counters_of(conn, nested) == (1, 1, 0, 0)


async def test_two_cancels_doom_once(database: str, store: Store, conn: asyncpg.Connection) -> None:
    """The second finds it doomed already and moves nothing, also not the first one's reason."""
    manager, _ = await a_batch(conn, PENDING)
    async with held(database) as a:
        await a.store.doom(manager, FAILED, "too many failures")

        assert await behind(a, conn, cancel(store, manager)) == []

    row = await row_of(conn, manager)
    assert (row["verdict"], row["reason"]) == (FAILED, "too many failures")


# -- retrying -------------------------------------------------------------------------------------


async def test_the_last_child_then_retry_failed(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The batch closes, with its follow-up, and is then opened again as a new generation."""
    manager, (running, failed) = await a_batch(conn, PROCESSING, FAILED)
    async with held(database) as a:
        await a.store.finish([(running, DONE)], ME)

        assert await behind(a, conn, store.retry_failed(manager)) == 1

    row = await row_of(conn, manager)
    assert (row["status"], row["generation"]) == (WAITING, 2)
    assert await follow_ups_of(conn, manager) == [1]
    assert await counters_of(conn, manager) == (2, 1, 0, 0)
    assert await status_of(conn, failed.id) is PENDING


async def test_retry_failed_then_the_last_child(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It is no longer the last: the batch never closed, so it stays the same generation."""
    manager, (running, failed) = await a_batch(conn, PROCESSING, FAILED)
    async with held(database) as a:
        assert await a.store.retry_failed(manager) == 1

        counted = await behind(a, conn, store.finish([(running, DONE)], ME))

    assert counted.closed == ()
    row = await row_of(conn, manager)
    assert (row["status"], row["generation"]) == (WAITING, 1)
    assert await follow_ups_of(conn, manager) == []
    (again,) = await claim(store)
    assert (again.id, again.attempt) == (failed.id, failed.attempt + 1)
    await finish(store, again)
    assert await follow_ups_of(conn, manager) == [1]


async def test_retry_failed_opens_up_to_the_root_while_the_root_is_counted_on(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """A nested batch is opened again, and uncounted on a root that another child just closed."""
    root = await insert_job(conn, WAITING, kind="manager", total=2, completed=1, on_closed="report")
    sibling = await claim_of(conn, await insert_job(conn, PROCESSING, parent=root))
    nested, _ = await a_batch(conn, COMPLETED, FAILED, status=COMPLETED, parent=root)
    await insert_job(conn, kind="report", follows_id=nested, follows_generation=1)
    async with held(database) as a:
        counted = await a.store.finish([(sibling, DONE)], ME)

        assert await behind(a, conn, store.retry_failed(nested)) == 1

    assert [job.id for job in counted.closed] == [root]
    rows = [await row_of(conn, job) for job in (nested, root)]
    assert [(row["status"], row["generation"]) for row in rows] == [(WAITING, 2), (WAITING, 2)]
    assert await counters_of(conn, root) == (2, 1, 0, 0)


async def test_two_retries_open_once(database: str, store: Store, conn: asyncpg.Connection) -> None:
    """The second finds nothing failed and is refused: no empty generation."""
    manager, (failed,) = await a_batch(conn, FAILED, status=COMPLETED)
    await insert_job(conn, kind="report", follows_id=manager, follows_generation=1)
    async with held(database) as a:
        assert await a.store.retry_failed(manager) == 1

        with pytest.raises(Refused):
            await behind(a, conn, store.retry_failed(manager))

    assert (await row_of(conn, manager))["generation"] == 2
    assert (await row_of(conn, failed.id))["generation"] == 2


async def test_cancel_then_retry_failed(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """What was cancelled meanwhile is not opened: the whole retry is taken back."""
    manager, (failed, _) = await a_batch(conn, FAILED, PENDING)
    async with held(database) as a:
        await cancel(a.store, manager)

        with pytest.raises(Refused):
            await behind(a, conn, store.retry_failed(manager))

    assert await status_of(conn, failed.id) is FAILED


async def test_retry_failed_then_cancel(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The child that was opened again is among those that the cancel ends."""
    manager, (failed, _) = await a_batch(conn, FAILED, PENDING)
    async with held(database) as a:
        await a.store.retry_failed(manager)

        assert await behind(a, conn, cancel(store, manager)) == [(manager, WAITING)]

    await store.doom_chunk(manager, 10)
    assert await counters_of(conn, manager) == (2, 0, 0, 2)
    assert await status_of(conn, failed.id) is CANCELLED


# -- zombies: a claim that was given away ---------------------------------------------------------


async def beat(store: Store, claim: Claim, token: UUID = ME) -> bool:
    """Renew one lease as the heartbeat's thread does; False: it is lost."""
    sql = load_statements()["heartbeat"]
    lease = timedelta(seconds=LEASE)
    rows = await store._pool.fetch(sql, [claim.id], [claim.attempt], token, lease)
    return not any(row["lost"] for row in rows)


async def beat_manager(store: Store, claim: Claim, token: UUID = ME) -> bool:
    sql = load_statements()["heartbeat_manager"]
    lease = timedelta(seconds=LEASE)
    return bool(await store._pool.fetch(sql, claim.id, claim.attempt, token, lease))


async def fail(store: Store, claim: Claim) -> bool:
    return bool((await store.finish([(claim, BROKEN)], ME)).moved)


async def put_back(store: Store, claim: Claim) -> bool:
    return bool(await store.retry([(claim, ERROR)], ME))


async def let_go(store: Store, claim: Claim) -> bool:
    return bool(await store.release([(claim, None)], ME))


async def checkpoint(store: Store, claim: Claim) -> bool:
    return await _unless_lost(store.save_checkpoint(claim, ME, '"page 7"'))


async def dispatch(store: Store, claim: Claim) -> bool:
    return await _unless_lost(fan_out(store, claim, ["a", "b"], gone=frozenset("b")))


async def dispatch_nothing(store: Store, claim: Claim) -> bool:
    return await _unless_lost(fan_out(store, claim, []))


async def _unless_lost(writing: Awaitable[object]) -> bool:
    try:
        await writing
    except LostClaim:
        return False
    return True


Write = Callable[[Store, Claim], Coroutine[Any, Any, bool]]
WRITES: Final[tuple[Write, ...]] = (
    finish,
    fail,
    beat,
    beat_manager,
    put_back,
    let_go,
    checkpoint,
    dispatch,
    dispatch_nothing,
)
SUCCESSORS: Final = pytest.mark.parametrize(
    "successor", [OTHER, ME], ids=["to another worker", "to the same worker again"]
)
WAITS: Final = tuple(write for write in WRITES if write is not beat)


def _name(write: Write) -> str:
    return write.__name__


async def a_claim_to_lose(conn: asyncpg.Connection) -> Claim:
    """A child that could fan out, with a lease that has run out."""
    root = await insert_job(conn, WAITING, kind="manager", total=1)
    child = await insert_job(conn, PROCESSING, parent=root)
    await expire(conn, child)
    return await claim_of(conn, child)


async def give_away(store: Store, lost: Claim, successor: UUID) -> Claim:
    """Rescue it, and let `successor` claim it."""
    assert await rescue(store) == [lost.id]
    again = await store.claim_alone(["leaf"], successor, LEASE)
    assert again is not None
    assert (again.id, again.attempt) == (lost.id, lost.attempt + 1)
    return again


@SUCCESSORS
@pytest.mark.parametrize("write", WRITES, ids=_name)
async def test_a_zombie_writes_nothing(
    write: Write, successor: UUID, store: Store, conn: asyncpg.Connection
) -> None:
    """It slept past its lease and its job was given away: no row, not a byte, whatever it tries."""
    lost = await a_claim_to_lose(conn)
    await give_away(store, lost, successor)
    before = await whole_table(conn)

    assert await write(store, lost) is False

    assert await whole_table(conn) == before


@SUCCESSORS
@pytest.mark.parametrize("write", WAITS, ids=_name)
async def test_a_zombie_writes_nothing_though_it_began_while_the_claim_was_its_own(
    write: Write, successor: UUID, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It waits for the row while the job is given away, and judges again what it then finds."""
    lost = await a_claim_to_lose(conn)
    async with held(database) as a:
        again = await give_away(a.store, lost, successor)

        assert await behind(a, conn, write(store, lost)) is False

    row = await row_of(conn, lost.id)
    assert (row["status"], row["attempt"], row["claim_token"]) == (PROCESSING, 2, successor)
    assert (row["total"], row["checkpoint"], row["failures"]) == (0, None, 0)
    assert await finish(store, again, successor) is True


@SUCCESSORS
async def test_a_heartbeat_never_waits_and_a_locked_row_is_not_lost(
    successor: UUID, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The beat passes by a locked row; only when the gift is committed does it say: lost."""
    lost = await a_claim_to_lose(conn)
    async with held(database) as a:
        await give_away(a.store, lost, successor)

        assert await beat(store, lost) is True
        await a.commit()

    assert await beat(store, lost) is False


async def test_a_managers_heartbeat_waits_for_its_row(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Children are counted on its row, so it is nearly always locked: skipping would starve it."""
    manager, (child,) = await a_batch(conn, PROCESSING, status=PROCESSING)
    await expire(conn, manager)
    async with held(database) as a:
        await a.store.finish([(child, DONE)], ME)

        assert await behind(a, conn, beat_manager(store, await claim_of(conn, manager))) is True

    assert await rescue(store, depth=0) == []


async def test_a_zombie_manager_dispatches_nothing_beside_its_successor(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Its successor goes on where it was: known documents stay, the rest is made, each once."""
    manager, _ = await a_batch(conn, status=PROCESSING)
    zombie = await claim_of(conn, manager)
    await fan_out(store, zombie, ["a", "b"], lease=GONE)
    assert await rescue(store, depth=0) == [manager]
    successor = await store.claim_alone(["manager"], ME, LEASE)
    assert successor is not None

    with pytest.raises(LostClaim):
        await fan_out(store, zombie, ["c", "d"])

    assert successor.total == 2
    assert await fan_out(store, successor, ["a", "b", "c"]) == (1, 3)
    keys = await conn.fetch("SELECT document_key FROM fanout.job WHERE parent_id = $1", manager)
    assert sorted(row[0] for row in keys) == ["a", "b", "c"]


async def test_a_chunk_that_began_before_the_rescue_is_rolled_back_whole(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The zombie had inserted its children and waits for the parent's row: they are never seen."""
    manager, _ = await a_batch(conn, status=PROCESSING)
    zombie = await claim_of(conn, manager)
    await expire(conn, manager)
    async with held(database) as a:
        assert await rescue(a.store, depth=0) == [manager]
        successor = await a.store.claim_alone(["manager"], ME, LEASE)
        assert successor is not None

        with pytest.raises(LostClaim):
            await behind(a, conn, fan_out(store, zombie, ["a", "b"]))

    assert await fan_out(store, successor, ["a", "b"]) == (2, 2)


async def test_a_chunk_in_flight_keeps_the_manager_from_being_rescued(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It holds the row, so the sweeper passes by; once committed, the lease is new."""
    manager, _ = await a_batch(conn, status=PROCESSING)
    dispatching = await claim_of(conn, manager)
    await expire(conn, manager)
    async with held(database) as a:
        await fan_out(a.store, dispatching, ["a"])

        assert await rescue(store, depth=0) == []
        await a.commit()

    assert await rescue(store, depth=0) == []
    assert await fan_out(store, dispatching, ["b"]) == (1, 2)


# -- giving up ------------------------------------------------------------------------------------


async def a_dead_batch(conn: asyncpg.Connection) -> tuple[int, list[int]]:
    """A sealed batch that nobody has touched for an hour, though a worker had free slots."""
    manager, children = await insert_batch(conn, WAITING, [PENDING, PENDING])
    await conn.execute(f"UPDATE fanout.job SET updated_at = {PAST}, run_at = {PAST}")
    await live_worker(conn, ["leaf"])
    return manager, children


async def test_a_batch_without_a_sign_of_life_is_given_up(
    store: Store, conn: asyncpg.Connection
) -> None:
    """It is doomed to fail, its children are ended in chunks, the last of them closes it."""
    manager, _ = await a_dead_batch(conn)
    assert await store.give_up_candidates(10, 600) == [manager]

    assert await store.give_up(manager, 600, "no sign of life") is True

    await store.doom_chunk(manager, 10)
    row = await row_of(conn, manager)
    assert (row["status"], row["reason"]) == (FAILED, "no sign of life")


async def test_a_child_that_is_claimed_after_the_scan_saves_its_batch(
    store: Store, conn: asyncpg.Connection
) -> None:
    """The scan said dead; the claim says alive; the give-up asks again."""
    manager, _ = await a_dead_batch(conn)
    assert await store.give_up_candidates(10, 600) == [manager]
    await claim(store, limit=1)

    assert await store.give_up(manager, 600, "no sign of life") is False


async def test_a_child_that_ends_while_its_batch_is_given_up_saves_it(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The give-up waits for the row, and decides on what it finds under the lock."""
    manager, _ = await a_dead_batch(conn)
    (running,) = await claim(store, limit=1)
    await conn.execute(
        f"UPDATE fanout.job SET claimed_at = {PAST}, lease_expires_at = {PAST} WHERE id = $1",
        running.id,
    )
    assert await store.give_up_candidates(10, 600) == [manager]
    async with held(database) as a:
        await a.store.finish([(running, DONE)], ME)

        assert await behind(a, conn, store.give_up(manager, 600, "no sign of life")) is False

    assert (await row_of(conn, manager))["verdict"] is None


# -- submitting -----------------------------------------------------------------------------------


async def test_of_two_submits_of_a_key_the_second_gets_the_firsts_job(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It waits for the rival transaction, so it never gets the id of a job that does not exist."""
    async with held(database) as a:
        first = await submit(a.store, key="import-1")

        (second,) = await behind(a, conn, store.submit([NewJob("manager", "{}", key="import-1")]))

    assert (second.id, second.created, second.same) == (first, False, True)


async def test_if_the_first_submit_of_a_key_is_rolled_back_the_second_makes_the_job(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Submitting lives or dies with the caller's transaction, and so does its key."""
    async with held(database) as a:
        await submit(a.store, key="import-1")
        task = asyncio.create_task(store.submit([NewJob("manager", "{}", key="import-1")]))
        await until_blocked(conn, task)
        await a.rollback()
        (second,) = await task

    assert second.created is True
    assert await status_of(conn, second.id) is PENDING


# -- lock order -----------------------------------------------------------------------------------


async def free(conn: asyncpg.Connection, job_ids: list[int]) -> list[int]:
    """Those of the jobs whose rows nobody has locked."""
    rows = await conn.fetch(
        """SELECT id FROM fanout.job WHERE id = ANY ($1) ORDER BY id
              FOR NO KEY UPDATE SKIP LOCKED""",
        job_ids,
    )
    return [row["id"] for row in rows]


async def many_batches(conn: asyncpg.Connection, count: int) -> tuple[list[int], list[Claim]]:
    """Batches with a running child each; the claims' order has nothing to do with the parents'."""
    managers = [await insert_job(conn, WAITING, kind="manager", total=2) for _ in range(count)]
    for manager in managers:
        await insert_job(conn, parent=manager)
    shuffled = sorted(managers, key=lambda manager: (manager * 7) % 11)
    ids = [await insert_job(conn, PROCESSING, parent=manager) for manager in shuffled]
    return managers, [await claim_of(conn, job_id) for job_id in ids]


Flush = Callable[[Store, list[Claim]], Coroutine[Any, Any, object]]


async def _finish_all(store: Store, claims: list[Claim]) -> object:
    return await store.finish([(c, DONE) for c in reversed(claims)], ME)


async def _retry_all(store: Store, claims: list[Claim]) -> object:
    return await store.retry([(c, ERROR) for c in reversed(claims)], ME)


async def _release_all(store: Store, claims: list[Claim]) -> object:
    return await store.release([(c, None) for c in reversed(claims)], ME)


async def _rescue_all(store: Store, claims: list[Claim]) -> object:
    return await rescue(store)


@pytest.fixture
async def unsorted_store(database: str, conn: asyncpg.Connection) -> AsyncIterator[Store]:
    """One that sorts only where it is told to: the order that a plan happens to have is none."""
    name = await conn.fetchval("SELECT current_database()")
    await conn.execute(f"ALTER DATABASE {name} SET enable_sort = off")
    async with a_store(database) as it:
        yield it


async def test_parents_are_locked_by_ascending_id(
    unsorted_store: Store, database: str, conn: asyncpg.Connection
) -> None:
    """A flush that waits for the lowest parent holds no other one: two flushes never cross."""
    managers, claims = await many_batches(conn, 10)
    store = unsorted_store
    async with held(database) as a:
        await a.lock(managers[0])
        task = asyncio.create_task(_finish_all(store, claims))
        await until_blocked(conn, task)

        assert await free(conn, managers) == managers[1:]

        await a.commit()
        await task


async def test_a_rescue_locks_parents_by_ascending_id(
    unsorted_store: Store, database: str, conn: asyncpg.Connection
) -> None:
    """The sweeper counts in the same order as the workers do."""
    managers, claims = await many_batches(conn, 10)
    store = unsorted_store
    await conn.execute("UPDATE fanout.job SET deaths = 3 WHERE status = 'processing'")
    await expire(conn, *(c.id for c in claims))
    async with held(database) as a:
        await a.lock(managers[0])
        task = asyncio.create_task(_rescue_all(store, claims))
        await until_blocked(conn, task)

        assert await free(conn, managers) == managers[1:]

        await a.commit()
        await task


@pytest.mark.parametrize("flush", [_finish_all, _retry_all, _release_all], ids=_name)
async def test_a_manager_is_locked_after_its_children(
    flush: Flush, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """One worker runs both, and gives both back at once: whoever ends the child meanwhile waits
    for the manager's row, which this must not hold while it waits for the child's.
    """
    root, [child] = await insert_batch(conn, PROCESSING, [PROCESSING])
    claims = [await claim_of(conn, one) for one in (root, child)]
    async with held(database) as a:
        await a.lock(child)
        task = asyncio.create_task(flush(store, claims))
        await until_blocked(conn, task)

        assert await free(conn, [root]) == [root]

        await a.commit()
        await task


@pytest.mark.parametrize("flush", [_finish_all, _retry_all, _release_all], ids=_name)
async def test_children_are_locked_by_ascending_id(
    flush: Flush, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """And before any parent: a flush that waits for its lowest child holds nothing else."""
    managers, claims = await many_batches(conn, 10)
    ids = [c.id for c in claims]
    async with held(database) as a:
        await a.lock(ids[0])
        task = asyncio.create_task(flush(store, claims))
        await until_blocked(conn, task)

        assert await free(conn, ids) == ids[1:]
        assert await free(conn, managers) == managers

        await a.commit()
        await task
