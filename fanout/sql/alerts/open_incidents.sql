-- Open an incident for what is still wrong, and tell the endpoints that want to know. $1 to $9: see trouble; $10 kinds and
-- $11 subjects to open.   A row for each that this call opened: whoever is second opens none.
WITH RECURSIVE
-- include trouble
,
opened AS (
    INSERT INTO fanout.incident (kind, subject, job_id, worker_id, message)
    SELECT DISTINCT ON (t.kind, t.subject) t.kind, t.subject, t.job_id, CASE WHEN t.kind = 'engine_error' THEN $1::uuid END, left(t.message, 1000)
      FROM trouble t JOIN unnest($10::text[], $11::text[]) AS w (kind, subject) ON w.kind = t.kind AND w.subject = t.subject
     WHERE t.is_firm
     ORDER BY t.kind, t.subject   -- two who open the same ones wait for each other in one order
        ON CONFLICT (kind, subject) WHERE closed_at IS NULL DO NOTHING
 RETURNING id, kind, subject, job_id, message, opened_at, closed_at),
told AS (
    INSERT INTO fanout.job (kind, payload, max_retries, follows_generation)
    SELECT 'fanout_webhook', json_build_object('type', 'alert.opened', 'endpoint', e.name, 'incident', o.id), COALESCE(k.max_retries, 10),
           0   -- that nobody else can set: the sender believes it
      FROM opened o
      JOIN fanout.webhook e ON e.enabled AND e.tenant IS NULL AND 'alert.opened' = ANY (e.events)
      LEFT JOIN fanout.kind k ON k.name = 'fanout_webhook')
SELECT * FROM opened ORDER BY id
