-- All that one delivery needs. $1 the job that sends, $2 the endpoint's name, $3 an incident (NULL: none).
-- What is told is only believed of a job that a close or an incident has enqueued: nobody else can set follows_id (of a close) and
-- follows_generation (of an incident 0).
SELECT e.name, e.url, e.events, e.tenant, e.secret, e.enabled, e.disabled_reason,
       CASE WHEN e.old_secret_until > statement_timestamp() THEN e.old_secret END AS old_secret,
       own.tenant AS own_tenant, own.follows_id, own.follows_generation, own.created_at, batch.idempotency_key AS key,
       i.id AS incident_id, i.kind AS incident_kind, i.subject, i.job_id, i.message, i.opened_at, i.closed_at,
       extract(epoch FROM clock_timestamp())::bigint AS now
  FROM fanout.job own
  LEFT JOIN fanout.webhook e ON e.name = $2
  LEFT JOIN fanout.job batch ON batch.id = own.follows_id
  LEFT JOIN fanout.incident i ON i.id = $3
 WHERE own.id = $1
