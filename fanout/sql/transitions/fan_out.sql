-- A chunk of children, and the parent's total, in one statement. A document that is gone is born failed, and counted: the
-- batch may have failed by it.
-- $1 parent id, $2 attempt, $3 claim token, $4 lease, $5 document keys (ascending), $6 payloads, $7 errors (NULL: not gone),
-- $8 kind, $9 max retries, $10 priority, $11 on_closed, $12 partitions; $9, $11 NULL: as the workers that serve the kind
-- registered it; $10, $12 NULL: as the parent's. $7 and $12 may be empty for all NULL.
-- Run it in a transaction; no row => ROLLBACK, the claim is lost: it was given away, or the batch was ended. The row 'born'
-- has in `ids` how many there are, the total, the first one's id, the root's, and whether the batch was given another
-- concurrency, and another priority, meanwhile (1); `ended`: it was paused, or resumed, meanwhile; `webhook`: is it paused now?
WITH asked AS (
    SELECT $8::text AS kind, $9::int AS max_retries, $10::smallint AS priority, $11::text AS on_closed, $4::interval AS lease,
           false AS outside),
docs AS (
    SELECT * FROM unnest($5::text[], $6::text[], $7::text[], $12::text[]) AS d (document_key, payload, error, partition)),
mine AS (
    SELECT id, tenant, COALESCE(root_id, id) AS root_id, depth, priority, partition, concurrency, paused, attempt, claim_token
      FROM fanout.job WHERE id = $1 AND attempt = $2 AND claim_token = $3),
-- include born
,
-- include grown
-- include tail
 UNION ALL
SELECT 'born', ARRAY[c.born, c.total, c.first_id, mine.root_id, (c.concurrency IS DISTINCT FROM mine.concurrency)::int,
                     (c.priority <> mine.priority)::int], NULL, c.depth, c.status, c.paused <> mine.paused AND c.depth = 0, NULL, c.paused, NULL
  FROM c CROSS JOIN mine
