-- Mends the counters of an open job from its children, and closes one that turns out to be complete.
-- $1 id.   MUST be the second statement of the transaction that took lock_job: its snapshot then has every committed
-- finish; in one statement it would overwrite what committed while it waited. No row: the counters were right.
WITH t AS (
    SELECT count(*)::int AS total,
           count(*) FILTER (WHERE status = 'completed')::int AS completed,
           count(*) FILTER (WHERE status = 'failed')::int AS failed,
           count(*) FILTER (WHERE status = 'cancelled')::int AS cancelled
      FROM fanout.job WHERE parent_id = $1),
c AS (
    UPDATE fanout.job c
       SET total = t.total, completed = t.completed, failed = t.failed, cancelled = t.cancelled, updated_at = clock_timestamp(),
           status = CASE WHEN c.status = 'waiting' AND t.completed + t.failed + t.cancelled >= t.total
                         THEN COALESCE(c.verdict, 'completed') ELSE c.status END,
           finished_at = CASE WHEN c.status = 'waiting' AND t.completed + t.failed + t.cancelled >= t.total
                              THEN clock_timestamp() END
      FROM t
     WHERE c.id = $1 AND c.finished_at IS NULL
       AND (c.total, c.completed, c.failed, c.cancelled) IS DISTINCT FROM (t.total, t.completed, t.failed, t.cancelled)
 RETURNING c.id, c.parent_id, c.depth, c.kind, c.status, c.finished_at, c.generation, c.on_closed, c.priority,
           c.total, c.completed, c.failed, c.cancelled),
-- include tail
