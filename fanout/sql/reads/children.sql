-- Children of a job by document key, by keyset. $1 parent, $2 status (NULL: any), $3 keys above this one (NULL: from the first), $4 limit.
SELECT id, parent_id, document_key, kind, status, attempt, failures, deaths, run_at, claimed_at, finished_at, error_type, error, reason,
       payload::text AS payload, result::text AS result, sums::text AS sums
  FROM fanout.job
 WHERE parent_id = $1 AND ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR document_key > $3)
 ORDER BY document_key LIMIT $4
