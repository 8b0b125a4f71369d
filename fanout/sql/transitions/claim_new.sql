-- pending -> processing: the job that this transaction made. Nobody else can see it, so it is dispatched and sealed before
-- anybody can claim it, and whoever sees it sees the whole batch.
-- $1 id, $2 claim token, $3 lease.
UPDATE fanout.job j
   SET status = 'processing', attempt = j.attempt + 1, claim_token = $2, claimed_at = clock_timestamp(),
       lease_expires_at = clock_timestamp() + $3::interval
 WHERE j.id = $1 AND j.status = 'pending' AND j.attempt = 0 AND j.parent_id IS NULL
RETURNING j.id, j.attempt, j.kind, j.depth, j.parent_id, j.root_id, j.document_key, j.deaths, j.failures, j.max_retries,
          j.total, j.priority, j.run_at, j.payload::text AS payload, j.checkpoint::text AS checkpoint
