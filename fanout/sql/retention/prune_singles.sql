-- Root jobs without children, many in one statement, with their few events and what is kept of their attempts; those with
-- many events go the way of batches. Locked is left alone: somebody is opening it. $1 ids, $2 retention.
-- Returns the ids that went.
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job
     WHERE id = ANY ($1::bigint[]) AND parent_id IS NULL AND total = 0 AND finished_at < statement_timestamp() - $2::interval
     ORDER BY id FOR UPDATE SKIP LOCKED),
bare AS MATERIALIZED (
    SELECT p.id FROM pick p
     WHERE NOT EXISTS (SELECT 1 FROM fanout.job c WHERE c.parent_id = p.id)
       AND NOT EXISTS (SELECT 1 FROM fanout.job f WHERE f.follows_id = p.id AND f.finished_at IS NULL)
       AND (SELECT count(*) FROM (SELECT 1 FROM fanout.event_batch e WHERE e.stream_id = p.id LIMIT 21) AS few) <= 20),
events AS (DELETE FROM fanout.event_batch e USING bare WHERE e.stream_id = bare.id),
attempts AS (DELETE FROM fanout.attempt a USING bare WHERE a.job_id = bare.id),
stream AS (DELETE FROM fanout.stream s USING bare WHERE s.stream_id = bare.id)
DELETE FROM fanout.job j USING bare WHERE j.id = bare.id
RETURNING j.id
