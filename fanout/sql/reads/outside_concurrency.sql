-- Has a batch with a concurrency open children that are not claimed within it? Locked ones, as a rule, that are being put back.
-- $1 the batch.
SELECT (SELECT 1 FROM fanout.job c WHERE c.parent_id = b.id AND c.status = 'processing' AND c.partition IS NULL LIMIT 1) IS NOT NULL
       OR (SELECT 1 FROM fanout.job c
            WHERE c.parent_id = b.id AND c.status IN ('pending', 'waiting') AND c.partition IS NULL LIMIT 1) IS NOT NULL AS some
  FROM fanout.job b WHERE b.id = $1 AND b.concurrency IS NOT NULL
