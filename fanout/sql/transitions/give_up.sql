-- waiting -> waiting with the verdict 'failed': a sealed batch without a sign of life. The conditions of the scan
-- (reads/give_up_candidates.sql) are judged again, for the transaction holds the row's lock (lock_job) by now.
-- $1 id, $2 how long without life, $3 reason.   No row: it lives, or has an excuse.
WITH c AS (
    UPDATE fanout.job c SET verdict = 'failed', reason = $3, updated_at = clock_timestamp()
     WHERE c.id = $1 AND c.status = 'waiting' AND c.verdict IS NULL
       AND c.updated_at < statement_timestamp() - $2::interval
-- include excuse
 RETURNING c.id)
SELECT id FROM c
