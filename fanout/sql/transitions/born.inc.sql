-- Spliced into the statements that dispatch children, after CTEs
--   asked (kind, max_retries, priority, on_closed; all but the first may be NULL), docs (document_key ascending, payload,
--   error, partition) and mine (id, tenant, root_id, depth, priority, partition, concurrency), one row: the parent they are
--   born to.
-- What a child inherits from its parent is said here; whether it is paused is its root's to say.
-- that fans out is told what its kind is told by default.
setup AS MATERIALIZED (
    SELECT asked.kind, COALESCE(asked.max_retries, k.max_retries, 3) AS max_retries,
           COALESCE(asked.on_closed, k.on_closed) AS on_closed, asked.priority,
           k.options ->> 'partition' AS partition, k.options ->> 'closing' AS closing,
           (k.options ->> 'concurrency')::int AS concurrency, (k.options ->> 'fail_after')::int AS fail_after,
           (k.options ->> 'fail_after_percent')::real AS fail_after_percent,
           COALESCE((k.options ->> 'deadline')::timestamptz,
                    clock_timestamp() + make_interval(secs => (k.options ->> 'deadline_seconds')::float8)) AS deadline,
           (k.options -> 'budget')::jsonb AS budget, k.options ->> 'webhook' AS webhook
      FROM asked LEFT JOIN fanout.kind k ON k.name = asked.kind),
born AS (
    INSERT INTO fanout.job (tenant, parent_id, root_id, depth, document_key, kind, payload, max_retries, priority, on_closed,
                            partition, paused, closing, concurrency, fail_after, fail_after_percent, deadline, budget, webhook,
                            status, finished_at, error, error_type)
    SELECT mine.tenant, mine.id, mine.root_id, mine.depth + 1, d.document_key, setup.kind, d.payload::json, setup.max_retries,
           COALESCE(setup.priority, mine.priority), setup.on_closed,
           COALESCE(d.partition, mine.partition, CASE WHEN mine.concurrency IS NOT NULL THEN '#' || mine.id END, setup.partition),
           d.error IS NULL AND root.paused,
           setup.closing, setup.concurrency, setup.fail_after, setup.fail_after_percent, setup.deadline, setup.budget, setup.webhook,
           CASE WHEN d.error IS NULL THEN 'pending' ELSE 'failed' END,
           CASE WHEN d.error IS NOT NULL THEN clock_timestamp() END,
           d.error, CASE WHEN d.error IS NOT NULL THEN 'DocumentGone' END
      FROM mine JOIN fanout.job root ON root.id = mine.root_id CROSS JOIN setup CROSS JOIN docs d
        ON CONFLICT (parent_id, document_key) WHERE parent_id IS NOT NULL DO NOTHING
    RETURNING id, status, tenant, kind, priority, on_closed, webhook),
born_follow_up AS (   -- a child that is born failed has closed
    INSERT INTO fanout.job (tenant, kind, payload, follows_id, follows_generation, priority, max_retries)
    SELECT born.tenant, next.kind,
           CASE WHEN next.endpoint IS NULL
                THEN json_build_object('job_id', born.id, 'kind', born.kind, 'generation', 1, 'outcome', 'failed',
                                       'total', 0, 'completed', 0, 'failed', 0, 'cancelled', 0)
                ELSE json_build_object('job_id', born.id, 'kind', born.kind, 'generation', 1, 'outcome', 'failed',
                                       'total', 0, 'completed', 0, 'failed', 0, 'cancelled', 0, 'endpoint', next.endpoint) END,
           born.id, 1, born.priority, COALESCE(f.max_retries, 3)
      FROM born
     CROSS JOIN LATERAL (VALUES (born.on_closed, NULL), (CASE WHEN born.webhook IS NOT NULL THEN 'fanout_webhook' END, born.webhook))
                        AS next (kind, endpoint)
      LEFT JOIN fanout.kind f ON f.name = next.kind
     WHERE born.status = 'failed' AND next.kind IS NOT NULL),
k AS (SELECT count(*)::int AS born, count(*) FILTER (WHERE status = 'failed')::int AS gone, min(id) AS first_id FROM born)
