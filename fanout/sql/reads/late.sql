-- Jobs whose deadline has passed. $1 limit, $2 ids above this one. Those that have one are few: never the whole table by id.
WITH late AS MATERIALIZED (
    SELECT id FROM fanout.job WHERE deadline <= statement_timestamp() AND finished_at IS NULL AND verdict IS NULL)
SELECT id FROM late WHERE id > $2 ORDER BY id LIMIT $1
