-- pending -> pending, some paused children of a job below a root that is not paused: they can be claimed again. They join
-- the queue anew, in the order of their ids: a claim's floor would hide an old run_at, and the give-up clock starts there.
-- $1 root, $2 the parent, $3 ids above this one only, $4 limit.   MUST be the second statement of the transaction that took
-- lock_job on the root, as pause_chunk.
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE parent_id = $2 AND status = 'pending' AND paused AND id > $3
       AND NOT (SELECT r.paused FROM fanout.job r WHERE r.id = $1)
     ORDER BY id LIMIT $4 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE fanout.job c SET paused = false, run_at = greatest(c.run_at, statement_timestamp()) FROM pick WHERE c.id = pick.id
RETURNING c.id, c.kind
