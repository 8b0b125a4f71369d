-- pending -> processing: due children of the batches that a process runs at once, without the queue.
-- $1 parents, $2 kinds, $3 limit, $4 claim token, $5 lease, $6 those that must run alone, or the others?
-- $7 are kinds among them under a limit? Then one at a time, and so are children of a batch with a concurrency.
-- No row: nothing is due, or nothing has room under its limits.
-- Run it in a transaction that holds the locks of `lock_limits`.
WITH pick AS MATERIALIZED (
    SELECT due.id
      FROM unnest($1::bigint[]) AS b (id)
     CROSS JOIN LATERAL (
           SELECT j.id FROM fanout.job j
            WHERE j.parent_id = b.id AND j.status = 'pending' AND (j.deaths > 0) = $6 AND NOT j.paused AND j.kind = ANY ($2::text[])
              AND j.run_at <= statement_timestamp()
-- include room
            ORDER BY j.id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED) due
     LIMIT CASE WHEN $7 OR EXISTS (SELECT 1 FROM fanout.job p WHERE p.id = ANY ($1::bigint[]) AND p.concurrency IS NOT NULL)
                THEN 1 ELSE $3 END)
UPDATE fanout.job j
   SET status = 'processing', attempt = j.attempt + 1, claim_token = $4, claimed_at = clock_timestamp(),
       lease_expires_at = clock_timestamp() + $5::interval
  FROM pick
 WHERE j.id = pick.id
RETURNING j.id, j.attempt, j.kind, j.depth, j.parent_id, j.root_id, j.document_key, j.deaths, j.failures, j.max_retries,
          j.total, j.priority, j.run_at, j.payload::text AS payload, j.checkpoint::text AS checkpoint
