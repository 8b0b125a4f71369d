-- Open batches that a sweep counts, with limits of which only it can say whether they are reached. $1 limit, $2 ids above
-- this one. In two parts, for each has an index.
SELECT id FROM (
    SELECT id FROM fanout.job
     WHERE status = 'waiting' AND closing = 'aggregate' AND verdict IS NULL AND id > $2
       AND (fail_after IS NOT NULL OR fail_after_percent IS NOT NULL OR budget IS NOT NULL)
     UNION ALL
    SELECT id FROM fanout.job
     WHERE status = 'processing' AND closing = 'aggregate' AND total > 0 AND id > $2
       AND (fail_after IS NOT NULL OR budget IS NOT NULL)) a
 ORDER BY id LIMIT $1
