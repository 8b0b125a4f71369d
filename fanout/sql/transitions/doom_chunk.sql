-- pending | processing | waiting -> cancelled, some open children of a doomed job; counted, and the last one closes it.
-- A child with open children of its own becomes doomed itself.
-- $1 the doomed job, $2 limit.   No row: it is not doomed, none is open, or those
-- that are open are locked right now.
WITH doomed AS MATERIALIZED (   -- a verdict is never taken back, so this needs no lock
    SELECT id FROM fanout.job WHERE id = $1 AND status = 'waiting' AND verdict IS NOT NULL),
running AS MATERIALIZED (
    SELECT id, attempt, claimed_at, claim_token FROM fanout.job
     WHERE parent_id = (SELECT id FROM doomed) AND status = 'processing' ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED),
idle AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = (SELECT id FROM doomed) AND status IN ('pending', 'waiting') AND verdict IS NULL
     ORDER BY id LIMIT $2 - (SELECT count(*) FROM running) FOR NO KEY UPDATE SKIP LOCKED),
pick AS MATERIALIZED (SELECT id FROM running UNION ALL SELECT id FROM idle),
c AS (
    UPDATE fanout.job c
       SET verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'cancelled' END,
           reason = 'its batch ended', claim_token = NULL, lease_expires_at = NULL, updated_at = clock_timestamp(),
           status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE 'cancelled' END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END
      FROM pick WHERE c.id = pick.id
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums, c.told_sums),
kept AS (
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT id, attempt, claimed_at, claim_token, 'cancelled', 'its batch ended' FROM running ON CONFLICT DO NOTHING),
-- include tail
