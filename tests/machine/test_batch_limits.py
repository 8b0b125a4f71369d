"""`fail_after` and budgets: the statement that counts is the one that says the batch has failed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from fanout.errors import LostClaim, Refused
from fanout.states import Status
from fanout.store import Store
from fanout.values import Completed, Counted, Failed
from tests.factories import (
    BROKEN,
    DONE,
    ME,
    add_children,
    claim,
    claim_of,
    fan_out,
    follow_ups_of,
    held,
    insert_batch,
    insert_job,
    row_of,
    until_blocked,
)
from tests.machine.invariants import History, check

PROCESSING, PENDING, FAILED = Status.PROCESSING, Status.PENDING, Status.FAILED
WAITING, COMPLETED = Status.WAITING, Status.COMPLETED


async def _fail(store: Store, conn: asyncpg.Connection, *ids: int) -> Counted:
    return await store.finish([(await claim_of(conn, i), BROKEN) for i in ids], ME)


@pytest.mark.parametrize("manager", [WAITING, PROCESSING, PENDING])
async def test_as_many_failures_as_are_allowed_end_the_batch(
    manager: Status, store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """Sealed or not: the child that fails too much gives the verdict, drops the claim, tells who
    asked; the open ones are cancelled, and the last closes it."""
    batch, children = await insert_batch(
        conn, manager, [PROCESSING] * 2 + [PENDING] * 2, fail_after=2, on_closed="report"
    )
    assert (await _fail(store, conn, children[0])).doomed == ()

    counted = await _fail(store, conn, children[1])

    assert counted.doomed == (batch,)
    row = await row_of(conn, batch)
    assert (row["status"], row["verdict"]) == ("waiting", "failed")
    assert row["reason"] == "2 children failed, fail_after is 2"
    assert await check(conn, quiet=False) == []
    await store.doom_chunk(batch, 10)
    row = await row_of(conn, batch)
    assert (row["status"], row["failed"], row["cancelled"]) == ("failed", 2, 2)
    assert await follow_ups_of(conn, batch) == [1]
    assert await check(conn, quiet=False) == []


async def test_the_last_child_may_be_the_one_too_many(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Nothing is open any more: it closes as failed in the same statement, with its follow-up."""
    batch, children = await insert_batch(
        conn, WAITING, [COMPLETED, PROCESSING], fail_after=1, on_closed="report"
    )

    counted = await _fail(store, conn, *children[1:])

    assert [(job.id, job.status) for job in counted.closed] == [(batch, FAILED)]
    assert counted.doomed == ()
    row = await row_of(conn, batch)
    assert (row["status"], row["reason"]) == ("failed", "1 child failed, fail_after is 1")
    assert await follow_ups_of(conn, batch) == [1]
    assert await check(conn, quiet=False) == []


async def test_a_share_is_judged_once_all_are_dispatched(
    store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """1 of 2 is no 50 % while more may come; the seal judges what it finds."""
    batch, children = await insert_batch(
        conn, PROCESSING, [PROCESSING, PENDING], fail_after_percent=50.0
    )
    await _fail(store, conn, children[0])
    assert (await row_of(conn, batch))["verdict"] is None

    counted = await store.finish([(await claim_of(conn, batch), DONE)], ME)

    assert [(job.id, job.status) for job in counted.moved] == [(batch, WAITING)]
    row = await row_of(conn, batch)
    assert (row["verdict"], row["reason"]) == (
        "failed",
        "1 of 2 children failed, fail_after is 50 %",
    )
    assert (row["failures"], row["error"]) == (0, None)
    assert await check(conn, quiet=False) == []


async def test_the_seal_closes_what_has_failed_and_is_complete(
    store: Store, conn: asyncpg.Connection
) -> None:
    """All children were faster than the manager."""
    batch, _ = await insert_batch(conn, PROCESSING, [COMPLETED, FAILED], fail_after_percent=50.0)

    await store.finish([(await claim_of(conn, batch), DONE)], ME)

    row = await row_of(conn, batch)
    assert (row["status"], row["verdict"]) == ("failed", None)
    assert await check(conn, quiet=False) == []


async def test_below_its_share_a_batch_completes(store: Store, conn: asyncpg.Connection) -> None:
    """49 of 100 are not 50 %; a batch without a failure never fails by a share."""
    batch, children = await insert_batch(
        conn, WAITING, [COMPLETED] * 51 + [FAILED] * 48 + [PROCESSING], fail_after_percent=50.0
    )

    await _fail(store, conn, children[-1])

    assert (await row_of(conn, batch))["status"] == "completed"


@pytest.mark.parametrize("first", ["the failure", "the dispatch"])
async def test_a_manager_that_dispatches_learns_that_its_batch_has_failed(
    first: str, database: str, store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """Whichever of the two has the row first: its next chunk is refused, and nothing dispatched
    is lost from the count."""
    batch, (child,) = await insert_batch(conn, PROCESSING, [PROCESSING], fail_after=1)
    manager = await claim_of(conn, batch)
    leaf = await claim_of(conn, child)
    async with held(database) as a:
        if first == "the failure":
            await a.store.finish([(leaf, BROKEN)], ME)
            late: asyncio.Task[Any] = asyncio.create_task(fan_out(store, manager, ["x", "y"]))
        else:
            await fan_out(a.store, manager, ["x", "y"])
            late = asyncio.create_task(store.finish([(leaf, BROKEN)], ME))
        await until_blocked(conn, late)
        await a.commit()
        if first == "the failure":
            with pytest.raises(LostClaim):
                await late
        else:
            assert (await late).doomed == (batch,)
    with pytest.raises(LostClaim):
        await fan_out(store, manager, ["z"])
    assert (await store.finish([(manager, DONE)], ME)).moved == ()

    await store.doom_chunk(batch, 10)

    row = await row_of(conn, batch)
    assert (row["status"], row["total"]) == ("failed", 1 if first == "the failure" else 3)
    assert await check(conn, quiet=False) == []


async def test_two_failures_at_once_are_both_seen(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Each alone would be within the limit: the second judges what the first has committed."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING] * 2 + [PENDING], fail_after=2)
    one, two = [await claim_of(conn, i) for i in children[:2]]
    async with held(database) as a:
        await a.store.finish([(one, BROKEN)], ME)
        second = asyncio.create_task(store.finish([(two, BROKEN)], ME))
        await until_blocked(conn, second)
        await a.commit()
        assert (await second).doomed == (batch,)
    assert await check(conn, quiet=False) == []


async def test_the_last_child_and_the_one_too_many_at_once(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The one closes it, whichever comes second, and as what it then is: failed."""
    batch, (good, bad) = await insert_batch(
        conn, WAITING, [PROCESSING] * 2, fail_after=1, on_closed="report"
    )
    good_claim, bad_claim = await claim_of(conn, good), await claim_of(conn, bad)
    async with held(database) as a:
        await a.store.finish([(bad_claim, BROKEN)], ME)
        last = asyncio.create_task(store.finish([(good_claim, DONE)], ME))
        await until_blocked(conn, last)
        await a.commit()
        assert [job.status for job in (await last).closed] == [FAILED]
    assert await follow_ups_of(conn, batch) == [1]
    assert (await row_of(conn, batch))["completed"] == 1
    assert await check(conn, quiet=False) == []


async def test_documents_that_are_gone_count_against_the_limit(
    store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """The chunk stands, the batch has failed by it, the caller is told, and the manager is out."""
    batch = await insert_job(conn, PROCESSING, kind="manager", fail_after=2)
    told: list[Counted] = []
    claim_on_it = await claim_of(conn, batch)

    with pytest.raises(LostClaim):
        await fan_out(
            store, claim_on_it, ["a", "b", "c"], gone=frozenset("ab"), on_counted=told.append
        )

    assert [job.status for job in told[0].moved] == [WAITING]
    row = await row_of(conn, batch)
    assert (row["total"], row["failed"], row["verdict"]) == (3, 2, "failed")
    assert await check(conn, quiet=False) == []


async def test_a_chunk_of_nothing_but_gone_documents_closes_it(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Nested: it counts on the batch above, in the same transaction."""
    root = await insert_job(conn, WAITING, kind="manager", total=1)
    nested = await insert_job(
        conn, PROCESSING, parent=root, kind="manager", fail_after=2, on_closed="report"
    )

    with pytest.raises(LostClaim):
        await fan_out(store, await claim_of(conn, nested), ["a", "b"], gone=frozenset("ab"))

    assert (await row_of(conn, nested))["status"] == "failed"
    assert (await row_of(conn, root))["status"] == "completed"
    assert await follow_ups_of(conn, nested) == [1]
    assert await check(conn, quiet=False) == []


async def test_documents_added_from_outside_count_as_well(
    store: Store, conn: asyncpg.Connection
) -> None:
    """They were added, and the batch failed by them."""
    batch, _ = await insert_batch(conn, WAITING, [PENDING], fail_after=1)

    with pytest.raises(Refused, match="1 child failed, fail_after is 1"):
        await add_children(store, batch, ["a", "b"], gone=frozenset("a"))

    row = await row_of(conn, batch)
    assert (row["total"], row["failed"], row["verdict"]) == (3, 1, "failed")
    assert await check(conn, quiet=False) == []


async def test_a_nested_batch_that_fails_may_be_the_one_too_many(
    store: Store, conn: asyncpg.Connection
) -> None:
    """The verdict goes up as counts do; the batch above is told of too."""
    root, (nested, _) = await insert_batch(
        conn, WAITING, [{"status": WAITING, "total": 1, "fail_after": 1}, PENDING], fail_after=1
    )
    leaf = await insert_job(conn, PROCESSING, parent=nested)

    counted = await _fail(store, conn, leaf)

    assert counted.doomed == (root,)
    assert (await row_of(conn, nested))["status"] == "failed"
    assert (await row_of(conn, root))["verdict"] == "failed"
    assert await check(conn, quiet=False) == []


async def test_what_a_poisoned_child_or_a_wrong_counter_hid_is_found(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Recount mends, and judges what it has mended."""
    batch, _ = await insert_batch(conn, WAITING, [FAILED, PENDING], fail_after=1)
    await conn.execute("UPDATE fanout.job SET failed = 0 WHERE id = $1", batch)

    await store.recount(batch)

    assert (await row_of(conn, batch))["verdict"] == "failed"
    assert await check(conn, quiet=False) == []


# -- budgets --------------------------------------------------------------------------------------


async def test_a_budget_that_is_reached_ends_the_batch(
    store: Store, conn: asyncpg.Connection
) -> None:
    """By what a child added that completed as well as by one that failed; to the last decimal."""
    batch, children = await insert_batch(
        conn, WAITING, [PROCESSING] * 2 + [PENDING], budget=json.dumps({"cost": 0.3, "pages": 100})
    )
    claims = [await claim_of(conn, i) for i in children[:2]]
    await store.finish([(claims[0], Completed(None, '{"cost": 0.1, "tokens": 7}'))], ME)
    assert (await row_of(conn, batch))["verdict"] is None

    counted = await store.finish([(claims[1], Failed("no", "E", '{"cost": 0.2}'))], ME)

    assert counted.doomed == (batch,)
    row = await row_of(conn, batch)
    assert json.loads(row["sums"]) == {"cost": 0.3, "tokens": 7}
    assert row["reason"] == "cost is 0.3, its budget is 0.3"
    assert await check(conn, quiet=False) == []


async def test_a_manager_can_spend_the_budget_itself(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Its own is judged when it seals."""
    batch, _ = await insert_batch(conn, PROCESSING, [PENDING], budget='{"cost": 1}')

    await store.finish([(await claim_of(conn, batch), Completed(None, '{"cost": 2}'))], ME)

    row = await row_of(conn, batch)
    assert (row["status"], row["reason"]) == ("waiting", "cost is 2, its budget is 1")
    assert await check(conn, quiet=False) == []


@pytest.mark.parametrize("budget", ["[1]", '"cost"', '{"cost": "much"}', '{"cost": null}'])
async def test_a_budget_that_is_none_never_stops_a_count(
    budget: str, store: Store, conn: asyncpg.Connection
) -> None:
    """It may come from SQL; a child must not fail by it."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING], budget=budget)

    await store.finish([(await claim_of(conn, children[0]), Completed(None, '{"cost": 1}'))], ME)

    assert (await row_of(conn, batch))["status"] == "completed"


async def test_a_batch_that_fails_by_a_limit_takes_no_new_claims_of_its_children_down(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A child that was claimed while its batch failed is ended by the chunk; its late result is
    dropped."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING, PENDING], fail_after=1)
    (running,) = await claim(store)
    await _fail(store, conn, children[0])
    await store.doom_chunk(batch, 10)

    late = await store.finish([(running, DONE)], ME)

    assert late.moved == ()
    row = await row_of(conn, batch)
    assert (row["status"], row["cancelled"], row["completed"]) == ("failed", 1, 0)
    assert await check(conn, quiet=False) == []
