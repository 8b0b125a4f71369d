-- Failed children of a job by document key, by keyset. $1 parent, $2 keys above this one (NULL: from the first), $3 limit,
-- $4 exactly this error (NULL: any).
SELECT id, parent_id, document_key, kind, status, attempt, failures, deaths, run_at, claimed_at, finished_at, error_type, error, reason,
       payload::text AS payload, result::text AS result, sums::text AS sums
  FROM fanout.job
 WHERE parent_id = $1 AND status = 'failed' AND ($2::text IS NULL OR document_key > $2)
   AND ($4::text IS NULL OR error = $4)
 ORDER BY document_key LIMIT $3
