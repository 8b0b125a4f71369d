-- Batches with children that are paused although their root is not: a resume that a crash ended. One look-up a batch,
-- however many children it has. $1 limit, $2 ids above this one.
WITH RECURSIVE parent (id) AS (
    (SELECT parent_id FROM fanout.job WHERE status = 'pending' AND paused AND parent_id > $2 ORDER BY parent_id LIMIT 1)
     UNION ALL
    SELECT (SELECT c.parent_id FROM fanout.job c
             WHERE c.status = 'pending' AND c.paused AND c.parent_id > parent.id ORDER BY c.parent_id LIMIT 1)
      FROM parent WHERE parent.id IS NOT NULL)
SELECT m.id
  FROM parent JOIN fanout.job m ON m.id = parent.id JOIN fanout.job r ON r.id = COALESCE(m.root_id, m.id)
 WHERE NOT r.paused
 ORDER BY m.id LIMIT $1
