-- processing -> pending: claims of this worker that it does not know of, because the answer to a claim was lost. They
-- never ran, so they cost no retry and are no death.
-- $1 claim token, $2 ids that the worker holds.   Returns the ids that went back.
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE status = 'processing' AND claim_token = $1 AND id <> ALL ($2::bigint[])
     ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)
UPDATE fanout.job c
   SET status = 'pending', claim_token = NULL, lease_expires_at = NULL
  FROM pick WHERE c.id = pick.id
RETURNING c.id
