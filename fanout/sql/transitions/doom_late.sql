-- pending | processing | waiting -> failed, or waiting with that verdict: a job whose deadline has passed, also while it is
-- paused. Then doom_chunk until nothing is left. Waits for the row; a finish that came first is what it then finds.
-- $1 id.   No row: it has time left, has closed or is being ended.
WITH c AS (
    UPDATE fanout.job c
       SET verdict = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'failed' END,
           reason = format('its deadline, %s UTC, has passed', to_char(c.deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')),
           claim_token = NULL, lease_expires_at = NULL, updated_at = clock_timestamp(),
           status = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN 'waiting' ELSE 'failed' END,
           finished_at = CASE WHEN c.completed + c.failed + c.cancelled < c.total THEN NULL ELSE clock_timestamp() END
     WHERE c.id = $1 AND c.deadline <= statement_timestamp()
       AND c.status IN ('pending', 'processing', 'waiting') AND c.verdict IS NULL
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.webhook, c.priority,
           c.total, c.completed, c.failed, c.cancelled, c.sums),
-- include tail
