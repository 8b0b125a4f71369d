-- processing -> completed | failed, and, for a manager whose children are open, -> waiting: sealing is the same statement.
-- $1 ids (ascending, all of ONE depth), $2 attempts, $3 claim token, $4 results, $5 errors (NULL: it completed), $6 error
-- types; the last three may be empty for all NULL.   An id that is not among 'moved' is a lost claim.
-- No "status = 'processing'" here: it implies the partial index, which statistics often think empty.
WITH i AS (
    SELECT id, attempt, result, error, error_type, CASE WHEN error IS NULL THEN 'completed' ELSE 'failed' END AS outcome
      FROM unnest($1::bigint[], $2::int[], $4::text[], $5::text[], $6::text[]) AS i (id, attempt, result, error, error_type)
     ORDER BY id),
lc AS MATERIALIZED (
    SELECT i.id, i.outcome, i.result, i.error, i.error_type
      FROM i CROSS JOIN LATERAL (   -- a locking subquery is not pulled up: one primary-key look-up a row, in id order
           SELECT 1 FROM fanout.job c
            WHERE c.id = i.id AND c.attempt = i.attempt AND c.claim_token = $3 FOR NO KEY UPDATE OF c) l),
c AS (
    UPDATE fanout.job c
       SET status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE lc.outcome END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END,
           verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total AND lc.outcome = 'failed' THEN 'failed' END,
           reason = CASE WHEN lc.outcome = 'failed' AND c.total > 0 THEN lc.error END,
           failures = c.failures + (lc.outcome = 'failed')::int,
           claim_token = NULL, lease_expires_at = NULL, ended_by = $3, updated_at = clock_timestamp(),
           result = lc.result::json, error = lc.error, error_type = lc.error_type
      FROM lc WHERE lc.id = c.id
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.priority,
           c.total, c.completed, c.failed, c.cancelled),
-- include tail
