-- Failed children grouped by reason, most frequent first. $1 parent, $2 limit.
SELECT error, error_type, count(*)::int AS n, min(document_key) AS example
  FROM fanout.job WHERE parent_id = $1 AND status = 'failed'
 GROUP BY error, error_type ORDER BY n DESC, error LIMIT $2
