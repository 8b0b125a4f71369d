-- Spliced into every statement that ends jobs, after a CTE
--   c (id, parent_id, depth, kind, status, finished_at, generation, on_closed, priority, total, completed, failed, cancelled)
-- of the rows it moved, all of ONE depth: PostgreSQL silently drops a row's second UPDATE within a statement.
-- Children are locked already; parents are locked by ascending id before they are updated.
n AS (
    SELECT parent_id,
           count(*) FILTER (WHERE status = 'completed')::int AS completed,
           count(*) FILTER (WHERE status = 'failed')::int AS failed,
           count(*) FILTER (WHERE status = 'cancelled')::int AS cancelled,
           count(*)::int AS ended
      FROM c WHERE finished_at IS NOT NULL AND parent_id IS NOT NULL GROUP BY parent_id),
lp AS MATERIALIZED (
    SELECT p.id, n.completed, n.failed, n.cancelled, n.ended
      FROM n JOIN fanout.job p ON p.id = n.parent_id ORDER BY p.id FOR NO KEY UPDATE OF p),
p AS (
    UPDATE fanout.job p
       SET completed = p.completed + lp.completed,
           failed = p.failed + lp.failed,
           cancelled = p.cancelled + lp.cancelled,
           updated_at = clock_timestamp(),
           status = CASE WHEN p.status = 'waiting' AND p.completed + p.failed + p.cancelled + lp.ended >= p.total
                         THEN COALESCE(p.verdict, 'completed') ELSE p.status END,
           finished_at = CASE WHEN p.status = 'waiting' AND p.completed + p.failed + p.cancelled + lp.ended >= p.total
                              THEN clock_timestamp() END,
           mark_at = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.mark_at ELSE clock_timestamp() END,
           mark_ended = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.mark_ended
                             ELSE p.completed + p.failed + p.cancelled END,
           last_mark_at = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.last_mark_at ELSE p.mark_at END,
           last_mark_ended = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.last_mark_ended ELSE p.mark_ended END
      FROM lp WHERE lp.id = p.id
 RETURNING p.id, p.parent_id, p.depth, p.kind, p.status, p.finished_at, p.generation, p.on_closed, p.priority,
           p.total, p.completed, p.failed, p.cancelled, p.updated_at),
follow_up AS (
    INSERT INTO fanout.job (tenant, kind, payload, follows_id, follows_generation, priority, max_retries, on_closed,
                            partition, closing, concurrency, fail_after, fail_after_percent, deadline, budget, webhook)
    SELECT own.tenant, z.on_closed,
           json_build_object('job_id', z.id, 'kind', z.kind, 'generation', z.generation, 'outcome', z.status,
                             'total', z.total, 'completed', z.completed, 'failed', z.failed, 'cancelled', z.cancelled),
           z.id, z.generation, z.priority, COALESCE(k.max_retries, 3),
           k.on_closed,   -- it may be a batch itself, with all that its kind is told
           k.options ->> 'partition', k.options ->> 'closing', (k.options ->> 'concurrency')::int, (k.options ->> 'fail_after')::int,
           (k.options ->> 'fail_after_percent')::real,
           COALESCE((k.options ->> 'deadline')::timestamptz,
                    clock_timestamp() + make_interval(secs => (k.options ->> 'deadline_seconds')::float8)),
           (k.options -> 'budget')::jsonb, k.options ->> 'webhook'
      FROM (SELECT id, kind, generation, status, on_closed, priority, total, completed, failed, cancelled
              FROM p WHERE finished_at IS NOT NULL
             UNION ALL
            SELECT id, kind, generation, status, on_closed, priority, total, completed, failed, cancelled
              FROM c WHERE finished_at IS NOT NULL) z
      JOIN fanout.job own ON own.id = z.id
      LEFT JOIN fanout.kind k ON k.name = z.on_closed
     WHERE z.on_closed IS NOT NULL
        ON CONFLICT (follows_id, follows_generation, kind) WHERE follows_id IS NOT NULL DO NOTHING)
-- One row for all that moved alike: a flush of 500 comes back as one row, not as 500.
SELECT 'moved' AS what, array_agg(id) AS ids, parent_id, depth, status, finished_at IS NOT NULL AS ended, on_closed,
       NULL::timestamptz AS locked_at
  FROM c GROUP BY parent_id, depth, status, finished_at IS NOT NULL, on_closed
 UNION ALL
SELECT 'counted', ARRAY[id], parent_id, depth, status, finished_at IS NOT NULL, on_closed, updated_at FROM p
