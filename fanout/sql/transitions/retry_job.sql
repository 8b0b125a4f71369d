-- failed -> pending, a job of its own without children. A child is retried through its batch (retry_failed).
-- $1 id.   No row: it is not a failed single job.
UPDATE fanout.job c
   SET status = 'pending', verdict = NULL, finished_at = NULL, ended_by = NULL, failures = 0, deaths = 0,
       error = NULL, error_type = NULL, reason = NULL, run_at = clock_timestamp(), generation = c.generation + 1,
       paused = false, deadline = CASE WHEN c.deadline > clock_timestamp() THEN c.deadline END
 WHERE c.id = $1 AND c.status = 'failed' AND c.total = 0 AND c.parent_id IS NULL AND c.pruned_at IS NULL
RETURNING c.id
