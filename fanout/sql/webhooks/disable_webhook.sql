-- Send nothing more to an endpoint. $1 name, $2 why, $3 only if this is its url still (NULL: whatever it is).   No row: there is none.
UPDATE fanout.webhook SET enabled = false, disabled_reason = $2 WHERE name = $1 AND ($3::text IS NULL OR url = $3) RETURNING name
