-- A root job on its way out goes, once nothing of it is left, with what is kept of its attempts and the head of its stream.
-- $1 id.   No row: it is not on its way out, or has children or events, or is locked.
WITH pick AS MATERIALIZED (
    SELECT id FROM fanout.job WHERE id = $1 AND pruned_at IS NOT NULL FOR UPDATE SKIP LOCKED),
bare AS MATERIALIZED (
    SELECT p.id FROM pick p
     WHERE NOT EXISTS (SELECT 1 FROM fanout.job c WHERE c.parent_id = p.id)
       AND NOT EXISTS (SELECT 1 FROM fanout.event_batch e WHERE e.stream_id = p.id)),
attempts AS (DELETE FROM fanout.attempt a USING bare WHERE a.job_id = bare.id),
stream AS (DELETE FROM fanout.stream s USING bare WHERE s.stream_id = bare.id)
DELETE FROM fanout.job j USING bare WHERE j.id = bare.id
RETURNING j.id
