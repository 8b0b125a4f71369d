-- What is true of a job now, and why nothing moves, from one snapshot. $1 id.
-- Exact: counters, processing. Bounded: the reasons look at no more than 1,000 pending children.
WITH j AS (SELECT * FROM fanout.job WHERE id = $1),
sample AS MATERIALIZED (
    SELECT o.kind, o.run_at, o.priority, o.id, o.deaths
      FROM j JOIN fanout.job o ON o.parent_id = j.id AND o.status IN ('pending', 'waiting') AND o.status = 'pending' LIMIT 1000),
own AS (   -- a job without children waits for the same things
    SELECT kind, run_at, priority, id, deaths FROM sample
     UNION ALL
    SELECT kind, run_at, priority, id, deaths FROM j WHERE status = 'pending'),
first_due AS (
    SELECT kind, priority, run_at, id FROM own WHERE run_at <= statement_timestamp() ORDER BY priority, run_at, id LIMIT 1)
SELECT j.id, j.kind, j.parent_id, j.status, j.verdict, j.reason, j.error, j.generation, j.total, j.completed, j.failed, j.cancelled,
       j.created_at, j.claimed_at, j.updated_at, j.finished_at, statement_timestamp() AS now,
       j.mark_at, j.mark_ended, j.last_mark_at, j.last_mark_ended,
       (SELECT r.paused FROM fanout.job r WHERE r.id = COALESCE(j.root_id, j.id)) AS paused,
       (SELECT count(*)::int FROM fanout.job p WHERE p.status = 'processing' AND p.parent_id = j.id) AS processing,
       (SELECT count(*)::int FROM fanout.job p WHERE p.status = 'waiting' AND p.parent_id = j.id) AS nested,
       (SELECT count(*)::int FROM own) AS sampled,
       (SELECT count(*)::int FROM own WHERE run_at > statement_timestamp()) AS later,
       (SELECT min(run_at) FROM own WHERE run_at > statement_timestamp()) AS next_run_at,
       (SELECT count(*)::int FROM own WHERE deaths > 0) AS suspects,
       (SELECT array_agg(DISTINCT own.kind) FROM own
         WHERE NOT EXISTS (SELECT 1 FROM fanout.worker w
                            WHERE own.kind = ANY (w.kinds) AND w.last_beat_at > statement_timestamp() - w.lease)) AS unserved,
       (SELECT count(DISTINCT ahead.batch)::int
          FROM first_due f CROSS JOIN LATERAL (
               SELECT COALESCE(a.parent_id, a.id) AS batch FROM fanout.job a
                WHERE a.status = 'pending' AND a.deaths = 0 AND NOT a.paused AND a.partition IS NULL AND a.kind = f.kind AND a.priority <= f.priority
                  AND a.run_at <= statement_timestamp()
                  AND (a.priority, a.run_at, a.id) < (f.priority, f.run_at, f.id)
                ORDER BY a.priority, a.run_at, a.id LIMIT 1000) ahead
         WHERE ahead.batch <> j.id) AS ahead
  FROM j
