-- What a drain has not done yet: jobs that are due, that run, or that are about to close; schedules that are due.
-- $1 kinds that are served, $2 how many.
SELECT j.id, j.kind, j.status, j.document_key, j.error
  FROM fanout.job j
 WHERE (j.status = 'pending' AND j.run_at <= statement_timestamp() AND NOT j.paused AND j.kind = ANY ($1::text[]))
    OR j.status = 'processing'
    OR (j.status = 'waiting' AND (j.verdict IS NOT NULL OR NOT EXISTS (
            SELECT 1 FROM fanout.job c WHERE c.parent_id = j.id AND c.finished_at IS NULL)))
UNION ALL
SELECT NULL, kind, 'due', name, NULL FROM fanout.cron WHERE enabled AND next_at <= statement_timestamp()
 ORDER BY 1 LIMIT $2
