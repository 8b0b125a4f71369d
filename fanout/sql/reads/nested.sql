-- Open children of a job that are batches themselves. $1 parent.
SELECT id FROM fanout.job WHERE parent_id = $1 AND status = 'processing' AND total > 0
 UNION ALL
SELECT id FROM fanout.job WHERE parent_id = $1 AND status IN ('pending', 'waiting') AND total > 0
 ORDER BY id
