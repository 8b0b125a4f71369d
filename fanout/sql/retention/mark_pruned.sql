-- A closed root job is on its way out: from here on nothing opens it again. Locked is left alone: somebody is opening it.
-- $1 id, $2 retention.   No row: it is open, or younger, or a follow-up of it is open, or it is locked.
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE id = $1 AND parent_id IS NULL AND finished_at < statement_timestamp() - $2::interval
       FOR NO KEY UPDATE SKIP LOCKED)
UPDATE fanout.job j SET pruned_at = COALESCE(j.pruned_at, clock_timestamp())
  FROM pick
 WHERE j.id = pick.id AND NOT EXISTS (SELECT 1 FROM fanout.job f WHERE f.follows_id = j.id AND f.finished_at IS NULL)
RETURNING j.id
