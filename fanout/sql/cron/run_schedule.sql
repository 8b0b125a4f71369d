-- A job of a schedule now, beside its times. $1 name.   No row: there is none.
WITH mine AS MATERIALIZED (SELECT * FROM fanout.cron WHERE name = $1 FOR NO KEY UPDATE),
job AS MATERIALIZED (
    SELECT s.id
      FROM mine CROSS JOIN LATERAL fanout.submit_job(
           mine.kind, mine.payload, NULL, mine.priority, NULL, NULL, mine.max_retries, NULL, mine.tenant, mine.options) AS s)
UPDATE fanout.cron c SET last_job_id = (SELECT id FROM job) FROM mine WHERE c.name = mine.name
RETURNING c.kind, c.last_job_id AS job_id
