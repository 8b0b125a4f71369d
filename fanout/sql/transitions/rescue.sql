-- processing -> pending when the lease ran out: a death. One that keeps dying while it runs alone -> failed ("poison"),
-- or waiting with that verdict; counted and closing in the same statement. A child of a paused batch is paused.
-- $1 depth, $2 limit, $3 deaths while alone that end a job, $4 ids above this one only, $5 lease.
-- Nothing within one lease of the server's start: an outage is nobody's death.
WITH lc AS MATERIALIZED (
    SELECT id, attempt, claimed_at, claim_token FROM fanout.job
     WHERE status = 'processing' AND lease_expires_at < statement_timestamp() AND depth = $1 AND id > $4
       AND pg_postmaster_start_time() < statement_timestamp() - $5::interval
     ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED),
c AS (
    UPDATE fanout.job c
       SET deaths = c.deaths + 1, claim_token = NULL, lease_expires_at = NULL,
           run_at = CASE WHEN c.deaths < $3 THEN clock_timestamp() ELSE c.run_at END,
           paused = CASE WHEN c.deaths < $3 THEN COALESCE((SELECT r.paused FROM fanout.job r WHERE r.id = c.root_id), c.paused)
                         ELSE c.paused END,
           verdict = CASE WHEN c.deaths >= $3 AND c.completed + c.failed + c.cancelled < c.total THEN 'failed' ELSE c.verdict END,
           reason = CASE WHEN c.deaths >= $3 AND c.total > 0
                         THEN format('poison: the manager''s worker died each time it ran alone, %s times', $3) ELSE c.reason END,
           error = CASE WHEN c.deaths >= $3
                        THEN format('poison: its worker died each time it ran alone, %s times', $3) ELSE c.error END,
           error_type = CASE WHEN c.deaths >= $3 THEN 'Poison' ELSE c.error_type END,
           status = CASE WHEN c.deaths < $3 THEN 'pending'
                         WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE 'failed' END,
           finished_at = CASE WHEN c.deaths < $3 OR c.completed + c.failed + c.cancelled < c.total THEN NULL
                              ELSE clock_timestamp() END,
           updated_at = clock_timestamp()
      FROM lc WHERE c.id = lc.id
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums, c.told_sums),
kept AS (
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT id, attempt, claimed_at, claim_token, 'lost', 'its lease ran out: the worker died, or could not say that it lived'
      FROM lc ON CONFLICT DO NOTHING),
-- include tail
