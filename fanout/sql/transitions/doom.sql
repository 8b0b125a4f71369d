-- pending | processing | waiting -> cancelled | failed, or waiting with that verdict while children are open: a cancel
-- ($2 'cancelled') or the end of a batch that cannot succeed ('failed'). Then doom_chunk until nothing is left.
-- $1 id, $2 verdict, $3 reason.   No row: it has closed, or is doomed, already.
WITH lc AS MATERIALIZED (
    SELECT id, attempt, claimed_at, claim_token FROM fanout.job
     WHERE id = $1 AND status IN ('pending', 'processing', 'waiting') AND verdict IS NULL FOR NO KEY UPDATE),
c AS (
    UPDATE fanout.job c
       SET verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN $2 END, reason = $3,
           claim_token = NULL, lease_expires_at = NULL, updated_at = clock_timestamp(),
           status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE $2 END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END
      FROM lc WHERE c.id = lc.id
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums, c.told_sums),
kept AS (
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT id, attempt, claimed_at, claim_token, 'cancelled', $3 FROM lc WHERE claim_token IS NOT NULL ON CONFLICT DO NOTHING),
-- include tail
