-- Incidents, newest first. $1 only those that are open, $2 limit.
SELECT id, kind, subject, job_id, message, opened_at, closed_at FROM fanout.incident
 WHERE NOT $1::boolean OR closed_at IS NULL ORDER BY id DESC LIMIT $2
