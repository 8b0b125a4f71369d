-- Jobs whose deadline has passed. $1 limit, $2 ids above this one.
SELECT id FROM fanout.job
 WHERE deadline <= statement_timestamp() AND finished_at IS NULL AND verdict IS NULL AND id > $2
 ORDER BY id LIMIT $1
