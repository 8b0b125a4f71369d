-- Forget what an operator said: the limit is again what the code says. $1 name.   No row: nothing was set.
-- The row of a limit that the code knows nothing of goes with it, unless handlers use it.
WITH gone AS (
    DELETE FROM fanout.limits l
     WHERE l.name = $1 AND l.operator IS NOT NULL AND l.code IS NULL
       AND NOT EXISTS (SELECT 1 FROM fanout.slot s WHERE s.limit_name = l.name)
 RETURNING l.name),
back AS (
    UPDATE fanout.limits l SET operator = NULL, updated_at = clock_timestamp()
     WHERE l.name = $1 AND l.operator IS NOT NULL
       AND (l.code IS NOT NULL OR EXISTS (SELECT 1 FROM fanout.slot s WHERE s.limit_name = l.name))
 RETURNING l.name)
SELECT name FROM gone UNION ALL SELECT name FROM back
