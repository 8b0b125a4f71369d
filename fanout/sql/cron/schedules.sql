-- All schedules, or one. $1 name, NULL: all.
SELECT name, kind, payload::text AS payload, expression, timezone, missed, priority, max_retries, tenant, options::text AS options,
       declared_by, enabled, next_at, last_at, last_job_id, statement_timestamp() AS now
  FROM fanout.cron WHERE $1::text IS NULL OR name = $1 ORDER BY name
