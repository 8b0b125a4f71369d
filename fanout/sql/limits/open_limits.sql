-- Named limits that handlers are about to ask for. $1 names, $2 what the code says of them (JSON text; NULL: nothing).
INSERT INTO fanout.limits AS l (name, code)
SELECT name, code::jsonb FROM unnest($1::text[], $2::text[]) AS i (name, code) ORDER BY name
ON CONFLICT (name) DO UPDATE
   SET code = excluded.code, updated_at = clock_timestamp()
 WHERE excluded.code IS NOT NULL AND l.code IS DISTINCT FROM excluded.code
