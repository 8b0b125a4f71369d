"""What must hold at any moment, asked in one snapshot, and a history of every move to ask it of.

Used by the tests of this folder after each step, and by the chaos tests beside killed processes:
`await check(conn, quiet=False)` in mid-run, `quiet=True` once everything has drained.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import asyncpg

__all__ = ["History", "Violation", "check"]


class Violation(NamedTuple):
    """An invariant that does not hold, and one row that shows it."""

    invariant: str
    job_id: int | None
    detail: str


_OPEN = "('pending', 'processing', 'waiting')"
_TERMINAL = "('completed', 'failed', 'cancelled')"

ARROWS: Final = (
    ("pending", "processing"),
    ("pending", "waiting"),  # doomed, a manager between two runs with children open
    ("pending", "failed"),
    ("pending", "cancelled"),
    ("processing", "pending"),
    ("processing", "waiting"),
    ("processing", "completed"),
    ("processing", "failed"),
    ("processing", "cancelled"),
    ("waiting", "completed"),
    ("waiting", "failed"),
    ("waiting", "cancelled"),
    ("completed", "waiting"),  # reopened
    ("failed", "pending"),  # retried
)
_LEGAL = ", ".join(f"('{old}', '{new}')" for old, new in ARROWS)

# Each: what it says, and a query of the (job, detail) that break it.
ALWAYS: Final = {
    "counters equal a recount": """
        SELECT p.id, format('has %s %s %s %s, its children are %s %s %s %s',
                            p.total, p.completed, p.failed, p.cancelled,
                            t.total, t.completed, t.failed, t.cancelled)
          FROM fanout.job p CROSS JOIN LATERAL (
               SELECT count(*) AS total,
                      count(*) FILTER (WHERE status = 'completed') AS completed,
                      count(*) FILTER (WHERE status = 'failed') AS failed,
                      count(*) FILTER (WHERE status = 'cancelled') AS cancelled
                 FROM fanout.job c WHERE c.parent_id = p.id) t
         WHERE CASE WHEN p.closing IS NULL OR p.finished_at IS NOT NULL
                    THEN (p.total, p.completed, p.failed, p.cancelled)
                         IS DISTINCT FROM (t.total, t.completed, t.failed, t.cancelled)
                    -- Its children leave its row alone; it may lag behind them until it closes.
                    ELSE p.total <> t.total OR p.completed > t.completed OR p.failed > t.failed
                         OR p.cancelled > t.cancelled END""",
    "sums are its own and those of the children that were counted": """
        SELECT p.id, format('has %s, should have %s', p.sums, t.sums)
          FROM fanout.job p CROSS JOIN LATERAL (
               SELECT jsonb_object_agg(s.name, s.amount) AS sums
                 FROM (SELECT e.key AS name, sum(e.value::numeric) AS amount
                         FROM (SELECT o.key, o.value FROM jsonb_each_text(p.own_sums) o
                                UNION ALL
                               SELECT e.key, e.value
                                 FROM fanout.job c
                                CROSS JOIN LATERAL jsonb_each_text(
                                      CASE WHEN c.finished_at IS NULL THEN c.told_sums
                                           ELSE c.sums END) e
                                WHERE c.parent_id = p.id) e
                        GROUP BY e.key) s) t
         WHERE p.total > 0 AND (p.closing IS NULL OR p.finished_at IS NOT NULL)
           AND p.sums IS DISTINCT FROM t.sums""",
    "no batch goes on beyond its limits": """
        SELECT id, format('%s failed, fail_after is %s, %s %%',
                          failed, fail_after, fail_after_percent)
          FROM fanout.job
         WHERE finished_at IS NULL AND verdict IS NULL AND closing IS NULL
           AND (failed >= fail_after
                OR status = 'waiting' AND failed > 0
                   AND failed * 100.0 >= fail_after_percent::numeric * total)""",
    "counters are in bounds": """
        SELECT id, format('%s %s %s of %s', completed, failed, cancelled, total) FROM fanout.job
         WHERE completed < 0 OR failed < 0 OR cancelled < 0
            OR completed + failed + cancelled > total""",
    "one child a document": """
        SELECT parent_id, document_key FROM fanout.job WHERE parent_id IS NOT NULL
         GROUP BY parent_id, document_key HAVING count(*) > 1""",
    "closed if and only if sealed and complete": f"""
        SELECT id, status FROM fanout.job
         WHERE status IN {_TERMINAL} AND completed + failed + cancelled <> total
            OR status = 'waiting' AND completed + failed + cancelled = total""",
    "no open child below a closed job": f"""
        SELECT p.id, format('child %s is %s', c.id, c.status)
          FROM fanout.job c JOIN fanout.job p ON p.id = c.parent_id
         WHERE c.status IN {_OPEN} AND p.status IN {_TERMINAL}""",
    "a token and a lease if and only if processing": """
        SELECT id, status FROM fanout.job
         WHERE (claim_token IS NOT NULL) <> (status = 'processing')
            OR (lease_expires_at IS NOT NULL) <> (status = 'processing')""",
    "one follow-up a close": f"""
        SELECT p.id, format('generation %s, %s, %s follow-ups', p.generation, p.status, count(f.id))
          FROM fanout.job p
          LEFT JOIN fanout.job f ON f.follows_id = p.id AND f.follows_generation = p.generation
         WHERE p.on_closed IS NOT NULL
         GROUP BY p.id HAVING count(f.id) <> (p.status IN {_TERMINAL})::int""",
    "every generation that closed has its follow-up": f"""
        SELECT p.id, format('generation %s, %s', p.generation, p.status) FROM fanout.job p
         WHERE p.on_closed IS NOT NULL
           AND (SELECT count(*) FROM fanout.job f WHERE f.follows_id = p.id)
               <> p.generation - (p.status IN {_OPEN})::int""",
    "a retry budget": """
        SELECT id, format('%s failures, %s retries', failures, max_retries) FROM fanout.job
         WHERE failures > max_retries + 1
            OR status IN ('pending', 'processing') AND failures > max_retries""",
    "depth and root follow from the parent": """
        SELECT c.id, format('depth %s below %s', c.depth, p.depth)
          FROM fanout.job c JOIN fanout.job p ON p.id = c.parent_id
         WHERE c.depth <> p.depth + 1 OR c.root_id <> COALESCE(p.root_id, p.id)""",
    "tenants never mix": """
        SELECT c.id, format('of %s, below or behind %s', c.tenant, p.tenant)
          FROM fanout.job c JOIN fanout.job p ON p.id = COALESCE(c.parent_id, c.follows_id)
         WHERE c.tenant <> p.tenant""",
    "sessions are clean": """
        SELECT pid, format('%s: %s since %s', application_name, state, state_change)
          FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE 'fanout%'
           AND state LIKE 'idle in transaction%'
           AND state_change < clock_timestamp() - interval '5 s'""",
}
OF_HISTORY: Final = {
    "only legal transitions": f"""
        SELECT job_id, format('%s -> %s in generation %s', old, new, generation)
          FROM public.test_history
         WHERE old NOT IN ('born', new) AND (old, new) NOT IN ({_LEGAL})""",
    "an attempt is one more at each claim, and only then": """
        SELECT job_id, format('%s -> %s, attempt %s -> %s', old, new, old_attempt, attempt)
          FROM public.test_history
         WHERE old <> 'born' AND attempt <> old_attempt + claimed::int""",
    "between two claims it was given back": """
        SELECT job_id, format('attempt %s -> %s', old_attempt, attempt) FROM public.test_history
         WHERE old = 'processing' AND new = 'processing'""",
    "one end a generation": f"""
        SELECT job_id, format('generation %s: %s', generation, array_agg(new ORDER BY seq))
          FROM public.test_history WHERE new IN {_TERMINAL} AND old <> new
         GROUP BY job_id, generation HAVING count(*) > 1""",
    "an attempt that ended otherwise than well is kept": """
        SELECT h.job_id, format('attempt %s ended as %s', h.old_attempt, h.new)
          FROM public.test_history h JOIN fanout.job j ON j.id = h.job_id
         WHERE h.old = 'processing' AND h.new NOT IN ('processing', 'completed')
           AND NOT EXISTS (SELECT 1 FROM fanout.attempt a
                            WHERE a.job_id = h.job_id AND a.attempt = h.old_attempt)""",
    "a new generation whenever a closed job opens, and only then": f"""
        SELECT job_id, format('%s -> %s, generation %s -> %s', old, new, old_generation, generation)
          FROM public.test_history
         WHERE old <> 'born'
           AND generation <> old_generation + (old IN {_TERMINAL} AND new IN {_OPEN})::int""",
}
AT_REST: Final = {
    "nothing is left open": f"""
        SELECT id, format('%s %s, verdict %s', kind, status, verdict) FROM fanout.job
         WHERE status IN {_OPEN}""",
}


class History:
    """Every move of every job, written by a trigger into `test_history`."""

    SQL = """
        CREATE TABLE public.test_history (
            seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id bigint, old text, new text,
            claimed boolean, old_attempt integer, attempt integer, old_generation integer,
            generation integer);
        CREATE INDEX ON public.test_history (job_id);
        CREATE FUNCTION public.test_history_write() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'INSERT' THEN
                INSERT INTO public.test_history (job_id, old, new, attempt, generation)
                VALUES (NEW.id, 'born', NEW.status, NEW.attempt, NEW.generation);
            ELSIF (NEW.status, NEW.attempt, NEW.generation)
                  IS DISTINCT FROM (OLD.status, OLD.attempt, OLD.generation) THEN
                INSERT INTO public.test_history (job_id, old, new, claimed, old_attempt, attempt,
                                          old_generation, generation)
                VALUES (NEW.id, OLD.status, NEW.status,
                        NEW.status = 'processing' AND OLD.status <> 'processing',
                        OLD.attempt, NEW.attempt, OLD.generation, NEW.generation);
            END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER test_history AFTER INSERT OR UPDATE ON fanout.job
            FOR EACH ROW EXECUTE FUNCTION public.test_history_write();"""

    @classmethod
    async def install(cls, conn: asyncpg.Connection) -> None:
        """Begin to write down every move."""
        await conn.execute(cls.SQL)

    @staticmethod
    async def of(conn: asyncpg.Connection, job_id: int) -> list[str]:
        """The states that the job was in, in order."""
        rows = await conn.fetch(
            "SELECT new FROM public.test_history WHERE job_id = $1 AND new <> old ORDER BY seq",
            job_id,
        )
        return [row["new"] for row in rows]


def _all_in_one(queries: dict[str, str]) -> str:
    return "\nUNION ALL\n".join(
        f"(SELECT '{name}', q.* FROM ({query}) AS q (job_id, detail) LIMIT 3)"
        for name, query in queries.items()
    )


async def check(conn: asyncpg.Connection, *, quiet: bool) -> list[Violation]:
    """The invariants that do not hold now, in one snapshot; if `quiet`, nothing may be open either.

    Those of the history are asked only where `History.install` was called.
    """
    kept = await conn.fetchval("SELECT to_regclass('public.test_history') IS NOT NULL")
    asked = ALWAYS | (OF_HISTORY if kept else {}) | (AT_REST if quiet else {})
    # One statement is one snapshot; a transaction would have to be REPEATABLE READ for it.
    rows = await conn.fetch(_all_in_one(asked))
    return [Violation(*row) for row in rows]
