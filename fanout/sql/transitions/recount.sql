-- Mends the counters and sums of an open job from its children, closes one that turns out to be complete, and ends one
-- that has failed by its limits. For a job whose children leave its row alone (closing = 'aggregate') this is how they are
-- counted.
-- $1 id.   MUST be the second statement of the transaction that took lock_job: its snapshot then has every committed
-- finish; in one statement it would overwrite what committed while it waited. No row: the counters were right.
WITH j AS (SELECT * FROM fanout.job WHERE id = $1 AND finished_at IS NULL),
t AS (
    SELECT count(*)::int AS total,
           count(*) FILTER (WHERE status = 'completed')::int AS completed,
           count(*) FILTER (WHERE status = 'failed')::int AS failed,
           count(*) FILTER (WHERE status = 'cancelled')::int AS cancelled,
           max(finished_at) AS last_end
      FROM fanout.job WHERE parent_id = $1),
below AS (   -- of a child that is open again, what it had added when it was counted
    SELECT jsonb_object_agg(e.name, e.amount) AS told
      FROM (SELECT e.key AS name, trim_scale(sum(e.value::numeric)) AS amount
              FROM fanout.job c
             CROSS JOIN LATERAL jsonb_each_text(CASE WHEN c.finished_at IS NULL THEN c.told_sums ELSE c.sums END) AS e
             WHERE c.parent_id = $1 AND c.sums IS NOT NULL GROUP BY e.key) e),
now AS MATERIALIZED (
    SELECT t.*, x.sums, t.completed + t.failed + t.cancelled >= t.total AS complete,
           CASE WHEN j.verdict IS NULL AND t.total > 0
                THEN fanout.batch_failure(t.failed, t.total, j.status = 'waiting', j.fail_after, j.fail_after_percent, x.sums, j.budget)
           END AS failure
      FROM j CROSS JOIN t CROSS JOIN below
     CROSS JOIN LATERAL (SELECT CASE WHEN t.total = 0 THEN j.sums WHEN below.told IS NULL THEN j.own_sums
                                     ELSE fanout.add_sums(j.own_sums, below.told) END AS sums) x),
c AS (
    UPDATE fanout.job c
       SET total = now.total, completed = now.completed, failed = now.failed, cancelled = now.cancelled, sums = now.sums,
           updated_at = CASE WHEN c.closing IS NULL OR now.failure IS NOT NULL THEN clock_timestamp()
                             ELSE greatest(c.updated_at, now.last_end) END,
           status = CASE WHEN (c.status = 'waiting' OR now.failure IS NOT NULL) AND now.complete
                         THEN COALESCE(c.verdict, CASE WHEN now.failure IS NOT NULL THEN 'failed' END, 'completed')
                         WHEN now.failure IS NOT NULL THEN 'waiting' ELSE c.status END,
           finished_at = CASE WHEN (c.status = 'waiting' OR now.failure IS NOT NULL) AND now.complete THEN clock_timestamp() END,
           verdict = CASE WHEN now.failure IS NOT NULL AND NOT now.complete THEN 'failed' ELSE c.verdict END,
           reason = COALESCE(now.failure, c.reason),
           claim_token = CASE WHEN now.failure IS NULL THEN c.claim_token END,
           lease_expires_at = CASE WHEN now.failure IS NULL THEN c.lease_expires_at END
      FROM now
     WHERE c.id = $1 AND c.finished_at IS NULL
       AND ((c.total, c.completed, c.failed, c.cancelled) IS DISTINCT FROM (now.total, now.completed, now.failed, now.cancelled)
            OR c.sums IS DISTINCT FROM now.sums OR now.failure IS NOT NULL)
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums, c.told_sums),
kept AS (   -- the manager was still dispatching
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT j.id, j.attempt, j.claimed_at, j.claim_token, 'cancelled', now.failure
      FROM j CROSS JOIN now WHERE now.failure IS NOT NULL AND j.claim_token IS NOT NULL ON CONFLICT DO NOTHING),
-- include tail
