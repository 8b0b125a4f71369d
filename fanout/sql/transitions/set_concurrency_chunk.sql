-- Any open state stays what it is: some open children of a batch with a concurrency get a partition, so that they stand in
-- the index of claims that are limited; with $2 = 0 all that run, too, for they may come back to be claimed.
-- $1 the batch, $2 ids above this one only, $3 limit.   MUST be the second statement of the transaction that took lock_job
-- on the batch.
WITH batch AS MATERIALIZED (SELECT id FROM fanout.job WHERE id = $1 AND concurrency IS NOT NULL),
running AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = (SELECT id FROM batch) AND status = 'processing' AND $2 = 0 AND partition IS NULL
     ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
idle AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = (SELECT id FROM batch) AND status IN ('pending', 'waiting') AND id > $2 AND partition IS NULL
     ORDER BY id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE fanout.job c SET partition = '#' || c.parent_id
  FROM (SELECT id FROM running UNION ALL SELECT id FROM idle) AS pick WHERE c.id = pick.id
RETURNING c.id, c.kind, c.status <> 'processing' AS idle
