"""(c) The naive form: a transaction per child.

It ends the child, increments the parent, and looks whether that was the last one. Two processes
with ten connections each. Rows are claimed as the ceiling claims them, so what differs is the
counting: each transaction holds the parent's row from its increment through its commit, and all
the others wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from benchmarks.contenders.bare import IDLE_SECONDS, BareMember, claim
from benchmarks.member import run

if TYPE_CHECKING:
    import asyncpg

    from benchmarks.workload import Workload

CONNECTIONS: Final = 10
CLAIM_LIMIT: Final = 50
"""Less than the ceiling claims: at the end neither process shall wait long for the other one."""

END: Final = """
UPDATE fanout.job
   SET status = 'completed', finished_at = clock_timestamp(), updated_at = clock_timestamp(),
       claim_token = NULL, lease_expires_at = NULL, result = $2::text::json
 WHERE id = $1"""
COUNT: Final = """
UPDATE fanout.job
   SET completed = completed + 1, updated_at = clock_timestamp(),
       status = CASE WHEN completed + 1 = total THEN 'completed' ELSE status END,
       finished_at = CASE WHEN completed + 1 = total THEN clock_timestamp() END
 WHERE id = $1
RETURNING finished_at IS NOT NULL"""


async def _lane(
    member: BareMember,
    connection: asyncpg.Connection,
    claimed: deque[tuple[int, int]],
    claiming: asyncio.Lock,
) -> None:
    end, count = await connection.prepare(END), await connection.prepare(COUNT)
    while not member.halting:
        if not claimed:
            async with claiming:
                if not claimed and (more := await claim(connection, CLAIM_LIMIT, member.token)):
                    claimed.extend(zip(more.ids, more.parents, strict=True))
            if not claimed:
                await asyncio.sleep(IDLE_SECONDS)
            continue
        child, parent = claimed.popleft()
        async with connection.transaction():
            await end.fetchval(child, member.result)
            closed = await count.fetchval(parent)
        member.executed += 1
        member.closes += bool(closed)


async def _work(member: BareMember) -> None:
    claimed: deque[tuple[int, int]] = deque()
    claiming = asyncio.Lock()
    await asyncio.gather(
        *(_lane(member, connection, claimed, claiming) for connection in member.connections)
    )


def member(dsn: str, workload: Workload) -> BareMember:
    return BareMember(dsn, workload, _work, CONNECTIONS)


if __name__ == "__main__":
    run(member)
