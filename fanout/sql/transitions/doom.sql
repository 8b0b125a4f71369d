-- pending | processing | waiting -> cancelled | failed, or waiting with that verdict while children are open: a cancel
-- ($2 'cancelled') or the end of a batch that cannot succeed ('failed'). Then doom_chunk until nothing is left.
-- $1 id, $2 verdict, $3 reason.   No row: it has closed, or is doomed, already.
WITH c AS (
    UPDATE fanout.job c
       SET verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN $2 END, reason = $3,
           claim_token = NULL, lease_expires_at = NULL, updated_at = clock_timestamp(),
           status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE $2 END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END
     WHERE c.id = $1 AND c.status IN ('pending', 'processing', 'waiting') AND c.verdict IS NULL
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.priority,
           c.total, c.completed, c.failed, c.cancelled),
-- include tail
