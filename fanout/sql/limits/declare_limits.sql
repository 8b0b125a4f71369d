-- What a program says of the limits of its kinds, when it starts. $1 names, $2 limits (JSON text; NULL: it has none).
-- What an operator set stands in another column, and wins. By name, so that two pods that start at once do not deadlock.
WITH i AS MATERIALIZED (
    SELECT name, code::jsonb AS code FROM unnest($1::text[], $2::text[]) AS i (name, code) ORDER BY name),
gone AS (
    DELETE FROM fanout.limits l USING i WHERE l.name = i.name AND i.code IS NULL AND l.code IS NOT NULL AND l.operator IS NULL),
taken AS (
    UPDATE fanout.limits l SET code = NULL, updated_at = clock_timestamp()
      FROM i WHERE l.name = i.name AND i.code IS NULL AND l.code IS NOT NULL AND l.operator IS NOT NULL)
INSERT INTO fanout.limits AS l (name, code)
SELECT name, code FROM i WHERE code IS NOT NULL
ON CONFLICT (name) DO UPDATE
   SET code = excluded.code, updated_at = clock_timestamp()
 WHERE l.code IS DISTINCT FROM excluded.code
