-- Children that have children themselves. $1 the parent, $2 document keys above this one only, $3 limit.
SELECT c.id, c.document_key FROM fanout.job c
 WHERE c.parent_id = $1 AND c.document_key > $2 AND c.total > 0
   AND EXISTS (SELECT 1 FROM fanout.job g WHERE g.parent_id = c.id)
 ORDER BY c.document_key LIMIT $3
