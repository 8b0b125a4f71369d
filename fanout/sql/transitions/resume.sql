-- pending | processing | waiting stay what they are: a paused root goes on. Then resume_chunk for all that is below it.
-- It joins the queue anew, and the time that it was paused is not held against it as time without a sign of life.
-- $1 id.   No row: it is not paused, or has closed, or is being ended.
UPDATE fanout.job
   SET paused = false, updated_at = clock_timestamp(),
       run_at = CASE WHEN status = 'pending' THEN greatest(run_at, clock_timestamp()) ELSE run_at END
 WHERE id = $1 AND parent_id IS NULL AND finished_at IS NULL AND verdict IS NULL AND paused
RETURNING id, kind
