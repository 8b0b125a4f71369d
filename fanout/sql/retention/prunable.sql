-- Root jobs that have closed so long ago that they go, and those whose going was begun: along the index of roots, from the
-- oldest on. $1 retention, $2 ids above this one only, $3 roots to look at.
-- One row: `ids`, the last id that was looked at, and whether there may be more (a job has closed after it was made, so the
-- first root that is younger than the retention ends the walk).
WITH walk AS MATERIALIZED (
    SELECT id, created_at, finished_at, pruned_at FROM fanout.job
     WHERE parent_id IS NULL AND id > $2 ORDER BY id LIMIT $3)
SELECT COALESCE(array_agg(w.id ORDER BY w.id) FILTER (
           WHERE w.pruned_at IS NOT NULL
              OR (w.finished_at < statement_timestamp() - $1::interval
                  AND NOT EXISTS (SELECT 1 FROM fanout.job f WHERE f.follows_id = w.id AND f.finished_at IS NULL))), '{}') AS ids,
       max(w.id) AS last_id,
       count(*) = $3 AND bool_and(w.created_at < statement_timestamp() - $1::interval) AS more
  FROM walk w
