-- pending -> processing, one job that was running when its worker died. The caller runs nothing else until it ends.
-- $1 kinds, $2 claim token, $3 lease.   No row: there is none, or none with room under its limits.
-- Run it in a transaction that holds the locks of `lock_limits`.
WITH pick AS MATERIALIZED (
    SELECT due.id
      FROM unnest($1::text[]) AS w (kind)
     CROSS JOIN LATERAL (
           SELECT j.id FROM fanout.job j
            WHERE j.status = 'pending' AND j.deaths > 0 AND NOT j.paused AND j.kind = w.kind AND j.run_at <= statement_timestamp()
-- include room
            ORDER BY j.run_at, j.id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) due
     LIMIT 1)
UPDATE fanout.job j
   SET status = 'processing', attempt = j.attempt + 1, claim_token = $2, claimed_at = clock_timestamp(),
       lease_expires_at = clock_timestamp() + $3::interval
  FROM pick
 WHERE j.id = pick.id
RETURNING j.id, j.attempt, j.kind, j.depth, j.parent_id, j.root_id, j.document_key, j.deaths, j.failures, j.max_retries,
          j.total, j.priority, j.run_at, j.payload::text AS payload, j.checkpoint::text AS checkpoint
