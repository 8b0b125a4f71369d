-- $1 name.   No row: there is none.
UPDATE fanout.cron SET enabled = false, updated_at = clock_timestamp() WHERE name = $1 RETURNING enabled
