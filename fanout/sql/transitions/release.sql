-- processing -> pending at shutdown: costs no retry and is no death. A child of a paused batch is paused.
-- $1 ids (ascending), $2 attempts, $3 claim token, $4 what handlers added up (JSON; may be empty for all
-- NULL).   An id without a row: a lost claim.
WITH i AS (SELECT * FROM unnest($1::bigint[], $2::int[], $4::text[]) AS i (id, attempt, added) ORDER BY id),
lc AS MATERIALIZED (
    SELECT i.id, i.attempt, i.added, l.claimed_at
      FROM i CROSS JOIN LATERAL (
           SELECT c.claimed_at FROM fanout.job c
            WHERE c.id = i.id AND c.attempt = i.attempt AND c.claim_token = $3 FOR NO KEY UPDATE OF c) l),
kept AS (
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome)
    SELECT id, attempt, claimed_at, $3, 'released' FROM lc ON CONFLICT DO NOTHING)
UPDATE fanout.job c
   SET status = 'pending', claim_token = NULL, lease_expires_at = NULL, run_at = clock_timestamp(),
       paused = COALESCE((SELECT r.paused FROM fanout.job r WHERE r.id = c.root_id), c.paused),
       sums = CASE WHEN lc.added IS NULL THEN c.sums ELSE fanout.add_sums(c.sums, lc.added::jsonb) END,
       own_sums = CASE WHEN lc.added IS NULL OR c.total = 0 THEN c.own_sums
                       ELSE fanout.add_sums(c.own_sums, lc.added::jsonb) END
  FROM lc WHERE lc.id = c.id
RETURNING c.id
