"""What handlers add up: exact, counted once, up to the root, through retries and generations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from fanout.states import Status
from fanout.store import Store
from fanout.values import Completed, Failed, Interrupted, Retry
from tests.factories import (
    DONE,
    ME,
    OTHER,
    claim,
    claim_of,
    fan_out,
    held,
    insert_batch,
    insert_job,
    row_of,
    submit,
    until_blocked,
)
from tests.machine.invariants import check

PROCESSING, PENDING, FAILED = Status.PROCESSING, Status.PENDING, Status.FAILED
WAITING, COMPLETED = Status.WAITING, Status.COMPLETED


def _cost(amount: float) -> str:
    return json.dumps({"cost": amount})


async def sums_of(conn: asyncpg.Connection, job_id: int) -> Any:
    text = (await row_of(conn, job_id))["sums"]
    return None if text is None else json.loads(text)


async def test_a_hundred_tenths_are_ten(store: Store, conn: asyncpg.Connection) -> None:
    """Decimal arithmetic, in one flush and over many; no trace of binary fractions."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING] * 101)
    claims = [await claim_of(conn, i) for i in children]
    for some in (claims[:60], claims[60:61], claims[61:100]):
        await store.finish([(c, Completed(None, '{"cost": 0.1, "pages": 2}')) for c in some], ME)

    assert (await row_of(conn, batch))["sums"] == '{"cost": 10, "pages": 200}'
    assert await check(conn, quiet=False) == []


async def test_who_adds_nothing_has_nothing(store: Store, conn: asyncpg.Connection) -> None:
    """NULL, and not an empty object that would be written with every count."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING])

    await store.finish([(await claim_of(conn, children[0]), DONE)], ME)

    assert await sums_of(conn, batch) is None
    assert await sums_of(conn, children[0]) is None


async def test_every_attempt_counts_and_counts_once(store: Store, conn: asyncpg.Connection) -> None:
    """Paid is paid: what a retried, a released and a failed attempt added, when the child ends."""
    batch, _ = await insert_batch(conn, WAITING, [{"status": PENDING, "max_retries": 1}])
    (first,) = await claim(store)
    await store.retry([(first, Retry("busy", "E", 0, _cost(1)))], ME)
    (second,) = await claim(store)
    await store.release([(second, Interrupted(_cost(2)))], ME)
    (third,) = await claim(store)
    assert await sums_of(conn, third.id) == {"cost": 3}
    assert await sums_of(conn, batch) is None
    assert await store.retry([(third, Retry("busy", "E", 0, _cost(4)))], ME) == set()

    await store.finish([(third, Failed("busy", "E", _cost(4)))], ME)

    assert await sums_of(conn, third.id) == {"cost": 7}
    assert await sums_of(conn, batch) == {"cost": 7}
    assert await check(conn, quiet=False) == []


async def test_what_a_lost_claim_added_is_not_counted_twice(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A zombie writes nothing, its sums neither."""
    batch, _ = await insert_batch(conn, WAITING, [PENDING])
    (zombie,) = await claim(store, lease=0)
    await store.rescue(1, 10, 3, 0, 0)
    second = await store.claim_alone(["leaf"], OTHER, 60)
    assert second is not None

    for _ in range(2):
        await store.finish([(zombie, Completed(None, _cost(100)))], ME)
        await store.retry([(zombie, Retry("x", "E", 0, _cost(100)))], ME)
        await store.release([(zombie, Interrupted(_cost(100)))], ME)
        await store.finish([(second, Completed(None, _cost(1)))], OTHER)

    assert await sums_of(conn, batch) == {"cost": 1}
    assert await check(conn, quiet=False) == []


async def test_a_poisoned_childs_earlier_attempts_count(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Rescue ends it; what it had added before is on the batch."""
    batch, _ = await insert_batch(conn, WAITING, [PENDING])
    (first,) = await claim(store)
    await store.retry([(first, Retry("busy", "E", 0, _cost(5)))], ME)
    await claim(store)
    await conn.execute(
        "UPDATE fanout.job SET deaths = 3, lease_expires_at = 'epoch' WHERE status = 'processing'"
    )

    await store.rescue(1, 10, 3, 0, 0)

    assert await sums_of(conn, batch) == {"cost": 5}
    assert await check(conn, quiet=False) == []


async def test_a_second_generation_adds_to_the_first(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Retried by hand: what was paid stays counted meanwhile, and only the new is added."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING, PROCESSING])
    one, two = [await claim_of(conn, i) for i in children]
    await store.finish([(one, Completed(None, _cost(1))), (two, Failed("no", "E", _cost(2)))], ME)
    for paid, spent in ((3, 4), (7, 5), (12, 6)):
        assert await sums_of(conn, batch) == {"cost": paid}
        await store.retry_failed(batch)
        assert await sums_of(conn, batch) == {"cost": paid}
        assert await check(conn, quiet=False) == []
        (again,) = await claim(store)
        await store.finish([(again, Failed("no", "E", _cost(spent)))], ME)
        assert await check(conn, quiet=False) == []

    assert await sums_of(conn, batch) == {"cost": 18}
    assert await sums_of(conn, two.id) == {"cost": 17}


@pytest.mark.parametrize("closing", [None, "aggregate"])
async def test_a_budget_is_one_of_all_generations(
    closing: str | None, store: Store, conn: asyncpg.Connection
) -> None:
    """What is retried has what is left of it; what is spent is counted once, and ends the batch."""
    batch, children = await insert_batch(
        conn, WAITING, [PROCESSING] * 2, closing=closing, budget='{"cost": 10}'
    )
    first, second = [await claim_of(conn, i) for i in children]
    await store.finish([(first, Completed(None, _cost(5)))], ME)
    await store.finish([(second, Failed("no", "E", _cost(4)))], ME)
    await store.recount(batch)
    assert (await row_of(conn, batch))["status"] == "completed"

    assert await store.retry_failed(batch) == 1
    await store.recount(batch)
    assert (await row_of(conn, batch))["status"] == "waiting"  # not over before it began
    [again] = await claim(store)
    await store.finish([(again, Completed(None, _cost(1)))], ME)
    await store.recount(batch)

    row = await row_of(conn, batch)
    assert (row["status"], row["reason"]) == ("failed", "cost is 10, its budget is 10")
    assert (row["completed"], row["failed"], await sums_of(conn, batch)) == (2, 0, {"cost": 10})
    assert await check(conn, quiet=False) == []


async def test_sums_go_up_to_the_root_when_a_nested_batch_closes(
    store: Store, conn: asyncpg.Connection
) -> None:
    """With what its manager added itself, before and after its first chunk; again after a new
    generation, and only what is new."""
    root = await submit(store)
    (top,) = await claim(store, ["manager"])
    await fan_out(store, top, ["nested"], kind="manager")
    await store.finish([(top, Completed(None, _cost(1)))], ME)
    (nested,) = await claim(store, ["manager"])
    await store.retry([(nested, Retry("x", "E", 0, _cost(10)))], ME)
    (nested,) = await claim(store, ["manager"])
    await fan_out(store, nested, ["a", "b"])
    await store.finish([(nested, Completed(None, _cost(100)))], ME)
    a, b = await claim(store)
    await store.finish([(a, Completed(None, _cost(1000)))], ME)
    assert await sums_of(conn, root) == {"cost": 1}
    assert await sums_of(conn, nested.id) == {"cost": 1110}
    assert await check(conn, quiet=False) == []

    await store.finish([(b, Failed("no", "E", _cost(10000)))], ME)

    assert await sums_of(conn, root) == {"cost": 11111}
    assert (await row_of(conn, root))["status"] == "completed"
    await store.retry_failed(nested.id)
    assert await sums_of(conn, root) == {"cost": 11111}
    assert await check(conn, quiet=False) == []
    (b,) = await claim(store)
    await store.finish([(b, Completed(None, _cost(0.5)))], ME)
    assert await sums_of(conn, root) == {"cost": 11111.5}
    assert await check(conn, quiet=True) == []


async def test_recount_mends_sums_and_leaves_right_ones(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Own, counted and not yet counted parts told apart."""
    batch = await submit(store)
    (manager,) = await claim(store, ["manager"])
    await store.retry([(manager, Retry("x", "E", 0, _cost(1)))], ME)
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, ["a", "b", "c"])
    a, b, c = await claim(store)
    await store.finish([(a, Completed(None, _cost(2))), (b, Failed("no", "E", _cost(4)))], ME)
    await store.retry([(c, Retry("x", "E", 0, _cost(8)))], ME)
    await store.retry_failed(batch)
    assert not (await store.recount(batch)).mended
    await conn.execute("""UPDATE fanout.job SET sums = '{"cost": 99}' WHERE id = $1""", batch)

    assert (await store.recount(batch)).mended

    assert await sums_of(conn, batch) == {"cost": 7}
    assert await check(conn, quiet=False) == []


async def test_a_cancelled_child_counts_what_it_had_paid(
    store: Store, conn: asyncpg.Connection
) -> None:
    """By its earlier attempts; what the one that runs adds is lost with its claim."""
    batch, _ = await insert_batch(conn, WAITING, [PENDING, PENDING])
    a, b = await claim(store)
    await store.retry([(a, Retry("x", "E", 0, _cost(3))), (b, Retry("x", "E", 0, _cost(4)))], ME)
    (running, _) = await claim(store)
    await store.doom(batch, Status.CANCELLED, "enough")

    await store.doom_chunk(batch, 10)
    await store.finish([(running, Completed(None, _cost(100)))], ME)

    assert await sums_of(conn, batch) == {"cost": 7}
    assert await check(conn, quiet=False) == []


async def test_two_flushes_at_once_lose_nothing(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Arithmetic on the row that was locked, not on the one that was read."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING] * 3)
    one, two, _ = [await claim_of(conn, i) for i in children]
    async with held(database) as first:
        await first.store.finish([(one, Completed(None, '{"cost": 1, "a": 1}'))], ME)
        second = asyncio.create_task(
            store.finish([(two, Completed(None, '{"cost": 2, "b": 1}'))], ME)
        )
        await until_blocked(conn, second)
        await first.commit()
        await second
    assert await sums_of(conn, batch) == {"cost": 3, "a": 1, "b": 1}
    assert await check(conn, quiet=False) == []


async def test_a_thousand_names_do_not_break_the_count(
    store: Store, conn: asyncpg.Connection
) -> None:
    """32 are kept, those that were there first; the children are counted all the same."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING] * 101)
    claims = [await claim_of(conn, i) for i in children]
    await store.finish([(claims[0], Completed(None, '{"zz": 1}'))], ME)
    long = "n" * 58
    many = [
        json.dumps({f"{long}_{n * 10 + i:04}": 999999999999999.5 for i in range(10)})
        for n in range(100)
    ]

    await store.finish([(c, Completed(None, m)) for c, m in zip(claims[1:], many, strict=True)], ME)

    sums = await sums_of(conn, batch)
    assert len(sums) == 32
    assert sums["zz"] == 1
    assert (await row_of(conn, batch))["status"] == "completed"


async def test_a_single_job_keeps_its_own(store: Store, conn: asyncpg.Connection) -> None:
    """Level 1, with a budget: there is nothing to stop."""
    job = await insert_job(conn, PROCESSING, budget='{"cost": 1}')

    await store.finish([(await claim_of(conn, job), Completed(None, _cost(2)))], ME)

    assert await sums_of(conn, job) == {"cost": 2}
    assert (await row_of(conn, job))["status"] == "completed"


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_progress_shows_them(status: Status, store: Store, conn: asyncpg.Connection) -> None:
    """Progress, one and many, the row, the child."""
    batch, children = await insert_batch(conn, WAITING, [PROCESSING, PENDING])
    outcome = Completed(None, _cost(0.25)) if status is COMPLETED else Failed("", "", _cost(0.25))
    await store.finish([(await claim_of(conn, children[0]), outcome)], ME)

    assert (await store.progress(batch)).sums == {"cost": 0.25}
    assert (await store.progress_many([batch]))[batch].sums == {"cost": 0.25}
    assert (await store.job(batch)).sums == {"cost": 0.25}
    assert [child.sums for child in await store.children(batch, status, None, 10)] == [
        {"cost": 0.25}
    ]
