-- Doomed jobs whose children are still being ended, the deepest first. $1 limit, $2 ids above this one.
SELECT id, depth FROM fanout.job WHERE status = 'waiting' AND verdict IS NOT NULL AND id > $2 ORDER BY id LIMIT $1
