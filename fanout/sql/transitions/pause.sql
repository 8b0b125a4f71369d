-- pending | processing | waiting stay what they are: a root is paused, which is the truth for all that is below it. Then
-- pause_chunk, until no child of it can be claimed. What runs goes on.
-- $1 id.   No row: it is paused already, no root, has closed or is being ended.
UPDATE fanout.job SET paused = true
 WHERE id = $1 AND parent_id IS NULL AND finished_at IS NULL AND verdict IS NULL AND NOT paused
RETURNING id
