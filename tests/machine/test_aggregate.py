"""Level 2, `closing = 'aggregate'`: children leave the batch's row alone, a sweep counts them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import asyncpg
import pytest

from fanout.settings import Settings
from fanout.states import Status
from fanout.store import Store
from fanout.sweeper import Sweeper
from fanout.values import Completed, Failed
from tests.factories import (
    BROKEN,
    DONE,
    ME,
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
)
from tests.machine.invariants import History, check

PROCESSING, PENDING, FAILED = Status.PROCESSING, Status.PENDING, Status.FAILED
WAITING, COMPLETED, CANCELLED = Status.WAITING, Status.COMPLETED, Status.CANCELLED
AGGREGATE: Final[dict[str, Any]] = {"closing": "aggregate"}
OPTIONS = json.dumps(AGGREGATE)


async def _batch(
    store: Store, keys: str = "abc", *, gone: str = "", **columns: Any
) -> tuple[int, list[Any]]:
    """A sealed batch by the engine's own statements, its children claimed."""
    job = await submit(store, on_closed="report", options=json.dumps({**AGGREGATE, **columns}))
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, list(keys), gone=frozenset(gone))
    await store.finish([(manager, DONE)], ME)
    return job, await claim(store)


def _sweeper(store: Store) -> Sweeper:
    return Sweeper(store, Settings())


async def test_children_never_touch_or_wait_for_the_batchs_row(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Its row is locked by somebody all the while: they finish, fail, die, and are cancelled."""
    batch, (a, b, c, d) = await _batch(store, "abcd")
    await conn.execute("UPDATE fanout.job SET lease_expires_at = 'epoch' WHERE id = $1", c.id)
    before = await row_of(conn, batch)
    async with held(database) as somebody:
        await somebody.lock(batch)
        async with asyncio.timeout(20):
            await store.finish([(a, DONE), (b, BROKEN)], ME)
            await store.rescue(1, 10, 0, 0, 0)
        assert await status_of(conn, c.id) is FAILED
        await somebody.rollback()
    assert await row_of(conn, batch) == before
    await store.doom(batch, CANCELLED, "enough")
    before = await row_of(conn, batch)
    async with held(database) as somebody:
        await somebody.lock(batch)
        async with asyncio.timeout(20):
            await store.doom_chunk(batch, 10)
        await somebody.rollback()
    assert await status_of(conn, d.id) is CANCELLED
    assert await row_of(conn, batch) == before
    assert await check(conn, quiet=False) == []


async def test_a_sweep_counts_and_closes_it_once(
    database: str, store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """On any number of pods at once, with one follow-up; nothing of it is called a drift."""
    batch, (a, b) = await _batch(store, "abc", gone="c")
    sweepers = [_sweeper(store) for _ in range(4)]
    await store.finish([(a, DONE)], ME)
    await asyncio.gather(*(sweeper.close_complete() for sweeper in sweepers))
    assert await status_of(conn, batch) is WAITING
    await store.finish([(b, BROKEN)], ME)

    await asyncio.gather(*(sweeper.close_complete() for sweeper in sweepers))

    assert await status_of(conn, batch) is COMPLETED
    assert await counters_of(conn, batch) == (3, 1, 2, 0)
    assert await follow_ups_of(conn, batch) == [1]
    assert sum(sweeper.drifts for sweeper in sweepers) == 0
    assert await check(conn, quiet=False) == []


async def test_progress_counts_its_children(store: Store, conn: asyncpg.Connection) -> None:
    """Exact at once, of one and of many, with sums and a rate; its row says nothing yet."""
    batch, (a, b, _) = await _batch(store, "abc")
    await store.finish([(a, Completed(None, '{"cost": 0.1}'))], ME)
    await store.finish([(b, Failed("no", "E", '{"cost": 0.2}'))], ME)
    assert await counters_of(conn, batch) == (3, 0, 0, 0)

    for progress in (
        await store.progress(batch),
        (await store.progress_many([batch]))[batch],
    ):
        assert (progress.total, progress.completed, progress.failed) == (3, 1, 1)
        assert (progress.processing, progress.pending, progress.percent) == (1, 0, 66)
        assert progress.sums == {"cost": 0.3}


async def test_a_sweep_keeps_its_row_up_to_date(store: Store, conn: asyncpg.Connection) -> None:
    """For lists, views and alerts, which read rows; no child that is open is touched by it."""
    batch, (a, _, _) = await _batch(store, "abc")
    await store.finish([(a, Completed(None, '{"cost": 0.1}'))], ME)

    await _sweeper(store).close_complete()

    assert await counters_of(conn, batch) == (3, 1, 0, 0)
    view = await conn.fetchrow("SELECT percent, sums FROM fanout.batches WHERE id = $1", batch)
    assert view is not None
    assert (view["percent"], view["sums"]) == (33, '{"cost": 0.1}')
    written = (await row_of(conn, batch))["updated_at"]
    await _sweeper(store).close_complete()
    assert (await row_of(conn, batch))["updated_at"] == written
    assert await check(conn, quiet=False) == []


async def test_what_waits_for_its_sweep_is_not_stuck(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Unless there has been none for a minute."""
    batch, claims = await _batch(store, "ab")
    await store.finish([(c, DONE) for c in claims], ME)
    assert await store.stuck(10) == []
    await conn.execute(
        "UPDATE fanout.job SET finished_at = now() - interval '2 min' WHERE parent_id = $1", batch
    )

    assert [row["id"] for row in await store.stuck(10)] == [batch]


async def test_all_ended_is_seen_before_it_is_closed(
    store: Store, conn: asyncpg.Connection
) -> None:
    """99 %, until the sweep, or whoever asks, has closed it."""
    batch, claims = await _batch(store, "ab")
    await store.finish([(c, Completed(None, '{"cost": 0.1}')) for c in claims], ME)
    progress = await store.progress(batch)
    assert (progress.ended, progress.percent, progress.status) == (2, 99, WAITING)

    await store.recount(batch)

    progress = await store.progress(batch)
    assert (progress.ended, progress.percent, progress.status) == (2, 100, COMPLETED)
    assert progress.sums == {"cost": 0.2}
    assert await check(conn, quiet=False) == []


async def test_the_empty_one_closes_at_once(store: Store, conn: asyncpg.Connection) -> None:
    """Nothing to count: the seal closes it."""
    batch, _ = await _batch(store, "")

    assert await status_of(conn, batch) is COMPLETED


@pytest.mark.parametrize("first", ["the count", "the child"])
async def test_a_child_that_ends_beside_the_count_is_counted_by_the_next(
    first: str, database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """Either way it closes once, when all are counted."""
    batch, (a, b) = await _batch(store, "ab")
    await store.finish([(a, DONE)], ME)
    async with held(database) as it:
        if first == "the child":
            await it.store.finish([(b, DONE)], ME)
            await store.recount(batch)
        else:
            await it.store.recount(batch)
            await store.finish([(b, DONE)], ME)
        await it.commit()
    assert await status_of(conn, batch) is WAITING
    assert await check(conn, quiet=False) == []

    await store.recount(batch)

    assert await status_of(conn, batch) is COMPLETED
    assert await counters_of(conn, batch) == (2, 2, 0, 0)
    assert await follow_ups_of(conn, batch) == [1]


@pytest.mark.parametrize("counted", [True, False])
async def test_retry_of_what_failed_opens_it_again(
    counted: bool, store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """Closed, or not yet counted: a new generation if it had closed, and right counters at its
    end."""
    batch, (a, b) = await _batch(store, "ab")
    await store.finish([(a, Completed(None, '{"c": 1}')), (b, Failed("", "", '{"c": 2}'))], ME)
    if counted:
        await store.recount(batch)

    assert await store.retry_failed(batch) == 1

    assert await status_of(conn, batch) is WAITING
    assert (await row_of(conn, batch))["generation"] == 1 + counted
    assert await check(conn, quiet=False) == []
    (b,) = await claim(store)
    await store.finish([(b, Completed(None, '{"c": 4}'))], ME)
    await store.recount(batch)
    assert await counters_of(conn, batch) == (2, 2, 0, 0)
    assert json.loads((await row_of(conn, batch))["sums"]) == {"c": 7}
    assert await follow_ups_of(conn, batch) == list(range(1, 2 + counted))
    assert await check(conn, quiet=False) == []


async def test_a_retry_beside_the_count(
    database: str, store: Store, conn: asyncpg.Connection
) -> None:
    """The count had the row first, and closes it: the retry opens a new generation."""
    batch, (a,) = await _batch(store, "a")
    await store.finish([(a, BROKEN)], ME)
    async with held(database) as it:
        await it.store.recount(batch)
        retrying = asyncio.create_task(store.retry_failed(batch))
        await until_blocked(conn, retrying)
        await it.commit()
        assert await retrying == 1
    assert (await row_of(conn, batch))["generation"] == 2
    assert await status_of(conn, batch) is WAITING
    assert await check(conn, quiet=False) == []


async def test_a_cancel_closes_it_as_cancelled(store: Store, conn: asyncpg.Connection) -> None:
    """The verdict waits for the count."""
    batch, (a, _, _) = await _batch(store, "abc")
    await store.finish([(a, DONE)], ME)
    await store.doom(batch, CANCELLED, "enough")
    sweeper = _sweeper(store)

    await sweeper.end_doomed()
    await sweeper.close_complete()

    assert await status_of(conn, batch) is CANCELLED
    assert await counters_of(conn, batch) == (3, 1, 0, 2)
    assert await follow_ups_of(conn, batch) == [1]
    assert await check(conn, quiet=False) == []


async def test_a_manager_that_fails_ends_its_batch(store: Store, conn: asyncpg.Connection) -> None:
    """Also when all its children had ended: nobody has counted them yet."""
    batch = await submit(store, options=OPTIONS)
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, ["a"])
    await store.finish([(c, DONE) for c in await claim(store)], ME)
    await store.finish([(manager, BROKEN)], ME)
    assert (await row_of(conn, batch))["verdict"] == "failed"

    await _sweeper(store).close_complete()

    assert await status_of(conn, batch) is FAILED
    assert await check(conn, quiet=False) == []


@pytest.mark.parametrize("manager", [WAITING, PROCESSING])
async def test_the_sweep_judges_its_limits(
    manager: Status, store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """Not the child that fails: nobody could without the row. The next sweep ends the rest."""
    batch, children = await insert_batch(
        conn, manager, [PROCESSING] * 2 + [PENDING] * 2, fail_after=2, on_closed="r", **AGGREGATE
    )
    for child in children[:2]:
        await store.finish([(await claim_of(conn, child), BROKEN)], ME)
    assert (await row_of(conn, batch))["verdict"] is None

    await _sweeper(store).close_complete()

    row = await row_of(conn, batch)
    assert (row["verdict"], row["reason"]) == ("failed", "2 children failed, fail_after is 2")
    assert [await status_of(conn, child) for child in children[2:]] == [CANCELLED] * 2
    await _sweeper(store).close_complete()
    assert await status_of(conn, batch) is FAILED
    assert await follow_ups_of(conn, batch) == [1]
    assert await check(conn, quiet=False) == []


async def test_the_sweep_judges_its_budget(store: Store, conn: asyncpg.Connection) -> None:
    """With the last child, too: it closes as failed."""
    batch, (a, b) = await _batch(store, "ab", budget={"cost": 3})
    await store.finish([(a, Completed(None, '{"cost": 1}'))], ME)
    await _sweeper(store).close_complete()
    assert (await row_of(conn, batch))["verdict"] is None
    await store.finish([(b, Completed(None, '{"cost": 2}'))], ME)

    await _sweeper(store).close_complete()

    row = await row_of(conn, batch)
    assert (row["status"], row["reason"]) == ("failed", "cost is 3, its budget is 3")
    assert await check(conn, quiet=False) == []


async def test_a_child_that_ended_lately_is_a_sign_of_life(
    store: Store, conn: asyncpg.Connection
) -> None:
    """Nobody wrote it into the row; without it, the batch is given up, with what it has counted."""
    batch, (old, waiting) = await insert_batch(
        conn, WAITING, [PROCESSING, PENDING], **AGGREGATE, on_closed="report"
    )
    await live_worker(conn, ["leaf"])
    await conn.execute("UPDATE fanout.job SET updated_at = 'epoch', run_at = 'epoch'")
    await store.finish([(await claim_of(conn, old), DONE)], ME)
    assert await store.give_up_candidates(10, 600) == []
    assert not await store.give_up(batch, 600, "no life")
    await conn.execute(
        "UPDATE fanout.job SET finished_at = now() - interval '1 h' WHERE id = $1", old
    )

    sweeper = Sweeper(store, Settings(give_up_after=600))
    await sweeper.give_up()

    assert sweeper.given_up == 1
    assert (await row_of(conn, batch))["verdict"] == "failed"
    assert await status_of(conn, waiting) is CANCELLED
    await sweeper.close_complete()
    assert await status_of(conn, batch) is FAILED
    assert await counters_of(conn, batch) == (2, 1, 0, 1)
    assert await check(conn, quiet=False) == []


@pytest.mark.parametrize("outer", ["aggregate", None])
@pytest.mark.parametrize("inner", ["aggregate", None])
async def test_nested_in_any_mixture(
    outer: str | None, inner: str | None, store: Store, conn: asyncpg.Connection
) -> None:
    """A batch in a batch, each closing in its own way; sums go up all the way."""
    root = await submit(store, options=json.dumps({"closing": outer} if outer else {}))
    (top,) = await claim(store, ["manager"])
    await store.register_kinds(
        [("nested", 3, 60.0, None, None, json.dumps({"closing": inner}) if inner else None)]
    )
    await fan_out(store, top, ["x"], kind="nested")
    await store.finish([(top, DONE)], ME)
    (nested,) = await claim(store, ["nested"])
    assert (await row_of(conn, nested.id))["closing"] == inner
    await fan_out(store, nested, ["a", "b"])
    await store.finish([(nested, DONE)], ME)
    await store.finish([(c, Completed(None, '{"c": 2}')) for c in await claim(store)], ME)
    sweeper = _sweeper(store)

    await sweeper.close_complete()
    await sweeper.close_complete()

    assert await status_of(conn, root) is COMPLETED
    assert json.loads((await row_of(conn, root))["sums"]) == {"c": 4}
    assert await check(conn, quiet=True) == []


async def test_many_counts_and_many_children_at_once(
    database: str, store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """100 children end one by one beside four that count: closed once, nothing lost."""
    batch, claims = await _batch(store, "".join(chr(0x4E00 + n) for n in range(100)))
    async with a_store(database) as other:
        done = asyncio.Event()

        async def counting(it: Store) -> None:
            while not done.is_set():
                await it.recount(batch)

        tasks = [asyncio.create_task(counting(it)) for it in (store, other, store, other)]
        for n, it in enumerate(claims):
            await store.finish([(it, BROKEN if n % 3 == 0 else DONE)], ME)
        await store.recount(batch)
        done.set()
        await asyncio.gather(*tasks)

    assert await counters_of(conn, batch) == (100, 66, 34, 0)
    assert (await History.of(conn, batch))[-1] == "completed"
    assert await follow_ups_of(conn, batch) == [1]
    assert await check(conn, quiet=False) == []


async def test_a_webhook_is_told_of_each_close(store: Store, conn: asyncpg.Connection) -> None:
    """Beside the follow-up, with the endpoint, once a generation; whoever closed it is told to
    wake the kind."""
    batch = await submit(store, on_closed="report", options=json.dumps({"webhook": "billing"}))
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, ["a"])
    await store.finish([(manager, DONE)], ME)
    (a,) = await claim(store)

    counted = await store.finish([(a, BROKEN)], ME)

    assert counted.follow_ups == {"report", "fanout_webhook"}
    told = await conn.fetch(
        "SELECT kind, payload::text, follows_generation FROM fanout.job WHERE follows_id = $1 "
        "ORDER BY kind",
        batch,
    )
    assert [row["kind"] for row in told] == ["fanout_webhook", "report"]
    payload = json.loads(told[0]["payload"])
    assert payload == {
        "job_id": batch,
        "kind": "manager",
        "generation": 1,
        "outcome": "completed",
        "total": 1,
        "completed": 0,
        "failed": 1,
        "cancelled": 0,
        "endpoint": "billing",
    }
    await store.retry_failed(batch)
    (a,) = await claim(store)
    await store.finish([(a, DONE)], ME)
    assert await follow_ups_of(conn, batch) == [1, 1, 2, 2]


async def test_a_single_job_and_a_child_tell_their_webhook_too(
    store: Store, conn: asyncpg.Connection
) -> None:
    """A leaf that ends, a document that is gone: each has closed."""
    job = await insert_job(conn, PROCESSING, webhook="w")
    counted = await store.finish([(await claim_of(conn, job), DONE)], ME)
    assert counted.follow_ups == {"fanout_webhook"}
    manager = await insert_job(conn, PROCESSING, kind="manager")
    await store.register_kinds([("leaf", 3, 60.0, None, None, '{"webhook": "each"}')])

    await fan_out(store, await claim_of(conn, manager), ["a", "b"], gone=frozenset("a"))

    endpoints = await conn.fetch(
        """SELECT payload ->> 'endpoint' AS it FROM fanout.job WHERE kind = 'fanout_webhook'
            ORDER BY 1"""
    )
    assert [row["it"] for row in endpoints] == ["each", "w"]
