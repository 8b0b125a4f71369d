-- The counters of several jobs, for people who watch: like progress, without the reasons. $1 ids.
SELECT j.id, j.kind, j.parent_id, j.status, j.verdict, j.reason, j.error, j.generation, j.total, t.completed, t.failed, t.cancelled,
       t.sums::text AS sums,
       j.created_at, j.claimed_at, j.updated_at, j.finished_at, statement_timestamp() AS now,
       t.mark_at, t.mark_ended, t.last_mark_at, t.last_mark_ended,
       (SELECT r.paused FROM fanout.job r WHERE r.id = COALESCE(j.root_id, j.id)) AS paused,
       (SELECT count(*)::int FROM fanout.job p WHERE p.status = 'processing' AND p.parent_id = j.id) AS processing,
       (SELECT count(*)::int FROM fanout.job p WHERE p.status = 'waiting' AND p.parent_id = j.id) AS nested,
       0 AS sampled, 0 AS later, NULL::timestamptz AS next_run_at, 0 AS suspects, NULL::text AS limits, NULL::text[] AS unserved, 0 AS ahead
  FROM fanout.job j
-- include counted
 WHERE j.id = ANY ($1::bigint[])
