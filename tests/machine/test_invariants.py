"""The invariants themselves: sound work satisfies them, and each sees what it is there to see."""

from __future__ import annotations

from typing import Final

import asyncpg
import pytest

from fanout.store import Store
from fanout.values import Retry
from tests.factories import (
    DONE,
    GONE,
    ME,
    claim,
    fan_out,
    held,
    insert_batch,
    insert_job,
    submit,
)
from tests.machine import invariants
from tests.machine.invariants import History, check

BREAK: Final = "UPDATE fanout.job SET {} WHERE kind = '{}'"
ALL_CHECKS: Final = """
    DO $$ DECLARE c text; BEGIN
        FOR c IN SELECT conname FROM pg_constraint
                  WHERE conrelid = 'fanout.job'::regclass AND contype = 'c' LOOP
            EXECUTE format('ALTER TABLE fanout.job DROP CONSTRAINT %I', c);
        END LOOP;
        DROP INDEX fanout.job_child;
    END $$"""
PLANTED: Final = {
    "counters equal a recount": ("manager", "completed = completed + 1"),
    "counters are in bounds": ("manager", "total = -1"),
    "one child a document": ("leaf", "document_key = 'the same'"),
    "closed if and only if sealed and complete": (
        "manager",
        "status = 'completed', finished_at = now()",
    ),
    "no open child below a closed job": ("manager", "status = 'completed', finished_at = now()"),
    "a token and a lease if and only if processing": ("leaf", f"claim_token = '{ME}'"),
    "one follow-up a close": ("manager", "status = 'completed', finished_at = now()"),
    "every generation that closed has its follow-up": ("manager", "generation = 2"),
    "sums are its own and those of the children that were counted": (
        "manager",
        """sums = '{"cost": 1}'""",
    ),
    "no batch goes on beyond its limits": ("manager", "fail_after = 1, failed = 1"),
    "a retry budget": ("leaf", "failures = 9"),
    "depth and root follow from the parent": ("leaf", "depth = 2"),
    "tenants never mix": ("leaf", "tenant = 'somebody else'"),
    "only legal transitions": ("leaf", "status = 'completed', finished_at = now()"),
    "an attempt is one more at each claim, and only then": ("leaf", "attempt = 5"),
    "between two claims it was given back": (
        "leaf",
        f"attempt = attempt + 1, claim_token = '{ME}', lease_expires_at = now()",
    ),
    "an attempt that ended otherwise than well is kept": (
        "leaf",
        "status = 'failed', claim_token = NULL, lease_expires_at = NULL, finished_at = now()",
    ),
    "a new generation whenever a closed job opens, and only then": ("leaf", "generation = 3"),
    "nothing is left open": ("leaf", "priority = 1"),
}


@pytest.mark.parametrize("invariant", PLANTED)
async def test_an_invariant_sees_what_breaks_it(
    invariant: str, conn: asyncpg.Connection, history: type[History]
) -> None:
    """With every CHECK dropped and the table broken by hand, it is the one that says so."""
    kind, change = PLANTED[invariant]
    is_claimed = "two claims" in invariant or "is kept" in invariant
    status = "processing" if is_claimed else "pending"
    await insert_batch(conn, "waiting", [status, status], on_closed="report")
    assert await check(conn, quiet=False) == []
    await conn.execute(ALL_CHECKS)

    await conn.execute(BREAK.format(change, kind))

    seen = await check(conn, quiet=invariant in invariants.AT_REST)
    assert invariant in {violation.invariant for violation in seen}


async def test_two_ends_of_one_generation_are_seen(
    conn: asyncpg.Connection, history: type[History]
) -> None:
    """A late result that counts again shows in the history, though the counters may agree."""
    job = await insert_job(conn)
    for status in ("completed", "failed"):
        await conn.execute(
            "UPDATE fanout.job SET status = $2, finished_at = now() WHERE id = $1", job, status
        )

    seen = {violation.invariant for violation in await check(conn, quiet=False)}

    assert "one end a generation" in seen


async def test_a_session_that_sleeps_in_a_transaction_is_seen(
    database: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the engine's own connections only, and after five seconds; here, at once."""
    at_once = {
        name: query.replace("interval '5 s'", "interval '0 s'")
        for name, query in invariants.ALWAYS.items()
    }
    monkeypatch.setattr(invariants, "ALWAYS", at_once)
    assert await check(conn, quiet=True) == []
    async with held(database) as a:
        await a.connection.fetch("SELECT 1")

        (seen,) = await check(conn, quiet=True)

    assert seen.invariant == "sessions are clean"


def test_every_invariant_is_shown_to_see() -> None:
    """None was added without a break that it sees."""
    shown = {*PLANTED, "one end a generation", "sessions are clean"}
    assert shown == {*invariants.ALWAYS, *invariants.OF_HISTORY, *invariants.AT_REST}


async def test_sound_work_satisfies_them_all(
    store: Store, conn: asyncpg.Connection, history: type[History]
) -> None:
    """A batch with a nested one, a gone document, a retry, a death: nothing to say, to the end."""
    root = await submit(store, on_closed="report")
    (manager,) = await claim(store, ["manager"])
    await fan_out(store, manager, ["a", "b", "c"], gone=frozenset("c"))
    await fan_out(store, manager, ["nested"], kind="manager")
    (nested,) = await claim(store, ["manager"], lease=GONE)
    await store.rescue(1, 10, 3, 0, 0)
    again = await store.claim_alone(["manager"], ME, 60)
    assert again is not None
    await fan_out(store, again, ["d"])
    first, *rest = await claim(store)
    await store.retry([(first, Retry("timeout", "TimeoutError", 0))], ME)
    assert await check(conn, quiet=False) == []

    await store.finish([(c, DONE) for c in (manager, nested, again, *rest)], ME)
    await store.finish([(c, DONE) for c in await claim(store, ["leaf", "report"])], ME)
    await store.finish([(c, DONE) for c in await claim(store, ["report"])], ME)

    assert await check(conn, quiet=True) == []
    assert await History.of(conn, root) == ["pending", "processing", "waiting", "completed"]
    states = ["pending", "processing", "pending", "processing", "completed"]
    assert await History.of(conn, first.id) == states
