-- Take on the telling of hooks: what nobody was told of yet, once, by whoever asks first and has hooks. A worker that dies
-- with it in hand tells nobody; what is older than an hour is no news.
WITH untold AS MATERIALIZED (
    SELECT id, told FROM fanout.incident
     WHERE told < 2 AND (told = 0 OR closed_at IS NOT NULL)
       AND COALESCE(closed_at, opened_at) > statement_timestamp() - interval '1 hour'
     ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED)
UPDATE fanout.incident i SET told = CASE WHEN i.closed_at IS NULL THEN 1 ELSE 2 END
  FROM untold WHERE i.id = untold.id
RETURNING i.id, i.kind, i.subject, i.job_id, i.message, i.opened_at, i.closed_at, untold.told AS told_before
