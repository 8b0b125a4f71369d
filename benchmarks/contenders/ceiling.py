"""(b) The ceiling: as fast as this table can move these rows by bare SQL.

Two processes; each claims up to 500 rows in one statement, and ends them and counts them on their
parents in a second one. No outcome is fenced, no lease is renewed, nothing is retried, no Python
runs per child (see `bare`). What no correct engine could leave out is in: two versions of each row,
both commits, the parent's row lock, payloads to the worker and results back, and parents locked in
the order of their ids.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from benchmarks.contenders.bare import IDLE_SECONDS, BareMember, claim
from benchmarks.member import run

if TYPE_CHECKING:
    import asyncpg

    from benchmarks.workload import Workload

LANES: Final = 1
"""Connections of a process that claim and finish in turn."""

FINISH: Final = """
WITH c AS (
    UPDATE fanout.job j
       SET status = 'completed', finished_at = clock_timestamp(), updated_at = clock_timestamp(),
           claim_token = NULL, lease_expires_at = NULL, result = d.result::json
      FROM unnest($1::bigint[], $2::text[]) AS d (id, result) WHERE j.id = d.id
 RETURNING j.parent_id),
n AS (SELECT parent_id, count(*)::int AS ended FROM c GROUP BY parent_id),
l AS MATERIALIZED (
    SELECT p.id, n.ended FROM n JOIN fanout.job p ON p.id = n.parent_id
     ORDER BY p.id FOR NO KEY UPDATE OF p)
UPDATE fanout.job p
   SET completed = p.completed + l.ended, updated_at = clock_timestamp(),
       status = CASE WHEN p.completed + l.ended = p.total THEN 'completed' ELSE p.status END,
       finished_at = CASE WHEN p.completed + l.ended = p.total THEN clock_timestamp() END
  FROM l WHERE l.id = p.id
RETURNING p.finished_at IS NOT NULL AS closed"""


async def _lane(member: BareMember, connection: asyncpg.Connection) -> None:
    finish = await connection.prepare(FINISH)
    while not member.halting:
        claimed = await claim(connection, member.workload.claim_limit, member.token)
        if claimed is None:
            await asyncio.sleep(IDLE_SECONDS)
            continue
        counted = await finish.fetch(claimed.ids, [member.result] * len(claimed.ids))
        member.executed += len(claimed.ids)
        member.closes += sum(row["closed"] for row in counted)


async def _work(member: BareMember) -> None:
    await asyncio.gather(*(_lane(member, connection) for connection in member.connections))


def member(dsn: str, workload: Workload) -> BareMember:
    return BareMember(dsn, workload, _work, LANES)


if __name__ == "__main__":
    run(member)
