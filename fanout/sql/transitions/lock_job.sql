-- Changes nothing: takes the row's lock, so that the NEXT statement of this transaction decides on what is committed.
-- $1 id.   Waits for the lock.
SELECT parent_id, status, finished_at IS NOT NULL AS closed, closing, pruned_at IS NOT NULL AS pruned FROM fanout.job WHERE id = $1 FOR NO KEY UPDATE
