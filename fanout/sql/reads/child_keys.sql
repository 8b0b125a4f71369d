-- Ids and keys of children in the order of keys, as the squares of a page stand. $1 parent, $2 how many before the first, $3 how many.
SELECT id, document_key AS key FROM fanout.job WHERE parent_id = $1 ORDER BY document_key OFFSET $2 LIMIT $3
