-- What this program says of the kinds it serves. $1 names, $2 max retries, $3 timeouts in seconds, $4 on_closed, $5 payload schemas,
-- $6 options.
-- Sorted by name, so that two pods that start at once do not deadlock; untouched where nothing changed.
INSERT INTO fanout.kind AS k (name, max_retries, timeout_seconds, on_closed, payload_schema, options)
SELECT i.name, i.max_retries, i.timeout_seconds, i.on_closed, i.payload_schema::json, i.options::json
  FROM unnest($1::text[], $2::int[], $3::float8[], $4::text[], $5::text[], $6::text[])
       AS i (name, max_retries, timeout_seconds, on_closed, payload_schema, options) ORDER BY i.name
ON CONFLICT (name) DO UPDATE
   SET max_retries = excluded.max_retries, timeout_seconds = excluded.timeout_seconds, on_closed = excluded.on_closed,
       payload_schema = excluded.payload_schema, options = excluded.options, registered_at = clock_timestamp()
 WHERE (k.max_retries, k.timeout_seconds, k.on_closed, k.payload_schema::text, k.options::text)
       IS DISTINCT FROM (excluded.max_retries, excluded.timeout_seconds, excluded.on_closed, excluded.payload_schema::text, excluded.options::text)
