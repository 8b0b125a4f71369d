-- Open batches whose children leave their row alone: a sweep counts them. $1 limit, $2 ids above this one. In two parts, for
-- each has an index.
SELECT id FROM (
    SELECT id FROM fanout.job WHERE status = 'waiting' AND closing = 'aggregate' AND id > $2
     UNION ALL
    SELECT id FROM fanout.job WHERE status = 'processing' AND closing = 'aggregate' AND total > 0 AND id > $2) a
 ORDER BY id LIMIT $1
