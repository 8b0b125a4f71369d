-- Any open state stays what it is: some open children of a job take their root's priority; with $3 = 0 all that run, too,
-- for they may come back to be claimed.
-- $1 root, $2 the parent, $3 ids above this one only, $4 limit.   MUST be the second statement of the transaction that took
-- lock_job on the root: so of two sessions the later one's priority is what all children end with.
WITH root AS MATERIALIZED (SELECT priority FROM fanout.job WHERE id = $1),
running AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = $2 AND status = 'processing' AND $3 = 0 AND priority <> (SELECT priority FROM root)
     ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
idle AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = $2 AND status IN ('pending', 'waiting') AND id > $3 AND priority <> (SELECT priority FROM root)
     ORDER BY id LIMIT $4 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE fanout.job c SET priority = (SELECT priority FROM root)
  FROM (SELECT id FROM running UNION ALL SELECT id FROM idle) AS pick WHERE c.id = pick.id
RETURNING c.id, c.kind, c.status <> 'processing' AS idle
