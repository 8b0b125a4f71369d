-- pending | processing | waiting stay what they are: another priority for a root, and for what it dispatches from now on.
-- Then set_priority_chunk for what it has dispatched. $1 id, $2 priority.   No row: no root, has closed or is being ended.
UPDATE fanout.job SET priority = $2::smallint
 WHERE id = $1 AND parent_id IS NULL AND finished_at IS NULL AND verdict IS NULL
RETURNING id, kind
