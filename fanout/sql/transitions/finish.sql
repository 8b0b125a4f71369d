-- processing -> completed | failed, and, for a manager whose children are open, -> waiting: sealing is the same statement,
-- and judges what can only be judged once the total stands.
-- $1 ids (ascending, all of ONE depth), $2 attempts, $3 claim token, $4 results, $5 errors (NULL: it completed), $6 error
-- types, $7 what handlers added up (JSON); the last four may be empty for all NULL.   An id that is not among 'moved' is a
-- lost claim.
-- No "status = 'processing'" here: it implies the partial index, which statistics often think empty.
WITH i AS (
    SELECT id, attempt, result, error, error_type, added, CASE WHEN error IS NULL THEN 'completed' ELSE 'failed' END AS outcome
      FROM unnest($1::bigint[], $2::int[], $4::text[], $5::text[], $6::text[], $7::text[])
           AS i (id, attempt, result, error, error_type, added)
     ORDER BY id),
lc AS MATERIALIZED (
    SELECT i.id, i.attempt, i.outcome, i.result, i.error, i.error_type, i.added, l.claimed_at, l.total, l.failure
      FROM i CROSS JOIN LATERAL (   -- a locking subquery is not pulled up: one primary-key look-up a row, in id order
           SELECT c.claimed_at, c.total,
                  CASE WHEN c.total > 0 AND i.error IS NULL AND c.verdict IS NULL
                        AND (c.fail_after IS NOT NULL OR c.fail_after_percent IS NOT NULL OR c.budget IS NOT NULL)
                       THEN fanout.batch_failure(c.failed, c.total, true, c.fail_after, c.fail_after_percent,
                                                 fanout.add_sums(c.sums, i.added::jsonb), c.budget) END AS failure
             FROM fanout.job c
            WHERE c.id = i.id AND c.attempt = i.attempt AND c.claim_token = $3 FOR NO KEY UPDATE OF c) l),
c AS (
    UPDATE fanout.job c
       SET status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting'
                         WHEN lc.failure IS NOT NULL THEN 'failed' ELSE lc.outcome END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END,
           verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total AND (lc.outcome = 'failed' OR lc.failure IS NOT NULL)
                          THEN 'failed' END,
           reason = CASE WHEN lc.outcome = 'failed' AND c.total > 0 THEN lc.error ELSE lc.failure END,
           failures = c.failures + (lc.outcome = 'failed')::int,
           claim_token = NULL, lease_expires_at = NULL, ended_by = $3, updated_at = clock_timestamp(),
           result = lc.result::json, error = lc.error, error_type = lc.error_type,
           sums = CASE WHEN lc.added IS NULL THEN c.sums ELSE fanout.add_sums(c.sums, lc.added::jsonb) END,
           own_sums = CASE WHEN lc.added IS NULL OR c.total = 0 THEN c.own_sums
                           ELSE fanout.add_sums(c.own_sums, lc.added::jsonb) END
      FROM lc WHERE lc.id = c.id
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums, c.told_sums),
kept AS (   -- a leaf that completed has its attempt in its own row
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error_type, error)
    SELECT id, attempt, claimed_at, $3, outcome, error_type, error FROM lc WHERE outcome = 'failed' OR total > 0
        ON CONFLICT DO NOTHING),
-- include tail
