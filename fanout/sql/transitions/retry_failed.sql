-- failed -> pending, the failed leaves of a batch, as a new generation. First statement of a transaction that goes on
-- with lock_job and reopen, upwards; child before parent.
-- $1 the batch, $2 only these document keys (NULL: all), $3 only this error (NULL: any).   No row: nothing to retry, ROLLBACK.
WITH lc AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = $1 AND status = 'failed' AND total = 0
       AND ($2::text[] IS NULL OR document_key = ANY ($2)) AND ($3::text IS NULL OR error = $3)
     ORDER BY id FOR NO KEY UPDATE)
UPDATE fanout.job c
   SET status = 'pending', verdict = NULL, finished_at = NULL, ended_by = NULL, failures = 0, deaths = 0,
       error = NULL, error_type = NULL, reason = NULL, run_at = clock_timestamp(), generation = c.generation + 1,
       told_sums = c.sums, paused = (SELECT r.paused AND r.finished_at IS NULL FROM fanout.job r WHERE r.id = c.root_id),
       deadline = CASE WHEN c.deadline > clock_timestamp() THEN c.deadline END
  FROM lc WHERE c.id = lc.id AND c.status = 'failed'
RETURNING c.id
