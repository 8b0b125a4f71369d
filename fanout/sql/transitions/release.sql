-- processing -> pending at shutdown: costs no retry and is no death.
-- $1 ids (ascending), $2 attempts, $3 claim token.   An id without a row: a lost claim.
WITH i AS (SELECT * FROM unnest($1::bigint[], $2::int[]) AS i (id, attempt) ORDER BY id),
lc AS MATERIALIZED (
    SELECT i.id
      FROM i CROSS JOIN LATERAL (
           SELECT 1 FROM fanout.job c
            WHERE c.id = i.id AND c.attempt = i.attempt AND c.claim_token = $3 FOR NO KEY UPDATE OF c) l)
UPDATE fanout.job c
   SET status = 'pending', claim_token = NULL, lease_expires_at = NULL, run_at = clock_timestamp()
  FROM lc WHERE lc.id = c.id
RETURNING c.id
