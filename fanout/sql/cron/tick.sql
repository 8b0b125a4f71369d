-- One due time of one schedule becomes a job, and the schedule goes on to its next time: together, so it happens once,
-- whoever tries. Who waited for the lock finds another next_at. The key holds also against a next_at that was set back.
-- $1 name, $2 next_at as it was read, $3 expression and $4 time zone from which the rest was reckoned, $5 the time of the
-- job (NULL: none, what was missed is passed over), $6 the next time.
-- No row: another worker was first, or the schedule is another one now.
WITH mine AS MATERIALIZED (
    SELECT * FROM fanout.cron
     WHERE name = $1 AND next_at = $2 AND expression = $3 AND timezone = $4
       AND enabled AND next_at <= statement_timestamp() AND ($5::timestamptz IS NULL OR $5 <= statement_timestamp()) AND $6 > next_at
       FOR NO KEY UPDATE),
job AS MATERIALIZED (
    SELECT s.id
      FROM mine CROSS JOIN LATERAL fanout.submit_job(
           mine.kind, mine.payload, format('cron:%s:%s', mine.name, to_char($5 AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')),
           mine.priority, $5, NULL, mine.max_retries, NULL, mine.tenant, mine.options) AS s
     WHERE $5 IS NOT NULL)
UPDATE fanout.cron c
   SET next_at = $6, last_at = COALESCE($5, c.last_at), last_job_id = COALESCE((SELECT id FROM job), c.last_job_id)
  FROM mine WHERE c.name = mine.name
RETURNING c.kind, CASE WHEN $5 IS NOT NULL THEN c.last_job_id END AS job_id
