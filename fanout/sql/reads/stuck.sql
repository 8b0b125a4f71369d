-- What does not move, and why. $1 limit.
SELECT id, parent_id, kind, why, since FROM fanout.stuck ORDER BY since LIMIT $1
