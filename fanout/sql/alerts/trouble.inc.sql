-- CTEs `trouble (kind, subject, job_id, message, is_firm)`: what is wrong now. What is not firm keeps an incident open and opens
-- none, so that a rate at its threshold opens and closes no ten incidents.
-- $1 this worker, $2 how long a batch may be without life, $3 how long jobs may be due without a worker, $4 share and $5 count of
-- failed children, $6 share of the notification queue, $7 this worker's loops that fail and $8 what is said of them,
-- $9 how long a batch that has ended is told of.
waits_kind (kind) AS (   -- kinds with pending jobs: a look a kind, however many jobs
    SELECT least((SELECT min(j.kind) FROM fanout.job j WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL),
                 (SELECT min(j.kind) FROM fanout.job j WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL),
                 (SELECT min(j.kind) FROM fanout.job j WHERE j.status = 'pending' AND j.deaths > 0 AND NOT j.paused))
     UNION ALL
    SELECT least((SELECT min(j.kind) FROM fanout.job j WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
                                                         AND j.kind > k.kind),
                 (SELECT min(j.kind) FROM fanout.job j WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL
                                                         AND j.kind > k.kind),
                 (SELECT min(j.kind) FROM fanout.job j WHERE j.status = 'pending' AND j.deaths > 0 AND NOT j.paused AND j.kind > k.kind))
      FROM waits_kind k WHERE k.kind IS NOT NULL),
rated AS (   -- batches that are open, or ended lately
    SELECT id, kind, completed, failed FROM fanout.job WHERE status = 'waiting' AND total > 0
     UNION ALL
    SELECT id, kind, completed, failed FROM fanout.job WHERE status = 'processing' AND total > 0
     UNION ALL
    SELECT id, kind, completed, failed FROM fanout.job
     WHERE total > 0 AND finished_at IS NOT NULL AND finished_at > statement_timestamp() - $9::interval),
trouble (kind, subject, job_id, message, is_firm) AS MATERIALIZED (
    SELECT 'batch_stuck', c.id::text, c.id,
           format('batch %s (%s) has shown no sign of life since %s UTC', c.id, c.kind,
                  to_char(c.updated_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')), true
      FROM fanout.job c
     WHERE c.status = 'waiting' AND c.verdict IS NULL AND c.updated_at < statement_timestamp() - $2::interval
-- include excuse
     UNION ALL
    SELECT 'batch_stuck', c.id::text, c.id, format('batch %s (%s) was given up, %s', c.id, c.kind, c.reason), true
      FROM fanout.job c
     WHERE c.total > 0 AND c.finished_at IS NOT NULL AND c.finished_at > statement_timestamp() - $9::interval
       AND c.status = 'failed' AND c.reason LIKE 'closed by the sweeper:%'
     UNION ALL
    SELECT 'failure_rate', r.id::text, r.id,
           format('%s of %s documents of batch %s (%s) failed', r.failed, r.completed + r.failed, r.id, r.kind),
           r.failed >= $4::float8 * (r.completed + r.failed)
      FROM rated r
     WHERE r.failed >= $5::int AND r.failed >= 0.8 * $4::float8 * (r.completed + r.failed)
     UNION ALL
    SELECT 'no_worker', k.kind, NULL, format('no worker serves %s, and jobs have been due for over %s s', k.kind,
                                             extract(epoch FROM $3::interval)::int), true
      FROM waits_kind k
     WHERE k.kind IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM fanout.worker w WHERE k.kind = ANY (w.kinds) AND w.last_beat_at >= statement_timestamp() - w.lease)
       AND (EXISTS (SELECT 1 FROM generate_series(0, 9) AS p (priority) CROSS JOIN LATERAL (
                           SELECT 1 FROM fanout.job j
                            WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL AND j.kind = k.kind
                              AND j.priority = p.priority AND j.run_at < statement_timestamp() - $3::interval LIMIT 1) due)
            -- not EXISTS, which might be hashed: a walk over the jobs of all kinds
            OR (SELECT 1 FROM fanout.job j
                 WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL AND j.kind = k.kind
                   AND j.run_at < statement_timestamp() - $3::interval LIMIT 1) IS NOT NULL
            OR (SELECT 1 FROM fanout.job j
                 WHERE j.status = 'pending' AND j.deaths > 0 AND NOT j.paused AND j.kind = k.kind
                   AND j.run_at < statement_timestamp() - $3::interval LIMIT 1) IS NOT NULL)
     UNION ALL
    SELECT 'engine_error', l.subject, NULL, l.message, true FROM unnest($7::text[], $8::text[]) AS l (subject, message)
     UNION ALL   -- another worker's is that worker's to judge, while it lives
    SELECT 'engine_error', i.subject, NULL, i.message, false
      FROM fanout.incident i JOIN fanout.worker w ON w.id = i.worker_id
     WHERE i.closed_at IS NULL AND i.kind = 'engine_error' AND i.worker_id <> $1::uuid
       AND w.last_beat_at >= statement_timestamp() - w.lease
     UNION ALL
    SELECT 'notification_queue', '', NULL,
           format('the notification queue is %s %% full: a session that listens has had a transaction open for long', round(q.used * 100)),
           q.used >= $6::float8
      FROM (SELECT pg_notification_queue_usage()::numeric AS used) q WHERE q.used >= 0.8 * $6::float8)
