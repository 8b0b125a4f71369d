-- processing -> pending after a transient error, while the budget lasts; it uses up one retry.
-- $1 ids (ascending), $2 attempts, $3 claim token, $4 delays in seconds, $5 errors, $6 error types.
-- An id without a row: a lost claim, or the budget is used up (the caller then ends it by finish, as failed).
WITH i AS (
    SELECT * FROM unnest($1::bigint[], $2::int[], $4::float8[], $5::text[], $6::text[])
               AS i (id, attempt, delay, error, error_type) ORDER BY id),
lc AS MATERIALIZED (
    SELECT i.id, i.delay, i.error, i.error_type
      FROM i CROSS JOIN LATERAL (
           SELECT 1 FROM fanout.job c
            WHERE c.id = i.id AND c.attempt = i.attempt AND c.claim_token = $3 AND c.failures < c.max_retries
              FOR NO KEY UPDATE OF c) l)
UPDATE fanout.job c
   SET status = 'pending', claim_token = NULL, lease_expires_at = NULL, failures = c.failures + 1,
       run_at = clock_timestamp() + make_interval(secs => lc.delay), error = lc.error, error_type = lc.error_type
  FROM lc WHERE lc.id = c.id
RETURNING c.id
