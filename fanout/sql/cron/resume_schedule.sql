-- $1 name, $2 its next time: what passed meanwhile was paused, not missed. $3 expression and $4 time zone it was reckoned from.
-- No row: there is none, or it is another one now.
UPDATE fanout.cron
   SET next_at = CASE WHEN enabled THEN next_at ELSE $2 END, enabled = true, updated_at = clock_timestamp()
 WHERE name = $1 AND expression = $3 AND timezone = $4 RETURNING next_at
