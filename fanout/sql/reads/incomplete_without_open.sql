-- Waiting jobs without an open child: their counters must be wrong. $1 limit, $2 ids above this one.
SELECT c.id FROM fanout.job c
 WHERE c.status = 'waiting' AND c.id > $2
   AND NOT EXISTS (SELECT 1 FROM fanout.job o WHERE o.parent_id = c.id AND o.status = 'processing')
   AND NOT EXISTS (SELECT 1 FROM fanout.job o WHERE o.parent_id = c.id AND o.status IN ('pending', 'waiting'))
 ORDER BY c.id LIMIT $1
