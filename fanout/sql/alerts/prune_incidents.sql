-- Forget incidents that ended long ago, some of them. $1 how long ago, $2 limit.
DELETE FROM fanout.incident
 WHERE id IN (SELECT id FROM fanout.incident WHERE closed_at < statement_timestamp() - $1::interval ORDER BY closed_at LIMIT $2)
