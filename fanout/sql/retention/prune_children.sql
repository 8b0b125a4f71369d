-- Some children of a job below a root that is on its way out, with what is kept of their attempts: those that have no
-- children themselves, and no open follow-up. $1 the root, $2 the parent, $3 document keys above this one only, $4 limit.
-- Returns how many went, and the last key that was looked at (NULL: there are no more).
WITH root AS MATERIALIZED (   -- the mark is never taken back, so this needs no lock
    SELECT id FROM fanout.job WHERE id = $1 AND pruned_at IS NOT NULL),
pick AS MATERIALIZED (
    SELECT c.id, c.document_key FROM fanout.job c
     WHERE c.parent_id = $2 AND c.document_key > $3 AND (SELECT id FROM root) IS NOT NULL
       AND (c.root_id = $1) AND c.finished_at IS NOT NULL
     ORDER BY c.document_key LIMIT $4 FOR UPDATE SKIP LOCKED),
bare AS MATERIALIZED (
    SELECT p.id FROM pick p
     WHERE NOT EXISTS (SELECT 1 FROM fanout.job g WHERE g.parent_id = p.id)
       AND NOT EXISTS (SELECT 1 FROM fanout.job f WHERE f.follows_id = p.id AND f.finished_at IS NULL)),
attempts AS (DELETE FROM fanout.attempt a USING bare WHERE a.job_id = bare.id),
gone AS (DELETE FROM fanout.job j USING bare WHERE j.id = bare.id RETURNING 1)
SELECT (SELECT count(*) FROM gone)::int AS gone, (SELECT max(document_key) FROM pick) AS last_key
