-- A chunk of children for a batch that is open, from outside any handler: as fan_out, without a claim.
-- $1 parent id, $2 document keys (ascending), $3 payloads, $4 errors (NULL: not gone), $5 kind, $6 max retries, $7 priority,
-- $8 on_closed, $9 partitions; as in fan_out, as is the row 'born', which has in `on_closed` the reason if the batch failed by it.
-- Run it in a transaction; no row => ROLLBACK: it has closed, or is being ended. A close that was on its way has happened by
-- the time that the row is locked, and one that comes waits, and finds the total raised.
WITH asked AS (
    SELECT $5::text AS kind, $6::int AS max_retries, $7::smallint AS priority, $8::text AS on_closed, NULL::interval AS lease,
           true AS outside),
docs AS (
    SELECT * FROM unnest($2::text[], $3::text[], $4::text[], $9::text[]) AS d (document_key, payload, error, partition)),
mine AS (
    SELECT id, tenant, COALESCE(root_id, id) AS root_id, depth, priority, partition, concurrency, paused, attempt, claim_token
      FROM fanout.job WHERE id = $1 AND finished_at IS NULL AND verdict IS NULL AND pruned_at IS NULL),
-- include born
,
-- include grown
-- include tail
 UNION ALL
SELECT 'born', ARRAY[c.born, c.total, c.first_id, mine.root_id, (c.concurrency IS DISTINCT FROM mine.concurrency)::int,
                     (c.priority <> mine.priority)::int], NULL, c.depth, c.status, c.paused <> mine.paused AND c.depth = 0, c.failure, c.paused, NULL
  FROM c CROSS JOIN mine
