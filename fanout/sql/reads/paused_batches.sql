-- Paused roots with children. $1 limit, $2 ids above this one.
SELECT id FROM fanout.job
 WHERE paused AND status IN ('processing', 'waiting') AND parent_id IS NULL AND verdict IS NULL AND total > 0 AND id > $2
 UNION ALL
SELECT id FROM fanout.job
 WHERE paused AND status = 'pending' AND parent_id IS NULL AND verdict IS NULL AND total > 0 AND id > $2
 ORDER BY id LIMIT $1
