-- What is true of a job now, and why nothing moves, from one snapshot. $1 id.
-- Exact: counters, processing. Bounded: the reasons look at no more than 1,000 pending children.
WITH j AS (SELECT * FROM fanout.job WHERE id = $1),
sample AS MATERIALIZED (
    SELECT o.kind, o.run_at, o.priority, o.id, o.deaths, o.partition
      FROM j JOIN fanout.job o ON o.parent_id = j.id AND o.status IN ('pending', 'waiting') AND o.status = 'pending' LIMIT 1000),
own AS (   -- a job without children waits for the same things
    SELECT kind, run_at, priority, id, deaths, partition FROM sample
     UNION ALL
    SELECT kind, run_at, priority, id, deaths, partition FROM j WHERE status = 'pending'),
full_limit AS (   -- what stands in the way of those that are due, and of those that run and wait for a slot
    SELECT s.limit_name AS name, NULL AS partition, l.concurrency AS most,
           (SELECT count(*) FROM fanout.slot u WHERE u.limit_name = s.limit_name AND u.granted_at IS NOT NULL) AS used,
           greatest(extract(epoch FROM l.requests_at - statement_timestamp())
                      + CASE WHEN l.requests_per_minute IS NOT NULL
                             THEN least(0, 60 / l.requests_per_minute - COALESCE(l.burst, 1)) END,
                    extract(epoch FROM l.weight_at - statement_timestamp())
                      - CASE WHEN l.weight_per_minute IS NOT NULL THEN COALESCE(l.burst, 1) END)::float8 AS next_seconds
      FROM (SELECT DISTINCT s.limit_name
              FROM fanout.slot s JOIN fanout.job o ON o.id = s.job_id AND o.attempt = s.attempt AND o.claim_token = s.claim_token
             WHERE s.granted_at IS NULL AND (o.id = $1 OR o.parent_id = $1)) AS s
      JOIN fanout.limits l ON l.name = s.limit_name
     UNION ALL
    SELECT k.kind, NULL, l.concurrency, u.n, NULL
      FROM (SELECT DISTINCT kind FROM own WHERE run_at <= statement_timestamp()) AS k
      JOIN fanout.limits l ON l.kind = k.kind AND l.concurrency IS NOT NULL
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM fanout.job r WHERE r.status = 'processing' AND r.kind = k.kind) AS u
     WHERE u.n >= l.concurrency
     UNION ALL
    SELECT k.kind, COALESCE(k.partition, ''), l.per_partition, u.n, NULL
      FROM (SELECT DISTINCT kind, partition FROM own WHERE run_at <= statement_timestamp()) AS k
      JOIN fanout.limits l ON l.kind = k.kind AND l.per_partition IS NOT NULL
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM fanout.job r
                          WHERE r.status = 'processing' AND r.kind = k.kind AND r.partition IS NOT DISTINCT FROM k.partition) AS u
     WHERE u.n >= l.per_partition
     UNION ALL
    SELECT NULL, NULL, j.concurrency, u.n, NULL
      FROM j CROSS JOIN LATERAL (SELECT count(*) AS n FROM fanout.job r WHERE r.status = 'processing' AND r.parent_id = j.id) AS u
     WHERE u.n >= j.concurrency AND EXISTS (SELECT 1 FROM own WHERE run_at <= statement_timestamp() AND id <> j.id)),
first_due AS (
    SELECT kind, priority, run_at, id FROM own WHERE run_at <= statement_timestamp() ORDER BY priority, run_at, id LIMIT 1)
SELECT j.id, j.kind, j.parent_id, j.status, j.verdict, j.reason, j.error, j.generation, j.total, t.completed, t.failed, t.cancelled,
       t.sums::text AS sums,
       j.created_at, j.claimed_at, j.updated_at, j.finished_at, statement_timestamp() AS now,
       t.mark_at, t.mark_ended, t.last_mark_at, t.last_mark_ended,
       (SELECT r.paused FROM fanout.job r WHERE r.id = COALESCE(j.root_id, j.id)) AS paused,
       (SELECT count(*)::int FROM fanout.job p WHERE p.status = 'processing' AND p.parent_id = j.id) AS processing,
       (SELECT count(*)::int FROM fanout.job p WHERE p.status = 'waiting' AND p.parent_id = j.id) AS nested,
       (SELECT count(*)::int FROM own) AS sampled,
       (SELECT count(*)::int FROM own WHERE run_at > statement_timestamp()) AS later,
       (SELECT min(run_at) FROM own WHERE run_at > statement_timestamp()) AS next_run_at,
       (SELECT count(*)::int FROM own WHERE deaths > 0) AS suspects,
       (SELECT json_agg(f ORDER BY f.name, f.partition)::text FROM full_limit f) AS limits,
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
-- include counted
