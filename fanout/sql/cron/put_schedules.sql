-- Schedules as somebody declares them. $1 names, $2 kinds, $3 payloads, $4 expressions, $5 time zones, $6 missed rules,
-- $7 priorities, $8 max retries, $9 tenants, $10 options, $11 next times, $12 who: code or operator.
-- Sorted by name, so that two pods that start at once do not deadlock; untouched where nothing changed. Whose a schedule
-- is, and whether it is enabled, stays; its next time too, unless its times are others now.
-- Returns the names that were made or changed.
INSERT INTO fanout.cron AS c (name, kind, payload, expression, timezone, missed, priority, max_retries, tenant, options, next_at, declared_by)
SELECT i.name, i.kind, i.payload::json, i.expression, i.timezone, i.missed, i.priority, i.max_retries, i.tenant, i.options::jsonb, i.next_at, $12::text
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::int[], $8::int[], $9::text[], $10::text[], $11::timestamptz[])
       AS i (name, kind, payload, expression, timezone, missed, priority, max_retries, tenant, options, next_at) ORDER BY i.name
ON CONFLICT (name) DO UPDATE
   SET kind = excluded.kind, payload = excluded.payload, expression = excluded.expression, timezone = excluded.timezone,
       missed = excluded.missed, priority = excluded.priority, max_retries = excluded.max_retries, tenant = excluded.tenant,
       options = excluded.options, updated_at = clock_timestamp(),
       next_at = CASE WHEN (c.expression, c.timezone) = (excluded.expression, excluded.timezone) THEN c.next_at ELSE excluded.next_at END
 WHERE c.declared_by = excluded.declared_by
   AND (c.kind, c.payload::text, c.expression, c.timezone, c.missed, c.priority, c.max_retries, c.tenant, c.options)
       IS DISTINCT FROM (excluded.kind, excluded.payload::text, excluded.expression, excluded.timezone, excluded.missed,
                         excluded.priority, excluded.max_retries, excluded.tenant, excluded.options)
RETURNING c.name
