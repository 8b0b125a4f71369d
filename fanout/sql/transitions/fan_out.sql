-- A chunk of children, and the parent's total, in one statement. A document that is gone is born failed, and counted.
-- $1 parent id, $2 attempt, $3 claim token, $4 lease, $5 document keys (ascending), $6 payloads, $7 errors (NULL: not gone),
-- $8 kind, $9 max retries, $10 priority, $11 on_closed; $9 and $11 NULL: as the workers that serve the kind registered it.
-- Run it in a transaction; no row => ROLLBACK, the claim is lost: it was given away, or the batch was ended.
WITH mine AS (
    SELECT id, tenant, COALESCE(root_id, id) AS root_id, (depth + 1)::smallint AS depth
      FROM fanout.job WHERE id = $1 AND attempt = $2 AND claim_token = $3),
setup AS (
    SELECT COALESCE($9::int, max(k.max_retries), 3) AS max_retries, COALESCE($11::text, max(k.on_closed)) AS on_closed
      FROM fanout.kind k WHERE k.name = $8),
born AS (
    INSERT INTO fanout.job (tenant, parent_id, root_id, depth, document_key, kind, payload, max_retries, priority, on_closed,
                            status, finished_at, error, error_type)
    SELECT mine.tenant, mine.id, mine.root_id, mine.depth, d.document_key, $8, d.payload::json, setup.max_retries, $10::smallint, setup.on_closed,
           CASE WHEN d.error IS NULL THEN 'pending' ELSE 'failed' END,
           CASE WHEN d.error IS NOT NULL THEN clock_timestamp() END,
           d.error, CASE WHEN d.error IS NOT NULL THEN 'DocumentGone' END
      FROM mine CROSS JOIN setup CROSS JOIN unnest($5::text[], $6::text[], $7::text[]) AS d (document_key, payload, error)
        ON CONFLICT (parent_id, document_key) WHERE parent_id IS NOT NULL DO NOTHING
    RETURNING id, status, tenant, on_closed),
follow_up AS (   -- a child that is born failed has closed
    INSERT INTO fanout.job (tenant, kind, payload, follows_id, follows_generation, priority, max_retries)
    SELECT born.tenant, born.on_closed,
           json_build_object('job_id', born.id, 'kind', $8::text, 'generation', 1, 'outcome', 'failed',
                             'total', 0, 'completed', 0, 'failed', 0, 'cancelled', 0),
           born.id, 1, $10::smallint, COALESCE(f.max_retries, 3)
      FROM born LEFT JOIN fanout.kind f ON f.name = born.on_closed
     WHERE born.status = 'failed' AND born.on_closed IS NOT NULL),
k AS (SELECT count(*)::int AS born, count(*) FILTER (WHERE status = 'failed')::int AS gone FROM born)
UPDATE fanout.job p
   SET total = p.total + k.born, failed = p.failed + k.gone, updated_at = clock_timestamp(),
       lease_expires_at = clock_timestamp() + $4::interval
  FROM k
 WHERE p.id = $1 AND p.attempt = $2 AND p.claim_token = $3
RETURNING k.born, p.total
