-- Some events of a root job that is on its way out. $1 the root, $2 most batches.   Returns how many went.
WITH old AS MATERIALIZED (
    SELECT e.stream_id, e.first_number FROM fanout.event_batch e
     WHERE e.stream_id = $1 AND EXISTS (SELECT 1 FROM fanout.job j WHERE j.id = $1 AND j.pruned_at IS NOT NULL)
     ORDER BY e.first_number LIMIT $2 FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM fanout.event_batch e USING old
     WHERE e.stream_id = old.stream_id AND e.first_number = old.first_number RETURNING 1)
SELECT count(*)::int AS gone FROM gone
