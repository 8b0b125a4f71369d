-- Send to an endpoint again. $1 name.   No row: there is none.
UPDATE fanout.webhook SET enabled = true, disabled_reason = NULL WHERE name = $1 RETURNING name
