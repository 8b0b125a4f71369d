-- pending -> pending, some children of a job below a paused root: they stand in no index of claims from then on. What the
-- batches below it dispatch, and what is put back, asks the root itself.
-- $1 root, $2 the parent, $3 ids above this one only, $4 limit.   MUST be the second statement of the transaction that took
-- lock_job on the root: then nobody pauses or resumes meanwhile. Children that are locked are being moved by somebody:
-- nothing here waits for one, so holding the root first is safe.
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = $2 AND status IN ('pending', 'waiting') AND status = 'pending' AND NOT paused AND id > $3
       AND (SELECT r.paused AND r.verdict IS NULL FROM fanout.job r WHERE r.id = $1)
     ORDER BY id LIMIT $4 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE fanout.job c SET paused = true FROM pick WHERE c.id = pick.id
RETURNING c.id, c.kind
