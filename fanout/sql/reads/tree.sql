-- The chain that a job belongs to: batches, batches inside them, and what followed their closes; leaves are only counted.
-- $1 id, $2 the most jobs, $3 the most steps upwards, $4 tenant (NULL: any).   No row: there is no such job.
-- Ids ascend along every edge, and each job hangs on one other at most, so there is no way round in a circle.
WITH RECURSIVE up AS (
    SELECT j.id, COALESCE(j.parent_id, j.follows_id) AS above, 0 AS step
      FROM fanout.job j WHERE j.id = $1 AND ($4::text IS NULL OR j.tenant = $4)
     UNION ALL
    SELECT j.id, COALESCE(j.parent_id, j.follows_id), up.step + 1
      FROM up JOIN fanout.job j ON j.id = up.above
     WHERE j.id < up.id AND up.step < $3),
top AS (SELECT id, above, step FROM up ORDER BY step DESC LIMIT 1),
down AS (   -- the nearest first; no more of it is computed than is read below
    SELECT id FROM top
     UNION ALL
    SELECT n.id FROM down d CROSS JOIN LATERAL (
        (SELECT c.id FROM fanout.job c
          WHERE c.parent_id = d.id AND (c.total > 0 OR c.on_closed IS NOT NULL) AND c.id > d.id ORDER BY c.id LIMIT $2)
         UNION ALL
        (SELECT f.id FROM fanout.job f WHERE f.follows_id = d.id AND f.id > d.id ORDER BY f.follows_generation, f.kind LIMIT $2)) n),
seen AS MATERIALIZED (SELECT id FROM down LIMIT $2 + 1)
SELECT j.id, j.parent_id, j.follows_id, j.follows_generation, j.kind, j.document_key, j.idempotency_key AS key, j.status, j.verdict,
       j.generation, j.total, j.completed, j.failed, j.cancelled, j.created_at, j.finished_at, COALESCE(j.reason, j.error) AS why,
       (SELECT count(*) FROM seen) > $2 AS cut_below,
       EXISTS (SELECT 1 FROM top JOIN fanout.job o ON o.id = top.above) AS cut_above
  FROM (SELECT id FROM seen UNION SELECT id FROM up) s JOIN fanout.job j ON j.id = s.id
 ORDER BY j.id
