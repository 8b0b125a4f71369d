-- completed -> waiting, or an open job stays what it is: takes back children that are open again.
-- $1 id, $2 $3 $4 how many children that counted as completed, failed, cancelled are open again.
-- updated_at moves too, or the sweeper would give the job up at once.   No row: it ended otherwise, ROLLBACK.
UPDATE fanout.job p
   SET completed = CASE WHEN p.closing IS NULL THEN p.completed - $2::int ELSE 0 END,   -- an aggregator counts anew
       failed = CASE WHEN p.closing IS NULL THEN p.failed - $3::int ELSE 0 END,
       cancelled = CASE WHEN p.closing IS NULL THEN p.cancelled - $4::int ELSE 0 END, updated_at = clock_timestamp(),
       finished_at = NULL, mark_at = NULL, last_mark_at = NULL, mark_ended = NULL, last_mark_ended = NULL,
       told_sums = CASE WHEN p.status = 'completed' THEN p.sums ELSE p.told_sums END,
       generation = p.generation + (p.status = 'completed')::int,
       -- What was true of the run that closed is not of the next one.
       paused = p.paused AND p.status <> 'completed',
       deadline = CASE WHEN p.status <> 'completed' OR p.deadline > clock_timestamp() THEN p.deadline END,
       status = CASE WHEN p.status = 'completed' THEN 'waiting' ELSE p.status END
 WHERE p.id = $1 AND p.pruned_at IS NULL AND (p.status = 'completed' OR (p.finished_at IS NULL AND p.verdict IS NULL))
RETURNING p.id
