-- pending | processing | waiting -> failed, or waiting with that verdict: a job whose deadline has passed, also while it is
-- paused. Then doom_chunk until nothing is left. Waits for the row; a finish that came first is what it then finds.
-- $1 id.   No row: it has time left, has closed or is being ended.
WITH lc AS MATERIALIZED (
    SELECT id, attempt, claimed_at, claim_token,
           format('its deadline, %s UTC, has passed', to_char(deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')) AS why
      FROM fanout.job
     WHERE id = $1 AND deadline <= statement_timestamp() AND status IN ('pending', 'processing', 'waiting') AND verdict IS NULL
       FOR NO KEY UPDATE),
c AS (
    UPDATE fanout.job c
       SET verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'failed' END, reason = lc.why,
           claim_token = NULL, lease_expires_at = NULL, updated_at = clock_timestamp(),
           status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE 'failed' END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END
      FROM lc WHERE c.id = lc.id
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums, c.told_sums),
kept AS (
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT id, attempt, claimed_at, claim_token, 'cancelled', why FROM lc WHERE claim_token IS NOT NULL ON CONFLICT DO NOTHING),
-- include tail
