-- Spliced into every statement that ends jobs, after a CTE
--   c (id, parent_id, depth, kind, status, finished_at, generation, on_closed, webhook, priority,
--      total, completed, failed, cancelled, sums, told_sums)
-- of the rows it moved, all of ONE depth: PostgreSQL silently drops a row's second UPDATE within a statement.
-- Children are locked already; parents are locked by ascending id before they are updated. A parent that an aggregator
-- counts is neither locked nor written.
n AS (
    SELECT parent_id,
           count(*) FILTER (WHERE status = 'completed')::int AS completed,
           count(*) FILTER (WHERE status = 'failed')::int AS failed,
           count(*) FILTER (WHERE status = 'cancelled')::int AS cancelled,
           count(*)::int AS ended
      FROM c WHERE finished_at IS NOT NULL AND parent_id IS NOT NULL GROUP BY parent_id),
s AS (   -- what they added up, without what was counted before they were opened again
    SELECT a.parent_id, jsonb_object_agg(a.name, a.amount) AS added
      FROM (SELECT c.parent_id, e.key AS name,
                   sum(e.value::numeric - COALESCE((c.told_sums ->> e.key)::numeric, 0)) AS amount
              FROM c CROSS JOIN LATERAL jsonb_each_text(c.sums) AS e
             WHERE c.sums IS NOT NULL AND c.finished_at IS NOT NULL AND c.parent_id IS NOT NULL GROUP BY c.parent_id, e.key) a
     GROUP BY a.parent_id),
lp AS MATERIALIZED (   -- what is said of p here is said of the version that was locked
    SELECT p.id, n.completed, n.failed, n.cancelled, n.ended, s.added, p.attempt, p.claim_token, p.claimed_at,
           CASE WHEN p.verdict IS NULL AND p.finished_at IS NULL
                 AND (p.fail_after IS NOT NULL OR p.fail_after_percent IS NOT NULL OR p.budget IS NOT NULL)
                THEN fanout.batch_failure(p.failed + n.failed, p.total, p.status = 'waiting', p.fail_after, p.fail_after_percent,
                                          CASE WHEN p.budget IS NOT NULL THEN fanout.add_sums(p.sums, s.added) END, p.budget)
           END AS failure
      FROM n JOIN fanout.job p ON p.id = n.parent_id LEFT JOIN s ON s.parent_id = n.parent_id
     WHERE p.closing IS NULL
     ORDER BY p.id FOR NO KEY UPDATE OF p),
p AS (
    UPDATE fanout.job p
       SET completed = p.completed + lp.completed,
           failed = p.failed + lp.failed,
           cancelled = p.cancelled + lp.cancelled,
           sums = CASE WHEN lp.added IS NULL THEN p.sums ELSE fanout.add_sums(p.sums, lp.added) END,
           updated_at = clock_timestamp(),
           status = CASE WHEN (p.status = 'waiting' OR lp.failure IS NOT NULL)
                              AND p.completed + p.failed + p.cancelled + lp.ended >= p.total
                         THEN COALESCE(p.verdict, CASE WHEN lp.failure IS NOT NULL THEN 'failed' END, 'completed')
                         WHEN lp.failure IS NOT NULL THEN 'waiting' ELSE p.status END,
           finished_at = CASE WHEN (p.status = 'waiting' OR lp.failure IS NOT NULL)
                                   AND p.completed + p.failed + p.cancelled + lp.ended >= p.total
                              THEN clock_timestamp() END,
           verdict = CASE WHEN lp.failure IS NOT NULL AND p.completed + p.failed + p.cancelled + lp.ended < p.total
                          THEN 'failed' ELSE p.verdict END,
           reason = COALESCE(lp.failure, p.reason),
           claim_token = CASE WHEN lp.failure IS NULL THEN p.claim_token END,
           lease_expires_at = CASE WHEN lp.failure IS NULL THEN p.lease_expires_at END,
           mark_at = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.mark_at ELSE clock_timestamp() END,
           mark_ended = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.mark_ended
                             ELSE p.completed + p.failed + p.cancelled END,
           last_mark_at = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.last_mark_at ELSE p.mark_at END,
           last_mark_ended = CASE WHEN p.mark_at > clock_timestamp() - interval '15 s' THEN p.last_mark_ended ELSE p.mark_ended END
      FROM lp WHERE lp.id = p.id
 RETURNING p.id, p.parent_id, p.depth, p.kind, p.status, p.finished_at, p.generation, p.on_closed, p.webhook, p.priority,
           p.total, p.completed, p.failed, p.cancelled, p.updated_at, lp.failure),
stopped AS (   -- the manager was still dispatching
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT id, attempt, claimed_at, claim_token, 'cancelled', failure FROM lp WHERE failure IS NOT NULL AND claim_token IS NOT NULL
        ON CONFLICT DO NOTHING),
follow_up AS (
    INSERT INTO fanout.job (tenant, kind, payload, follows_id, follows_generation, priority, max_retries, on_closed,
                            partition, closing, concurrency, fail_after, fail_after_percent, deadline, budget, webhook)
    SELECT own.tenant, next.kind,
           CASE WHEN next.endpoint IS NULL
                THEN json_build_object('job_id', z.id, 'kind', z.kind, 'generation', z.generation, 'outcome', z.status,
                                       'total', z.total, 'completed', z.completed, 'failed', z.failed, 'cancelled', z.cancelled)
                ELSE json_build_object('job_id', z.id, 'kind', z.kind, 'generation', z.generation, 'outcome', z.status,
                                       'total', z.total, 'completed', z.completed, 'failed', z.failed, 'cancelled', z.cancelled,
                                       'endpoint', next.endpoint) END,
           z.id, z.generation, z.priority, COALESCE(k.max_retries, 3),
           k.on_closed,   -- it may be a batch itself, with all that its kind is told
           k.options ->> 'partition', k.options ->> 'closing', (k.options ->> 'concurrency')::int, (k.options ->> 'fail_after')::int,
           (k.options ->> 'fail_after_percent')::real,
           COALESCE((k.options ->> 'deadline')::timestamptz,
                    clock_timestamp() + make_interval(secs => (k.options ->> 'deadline_seconds')::float8)),
           (k.options -> 'budget')::jsonb, k.options ->> 'webhook'
      FROM (SELECT id, kind, generation, status, on_closed, webhook, priority, total, completed, failed, cancelled
              FROM p WHERE finished_at IS NOT NULL
             UNION ALL
            SELECT id, kind, generation, status, on_closed, webhook, priority, total, completed, failed, cancelled
              FROM c WHERE finished_at IS NOT NULL) z
     CROSS JOIN LATERAL (VALUES (z.on_closed, NULL), (CASE WHEN z.webhook IS NOT NULL THEN 'fanout_webhook' END, z.webhook))
                        AS next (kind, endpoint)
      JOIN fanout.job own ON own.id = z.id
      LEFT JOIN fanout.kind k ON k.name = next.kind
     WHERE next.kind IS NOT NULL AND (z.on_closed IS NOT NULL OR z.webhook IS NOT NULL)
        ON CONFLICT (follows_id, follows_generation, kind) WHERE follows_id IS NOT NULL DO NOTHING)
-- One row for all that moved alike: a flush of 500 comes back as one row, not as 500.
SELECT 'moved' AS what, array_agg(id) AS ids, parent_id, depth, status, finished_at IS NOT NULL AS ended, on_closed,
       webhook IS NOT NULL AS webhook, NULL::timestamptz AS locked_at
  FROM c GROUP BY parent_id, depth, status, finished_at IS NOT NULL, on_closed, webhook IS NOT NULL
 UNION ALL
SELECT CASE WHEN failure IS NOT NULL AND finished_at IS NULL THEN 'doomed' ELSE 'counted' END, ARRAY[id], parent_id, depth, status,
       finished_at IS NOT NULL, on_closed, webhook IS NOT NULL, updated_at
  FROM p
