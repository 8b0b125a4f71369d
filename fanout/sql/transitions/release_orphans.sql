-- processing -> pending: claims of this worker that it does not know of, because the answer to a claim was lost. They
-- never ran, so they cost no retry and are no death.
-- $1 claim token, $2 ids that the worker holds.   Returns the ids that went back.
WITH lc AS MATERIALIZED (
    SELECT id, attempt, claimed_at FROM fanout.job
     WHERE status = 'processing' AND claim_token = $1 AND id <> ALL ($2::bigint[])
     ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
kept AS (
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome)
    SELECT id, attempt, claimed_at, $1, 'released' FROM lc ON CONFLICT DO NOTHING)
UPDATE fanout.job c
   SET status = 'pending', claim_token = NULL, lease_expires_at = NULL,
       paused = COALESCE((SELECT r.paused FROM fanout.job r WHERE r.id = c.root_id), c.paused)
  FROM lc WHERE c.id = lc.id
RETURNING c.id
