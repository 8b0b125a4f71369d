-- waiting -> its verdict or completed, one level up: the cascade, a loop in the transaction of the statement that closed
-- the jobs in $1 (all of one depth, each with a parent).
WITH c AS (
    SELECT id, parent_id, depth, kind, status, finished_at, generation, NULL::text AS on_closed, NULL::text AS webhook, priority,
           total, completed, failed, cancelled, sums, told_sums
      FROM fanout.job WHERE id = ANY ($1::bigint[])),
-- include tail
