-- One letter a child, in the order of keys. $1 parent, $2 most children.
SELECT string_agg(c.letter, '' ORDER BY c.document_key) AS states, count(*)::int AS n
  FROM (SELECT document_key, CASE status WHEN 'pending' THEN 'p' WHEN 'processing' THEN 'r' WHEN 'waiting' THEN 'w'
                                         WHEN 'completed' THEN 'c' WHEN 'failed' THEN 'f' ELSE 'x' END AS letter
          FROM fanout.job WHERE parent_id = $1 ORDER BY document_key LIMIT $2) c
