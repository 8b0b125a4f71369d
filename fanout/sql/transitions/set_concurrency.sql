-- pending | processing | waiting stay what they are: how many children of a batch may run at once (NULL: no limit of its
-- own). Then set_concurrency_chunk. $1 id, $2 concurrency.   No row: it has closed, or is being ended.
UPDATE fanout.job SET concurrency = $2::int
 WHERE id = $1 AND finished_at IS NULL AND verdict IS NULL
RETURNING id
