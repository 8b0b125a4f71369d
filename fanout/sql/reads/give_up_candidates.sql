-- Sealed batches without a sign of life and without an excuse. $1 limit, $2 how long without life, $3 ids above this one.
SELECT c.id FROM fanout.job c
 WHERE c.status = 'waiting' AND c.verdict IS NULL AND c.id > $3
   AND c.updated_at < statement_timestamp() - $2::interval
-- include excuse
 ORDER BY c.id LIMIT $1
