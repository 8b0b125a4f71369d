-- The children whose last attempt took longest. $1 parent, $2 limit.
SELECT document_key, status, finished_at - claimed_at AS took
  FROM fanout.job WHERE parent_id = $1 AND finished_at IS NOT NULL AND claimed_at IS NOT NULL
 ORDER BY finished_at - claimed_at DESC LIMIT $2
