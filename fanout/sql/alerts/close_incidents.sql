-- Close the incidents whose trouble is over, and tell the endpoints that want to know. $1 to $9: see trouble; $10 kinds and
-- $11 subjects to close.   A row for each that this call closed.
WITH RECURSIVE
-- include trouble
,
over AS MATERIALIZED (
    SELECT i.id FROM fanout.incident i JOIN unnest($10::text[], $11::text[]) AS w (kind, subject) ON w.kind = i.kind AND w.subject = i.subject
     WHERE i.closed_at IS NULL AND NOT EXISTS (SELECT 1 FROM trouble t WHERE t.kind = i.kind AND t.subject = i.subject)
     ORDER BY i.id FOR UPDATE OF i SKIP LOCKED),
closed AS (
    UPDATE fanout.incident i SET closed_at = clock_timestamp() FROM over WHERE i.id = over.id AND i.closed_at IS NULL
 RETURNING i.id, i.kind, i.subject, i.job_id, i.message, i.opened_at, i.closed_at),
told AS (
    INSERT INTO fanout.job (kind, payload, max_retries, follows_generation)
    SELECT 'fanout_webhook', json_build_object('type', 'alert.closed', 'endpoint', e.name, 'incident', o.id), COALESCE(k.max_retries, 10),
           0   -- that nobody else can set: the sender believes it
      FROM closed o
      JOIN fanout.webhook e ON e.enabled AND e.tenant IS NULL AND 'alert.closed' = ANY (e.events)
      LEFT JOIN fanout.kind k ON k.name = 'fanout_webhook')
SELECT * FROM closed ORDER BY id
